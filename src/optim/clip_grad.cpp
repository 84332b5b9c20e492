#include <hyper_parallel/optim/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <hyper_parallel/core/trace.h>

#include "optim/norm.h"

namespace hyper_parallel {
namespace {

constexpr std::string_view kOp = "clip_grad_norm_";

double combine(double a, double b, bool largest) {
  if (!largest) return a + b;
  return std::isnan(a) || std::isnan(b) ? std::nan("") : std::max(a, b);
}

/// The sum over the ranks that hold different shards; replicas hold the same.
double over_ranks(const Comm& comm, double value, bool largest, const at::TensorOptions& options) {
  if (comm.size() == 1) return value;
  const at::Tensor scalar = at::empty({1}, options.dtype(at::kDouble)).fill_(value);
  comm.all_reduce(scalar, {.op = largest ? ReduceOp::kMax : ReduceOp::kSum, .label = kOp}).wait();
  return scalar.item<double>();
}

}  // namespace

double clip_grad_norm_(const fsdp::UnitHandle& root, double max_norm, const ClipGradOptions& options) {
  check_value(max_norm >= 0, kOp, "max_norm is ", max_norm, ", want at least 0");
  check_value(options.norm_type > 0, kOp, "norm_type is ", options.norm_type, ", want a positive number or infinity");
  const trace::Span span("clip");
  at::NoGradGuard no_grad;
  const double p = options.norm_type;
  const bool largest = std::isinf(p);

  const std::vector<fsdp::ShardedGroup> groups = root.groups();
  std::vector<std::pair<const fsdp::ShardedGroup*, double>> by_comm;  // one entry for each distinct set of ranks, in order
  for (const fsdp::ShardedGroup& group : groups) {
    auto entry = std::find_if(by_comm.begin(), by_comm.end(),
                              [&](const auto& e) { return e.first->shard_comm.ranks() == group.shard_comm.ranks(); });
    if (entry == by_comm.end()) entry = by_comm.insert(by_comm.end(), {&group, 0.0});
    for (const auto& parameter : group.parameters) {
      const at::Tensor& grad = parameter.sharded.grad();
      if (grad.defined()) entry->second = combine(entry->second, optim::power_sum(grad, p), largest);
    }
  }
  double total = 0;
  for (const auto& [group, local] : by_comm)
    total = combine(total, over_ranks(group->shard_comm, local, largest, group->shard.options()), largest);
  for (const at::Tensor& parameter : options.plain_parameters) {
    if (parameter.grad().defined()) total = combine(total, optim::power_sum(parameter.grad(), p), largest);
  }
  const double norm = largest ? total : std::pow(total, 1.0 / p);
  if (options.error_if_nonfinite && !std::isfinite(norm))
    throw Error(concat('[', kOp, "] the norm of the gradients is ", norm, ", want a finite number"));

  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1.0) return norm;
  for (const fsdp::ShardedGroup& group : groups) {
    for (const auto& parameter : group.parameters) {
      if (parameter.sharded.grad().defined()) parameter.sharded.grad().mul_(factor);
    }
  }
  for (const at::Tensor& parameter : options.plain_parameters) {
    if (parameter.grad().defined()) parameter.grad().mul_(factor);
  }
  return norm;
}

}  // namespace hyper_parallel
