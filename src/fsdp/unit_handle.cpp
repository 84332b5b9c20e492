// The public face of a unit: handles and forward scopes.
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>

#include "fsdp/frozen_watch.h"
#include "fsdp/managed_registry.h"
#include "fsdp/runtime.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel {
namespace fsdp {

void UnshardHandle::wait() {
  if (const auto unit = unit_.lock(); unit != nullptr && unit->is_unsharding()) {
    unit->finish_unshard();
    if (unit->held) unit->show(true);
  }
  unit_.reset();
}

Unit& UnitHandle::get() const {
  check_value(unit_ != nullptr, "HSDPModule", "the handle is empty, want the one that fully_shard returned");
  return *unit_;
}

const std::string& UnitHandle::name() const { return get().name(); }
bool UnitHandle::is_unsharded() const { return get().is_unsharded(); }

UnshardHandle UnitHandle::unshard(bool async_op) const {
  get().start_hold("unshard");
  if (async_op) return UnshardHandle(unit_);
  get().finish_unshard();
  get().show(true);
  return {};
}

void UnitHandle::reshard() const { get().reshard(); }

ParameterLeaf::~ParameterLeaf() = default;

void UnitHandle::set_front_end(FrontEnd front_end) const { get().front_end = std::move(front_end); }

void UnitHandle::visit(bool recurse, const std::function<void(Unit&, ParamGroup&, std::size_t)>& f) const {
  for (Unit* unit : get().reached(recurse)) {
    unit->follow_module();
    for (auto& group : unit->groups()) {
      group->readopt();
      for (std::size_t i = 0; i < group->parameters().size(); ++i) f(*unit, *group, i);
    }
  }
}

void UnitHandle::zero_grad(bool set_to_none) const {
  at::NoGradGuard no_grad;
  for (Unit* unit : get().reached(true)) {
    for (auto& group : unit->groups()) {
      for (auto& parameter : group->parameters()) {
        at::Tensor& grad = group->gradient(parameter);
        if (!grad.defined()) continue;
        if (set_to_none) {
          grad = at::Tensor();
          group->gradient_changed(parameter);
        } else {
          grad.zero_();
        }
      }
    }
  }
}

std::vector<ShardedGroup> UnitHandle::groups(bool recurse) const {
  std::vector<ShardedGroup> groups;
  for (Unit* unit : get().reached(recurse)) {
    unit->follow_module();
    for (auto& group : unit->groups()) {
      group->readopt();
      ShardedGroup& result = groups.emplace_back();
      result.shard = group->shard();
      result.grad = group->grad();
      result.shard_comm = group->options().shard_comm;
      result.replicate_comm = group->options().replicate_comm;
      result.parts_comm = group->options().parts_comm;
      result.unit_comm = unit->unit_comm();
      result.trainable = group->trainable();
      const int rank = result.shard_comm.rank();
      for (std::size_t i = 0; i < group->parameters().size(); ++i) {
        ManagedParameter& parameter = group->parameters()[i];
        const ParameterSlice& slice = group->layout().slice(i, rank);
        result.parameters.push_back({unit->qualified(parameter), parameter.sharded, parameter.whole_shape, slice.shard_offset,
                                     slice.numel, group->gradient(parameter)});
      }
    }
  }
  return groups;
}

MemoryUse UnitHandle::memory_use() const {
  MemoryUse use;
  for (Unit* unit : get().reached(true)) {
    for (auto& group : unit->groups()) {
      use.shards += group->shard_bytes_held();
      use.gradients += group->grad_bytes();
      use.copies += group->copy_bytes();
      use.mapped += group->mapped_bytes();
    }
  }
  use.pool = static_cast<std::int64_t>(get().runtime().pool().capacity());
  return use;
}

Comm UnitHandle::data_parallel_comm() const { return get().data_parallel_comm(); }
Comm UnitHandle::unit_comm() const { return get().unit_comm(); }

ForwardScope::ForwardScope(Unit& unit, int member) : unit_(unit), member_(member) { unit_.pre_forward(); }

ForwardScope::~ForwardScope() {
  if (finished_) return;
  try {
    unit_.post_forward(member_, false);
  } catch (...) {  // the exception that is under way says what happened
  }
  unit_.runtime().abandon_reading();
}

void ForwardScope::finish() {
  finished_ = true;
  unit_.post_forward(member_, true);
  unit_.runtime().wait_after_forward();
}

bool ForwardScope::casts_inputs() const {
  const MixedPrecisionPolicy& policy = unit_.options().mp_policy;
  return policy.param_dtype.has_value() && policy.cast_forward_inputs;
}

at::Tensor ForwardScope::input(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.is_floating_point() || !casts_inputs()) return tensor;
  return tensor.to(*unit_.options().mp_policy.param_dtype);
}

at::Tensor ForwardScope::output(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto dtype = unit_.options().mp_policy.output_dtype;
  at::Tensor result = dtype && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
  if (!at::GradMode::is_enabled() || !result.requires_grad()) return result;
  // An input passed through, or a parameter: a hook on a tensor that stays would stay with it for ever.
  if (result.is_leaf() || managed_by(result)) result = at::alias(result);
  unit_.awaits_backward = true;
  const auto& pass = unit_.pass();
  if (pass && !pass->in_segment) pass->results.push_back(result.grad_fn().get());
  result.register_hook([unit = unit_.weak_from_this(), pass](const at::Tensor&) {
    if (const auto alive = unit.lock()) alive->pre_backward();
  });
  return result;
}

}  // namespace fsdp
}  // namespace hyper_parallel
