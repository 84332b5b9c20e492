#pragma once
// A Llama-style decoder (Touvron et al. 2023) in plain torch::nn: nothing in the modules knows that they will be sharded.
//
//   x = embed_tokens[tokens]
//   for each layer:  x = x + self_attn(input_layernorm(x))
//                    x = x + mlp(post_attention_layernorm(x))
//   logits = lm_head(norm(x))
//
// The exact mathematics, for twins in other languages (B sequences of T tokens, D = dim / n_heads; no biases anywhere):
//   RMSNorm    x / sqrt(mean(x^2) + norm_eps) * weight; weight starts at 1
//   attention  q = q_proj(x) as (B, n_heads, T, D), k and v likewise with n_kv_heads; query head h reads key head h / (n_heads /
//   n_kv_heads);
//              q and k are rotated; softmax(q k^T / sqrt(D) + causal mask) v, heads joined, then o_proj
//   rotary     "rotate half": y = x * cos + cat(-x[D/2:], x[:D/2]) * sin, with angle(t, i) = t * rope_theta^(-2 (i mod D/2) / D);
//              cos and sin are computed in float32 and cast to the dtype of x
//   mlp        down_proj(silu(gate_proj(x)) * up_proj(x))
//   loss       cross entropy of the logits in float32, mean over all tokens
// Initial weights: torch's CPU generator with the seed; matrices in the order of named_parameters() get normal_(0, s), s = 0.02,
// and s = 0.02 / sqrt(2 n_layers) for o_proj and down_proj, which write to the residual stream. In Python: p.normal_(0, s,
// generator=g).
#include <string>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <hyper_parallel/nn/library.h>
#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Root mean square norm (Zhang and Sennrich 2019) over the last dimension.
struct RMSNormImpl : torch::nn::Module {
  RMSNormImpl(std::int64_t dim, double norm_eps);
  torch::Tensor forward(torch::Tensor x);

  torch::Tensor weight;
  double eps;
};
HP_MODULE(RMSNorm);

/// Causal self-attention with rotary positions and grouped key and value heads.
struct LlamaAttentionImpl : torch::nn::Module {
  explicit LlamaAttentionImpl(const ModelConfig& config);
  /// x (B, T, dim); cos and sin (T, D).
  torch::Tensor forward(torch::Tensor x, torch::Tensor cos, torch::Tensor sin);

  std::int64_t n_heads, n_kv_heads, head_dim;
  torch::nn::Linear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr}, o_proj{nullptr};
};
HP_MODULE(LlamaAttention);

/// SwiGLU (Shazeer 2020).
struct LlamaMLPImpl : torch::nn::Module {
  explicit LlamaMLPImpl(const ModelConfig& config);
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Linear gate_proj{nullptr}, up_proj{nullptr}, down_proj{nullptr};
};
HP_MODULE(LlamaMLP);

/// One decoder layer: a unit of sharding.
struct LlamaBlockImpl : torch::nn::Module {
  explicit LlamaBlockImpl(const ModelConfig& config);
  torch::Tensor forward(torch::Tensor x, torch::Tensor cos, torch::Tensor sin);

  RMSNorm input_layernorm{nullptr};
  LlamaAttention self_attn{nullptr};
  RMSNorm post_attention_layernorm{nullptr};
  LlamaMLP mlp{nullptr};
};
HP_MODULE(LlamaBlock);

/// The whole decoder. Parameters are named as in Hugging Face's Llama, without its "model.": embed_tokens.weight,
/// layers.N.self_attn.q_proj.weight, ..., norm.weight, lm_head.weight (none when tied).
struct LlamaImpl : torch::nn::Module {
  /// ValueError: sizes that do not fit each other. Weights are drawn from `seed` alone.
  explicit LlamaImpl(const ModelConfig& model_config, std::uint64_t seed = 0);
  /// tokens (B, T) int64, T <= max_seq_len -> logits (B, T, vocab_size).
  torch::Tensor forward(torch::Tensor tokens);
  void reset_parameters(std::uint64_t seed);
  /// Draws one whole parameter; in the order of named_parameters() from one generator it is what reset_parameters does.
  void init_parameter(const std::string& name, torch::Tensor& whole, at::Generator& generator) const;

  ModelConfig config;
  std::int64_t checkpoint_every = 0;  ///< blocks 0, n, 2n, ... are computed again in backward; 0: none
  nn::Embedding embed_tokens{nullptr};
  std::vector<LlamaBlock> layers;
  RMSNorm norm{nullptr};
  nn::Linear lm_head{nullptr};  ///< empty when tied
  torch::Tensor cos, sin;       ///< (max_seq_len, D) float32; recomputed, not learned: no buffers
};
HP_MODULE(Llama);

/// Mean cross entropy of logits (B, T, V) against targets (B, T), in float32.
[[nodiscard]] torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace hyper_parallel::train
