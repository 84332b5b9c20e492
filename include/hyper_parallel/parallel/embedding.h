#pragma once
// Vocabulary parallelism: embedding table and loss with the vocabulary cut over the ranks of a mesh axis (Shoeybi et al. 2019).
#include <torch/nn/module.h>

#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/parallel/cut.h>

namespace hyper_parallel::parallel {

struct ParallelEmbeddingOptions {
  DeviceMesh mesh = {};            ///< one axis; undefined: the layer is not cut
  bool sequence_parallel = false;  ///< the output is this rank's ceil chunk of the sequence
  std::int64_t sequence_dim = 1;   ///< of the output
};

/// Table (vocabulary, dim) cut in ceil chunks along dim 0; the vocabulary need not divide evenly. Each rank looks up the tokens
/// it has, and the rows are summed over the ranks: one term of each sum is not zero, so the result is that of the whole table,
/// bit for bit. Initialised like torch::nn::Embedding from the same random numbers. Parameter: weight.
class HP_API VocabParallelEmbeddingImpl : public torch::nn::Module, public ParallelModule {
 public:
  /// Collective over the axis where its group is used for the first time. ValueError: sizes < 0, a mesh of several axes.
  VocabParallelEmbeddingImpl(std::int64_t num_embeddings, std::int64_t embedding_dim, ParallelEmbeddingOptions options = {});
  /// tokens, int64 or int32 and equal on all ranks of the axis -> (tokens' shape..., dim). Collective, forward and, with
  /// sequence_parallel, backward. ValueError on all ranks: a token out of range.
  torch::Tensor forward(torch::Tensor tokens);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;

  const std::int64_t num_embeddings, embedding_dim;
  const ParallelEmbeddingOptions options;
  torch::Tensor weight;

 private:
  Comm comm_;
};
HP_MODULE(VocabParallelEmbedding);

enum class LossReduction { kMean, kSum, kNone };

struct ParallelCrossEntropyOptions {
  DeviceMesh mesh = {};  ///< one axis; undefined: the logits are whole
  std::int64_t vocab_size = 0;
  std::int64_t ignore_index = -100;
  LossReduction reduction = LossReduction::kMean;
};

/// Cross entropy of logits of which each rank has the columns of its ceil chunk of the vocabulary, as
/// torch::nn::functional::cross_entropy gives it for the whole logits (mean over targets that are not ignored; NaN if all are).
///
/// Computed in fp32 (fp64 for fp64 logits) with the maximum over the whole vocabulary subtracted; the logits stay in their dtype,
/// are not gathered, and no fp32 copy of them is made: besides the gradient of the logits, memory is O(tokens).
///
/// \param logits (..., own columns), e.g. of a ColumnParallelLinear without gather_output
/// \param targets (...) int64, equal on all ranks of the axis
/// \return scalar, or (...) with kNone; fp32 or fp64; equal on all ranks
/// Collective forward: 3 numbers for each token are reduced; backward local. Cannot be differentiated twice (Error).
/// ValueError: shapes that do not fit, logits that are no floats, a target outside of the vocabulary that is not ignore_index.
[[nodiscard]] HP_API at::Tensor parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                                       const ParallelCrossEntropyOptions& options);

}  // namespace hyper_parallel::parallel
