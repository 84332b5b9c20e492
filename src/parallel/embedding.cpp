#include <hyper_parallel/parallel/embedding.h>

#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include "parallel/layer.h"

namespace hyper_parallel::parallel {

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(std::int64_t vocabulary, std::int64_t dim,
                                                       ParallelEmbeddingOptions embedding_options)
    : num_embeddings(vocabulary), embedding_dim(dim), options(std::move(embedding_options)) {
  constexpr const char* kOp = "VocabParallelEmbedding";
  check_value(vocabulary >= 0 && dim >= 0, kOp, vocabulary, " embeddings of ", dim, " elements, want 0 or more");
  comm_ = group_of(kOp, options.mesh);
  weight = register_parameter("weight", at::empty(local_shape(own_cuts().at("weight"))));
  reset_parameters();
}

void VocabParallelEmbeddingImpl::reset_parameters() {
  reset_part(own_cuts().at("weight"), weight, [](at::Tensor& whole) { torch::nn::init::normal_(whole); });
}

ParameterCuts VocabParallelEmbeddingImpl::own_cuts() const {
  return {{"weight", {{num_embeddings, embedding_dim}, axis_cut(options.mesh, Shard(0))}}};
}

torch::Tensor VocabParallelEmbeddingImpl::forward(torch::Tensor tokens) {
  constexpr const char* kOp = "VocabParallelEmbedding";
  if (tokens.numel() > 0) {
    const auto lowest = tokens.min().item<std::int64_t>(), highest = tokens.max().item<std::int64_t>();
    check_value(lowest >= 0 && highest < num_embeddings, kOp, "tokens from ", lowest, " to ", highest, ", want 0 to ",
                num_embeddings - 1);
  }
  if (alone(comm_)) return at::embedding(weight, tokens);
  const FeatureRange own = chunk_of(num_embeddings, size_of(comm_), rank_in(comm_));
  const at::Tensor flat = tokens.reshape({-1}).to(at::kLong);
  std::vector<std::int64_t> shape = tokens.sizes().vec();
  shape.push_back(embedding_dim);
  const at::Tensor places = flat.ge(own.begin).logical_and_(flat.lt(own.end)).nonzero().reshape({-1});
  const at::Tensor rows = weight.index_select(0, flat.index_select(0, places).sub_(own.begin));
  const at::Tensor partial = at::index_copy(at::zeros({flat.numel(), embedding_dim}, rows.options()), 0, places, rows);
  return leave(partial.view(shape), comm_, sequence_of(options), kOp);
}

}  // namespace hyper_parallel::parallel
