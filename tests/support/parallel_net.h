#pragma once
// A small decoder out of parallel layers, in every combination: tensor, sequence, expert and context parallelism, tied or not.
// Without meshes it is the model on one rank.
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

struct DecoderOptions {
  int64_t vocab = 11, dim = 12, hidden = 10, heads = 2, kv_heads = 0, layers = 2, length = 6;
  bool tied = false;           ///< the head has the weight of the table
  bool loss_parallel = false;  ///< the loss of cut logits; false: logits are gathered
  bool sequence = false;       ///< sequence parallelism over tp
  bool checkpoint = false;     ///< blocks are recomputed
  bool planned_scale =
      false;  ///< blocks have a scale with sequence parallelism, too: a plan must say that its gradient is partial
  int64_t experts = 0, top_k = 2;
  double aux_loss = 0.0;
  bool split_tokens = false;  ///< the ranks of tp share out the tokens of experts
  DeviceMesh tp = {}, cp = {}, ep = {};
  DeviceMesh balance = {};  ///< one axis, all ranks with tokens of their own
};

/// Options for the meshes of a run.
inline DecoderOptions on_meshes(DecoderOptions options, const PlanMeshes& meshes) {
  options.tp = meshes.dense["tp"];
  options.cp = meshes.dense["cp"];
  if (options.cp.size() == 1) options.cp = {};
  if (meshes.expert.defined()) options.ep = meshes.expert["ep"];
  options.balance = (options.split_tokens ? meshes.dense : parallel::data_mesh(meshes.dense)).flatten("data");
  return options;
}

inline parallel::SequenceSplit split_of(const DecoderOptions& options) {
  return {options.length, options.cp.defined() ? static_cast<int>(options.cp.size()) : 1};
}

/// A block's result.
struct DecoderState {
  torch::Tensor x, aux_loss;
  template <class F>
  void walk_tensors(F& f) {
    f(x);
    f(aux_loss);
  }
};

/// x + attention, + SwiGLU or experts, and a plain scale that no parallel layer speaks of.
struct DecoderBlockImpl : torch::nn::Module {
  explicit DecoderBlockImpl(const DecoderOptions& o) : options(o) {
    const parallel::ParallelNormOptions norm{.mesh = o.tp, .sequence_parallel = o.sequence};
    attention_norm = register_module("attention_norm", parallel::ParallelRMSNorm(o.dim, norm));
    attention = register_module(
        "attention", parallel::ParallelAttention(o.dim, parallel::ParallelAttentionOptions{.n_heads = o.heads,
                                                                                           .n_kv_heads = o.kv_heads,
                                                                                           .head_dim = 4,
                                                                                           .mesh = o.tp,
                                                                                           .sequence_parallel = o.sequence,
                                                                                           .cp_mesh = o.cp}));
    mlp_norm = register_module("mlp_norm", parallel::ParallelLayerNorm(o.dim, norm));
    if (o.experts > 0) {
      moe = register_module("moe", parallel::MixtureOfExperts(o.dim, parallel::MoEOptions{.n_experts = o.experts,
                                                                                          .top_k = o.top_k,
                                                                                          .ffn_dim = 5,
                                                                                          .shared_ffn_dim = 3,
                                                                                          .aux_loss_weight = o.aux_loss,
                                                                                          .ep_mesh = o.ep,
                                                                                          .tp_mesh = o.tp,
                                                                                          .split_tokens = o.split_tokens,
                                                                                          .balance_mesh = o.balance,
                                                                                          .sequence_parallel = o.sequence}));
    } else {
      mlp = register_module("mlp", parallel::ParallelSwiGLU(o.dim, o.hidden,
                                                            parallel::ParallelSwiGLUOptions{
                                                                .mesh = o.tp, .bias = true, .sequence_parallel = o.sequence}));
    }
    if (!o.sequence || o.planned_scale) scale = register_parameter("scale", torch::ones({o.dim}));
  }
  /// \param length of the sequence that the ranks of tp share
  DecoderState forward(torch::Tensor x, const torch::Tensor& aux_loss, int64_t length) {
    parallel::AttentionArguments arguments;
    if (options.sequence) arguments.sequence_length = length;
    if (options.cp.defined()) arguments.context_length = options.length;
    x = x + attention(attention_norm(x), arguments);
    const torch::Tensor h = mlp_norm(x);
    torch::Tensor y, aux = aux_loss;
    if (moe) {
      const parallel::MoEOutput out = moe(h, options.sequence ? length : 0);
      y = out.output;
      if (out.aux_loss.defined()) aux = aux + out.aux_loss;
    } else {
      y = mlp(h, options.sequence ? length : 0);
    }
    return {x + (scale.defined() ? y * scale : y), aux};
  }
  DecoderOptions options;
  parallel::ParallelRMSNorm attention_norm{nullptr};
  parallel::ParallelLayerNorm mlp_norm{nullptr};
  parallel::ParallelAttention attention{nullptr};
  parallel::ParallelSwiGLU mlp{nullptr};
  parallel::MixtureOfExperts moe{nullptr};
  torch::Tensor scale;
};
HP_MODULE(DecoderBlock);

/// The output projection with the weight of a table.
struct DecoderTiedHeadImpl : torch::nn::Module {
  explicit DecoderTiedHeadImpl(const torch::Tensor& table) { weight = register_parameter("weight", table); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::matmul(x, weight.t()); }
  torch::Tensor weight;
};
HP_MODULE(DecoderTiedHead);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const DecoderOptions& o) : options(o) {
    table = register_module(
        "table", parallel::VocabParallelEmbedding(o.vocab, o.dim, parallel::ParallelEmbeddingOptions{o.tp, o.sequence}));
    torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < o.layers; ++i) {
      layers.emplace_back(o);
      list->push_back(layers.back().ptr());
    }
    norm = register_module(
        "norm", parallel::ParallelRMSNorm(o.dim, parallel::ParallelNormOptions{.mesh = o.tp, .sequence_parallel = o.sequence}));
    if (o.tied) {
      tied_head = register_module("head", DecoderTiedHead(table->weight));
    } else {
      head = register_module(
          "head", parallel::ColumnParallelLinear(
                      o.dim, o.vocab,
                      parallel::ParallelLinearOptions{
                          .mesh = o.tp, .bias = false, .gather_output = !o.loss_parallel, .sequence_parallel = o.sequence}));
    }
  }
  /// This rank's rows and, with context parallelism, positions. \return the mean loss of these tokens
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets) {
    const int64_t length = tokens.size(1);
    DecoderState state{table(tokens), torch::zeros({})};
    for (DecoderBlock& layer : layers) {
      state = options.checkpoint && torch::GradMode::is_enabled() ? checkpoint(layer, state.x, state.aux_loss, length)
                                                                  : layer(state.x, state.aux_loss, length);
    }
    const torch::Tensor x = norm(state.x);
    const torch::Tensor logits = tied_head ? tied_logits(x, length) : head(x, options.sequence ? length : 0);
    torch::Tensor loss;
    if (options.loss_parallel) {
      loss = parallel::parallel_cross_entropy(logits, targets, {.mesh = options.tp, .vocab_size = options.vocab});
    } else {
      loss = torch::nn::functional::cross_entropy(logits.to(torch::kFloat).reshape({-1, options.vocab}), targets.reshape({-1}));
    }
    return loss + state.aux_loss.to(loss.dtype());
  }
  torch::Tensor tied_logits(const torch::Tensor& x, int64_t length) {
    if (!options.tp.defined()) return tied_head(x);
    const Comm tp = options.tp.get_group();
    const torch::Tensor whole = options.sequence
                                    ? parallel::all_gather_reduce_scatter(x, tp, {1, parallel::ceil_chunks(length, tp.size())})
                                    : parallel::identity_all_reduce(x, tp);
    const torch::Tensor logits = tied_head(whole);
    return options.loss_parallel ? logits
                                 : parallel::all_gather_split(logits, tp, {-1, parallel::ceil_chunks(options.vocab, tp.size())});
  }

  DecoderOptions options;
  parallel::VocabParallelEmbedding table{nullptr};
  std::vector<DecoderBlock> layers;
  parallel::ParallelRMSNorm norm{nullptr};
  parallel::ColumnParallelLinear head{nullptr};
  DecoderTiedHead tied_head{nullptr};
};
HP_MODULE(Decoder);

/// Values for all parameters of a decoder on one rank, by name: norms around one, the rest small.
inline Tensors decoder_values(const DecoderOptions& options, uint64_t seed = 3) {
  const torch::NoGradGuard no_grad;
  Decoder whole(options);
  seed_parameters(*whole, seed);
  Tensors values;
  for (const auto& item : whole->named_parameters())
    values[item.key()] = item.value().detach().clone() + (item.key().find("norm") != std::string::npos ? 1.0 : 0.0);
  return values;
}

/// Rows of tokens and targets for one rank on one data-parallel coordinate, and its positions of the sequence.
inline Batch decoder_part(const DecoderOptions& options, const Batch& batch, int64_t row, int64_t rows) {
  Batch mine = batch.part(row, rows);
  if (!options.cp.defined()) return mine;
  const parallel::SequenceSplit split = split_of(options);
  const int rank = options.cp.get_local_rank();
  return {split.part(mine.tokens, 1, rank), split.part(mine.targets, 1, rank)};
}

inline Batch decoder_batch(const DecoderOptions& options, int64_t rows, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto draw = [&] { return torch::randint(0, options.vocab, {rows, options.length}, generator, torch::kLong); };
  return {draw(), draw()};
}

}  // namespace hyper_parallel::testing
