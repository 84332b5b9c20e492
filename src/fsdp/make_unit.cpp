// Validation first, then the change: a call that throws leaves the model as it was.
#include <algorithm>
#include <utility>

#include <hyper_parallel/comm/world.h>

#include "fsdp/managed_registry.h"
#include "fsdp/runtime.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

constexpr std::string_view kOp = "fully_shard";

void check_mesh(const DeviceMesh& mesh, const std::string& unit) {
  check_value(mesh.ndim() == 1 || mesh.ndim() == 2, kOp, "mesh has ", mesh.ndim(),
              " dims, want 1 (shard) or 2 (replicate, shard): ", mesh.to_string(), " (unit ", unit, ')');
  check_value(mesh.get_coordinate().has_value(), kOp, "rank ", mesh.world().rank(), " is not part of ", mesh.to_string(),
              " (unit ", unit, ')');
}

void check_parameter(const ParameterSlot& slot, const DeviceMesh& mesh, const std::string& unit) {
  const at::Tensor& parameter = slot.parameter;
  const auto where = [&] { return concat(" (parameter ", slot.name, " of unit ", unit, ')'); };
  if (const auto owner = managed_by(parameter)) {
    throw ValueError(concat('[', kOp, "] parameter is already managed by unit ", *owner,
                            ": wrap inner modules before outer ones, and keep modules that share a parameter in one unit",
                            where()));
  }
  check_value(parameter.layout() == at::kStrided, kOp, "parameter is ", parameter.layout(), ", want Strided", where());
  check_value(parameter.is_meta() || parameter.device().type() == at::Device(mesh.device_type()).type(), kOp, "parameter is on ",
              parameter.device(), ", want ", mesh.device_type(), ", the device of the mesh", where());
  check_value(parameter.is_leaf(), kOp, "parameter is not a leaf, want a torch::nn parameter", where());
  check_value(!parameter.requires_grad() || at::isFloatingType(parameter.scalar_type()), kOp, "trainable parameter is ",
              parameter.scalar_type(), ", want a floating type", where());
}

std::int64_t choose_dim(const ParameterSlot& slot, const FullyShardOptions& options, const std::string& unit) {
  if (!options.shard_placement_fn) return 0;
  const std::optional<std::int64_t> chosen = options.shard_placement_fn(slot.name, slot.parameter);
  if (!chosen) return 0;
  const std::int64_t ndim = std::max<std::int64_t>(slot.parameter.dim(), 1);  // a scalar has dims -1 and 0, as in torch
  const std::int64_t dim = *chosen < 0 ? *chosen + ndim : *chosen;
  check_value(dim >= 0 && dim < ndim, kOp, "shard_placement_fn returned dim ", *chosen, " for parameter ", slot.name,
              " of shape ", slot.parameter.sizes(), ", want ", -ndim, " to ", ndim - 1, " (unit ", unit, ')');
  check_value(dim == 0 || options.shard_layout == ShardLayout::kPerParameter, kOp, "shard_placement_fn returned dim ", *chosen,
              " for parameter ", slot.name, ", want 0 or none: the ragged layout cuts flat rows (unit ", unit, ')');
  return dim;
}

void check_policy(const MixedPrecisionPolicy& policy, const std::string& unit) {
  const auto check = [&](const std::optional<at::ScalarType>& dtype, const char* field) {
    check_value(!dtype || at::isFloatingType(*dtype), kOp, "mp_policy.", field, " is ", dtype.value_or(at::kFloat),
                ", want a floating type (unit ", unit, ')');
  };
  check(policy.param_dtype, "param_dtype");
  check(policy.reduce_dtype, "reduce_dtype");
  check(policy.output_dtype, "output_dtype");
}

DeviceMesh default_mesh(const std::vector<ParameterSlot>& slots) {
  const World world = current_world();
  const auto real = std::find_if(slots.begin(), slots.end(), [](const auto& slot) { return !slot.parameter.is_meta(); });
  const std::string device =
      real == slots.end() ? "cpu" : c10::DeviceTypeName(real->parameter.device().type(), /*lower_case=*/true);
  return init_device_mesh(device, {world.size()}, {"dp_shard"});
}

}  // namespace

std::shared_ptr<Unit> make_unit(const std::string& name, std::vector<ParameterSlot> slots, const FullyShardOptions& given,
                                const std::vector<ChildUnit>& children, int members) {
  FullyShardOptions options = given;
  if (!options.mesh.defined()) options.mesh = default_mesh(slots);
  check_mesh(options.mesh, name);
  check_policy(options.mp_policy, name);
  std::vector<std::int64_t> dims;
  for (const ParameterSlot& slot : slots) {
    check_parameter(slot, options.mesh, name);
    dims.push_back(choose_dim(slot, options, name));
  }
  for (const ChildUnit& child : children) {
    check_value(child.unit->runtime().idle(), kOp, "inner unit ", child.unit->name(),
                " is in the middle of a step, want it idle: call reset_iter_state() after an exception (unit ", name, ')');
  }
  const bool hybrid = options.mesh.ndim() == 2;
  const Comm shard = options.mesh.get_group(hybrid ? 1 : 0);
  const Comm replicate = hybrid ? options.mesh.get_group(std::int64_t{0}) : Comm();
  const Comm all = hybrid ? options.mesh.flatten().get_group(std::int64_t{0}) : shard;

  auto unit = std::make_shared<Unit>(name, options, shard, replicate, all);
  unit->members = members;
  unit->add_groups(std::move(slots), dims);
  unit->adopt(children);
  return unit;
}

}  // namespace hyper_parallel::fsdp
