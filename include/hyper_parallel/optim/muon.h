#pragma once
// Muon: momentum, orthogonalized, for the matrices of hidden layers; AdamW for all other parameters.
#include <array>
#include <memory>

#include <hyper_parallel/optim/adamw.h>

namespace hyper_parallel::optim {

class MuonExchange;

/// How the rate of a matrix follows from its shape [A, B].
enum class MuonLr {
  kOriginal,       ///< lr * sqrt(max(1, A / B)) (Jordan, 2024)
  kMatchRmsAdamW,  ///< lr * 0.2 * sqrt(max(A, B)): updates as large as AdamW's (Liu et al., 2025)
};

struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;  ///< smallest norm that a matrix is divided by
  std::int64_t ns_steps = 5;
  MuonLr adjust_lr_fn = MuonLr::kOriginal;
  /// Which parameters Muon updates; they must be matrices. Default: all with two dimensions but `not_matrices`.
  ParameterPredicate matrices = {};
  /// Matrices for AdamW: name embeddings and output heads here.
  std::vector<std::string> not_matrices = {};
  std::vector<ParamGroup> groups = {};  ///< of matrices: lr and weight_decay
  /// Of Newton-Schulz and of what travels: float32 or bfloat16. torch computes in bfloat16, which moves half the bytes.
  c10::ScalarType ns_dtype = c10::ScalarType::Float;
  std::optional<c10::ScalarType> state_dtype = {};  ///< of the momentum, as in AdamWOptions
  bool master_weights = false;                      ///< of the matrices, as in AdamWOptions
  /// Of all other parameters. `parameters` further limits them; a group's names may only be such parameters.
  AdamWOptions adamw = {};
};

/// Muon (Jordan et al., 2024) in the form of torch.optim.Muon, for sharded matrices of any layout.
///
/// Each matrix is orthogonalized on one of the ranks that share it: the owner, chosen so that the ranks have equal work. The
/// momentum stays sharded; its shards go to the owners in one all-to-all, and their updates come back in a second one. Replicas
/// (HSDP) each do this among their own shards, and each rank alone does it for parameters that are not cut: no bytes travel
/// between replicas. In each of the two exchanges, rank r sends and receives
/// ```
///   phase 1   sent      sum over matrices m that another rank owns of n(m, r)          n(m, r): elements of m on rank r
///             received  sum over matrices m that rank r owns of N(m) - n(m, r)         N(m):    elements of m
///   phase 2   the other way round
/// ```
/// elements of ns_dtype, so 2 * sum over m of (N(m) - n(m, owner)) leave all ranks together in a step. The result does not depend
/// on the number of ranks, bit for bit, given equal gradients. State of a matrix: "momentum_buffer"; of other parameters:
/// AdamW's.
class HP_API Muon : public FlatOptimizer {
 public:
  /// Local. ValueError: what AdamW rejects; momentum outside [0, 1), ns_steps outside [0, 100), eps negative, another ns_dtype, a
  /// parameter chosen that is no matrix, a name in not_matrices of no parameter.
  explicit Muon(const fsdp::UnitHandle& root, MuonOptions options = {});
  ~Muon() override;
  Muon(Muon&&) noexcept;
  Muon& operator=(Muon&&) noexcept;

  /// Collective over the shard groups: the ranks of one must have gradients for the same parameters, as a reduction leaves them.
  void step() override;
  [[nodiscard]] std::vector<double> lrs() const override;
  void set_lrs(const std::vector<double>& lrs) override;
  [[nodiscard]] std::vector<State> state() const override;
  void load_state(const std::vector<State>& state) override;
  void check_state(const std::vector<State>& state) override;
  [[nodiscard]] std::vector<ParamGroupState> param_groups() const override;
  [[nodiscard]] std::int64_t state_bytes() const override;

  [[nodiscard]] const MuonOptions& options() const { return options_; }
  /// The optimizer of all other parameters.
  [[nodiscard]] AdamW& adamw() { return adamw_; }
  [[nodiscard]] const AdamW& adamw() const { return adamw_; }

  /// Bytes that this rank sends to others in a step in which all matrices have gradients: the formula above.
  [[nodiscard]] std::int64_t bytes_per_step() const;
  /// Group rank of the owner of each matrix, by name.
  [[nodiscard]] std::vector<std::pair<std::string, int>> owners() const;

 private:
  void update(const Update& update) override;
  /// Those of matrices, and all others.
  [[nodiscard]] std::pair<std::vector<State>, std::vector<State>> divided(const std::vector<State>& states) const;

  MuonOptions options_;
  AdamW adamw_;
  std::vector<std::unique_ptr<MuonExchange>> exchanges_;  // one for each distinct set of ranks, in the order of the tree
};

}  // namespace hyper_parallel::optim
