#include <hyper_parallel/optim/grad_scaler.h>

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "optim/kernels.h"

namespace hyper_parallel::optim {
namespace {

constexpr std::string_view kOp = "GradScaler";

bool valid_scale(double scale) { return scale > 0 && scale <= std::numeric_limits<float>::max(); }

bool same_ranks(std::vector<int> a, std::vector<int> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  return a == b;
}

/// The groups over which the ranks of a tree agree: the root's, and those of units with other ranks, in the order of the tree.
/// Only equal sets of ranks are left out: all members of a set find the same there, so that they reduce equally often.
std::vector<Comm> agreeing_groups(const fsdp::UnitHandle& root, const std::vector<fsdp::ShardedGroup>& groups) {
  std::vector<Comm> comms = {root.unit_comm()};
  for (const fsdp::ShardedGroup& group : groups) {
    const auto known = [&](const Comm& other) { return same_ranks(other.ranks(), group.unit_comm.ranks()); };
    if (group.unit_comm.size() > 1 && std::none_of(comms.begin(), comms.end(), known)) comms.push_back(group.unit_comm);
  }
  return comms;
}

bool any_rank(const Comm& comm, bool mine) {
  if (comm.size() == 1) return mine;
  const at::Tensor flag = at::empty({1}, at::TensorOptions().dtype(at::kFloat)).fill_(mine ? 1.0 : 0.0);
  comm.all_reduce(flag, {.op = ReduceOp::kMax, .label = "GradScaler"}).wait();
  return flag.item<float>() != 0;
}

/// False when an element was not finite.
bool unscale(const at::Tensor& grad, double factor) {
  const at::Tensor values = grad.contiguous();
  const bool finite = scale(values_of(values), values.numel(), factor);
  if (!values.is_same(grad)) grad.copy_(values);
  return finite;
}

void check_gradient(const at::Tensor& grad, const std::string& name) {
  check_value(grad.is_cpu(), kOp, "the gradient of ", name, " is on ", grad.device(), ", want the CPU");
  check_value(grad.is_floating_point() && grad.scalar_type() != at::kHalf, kOp, "the gradient of ", name, " is ",
              grad.scalar_type(), ", want fp32 or bf16: keep fp32 shards or fp32 main gradients");
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(std::move(options)), state_{.scale = options_.init_scale} {
  const GradScalerOptions& o = options_;
  check_value(valid_scale(o.init_scale), kOp, "init_scale is ", o.init_scale, ", want a positive number in the range of fp32");
  check_value(o.growth_factor > 1 && std::isfinite(o.growth_factor), kOp, "growth_factor is ", o.growth_factor, ", want above 1");
  check_value(o.backoff_factor > 0 && o.backoff_factor < 1, kOp, "backoff_factor is ", o.backoff_factor,
              ", want above 0 and below 1");
  check_value(o.growth_interval >= 1, kOp, "growth_interval is ", o.growth_interval, ", want at least 1");
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  if (!enabled()) return loss;
  const bool low = loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16;
  return (low ? loss.to(at::kFloat) : loss).mul(state_.scale);
}

bool GradScaler::is_unscaled(const fsdp::UnitHandle& root) const {
  return std::find(unscaled_.begin(), unscaled_.end(), root.unit().get()) != unscaled_.end();
}

void GradScaler::check_unscaled() const {
  if (unscaled_.empty())
    throw Error(concat('[', kOp, "] no gradients were unscaled since the last update, want unscale_(root) before"));
}

void GradScaler::unscale_(const fsdp::UnitHandle& root, const std::vector<at::Tensor>& plain_parameters) {
  if (!enabled()) return;
  check_value(root.defined(), kOp, "root is empty, want the handle that fully_shard returned");
  if (is_unscaled(root)) throw Error(concat('[', kOp, "] unscale_ was called before for this tree, want one call in a step"));
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = root.groups();
  const auto for_each = [&](auto&& f) {
    for (const fsdp::ShardedGroup& group : groups) {
      for (const auto& parameter : group.parameters) {
        if (parameter.grad.defined()) f(parameter.grad, parameter.name);
      }
    }
    for (const at::Tensor& parameter : plain_parameters) {
      if (parameter.grad().defined()) f(parameter.grad(), "a plain parameter");
    }
  };
  for_each([](const at::Tensor& grad, const std::string& name) { check_gradient(grad, name); });
  bool finite = true;
  for_each([&](const at::Tensor& grad, const std::string&) { finite = unscale(grad, 1 / state_.scale) && finite; });

  const std::vector<Comm> comms = options_.comm.defined() ? std::vector<Comm>{options_.comm} : agreeing_groups(root, groups);
  bool bad = !finite;
  for (const Comm& comm : comms) bad = any_rank(comm, bad);
  if (comms.size() > 1) {  // what later groups knew goes back
    for (std::size_t i = comms.size(); i-- > 0;) bad = any_rank(comms[i], bad);
  }
  found_nonfinite_ = found_nonfinite_ || bad;
  unscaled_.push_back(root.unit().get());
}

void GradScaler::update() {
  if (!enabled()) return;
  check_unscaled();
  if (found_nonfinite_) {
    state_.scale = std::max(state_.scale * options_.backoff_factor, static_cast<double>(std::numeric_limits<float>::min()));
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker >= options_.growth_interval) {
    if (valid_scale(state_.scale * options_.growth_factor)) state_.scale *= options_.growth_factor;
    state_.growth_tracker = 0;
  }
  unscaled_.clear();
  found_nonfinite_ = false;
}

void GradScaler::load_state(const State& state) {
  check_value(valid_scale(state.scale), kOp, "scale is ", state.scale, ", want a positive number in the range of fp32");
  check_value(state.growth_tracker >= 0, kOp, "growth_tracker is ", state.growth_tracker, ", want at least 0");
  state_ = state;
}

}  // namespace hyper_parallel::optim
