#pragma once
// Mixture of experts (Shazeer et al. 2017), with the experts spread over the ranks of a mesh axis (expert parallelism) and each
// expert optionally cut over another (tensor parallelism). No token is dropped.
//
//   x ─ router ─ top k ──────────────── weights ───────────────┐
//   └─ rows in expert order ─ all-to-all ─ experts ─ all-to-all ─ sum over a token's experts ─ + shared expert(x)
//
// Everything that is summed is summed in an order that depends on the tokens alone: rows of an expert come in the order (rank,
// token), the terms of a token in the order of the experts. An expert, or a rank, without tokens takes part with empty tensors.
#include <cstdint>
#include <vector>

#include <torch/nn/module.h>

#include <hyper_parallel/parallel/attention.h>
#include <hyper_parallel/parallel/cut.h>

namespace hyper_parallel::parallel {

/// y = x_e W_e^T for consecutive groups of rows, one for each matrix.
/// \param x (sum of counts, in), contiguous groups in the order of the matrices
/// \param weight (groups, out, in)
/// \param counts rows of each group, zeros allowed
/// \return (sum of counts, out). A matrix without rows gets a zero gradient. Local. Cannot be differentiated twice (ValueError).
/// ValueError: shapes that do not fit.
[[nodiscard]] HP_API at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight,
                                               const std::vector<std::int64_t>& counts);

enum class RouterScore {
  kSoftmax,  ///< over all experts
  kSigmoid,  ///< of each expert alone (DeepSeek-V3)
};

struct MoEOptions {
  std::int64_t n_experts = 1;
  std::int64_t top_k = 1;
  std::int64_t ffn_dim = 0;         ///< hidden features of an expert, a SwiGLU without bias
  std::int64_t shared_ffn_dim = 0;  ///< of the expert that every token visits; 0: none
  RouterScore score = RouterScore::kSoftmax;
  bool normalize_weights = true;  ///< the weights of a token's experts are divided by their sum
  double route_scale = 1.0;       ///< multiplies the weights
  /// Factor of the auxiliary loss (Fedus et al. 2021): n_experts * sum over experts of (share of the assignments) * (mean score).
  double aux_loss_weight = 0.0;
  /// Step of the balancing by bias (Wang et al. 2024): an expert with fewer tokens than the mean becomes more likely to be
  /// chosen. The bias has no influence on the weights. 0: no bias. Needs a call of update_bias() in every step.
  double bias_update_speed = 0.0;
  DeviceMesh ep_mesh = {};  ///< experts in ceil chunks; its ranks have different tokens. Undefined: this rank has all experts
  DeviceMesh tp_mesh = {};  ///< cuts the hidden features of each expert; its ranks have the same tokens
  /// The ranks of tp_mesh share out the tokens, along sequence_dim, instead of the hidden features: each has whole experts and
  /// works on its ceil chunk. ep_mesh may then span ranks of tp_mesh, and the gradient of an expert holds each token once, of
  /// whichever rank. The shared expert is cut as ever.
  bool split_tokens = false;
  /// The ranks whose tokens are balanced together, one axis (flatten several): usually all that have different tokens. Their
  /// loads are summed. Undefined: this rank's tokens alone. With split_tokens the ranks of tp_mesh count as having different
  /// ones; undefined: those of tp_mesh.
  DeviceMesh balance_mesh = {};
  bool sequence_parallel = false;  ///< over tp_mesh
  std::int64_t sequence_dim = 1;
};

/// Chooses experts. Parameter: weight (n_experts, dim), on all ranks, in the role of a torch::nn::Linear without bias; computed
/// in fp32. Buffers: expert_bias (fp32) and tokens_per_expert (int64, since the last update_bias), where bias_update_speed > 0.
class HP_API MoERouterImpl : public torch::nn::Module, public ParallelModule {
 public:
  MoERouterImpl(std::int64_t dim, const MoEOptions& options);
  struct Choice {
    torch::Tensor experts;  ///< (..., k) int64, ascending
    torch::Tensor weights;  ///< (..., k) fp32
    torch::Tensor scores;   ///< (..., n_experts) fp32, sum 1 for each token
    template <class F>
    void walk_tensors(F& f) {
      f(experts);
      f(weights);
      f(scores);
    }
  };
  /// x (..., dim). Of equal scores the expert with the lower number wins. Local.
  [[nodiscard]] Choice forward(torch::Tensor x);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;

  const std::int64_t dim;
  const MoEOptions options;
  torch::Tensor weight, expert_bias, tokens_per_expert;
};
HP_MODULE(MoERouter);

/// The experts that this rank has. Parameters: gate_proj, up_proj (n_experts, ffn_dim, dim), down_proj (n_experts, dim, ffn_dim);
/// dim 0 is cut over ep_mesh, ffn_dim over tp_mesh without split_tokens. Each expert's matrices are initialised like those of
/// torch::nn::Linear. A unit of its own for fully_shard, on the mesh of the ranks that have the same experts.
class HP_API GroupedExpertsImpl : public torch::nn::Module, public ParallelModule {
 public:
  GroupedExpertsImpl(std::int64_t dim, const MoEOptions& options);
  /// rows (sum of counts, dim) in the order of this rank's experts -> the same shape; with tp_mesh a summand of the result.
  /// Local.
  torch::Tensor forward(torch::Tensor rows, std::vector<std::int64_t> counts);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;

  const std::int64_t dim;
  const MoEOptions options;
  torch::Tensor gate_proj, up_proj, down_proj;
};
HP_MODULE(GroupedExperts);

/// Result of MixtureOfExperts.
struct MoEOutput {
  torch::Tensor output;
  torch::Tensor aux_loss;  ///< to be added to the loss; undefined where aux_loss_weight is 0
  template <class F>
  void walk_tensors(F& f) {
    f(output);
    f(aux_loss);
  }
};

/// The whole layer. Children: router, experts, shared_expert (a ParallelSwiGLU).
///
/// Gradients: those of the experts contain the tokens of all ranks of ep_mesh; that of the router is of this rank's tokens, like
/// that of any parameter of a data-parallel model; the mean of aux_loss over the ranks of balance_mesh is the auxiliary loss of
/// all their tokens.
class HP_API MixtureOfExpertsImpl : public torch::nn::Module {
 public:
  /// Collective over the axes where their groups are used for the first time. ValueError: numbers out of range, a mesh of several
  /// axes.
  MixtureOfExpertsImpl(std::int64_t dim, MoEOptions options);
  /// x (..., dim). Collective over ep_mesh, tp_mesh and, with an auxiliary loss, balance_mesh.
  /// \param sequence_length as in ColumnParallelLinear
  MoEOutput forward(torch::Tensor x, std::int64_t sequence_length = 0);
  /// Moves the bias of each expert by bias_update_speed towards the mean load since the last call, and forgets the loads. Once
  /// per step. Collective over balance_mesh. A recomputation (hp::checkpoint) counts its tokens twice, which changes no sign.
  /// Where a conversion of the module has cast the bias, it is fp32 again afterwards. No-op without bias.
  void update_bias();

  const std::int64_t dim;
  const MoEOptions options;
  MoERouter router{nullptr};
  GroupedExperts experts{nullptr};
  ParallelSwiGLU shared_expert{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::int64_t{0})})

 private:
  torch::Tensor run_experts(const torch::Tensor& rows, const std::vector<std::int64_t>& counts);
  torch::Tensor own_tokens(const torch::Tensor& x) const;
  torch::Tensor aux_loss(const torch::Tensor& scores, torch::Tensor loads) const;

  Comm ep_, tp_, balance_;
};
HP_MODULE(MixtureOfExperts);

}  // namespace hyper_parallel::parallel
