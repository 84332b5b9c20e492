#pragma once
// A Llama-style decoder (Touvron et al. 2023), with a mixture of experts in place of the MLP where the configuration says so. It
// is built from the layers of parallel/, which without meshes are plain ones; nothing in it knows that fully_shard will cut it
// again.
//
//   x = embed_tokens[tokens]
//   for each layer:  x = x + self_attn(input_layernorm(x))
//                    x = x + mlp(post_attention_layernorm(x))
//   logits = lm_head(norm(x))
//
// The exact mathematics, for twins in other languages (B sequences of T tokens, D = head_dim, or dim / n_heads; no biases but
// with attention_bias, which gives them to the projections of attention, starting at 0):
//   RMSNorm    x / sqrt(mean(x^2) + norm_eps) * weight; weight starts at 1
//   attention  q = q_proj(x) as (B, n_heads, T, D), k and v likewise with n_kv_heads; query head h reads key head h / (n_heads /
//   n_kv_heads);
//              with qk_norm, each head of q and k goes through an RMSNorm of D elements; q and k are rotated; softmax(q k^T /
//              sqrt(D) + causal mask) v, heads joined, then o_proj
//   rotary     "rotate half": y = x * cos + cat(-x[D/2:], x[:D/2]) * sin, with angle(t, i) = t * rope_theta^(-2 (i mod D/2) / D);
//              cos and sin are computed in float32 and cast to the dtype of x; rope_scaling: see src/train/rope.h
//   mlp        down_proj(silu(gate_proj(x)) * up_proj(x))
//   experts    scores = softmax(router(x)) over all experts, or sigmoid, in float32; the top_k of scores + bias; their weights
//   are
//              the scores, divided by their sum with norm_topk_prob, times route_scale; sum of weight * mlp of the expert, plus
//              the mlp of the shared expert
//   loss       cross entropy of the logits in float32, mean over all tokens
// Initial weights: torch's CPU generator with the seed; matrices in the order of named_parameters() get normal_(0, s), s = 0.02,
// and s = 0.02 / sqrt(2 n_layers) for o_proj and down_proj, which write to the residual stream. In Python: p.normal_(0, s,
// generator=g). The matrices of experts are stacked, (n_experts, out, in), and drawn as one.
#include <string>
#include <vector>

#include <torch/nn/modules/container/modulelist.h>

#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/parallel/attention.h>
#include <hyper_parallel/parallel/embedding.h>
#include <hyper_parallel/parallel/linear.h>
#include <hyper_parallel/parallel/moe.h>
#include <hyper_parallel/parallel/norm.h>
#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Over which ranks the decoder itself is cut; meshes of one axis, undefined: not cut.
struct LlamaParallel {
  DeviceMesh tp = {};       ///< cuts matrices, heads and vocabulary; its ranks are given the same tokens
  DeviceMesh cp = {};       ///< its ranks are given the same tokens too, and each works on its part of every sequence (zig-zag)
  DeviceMesh ep = {};       ///< shares out the experts; may span ranks of all other axes
  DeviceMesh balance = {};  ///< all ranks whose tokens the experts are balanced over; those of tp and cp among them
  bool sequence_parallel = false;  ///< over tp
};

/// One decoder layer: a unit of sharding; its experts are one of their own.
struct LlamaBlockImpl : torch::nn::Module {
  LlamaBlockImpl(const ModelConfig& config, const LlamaParallel& meshes, std::int64_t layer);
  /// x: this rank's part of (B, T, dim). The auxiliary loss is undefined where there is none.
  parallel::MoEOutput forward(torch::Tensor x, parallel::AttentionArguments arguments);

  parallel::ParallelRMSNorm input_layernorm{nullptr};
  parallel::ParallelAttention self_attn{nullptr};
  parallel::ParallelRMSNorm post_attention_layernorm{nullptr};
  parallel::ParallelSwiGLU mlp{nullptr};    ///< registered as "mlp"; empty in a layer with experts
  parallel::MixtureOfExperts moe{nullptr};  ///< registered as "mlp"; empty in a layer without
};
HP_MODULE(LlamaBlock);

/// The whole decoder. Parameters are named as in Hugging Face's Llama, without its "model.": embed_tokens.weight,
/// layers.N.self_attn.q_proj.weight, ..., norm.weight, lm_head.weight (none when tied). Experts: layers.N.mlp.router.weight,
/// .experts.gate_proj, .experts.up_proj, .experts.down_proj, .shared_expert.gate_proj.weight, ...
struct LlamaImpl : torch::nn::Module {
  /// ValueError: sizes that do not fit each other. Weights are drawn from `seed` alone; a rank keeps its part of them. Collective
  /// where the groups of the meshes are used for the first time.
  explicit LlamaImpl(const ModelConfig& model_config, std::uint64_t seed = 0, LlamaParallel llama_meshes = {});
  /// tokens (B, T) int64, T <= max_seq_len -> logits (B, T, vocab_size): of this rank's positions with cp, and of those the
  /// columns of its chunk of the vocabulary with tp. Collective over tp, cp, ep and, with an auxiliary loss, balance.
  torch::Tensor forward(torch::Tensor tokens);
  /// The logits of all positions and tokens, of forward's result for sequences of `length` tokens. Without gradient. Collective
  /// over tp and cp.
  [[nodiscard]] torch::Tensor whole_logits(const torch::Tensor& logits, std::int64_t length) const;
  /// Loss of forward's result against targets (B, T): the mean cross entropy over all tokens, in float32. With cp a rank's share
  /// of it, of which the mean over the ranks is the loss; equal on all ranks of tp. Collective over tp.
  [[nodiscard]] torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& targets) const;
  /// The sum of the auxiliary losses of the last forward, once; undefined without experts or aux_loss_weight. To be added to the
  /// loss: the mean over all ranks is that of all tokens. Local.
  [[nodiscard]] torch::Tensor take_aux_loss();
  /// Balances the experts of all layers by the tokens since the last call (MixtureOfExperts::update_bias): once after each step.
  /// Collective over balance; does nothing without bias_update_speed.
  void update_expert_bias();
  /// Cosines and sines of the positions of `length` tokens, (length, D) float32. Local.
  [[nodiscard]] std::pair<torch::Tensor, torch::Tensor> rotary(std::int64_t length) const;
  void reset_parameters(std::uint64_t seed);
  /// Draws one whole parameter; in the order of named_parameters() from one generator it is what reset_parameters does.
  void init_parameter(const std::string& name, torch::Tensor& whole, at::Generator& generator) const;

  ModelConfig config;
  LlamaParallel meshes;
  std::int64_t checkpoint_every = 0;  ///< blocks 0, n, 2n, ... are computed again in backward; 0: none
  parallel::VocabParallelEmbedding embed_tokens{nullptr};
  std::vector<LlamaBlock> layers;
  parallel::ParallelRMSNorm norm{nullptr};
  parallel::ColumnParallelLinear lm_head{nullptr};  ///< empty when tied
  torch::Tensor cos, sin;                           ///< (max_seq_len, D) float32, "dynamic": of the first context; no buffers

 private:
  [[nodiscard]] parallel::SequenceSplit split_of(std::int64_t length) const;
  [[nodiscard]] torch::Tensor tied_logits(torch::Tensor x, std::int64_t length) const;

  Comm tp_, cp_;
  torch::Tensor aux_loss_;
};
HP_MODULE(Llama);

/// Mean cross entropy of logits (B, T, V) against targets (B, T), in float32.
[[nodiscard]] torch::Tensor next_token_loss(const torch::Tensor& logits, const torch::Tensor& targets);

}  // namespace hyper_parallel::train
