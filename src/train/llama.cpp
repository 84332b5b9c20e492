#include <hyper_parallel/train/llama.h>

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/nn/checkpoint.h>
#include <hyper_parallel/parallel/functions.h>

#include "train/rope.h"

namespace hyper_parallel::train {
namespace {

constexpr double kInitStd = 0.02;

namespace pl = parallel;

pl::MoEOptions moe_options(const ModelConfig& c, const LlamaParallel& meshes) {
  const bool balanced = c.aux_loss_weight > 0 || c.bias_update_speed > 0;
  return {.n_experts = c.n_experts,
          .top_k = c.top_k,
          .ffn_dim = c.expert_ffn_dim,
          .shared_ffn_dim = c.shared_ffn_dim,
          .score = c.router == "sigmoid" ? pl::RouterScore::kSigmoid : pl::RouterScore::kSoftmax,
          .normalize_weights = c.norm_topk_prob,
          .route_scale = c.route_scale,
          .aux_loss_weight = c.aux_loss_weight,
          .bias_update_speed = c.bias_update_speed,
          .ep_mesh = meshes.ep,
          .tp_mesh = meshes.tp,
          .split_tokens = meshes.tp.defined(),
          .balance_mesh = balanced ? meshes.balance : DeviceMesh(),
          .sequence_parallel = meshes.sequence_parallel};
}

pl::ParallelRMSNorm norm_of(const ModelConfig& c, const LlamaParallel& meshes) {
  const pl::ParallelNormOptions options{.mesh = meshes.tp, .sequence_parallel = meshes.sequence_parallel, .eps = c.norm_eps};
  return pl::ParallelRMSNorm(c.dim, options);
}

bool alone(const Comm& comm) { return !comm.defined() || comm.size() == 1; }

}  // namespace

LlamaBlockImpl::LlamaBlockImpl(const ModelConfig& c, const LlamaParallel& meshes, std::int64_t layer) {
  input_layernorm = register_module("input_layernorm", norm_of(c, meshes));
  self_attn = register_module(
      "self_attn", pl::ParallelAttention(c.dim, pl::ParallelAttentionOptions{.n_heads = c.n_heads,
                                                                             .n_kv_heads = c.n_kv_heads,
                                                                             .head_dim = c.head_dim,
                                                                             .bias = c.attention_bias,
                                                                             .qk_norm = c.qk_norm,
                                                                             .norm_eps = c.norm_eps,
                                                                             .mesh = meshes.tp,
                                                                             .sequence_parallel = meshes.sequence_parallel,
                                                                             .cp_mesh = meshes.cp}));
  post_attention_layernorm = register_module("post_attention_layernorm", norm_of(c, meshes));
  if (has_experts(c, layer)) {
    moe = register_module("mlp", pl::MixtureOfExperts(c.dim, moe_options(c, meshes)));
  } else {
    const pl::ParallelSwiGLUOptions options{.mesh = meshes.tp, .sequence_parallel = meshes.sequence_parallel};
    mlp = register_module("mlp", pl::ParallelSwiGLU(c.dim, c.ffn_dim, options));
  }
}

pl::MoEOutput LlamaBlockImpl::forward(torch::Tensor x, pl::AttentionArguments arguments) {
  const std::int64_t length = arguments.sequence_length;
  x = x + self_attn(input_layernorm(x), arguments);
  const torch::Tensor h = post_attention_layernorm(x);
  if (moe.is_empty()) return {.output = x + mlp(h, length), .aux_loss = {}};
  pl::MoEOutput result = moe(h, length);
  result.output = x + result.output;
  return result;
}

LlamaImpl::LlamaImpl(const ModelConfig& model_config, std::uint64_t seed, LlamaParallel llama_meshes)
    : config(model_config), meshes(std::move(llama_meshes)) {
  const ModelConfig& c = config;
  check_value(c.n_heads > 0 && c.head_dim >= 0 && (c.head_dim > 0 || c.dim % c.n_heads == 0) && head_dim_of(c) > 0 &&
                  head_dim_of(c) % 2 == 0,
              "Llama", "dim ", c.dim, ", n_heads ", c.n_heads, " and head_dim ", c.head_dim,
              ", want an even head_dim, or an even dim / n_heads");
  check_rope(c);
  check_value(c.n_kv_heads == 0 || (c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0), "Llama", "n_kv_heads ", c.n_kv_heads,
              ", want a divisor of n_heads ", c.n_heads);
  check_value(meshes.tp.defined() || !meshes.sequence_parallel, "Llama", "sequence_parallel without tp, want both or neither");
  if (meshes.tp.defined()) tp_ = meshes.tp.get_group();
  if (meshes.cp.defined()) cp_ = meshes.cp.get_group();
  const pl::ParallelEmbeddingOptions table{.mesh = meshes.tp, .sequence_parallel = meshes.sequence_parallel};
  embed_tokens = register_module("embed_tokens", pl::VocabParallelEmbedding(c.vocab_size, c.dim, table));
  torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    layers.emplace_back(c, meshes, i);
    list->push_back(layers.back().ptr());
  }
  norm = register_module("norm", norm_of(c, meshes));
  if (!c.tied) {
    const pl::ParallelLinearOptions head{.mesh = meshes.tp, .bias = false, .sequence_parallel = meshes.sequence_parallel};
    lm_head = register_module("lm_head", pl::ColumnParallelLinear(c.dim, c.vocab_size, head));
  }
  reset_parameters(seed);

  std::tie(cos, sin) = rotary(c.rope_scaling == "dynamic" ? std::min(original_len(c), c.max_seq_len) : c.max_seq_len);
}

std::pair<torch::Tensor, torch::Tensor> LlamaImpl::rotary(std::int64_t length) const {
  const std::int64_t head_dim = head_dim_of(config);
  const auto real = torch::device(torch::kCPU).dtype(torch::kFloat);  // not on meta, where hp::MetaInit puts the parameters
  torch::Tensor frequency;
  double scale = 1.0;
  if (config.rope_scaling == "none") {
    frequency = torch::pow(config.rope_theta, -torch::arange(0, head_dim, 2, real) / head_dim);
  } else {
    const Rope rope = scaled_rope(config, head_dim, length);
    frequency = torch::tensor(rope.frequencies, real);
    scale = rope.scale;
  }
  const torch::Tensor angle = torch::outer(torch::arange(length, real), frequency);
  const torch::Tensor both = torch::cat({angle, angle}, -1);
  if (scale == 1.0) return {both.cos(), both.sin()};
  return {both.cos() * scale, both.sin() * scale};
}

void LlamaImpl::reset_parameters(std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const auto& child : named_children()) {  // not of *this, which nobody holds while it is being built
    const pl::ParameterCuts cuts = pl::parameter_cuts(*child.value());
    for (auto& item : child.value()->named_parameters()) {
      const std::string name = concat(child.key(), '.', item.key());
      pl::reset_part(cuts.at(item.key()), item.value(), [&](torch::Tensor& whole) { init_parameter(name, whole, generator); });
    }
  }
}

void LlamaImpl::init_parameter(const std::string& name, torch::Tensor& whole, at::Generator& generator) const {
  const bool residual =
      name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") || name.ends_with("experts.down_proj");
  const double residual_std = kInitStd / std::sqrt(2.0 * static_cast<double>(config.n_layers));
  if (whole.dim() >= 2)
    whole.normal_(0.0, residual ? residual_std : kInitStd, generator);
  else
    whole.fill_(name.ends_with(".bias") ? 0.0 : 1.0);
}

pl::SequenceSplit LlamaImpl::split_of(std::int64_t length) const { return {length, alone(cp_) ? 1 : cp_.size()}; }

torch::Tensor LlamaImpl::tied_logits(torch::Tensor x, std::int64_t length) const {
  constexpr const char* kLabel = "tied lm_head";
  if (!meshes.sequence_parallel) {
    x = pl::identity_all_reduce(x, tp_, kLabel);
  } else {
    x = pl::all_gather_reduce_scatter(x, tp_, {1, pl::ceil_chunks(length, tp_.size()), kLabel});
  }
  return at::linear(x, embed_tokens->weight);
}

torch::Tensor LlamaImpl::forward(torch::Tensor tokens) {
  const std::int64_t length = tokens.size(1);
  check_value(length <= config.max_seq_len, "Llama", "sequence of ", length,
              " tokens, want at most max_seq_len = ", config.max_seq_len);
  // Only "dynamic" has other angles for longer sequences.
  auto [c, s] = length <= cos.size(0) ? std::pair(cos.narrow(0, 0, length), sin.narrow(0, 0, length)) : rotary(length);
  if (!alone(cp_)) {
    const pl::SequenceSplit split = split_of(length);
    tokens = split.part(tokens, 1, cp_.rank());
    c = split.part(c, 0, cp_.rank());
    s = split.part(s, 0, cp_.rank());
  }
  const std::int64_t own = tokens.size(1);
  torch::Tensor x = embed_tokens(tokens);
  const pl::AttentionArguments arguments{
      .cos = c.to(x.options()), .sin = s.to(x.options()), .sequence_length = own, .context_length = length};
  aux_loss_ = torch::Tensor();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool again = checkpoint_every > 0 && static_cast<std::int64_t>(i) % checkpoint_every == 0;
    // A block draws no random numbers.
    const auto [output, aux] =
        again ? checkpoint({.preserve_rng_state = false}, layers[i], x, arguments) : layers[i](x, arguments);
    x = output;
    if (aux.defined()) aux_loss_ = aux_loss_.defined() ? aux_loss_ + aux : aux;
  }
  x = norm(x);
  return config.tied ? tied_logits(x, own) : lm_head(x, own);
}

torch::Tensor LlamaImpl::whole_logits(const torch::Tensor& logits, std::int64_t length) const {
  const torch::NoGradGuard no_grad;
  torch::Tensor all = logits;
  if (!alone(tp_)) all = pl::all_gather_split(all, tp_, {-1, pl::ceil_chunks(config.vocab_size, tp_.size()), "logits"});
  if (alone(cp_)) return all;
  const pl::SequenceSplit split = split_of(length);
  return split.restore(pl::all_gather_split(all, cp_, {1, split.lengths(), "logits"}), 1);
}

torch::Tensor LlamaImpl::loss(const torch::Tensor& logits, const torch::Tensor& targets) const {
  if (alone(tp_) && alone(cp_)) return next_token_loss(logits, targets);
  const torch::Tensor own = alone(cp_) ? targets : split_of(targets.size(1)).part(targets, 1, cp_.rank());
  torch::Tensor sum;
  if (alone(tp_)) {
    sum = at::cross_entropy_loss(logits.to(torch::kFloat).reshape({-1, config.vocab_size}), own.reshape({-1}), {},
                                 at::Reduction::Sum);
  } else {
    sum = pl::parallel_cross_entropy(logits, own,
                                     {.mesh = meshes.tp, .vocab_size = config.vocab_size, .reduction = pl::LossReduction::kSum});
  }
  // Ranks of cp may have different numbers of tokens: each counts with its sum.
  const int sharing = alone(cp_) ? 1 : cp_.size();
  return sum * (static_cast<double>(sharing) / static_cast<double>(targets.numel()));
}

torch::Tensor LlamaImpl::take_aux_loss() { return std::exchange(aux_loss_, torch::Tensor()); }

void LlamaImpl::update_expert_bias() {
  for (LlamaBlock& layer : layers) {
    if (!layer->moe.is_empty()) layer->moe->update_bias();
  }
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(torch::kFloat).view({-1, logits.size(-1)}), targets.view({-1}));
}

}  // namespace hyper_parallel::train
