#pragma once
// Learning-rate schedules: pure functions, and the object that sets them. Torch-free.
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::optim {

/// How the rate falls after the warm-up.
enum class LrShape {
  kConstant,
  kLinear,       ///< straight down to min_ratio
  kCosine,       ///< half a cosine down to min_ratio (Loshchilov and Hutter, SGDR)
  kWsd,          ///< warm-up, stable, decay: constant, then straight down to min_ratio in the last decay_share
  kInverseSqrt,  ///< 1 / sqrt(step), continuous at the end of the warm-up (Vaswani et al., 2017); never below min_ratio
};

/// "constant", "linear", "cosine", "wsd", "inverse_sqrt"; ValueError: another name.
[[nodiscard]] HP_API LrShape lr_shape(std::string_view name);

/// Share of the peak rate as a function of the step, or of the share of the run; a plain value. Thread safety: any thread.
struct HP_API LrSchedule {
  LrShape shape = LrShape::kCosine;
  std::int64_t warmup_steps = 0;  ///< straight up: (step + 1) / warmup_steps
  std::int64_t total_steps = 0;   ///< warm-up included; kConstant and kInverseSqrt do not need it
  double min_ratio = 0;           ///< what is left at the end
  double decay_share = 0.2;       ///< kWsd: the part of the run after the warm-up in which the rate falls

  /// Share of the peak rate in step `step`, from 0; after the last step it stays. ValueError: see validate.
  [[nodiscard]] double factor(std::int64_t step) const;
  /// Share of the peak rate when `share` (0..1, clamped) of what follows the warm-up is done, for schedules that follow a clock.
  /// ValueError: kInverseSqrt, which knows steps only.
  [[nodiscard]] double after_warmup(double share) const;
  /// ValueError: negative steps, min_ratio outside [0, 1], decay_share outside (0, 1], total_steps missing where the shape needs
  /// it.
  void validate() const;
};

/// Sets the rates of an optimizer, step by step: initial rate of each parameter group times a factor.
///
/// Works with our optimizers and with those of torch::optim. Like torch's schedulers it sets the rate of step 0 when it is made,
/// and `step()` is called after each step of the optimizer. Refers to the optimizer, which must outlive it. Local. Thread safety:
/// one thread at a time.
class HP_API LrScheduler {
 public:
  using Factor = std::function<double(std::int64_t step)>;

  template <class Optimizer>
  LrScheduler(Optimizer& optimizer, Factor factor)
      : LrScheduler(Rates{[&optimizer] { return get_rates(optimizer); },
                          [&optimizer](const std::vector<double>& rates) { set_rates(optimizer, rates); }},
                    std::move(factor)) {}
  template <class Optimizer>
  LrScheduler(Optimizer& optimizer, const LrSchedule& schedule) : LrScheduler(optimizer, checked(schedule)) {}

  /// The next step of the training begins: sets its rates.
  void step();
  [[nodiscard]] std::int64_t last_step() const { return state_.step; }
  [[nodiscard]] std::vector<double> last_lrs() const { return rates_.get(); }

  struct State {
    std::int64_t step = 0;
    std::vector<double> initial_lrs;  ///< of each parameter group
    friend bool operator==(const State&, const State&) = default;
  };
  [[nodiscard]] const State& state() const { return state_; }
  /// Goes on from there and sets the rates. ValueError: negative step, another number of groups.
  void load_state(const State& state);

 private:
  struct Rates {
    std::function<std::vector<double>()> get;
    std::function<void(const std::vector<double>&)> set;
  };
  LrScheduler(Rates rates, Factor factor);
  static Factor checked(const LrSchedule& schedule);
  void set_rates_of(std::int64_t step);

  template <class Optimizer>
  static std::vector<double> get_rates(Optimizer& optimizer) {
    if constexpr (requires { optimizer.lrs(); }) {
      return optimizer.lrs();
    } else {
      std::vector<double> rates;
      for (auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
      return rates;
    }
  }
  template <class Optimizer>
  static void set_rates(Optimizer& optimizer, const std::vector<double>& rates) {
    if constexpr (requires { optimizer.set_lrs(rates); }) {
      optimizer.set_lrs(rates);
    } else {
      std::size_t i = 0;
      for (auto& group : optimizer.param_groups()) group.options().set_lr(rates.at(i++));
    }
  }

  Rates rates_;
  Factor factor_;
  State state_;
};

}  // namespace hyper_parallel::optim
