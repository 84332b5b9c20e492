#include <hyper_parallel/train/schedule.h>

#include <algorithm>

namespace hyper_parallel::train {

double Schedule::progress(std::int64_t step, double seconds) const {
  const double steps = max_steps > 0 ? static_cast<double>(step) / static_cast<double>(max_steps) : 0;
  const double time = max_seconds > 0 ? seconds / max_seconds : 0;
  return std::clamp(std::max(steps, time), 0.0, 1.0);
}

double Schedule::at(std::int64_t step, double seconds, double warmup_seconds) const {
  if (step < warmup_steps) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  double share = 0;
  if (max_steps > warmup_steps) share = static_cast<double>(step - warmup_steps) / static_cast<double>(max_steps - warmup_steps);
  if (max_seconds > warmup_seconds) share = std::max(share, (seconds - warmup_seconds) / (max_seconds - warmup_seconds));
  return lr * optim::LrSchedule{.shape = shape, .min_ratio = min_ratio, .decay_share = decay_share}.after_warmup(share);
}

}  // namespace hyper_parallel::train
