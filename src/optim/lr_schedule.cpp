#include <hyper_parallel/optim/lr_schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace hyper_parallel::optim {
namespace {

constexpr std::string_view kOp = "lr_schedule";

}  // namespace

LrShape lr_shape(std::string_view name) {
  constexpr std::pair<std::string_view, LrShape> kShapes[] = {{"constant", LrShape::kConstant},
                                                              {"linear", LrShape::kLinear},
                                                              {"cosine", LrShape::kCosine},
                                                              {"wsd", LrShape::kWsd},
                                                              {"inverse_sqrt", LrShape::kInverseSqrt}};
  for (const auto& [known, shape] : kShapes) {
    if (known == name) return shape;
  }
  throw ValueError(concat('[', kOp, "] schedule is ", name, ", want constant, linear, cosine, wsd or inverse_sqrt"));
}

void LrSchedule::validate() const {
  check_value(warmup_steps >= 0, kOp, "warmup_steps is ", warmup_steps, ", want at least 0");
  check_value(total_steps >= 0, kOp, "total_steps is ", total_steps, ", want at least 0");
  check_value(min_ratio >= 0 && min_ratio <= 1, kOp, "min_ratio is ", min_ratio, ", want 0 to 1");
  check_value(decay_share > 0 && decay_share <= 1, kOp, "decay_share is ", decay_share, ", want above 0 and at most 1");
  const bool endless = shape == LrShape::kConstant || shape == LrShape::kInverseSqrt;
  check_value(endless || total_steps > 0, kOp, "total_steps is 0, want the number of steps that the schedule falls over");
}

double LrSchedule::after_warmup(double share) const {
  share = std::clamp(share, 0.0, 1.0);
  switch (shape) {
    case LrShape::kConstant:
      return 1;
    case LrShape::kLinear:
      return 1 - (1 - min_ratio) * share;
    case LrShape::kCosine:
      return min_ratio + (1 - min_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * share));
    case LrShape::kWsd:
      return 1 - (1 - min_ratio) * std::max(0.0, (share - (1 - decay_share)) / decay_share);
    case LrShape::kInverseSqrt:
      break;
  }
  throw ValueError(concat('[', kOp, "] inverse_sqrt by share of the run, want a step: it has no end"));
}

double LrSchedule::factor(std::int64_t step) const {
  validate();
  step = std::max<std::int64_t>(step, 0);
  if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  if (shape == LrShape::kInverseSqrt) {
    const auto peak = static_cast<double>(std::max<std::int64_t>(warmup_steps, 1));
    return std::max(min_ratio, std::sqrt(peak / static_cast<double>(std::max<std::int64_t>(step + 1, 1))));
  }
  const std::int64_t rest = total_steps - warmup_steps;
  return after_warmup(rest > 0 ? static_cast<double>(step - warmup_steps) / static_cast<double>(rest) : 1);
}

LrScheduler::LrScheduler(Rates rates, Factor factor) : rates_(std::move(rates)), factor_(std::move(factor)) {
  check_value(static_cast<bool>(factor_), "LrScheduler", "no factor, want a schedule");
  state_.initial_lrs = rates_.get();
  set_rates_of(0);
}

LrScheduler::Factor LrScheduler::checked(const LrSchedule& schedule) {
  schedule.validate();
  return [schedule](std::int64_t step) { return schedule.factor(step); };
}

void LrScheduler::set_rates_of(std::int64_t step) {
  std::vector<double> rates = state_.initial_lrs;
  const double factor = factor_(step);
  for (double& rate : rates) rate *= factor;
  rates_.set(rates);
}

void LrScheduler::step() {
  set_rates_of(state_.step + 1);
  ++state_.step;
}

void LrScheduler::load_state(const State& state) {
  check_value(state.step >= 0, "LrScheduler", "step is ", state.step, ", want at least 0");
  check_value(state.initial_lrs.size() == state_.initial_lrs.size(), "LrScheduler", "the state has ", state.initial_lrs.size(),
              " initial rates, want ", state_.initial_lrs.size(), ", one for each parameter group");
  state_ = state;
  set_rates_of(state_.step);
}

}  // namespace hyper_parallel::optim
