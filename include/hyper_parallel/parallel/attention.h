#pragma once
// The two halves of a decoder layer, cut by heads and by hidden features over the ranks of a mesh axis.
#include <optional>

#include <torch/nn/module.h>

#include <hyper_parallel/parallel/context.h>
#include <hyper_parallel/parallel/linear.h>
#include <hyper_parallel/parallel/norm.h>

namespace hyper_parallel::parallel {

struct ParallelSwiGLUOptions {
  DeviceMesh mesh = {};  ///< one axis; undefined: the layer is not cut
  bool bias = false;
  bool sequence_parallel = false;  ///< input and output are this rank's part of the sequence
  std::int64_t sequence_dim = 1;
};

/// down_proj(silu(gate_proj(x)) * up_proj(x)) (Shazeer 2020); hidden features in ceil chunks, any number of them. x is brought to
/// all ranks once for both projections. Children: gate_proj, up_proj, down_proj.
class HP_API ParallelSwiGLUImpl : public torch::nn::Module {
 public:
  ParallelSwiGLUImpl(std::int64_t dim, std::int64_t hidden, ParallelSwiGLUOptions options = {});
  /// x (..., dim) -> (..., dim). Collective. \param sequence_length as in ColumnParallelLinear
  torch::Tensor forward(torch::Tensor x, std::int64_t sequence_length = 0);

  const ParallelSwiGLUOptions options;
  ColumnParallelLinear gate_proj{nullptr}, up_proj{nullptr};
  RowParallelLinear down_proj{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::int64_t{0})})

 private:
  Comm comm_;
};
HP_MODULE(ParallelSwiGLU);

struct ParallelAttentionOptions {
  std::int64_t n_heads = 1;
  std::int64_t n_kv_heads = 0;  ///< 0: n_heads; otherwise query head h reads key head h / (n_heads / n_kv_heads)
  std::int64_t head_dim = 0;    ///< 0: dim / n_heads
  bool bias = false;
  /// RMSNorm of each query and key head, before they are rotated (Qwen3): children q_norm and k_norm, whole on all ranks, whose
  /// gradients are partial over `mesh`.
  bool qk_norm = false;
  double norm_eps = 1e-5;  ///< of qk_norm
  bool causal = true;
  DeviceMesh mesh = {};  ///< cuts the heads; undefined: they are not cut
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 1;  ///< of the part of sequence_parallel; 1 is the only one that attention has
  DeviceMesh cp_mesh = {};        ///< splits the sequence; undefined: it is whole
  SequenceOrder cp_order = SequenceOrder::kZigZag;
};

/// What a call of ParallelAttention needs besides x.
struct AttentionArguments {
  torch::Tensor cos = {}, sin = {};  ///< rotary angles (T, head_dim) of the positions that x stands for; undefined: none
  /// With sequence_parallel: length of the sequence that the ranks of `mesh` share, in ceil chunks; 0: all have as much.
  std::int64_t sequence_length = 0;
  /// With cp_mesh: length of the whole sequence; 0: a multiple of 2 * ranks, all ranks have as much.
  std::int64_t context_length = 0;
  template <class F>
  void walk_tensors(F& f) {
    f(cos);
    f(sin);
  }
};

/// Self-attention with optional rotary positions ("rotate half") and grouped key and value heads.
///
/// Heads are whole on a rank. Where the ranks divide n_heads (n_kv_heads), the weights are cut. Where they do not, heads are
/// given out evenly, the first ranks one more: each rank then holds whole weights, computes its heads of them, and the gradient
/// is partial (AxisCut::partial_gradient). So are keys and values where there are fewer heads of them than ranks: ranks that
/// share a head both compute it. More ranks than heads: some have none, and take part in the communication. Children: q_proj,
/// k_proj, v_proj, o_proj.
class HP_API ParallelAttentionImpl : public torch::nn::Module {
 public:
  /// ValueError: n_heads that is no multiple of n_kv_heads, sizes below 1, sequence_parallel along another dimension than 1.
  ParallelAttentionImpl(std::int64_t dim, ParallelAttentionOptions options);
  /// x (B, T, dim) -> (B, T, dim); T is this rank's part with sequence_parallel or cp_mesh. Collective.
  torch::Tensor forward(torch::Tensor x, AttentionArguments arguments = {});
  [[nodiscard]] FeatureRange heads() const { return heads_; }        ///< of this rank
  [[nodiscard]] FeatureRange kv_heads() const { return kv_heads_; }  ///< that its heads read

  const std::int64_t dim;
  const ParallelAttentionOptions options;
  ColumnParallelLinear q_proj{nullptr}, k_proj{nullptr}, v_proj{nullptr};
  RowParallelLinear o_proj{nullptr};
  ParallelRMSNorm q_norm{nullptr}, k_norm{nullptr};  ///< empty without qk_norm

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(AttentionArguments())})

 private:
  torch::Tensor mix(const torch::Tensor& q, torch::Tensor k, torch::Tensor v, std::int64_t context_length) const;

  Comm comm_, cp_comm_;
  std::int64_t kv_count_, head_dim_;
  FeatureRange heads_, kv_heads_;
};
HP_MODULE(ParallelAttention);

}  // namespace hyper_parallel::parallel
