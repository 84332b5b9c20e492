#pragma once
// Learning rate of a run that ends after steps or after seconds. Torch-free.
#include <cstdint>

#include <hyper_parallel/optim/lr_schedule.h>

namespace hyper_parallel::train {

/// Linear warm-up over `warmup_steps`, then from `lr` along `shape` (see optim::LrShape) to `lr * min_ratio`.
///
/// The shape runs over what is left of `max_steps`, or of `max_seconds` when that ends sooner, so that a run with a time budget
/// anneals as well. Thread safety: a plain value.
struct Schedule {
  double lr = 3e-4;
  optim::LrShape shape = optim::LrShape::kCosine;  ///< but for kInverseSqrt, which has no end
  double min_ratio = 0.1;
  double decay_share = 0.2;  ///< kWsd: the part of the run after the warm-up in which the rate falls
  std::int64_t warmup_steps = 0;
  std::int64_t max_steps = 0;  ///< 0: no limit
  double max_seconds = 0;      ///< 0: no limit

  /// Rate of step `step` (from 0), begun `seconds` after the start; `warmup_seconds` is when the warm-up ended.
  [[nodiscard]] double at(std::int64_t step, double seconds = 0, double warmup_seconds = 0) const;
  /// How much of the run lies behind, 0..1: the larger of the shares of steps and of seconds.
  [[nodiscard]] double progress(std::int64_t step, double seconds) const;
};

}  // namespace hyper_parallel::train
