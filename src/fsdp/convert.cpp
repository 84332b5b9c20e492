// Another dtype for a tree of units.
#include <hyper_parallel/fsdp/init.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include "fsdp/places.h"
#include "fsdp/runtime.h"
#include "fsdp/unit_node.h"

namespace hyper_parallel::fsdp {

/// Each group to the dtype that `choose` names, if it names one.
void Unit::convert(const std::function<std::optional<at::ScalarType>(const ParamGroup&)>& choose) {
  const MixedPrecisionPolicy& policy = options_.mp_policy;
  aliased_ = true;
  for (auto& group : groups_) {
    const auto dtype = choose(*group);
    if (dtype && *dtype != group->shard().scalar_type()) {
      const at::ScalarType compute = policy.param_dtype.value_or(*dtype);
      group->convert(*dtype, compute, policy.reduce_dtype.value_or(compute));
    }
    aliased_ = aliased_ && group->aliased();
  }
  reconnect();
}

void Unit::follow_module() {
  if (front_end.follow) front_end.follow();
  const auto moved = [](const auto& group) { return group->dtype_from_outside().has_value(); };
  if (std::none_of(groups_.begin(), groups_.end(), moved)) return;
  check_value(runtime_->idle() && !awaits_backward && !owes_reduction, "fully_shard", "parameters of unit ", name_,
              " were converted in the middle of a step, want conversions between two steps");
  reshard();
  convert([](const ParamGroup& group) { return group.dtype_from_outside(); });
  runtime_->start_over();
}

void Unit::cast_buffers(at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers()) {
    if (!buffer.is_floating_point() || buffer.scalar_type() == dtype) continue;
    const auto unwritten = unwritten_buffers_.find(buffer.unsafeGetTensorImpl());
    const bool waits = unwritten != unwritten_buffers_.end() && unwritten->second.still(buffer);
    become(buffer, buffer.detach().to(dtype));
    if (waits) unwritten->second = Unwritten(buffer);
  }
}

/// Dtypes are part of what a node knows of its inputs: the parameters get a new node, and graphs of before lead to the old one.
void Unit::reconnect() {
  node_->retire();
  node_ = c10::make_intrusive<UnitNode>(weak_from_this());
  node_inputs_.clear();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    auto& parameters = groups_[g]->parameters();
    input_of_parameter_[g].assign(parameters.size(), -1);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].trainable) connect(parameters[i], g, i);
    }
  }
}

const std::string& device_type(const UnitHandle& root) { return root.get().options().mesh.device_type(); }

void cast_buffers(const UnitHandle& root, c10::ScalarType dtype) {
  check_value(at::isFloatingType(dtype), "cast_buffers", "dtype is ", dtype, ", want a floating type (unit ", root.name(), ')');
  const std::vector<Unit*> units = root.get().reached(true);
  for (Unit* unit : units) unit->cast_buffers(dtype);
}

void convert(const UnitHandle& root, c10::ScalarType dtype) {
  constexpr std::string_view kOp = "to";
  check_value(at::isFloatingType(dtype), kOp, "dtype is ", dtype, ", want a floating type (unit ", root.name(), ')');
  Unit& top = root.get();
  check_between_steps(top, kOp);
  const std::vector<Unit*> units = top.reached(true);
  for (Unit* unit : units) {
    unit->follow_module();
    unit->reshard();
    for (auto& group : unit->groups()) group->readopt();
  }
  const auto floating = [&](const ParamGroup& group) {
    return at::isFloatingType(group.shard().scalar_type()) ? std::optional(dtype) : std::nullopt;
  };
  for (Unit* unit : units) unit->convert(floating);
  cast_buffers(root, dtype);
  top.runtime().start_over();
}

}  // namespace hyper_parallel::fsdp
