#pragma once
// Loss scaling for fp16, and steps that are left out.
#include <cmath>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: scales by nothing and skips nothing
  /// All ranks that must step or skip together. Default: all ranks on which the parameters of the unscaled trees lie. Needed
  /// where ranks hold other trees altogether (pipeline stages).
  Comm comm = {};
};

/// Scales the loss so that small fp16 gradients do not vanish, as torch.amp.GradScaler does, with one decision for all ranks.
///
/// A step: `scaler.scale(loss).backward(); scaler.unscale_(root); clip_grad_norm_(root, 1.0); scaler.step(optimizer);
/// scaler.update();` where unscale_ may be left out with our optimizers. When a gradient of any rank is infinite or NaN, no rank
/// steps. Every rank has the same scale. Thread safety: one thread at a time.
class HP_API GradScaler {
 public:
  /// Local. ValueError: init_scale not positive and finite as fp32, growth_factor not above 1, backoff_factor outside (0, 1),
  /// growth_interval below 1.
  explicit GradScaler(GradScalerOptions options = {});

  /// loss * get_scale(), in fp32 where the loss is fp16 or bf16. Local.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the gradients of the tree, and of `plain_parameters` outside of it, by the scale, and finds out whether all of them,
  /// of all ranks, are finite. Once between two updates. Collective: one all-reduce of one number over the ranks of the tree
  /// (where units lie on other ranks than the root, two for the root's group and for each of theirs). ValueError: fp16 gradients,
  /// which unscaling would flush to zero (keep fp32 shards or fp32 main gradients). Error: a second time for the same tree before
  /// update().
  void unscale_(const fsdp::UnitHandle& root, const std::vector<at::Tensor>& plain_parameters = {});

  /// Steps `optimizer`, one of ours or of torch::optim, unless gradients were not finite; \return whether it stepped. Unscales
  /// before if the optimizer is ours and that was not done, collective then. Error: nothing was unscaled and the optimizer is
  /// torch's.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    if (enabled()) {
      if constexpr (requires { optimizer.root(); }) {
        if (!is_unscaled(optimizer.root())) unscale_(optimizer.root());
      }
      check_unscaled();
      if (found_nonfinite_) return false;
    }
    optimizer.step();
    return true;
  }
  /// Ends the step: after non-finite gradients the scale shrinks by backoff_factor; after growth_interval steps without any it
  /// grows by growth_factor, unless that leaves fp32. Local. Error: nothing was unscaled since the last one.
  void update();

  [[nodiscard]] double get_scale() const { return enabled() ? state_.scale : 1.0; }
  [[nodiscard]] bool enabled() const { return options_.enabled; }
  /// Whether any rank had a gradient that is infinite or NaN since the last update.
  [[nodiscard]] bool found_nonfinite() const { return found_nonfinite_; }

  struct State {
    double scale = 0;
    std::int64_t growth_tracker = 0;  ///< finite steps since the scale changed
    friend bool operator==(const State&, const State&) = default;
  };
  [[nodiscard]] const State& state() const { return state_; }
  /// ValueError: scale not positive and finite as fp32, growth_tracker negative.
  void load_state(const State& state);

 private:
  [[nodiscard]] bool is_unscaled(const fsdp::UnitHandle& root) const;
  void check_unscaled() const;

  GradScalerOptions options_;
  State state_;
  std::vector<const fsdp::Unit*> unscaled_;  // since the last update
  bool found_nonfinite_ = false;
};

/// Steps unless `norm`, which clip_grad_norm_ gives equal on all ranks, is infinite or NaN: skips a bad batch without loss
/// scaling. \return whether it stepped. Local for element-wise optimizers.
template <class Optimizer>
bool step_if_finite(Optimizer& optimizer, double norm) {
  if (!std::isfinite(norm)) return false;
  optimizer.step();
  return true;
}

}  // namespace hyper_parallel::optim
