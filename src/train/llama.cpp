#include <hyper_parallel/train/llama.h>

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include <hyper_parallel/nn/checkpoint.h>

namespace hyper_parallel::train {
namespace {

constexpr double kInitStd = 0.02;

torch::nn::Linear linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

torch::Tensor rotate(const torch::Tensor& x, const torch::Tensor& cos, const torch::Tensor& sin) {
  const std::vector<torch::Tensor> halves = x.chunk(2, -1);
  return x * cos + torch::cat({-halves[1], halves[0]}, -1) * sin;
}

}  // namespace

RMSNormImpl::RMSNormImpl(std::int64_t dim, double norm_eps)
    : weight(register_parameter("weight", torch::ones({dim}))), eps(norm_eps) {}

torch::Tensor RMSNormImpl::forward(torch::Tensor x) { return at::rms_norm(x, weight.sizes(), weight, eps); }

LlamaAttentionImpl::LlamaAttentionImpl(const ModelConfig& c)
    : n_heads(c.n_heads), n_kv_heads(c.n_kv_heads > 0 ? c.n_kv_heads : c.n_heads), head_dim(c.dim / c.n_heads) {
  q_proj = register_module("q_proj", linear(c.dim, n_heads * head_dim));
  k_proj = register_module("k_proj", linear(c.dim, n_kv_heads * head_dim));
  v_proj = register_module("v_proj", linear(c.dim, n_kv_heads * head_dim));
  o_proj = register_module("o_proj", linear(n_heads * head_dim, c.dim));
}

torch::Tensor LlamaAttentionImpl::forward(torch::Tensor x, torch::Tensor cos, torch::Tensor sin) {
  const std::int64_t batch = x.size(0), length = x.size(1);
  auto heads = [&](const torch::Tensor& t, std::int64_t n) { return t.view({batch, length, n, head_dim}).transpose(1, 2); };
  const torch::Tensor q = rotate(heads(q_proj(x), n_heads), cos, sin);
  const torch::Tensor k = rotate(heads(k_proj(x), n_kv_heads), cos, sin);
  const torch::Tensor v = heads(v_proj(x), n_kv_heads);
  const torch::Tensor mixed = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                                               /*scale=*/std::nullopt, /*enable_gqa=*/n_kv_heads != n_heads);
  return o_proj(mixed.transpose(1, 2).reshape({batch, length, n_heads * head_dim}));
}

LlamaMLPImpl::LlamaMLPImpl(const ModelConfig& c) {
  gate_proj = register_module("gate_proj", linear(c.dim, c.ffn_dim));
  up_proj = register_module("up_proj", linear(c.dim, c.ffn_dim));
  down_proj = register_module("down_proj", linear(c.ffn_dim, c.dim));
}

torch::Tensor LlamaMLPImpl::forward(torch::Tensor x) { return down_proj(torch::silu(gate_proj(x)) * up_proj(x)); }

LlamaBlockImpl::LlamaBlockImpl(const ModelConfig& c) {
  input_layernorm = register_module("input_layernorm", RMSNorm(c.dim, c.norm_eps));
  self_attn = register_module("self_attn", LlamaAttention(c));
  post_attention_layernorm = register_module("post_attention_layernorm", RMSNorm(c.dim, c.norm_eps));
  mlp = register_module("mlp", LlamaMLP(c));
}

torch::Tensor LlamaBlockImpl::forward(torch::Tensor x, torch::Tensor cos, torch::Tensor sin) {
  x = x + self_attn(input_layernorm(x), cos, sin);
  return x + mlp(post_attention_layernorm(x));
}

LlamaImpl::LlamaImpl(const ModelConfig& model_config, std::uint64_t seed) : config(model_config) {
  const ModelConfig& c = config;
  check_value(c.n_heads > 0 && c.dim % c.n_heads == 0 && c.dim / c.n_heads % 2 == 0, "Llama", "dim ", c.dim, " and n_heads ",
              c.n_heads, ", want an even dim / n_heads");
  check_value(c.n_kv_heads == 0 || (c.n_kv_heads > 0 && c.n_heads % c.n_kv_heads == 0), "Llama", "n_kv_heads ", c.n_kv_heads,
              ", want a divisor of n_heads ", c.n_heads);
  embed_tokens = register_module("embed_tokens", nn::Embedding(torch::nn::EmbeddingOptions(c.vocab_size, c.dim)));
  torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < c.n_layers; ++i) {
    layers.emplace_back(c);
    list->push_back(layers.back().ptr());
  }
  norm = register_module("norm", RMSNorm(c.dim, c.norm_eps));
  if (!c.tied) lm_head = register_module("lm_head", nn::Linear(torch::nn::LinearOptions(c.dim, c.vocab_size).bias(false)));
  reset_parameters(seed);

  const std::int64_t head_dim = c.dim / c.n_heads;
  const auto real = torch::device(torch::kCPU).dtype(torch::kFloat);  // not on meta, where hp::MetaInit puts the parameters
  const torch::Tensor frequency = torch::pow(c.rope_theta, -torch::arange(0, head_dim, 2, real) / head_dim);
  const torch::Tensor angle = torch::outer(torch::arange(c.max_seq_len, real), frequency);
  const torch::Tensor both = torch::cat({angle, angle}, -1);
  cos = both.cos();
  sin = both.sin();
}

void LlamaImpl::reset_parameters(std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (auto& item : named_parameters()) init_parameter(item.key(), item.value(), generator);
}

void LlamaImpl::init_parameter(const std::string& name, torch::Tensor& whole, at::Generator& generator) const {
  const bool residual = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
  const double residual_std = kInitStd / std::sqrt(2.0 * static_cast<double>(config.n_layers));
  if (whole.dim() == 2)
    whole.normal_(0.0, residual ? residual_std : kInitStd, generator);
  else
    whole.fill_(1.0);
}

torch::Tensor LlamaImpl::forward(torch::Tensor tokens) {
  const std::int64_t length = tokens.size(1);
  check_value(length <= config.max_seq_len, "Llama", "sequence of ", length,
              " tokens, want at most max_seq_len = ", config.max_seq_len);
  torch::Tensor x = embed_tokens(tokens);
  const torch::Tensor c = cos.narrow(0, 0, length).to(x.options()), s = sin.narrow(0, 0, length).to(x.options());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool again = checkpoint_every > 0 && static_cast<std::int64_t>(i) % checkpoint_every == 0;
    // A block draws no random numbers.
    x = again ? checkpoint({.preserve_rng_state = false}, layers[i], x, c, s) : layers[i](x, c, s);
  }
  x = norm(x);
  return config.tied ? at::linear(x, embed_tokens->weight) : lm_head(x);
}

torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(torch::kFloat).view({-1, logits.size(-1)}), targets.view({-1}));
}

}  // namespace hyper_parallel::train
