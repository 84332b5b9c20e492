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

/// The sum over the ranks that hold different shards; replicas hold the same.
double over_ranks(const Comm& comm, double value, double p, const at::TensorOptions& options) {
  if (comm.size() == 1) return value;
  const at::Tensor scalar = at::empty({1}, options.dtype(at::kDouble)).fill_(value);
  comm.all_reduce(scalar, {.op = std::isinf(p) ? ReduceOp::kMax : ReduceOp::kSum, .label = "total norm"}).wait();
  return scalar.item<double>();
}

double power_sum_of(const at::Tensor& tensor, double p) {
  const at::Tensor grad = tensor.is_floating_point() ? tensor.contiguous().cpu() : tensor.to(at::kDouble).contiguous().cpu();
  return optim::power_sum(optim::values_of(grad), grad.numel(), p);
}

/// Calls f for every gradient of the tree and of the plain parameters.
template <class F>
void for_each_gradient(const fsdp::UnitHandle& root, const ClipGradOptions& options, F&& f) {
  at::NoGradGuard no_grad;
  for (const fsdp::ShardedGroup& group : root.groups()) {
    for (const auto& parameter : group.parameters) {
      if (parameter.grad.defined() && parameter.grad.numel() > 0) f(parameter.grad);
    }
  }
  for (const at::Tensor& parameter : options.plain_parameters) {
    if (parameter.grad().defined()) f(parameter.grad());
  }
}

double total_norm(std::string_view op, const fsdp::UnitHandle& root, const ClipGradOptions& options) {
  const double p = options.norm_type;
  check_value(p > 0, op, "norm_type is ", p, ", want a positive number or infinity");
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = root.groups();
  std::vector<std::pair<const fsdp::ShardedGroup*, double>> by_comm;  // one entry for each distinct set of ranks, in order
  for (const fsdp::ShardedGroup& group : groups) {
    auto entry = std::find_if(by_comm.begin(), by_comm.end(),
                              [&](const auto& e) { return e.first->parts_comm.ranks() == group.parts_comm.ranks(); });
    if (entry == by_comm.end()) entry = by_comm.insert(by_comm.end(), {&group, 0.0});
    for (const auto& parameter : group.parameters) {
      if (parameter.grad.defined()) entry->second = optim::combine_powers(entry->second, power_sum_of(parameter.grad, p), p);
    }
  }
  double total = 0;
  for (const auto& [group, local] : by_comm)
    total = optim::combine_powers(total, over_ranks(group->parts_comm, local, p, group->shard.options()), p);
  for (const at::Tensor& parameter : options.plain_parameters) {
    if (parameter.grad().defined()) total = optim::combine_powers(total, power_sum_of(parameter.grad(), p), p);
  }
  const double norm = std::isinf(p) ? total : std::pow(total, 1.0 / p);
  if (options.error_if_nonfinite && !std::isfinite(norm))
    throw Error(concat('[', op, "] the norm of the gradients is ", norm, ", want a finite number"));
  return norm;
}

}  // namespace

double get_total_norm(const fsdp::UnitHandle& root, const ClipGradOptions& options) {
  return total_norm("get_total_norm", root, options);
}

double clip_grad_norm_(const fsdp::UnitHandle& root, double max_norm, const ClipGradOptions& options) {
  const trace::Span span("clip");
  check_value(max_norm >= 0, "clip_grad_norm_", "max_norm is ", max_norm, ", want at least 0");
  const double norm = total_norm("clip_grad_norm_", root, options);
  clip_grads_with_norm_(root, max_norm, norm, options);
  return norm;
}

void clip_grads_with_norm_(const fsdp::UnitHandle& root, double max_norm, double total_norm, const ClipGradOptions& options) {
  check_value(max_norm >= 0, "clip_grads_with_norm_", "max_norm is ", max_norm, ", want at least 0");
  const double factor = max_norm / (total_norm + 1e-6);
  if (factor >= 1.0) return;
  for_each_gradient(root, options, [&](const at::Tensor& grad) { grad.mul_(factor); });
}

void clip_grad_value_(const fsdp::UnitHandle& root, double clip_value, const ClipGradOptions& options) {
  check_value(clip_value >= 0, "clip_grad_value_", "clip_value is ", clip_value, ", want at least 0");
  for_each_gradient(root, options, [&](const at::Tensor& grad) { grad.clamp_(-clip_value, clip_value); });
}

}  // namespace hyper_parallel
