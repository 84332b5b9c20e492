// Validation first, then the change: a call that throws leaves the model as it was.
#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>

#include <hyper_parallel/comm/world.h>

#include "fsdp/make_groups.h"
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

/// Types in which gradients are summed.
bool trains(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

constexpr const char* kTrains = ", want a floating type of 16 bits or more";

void check_parameter(const ParameterSlot& slot, const DeviceMesh& mesh, const std::string& unit) {
  const at::Tensor& parameter = slot.parameter;
  const auto where = [&] { return concat(" (parameter ", slot.name, " of unit ", unit, ')'); };
  if (const auto owner = managed_by(parameter)) {
    throw ValueError(concat('[', kOp, "] parameter is already managed by ", *owner,
                            ": wrap inner modules before outer ones, and keep modules that share a parameter in one unit",
                            where()));
  }
  check_value(parameter.layout() == at::kStrided, kOp, "parameter is ", parameter.layout(), ", want Strided", where());
  check_value(parameter.is_meta() || parameter.device().type() == at::Device(mesh.device_type()).type(), kOp, "parameter is on ",
              parameter.device(), ", want ", mesh.device_type(), ", the device of the mesh", where());
  check_value(parameter.is_leaf(), kOp, "parameter is not a leaf, want a torch::nn parameter", where());
  check_value(!parameter.requires_grad() || trains(parameter.scalar_type()), kOp, "trainable parameter is ",
              parameter.scalar_type(), kTrains, where());
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
    check_value(!dtype || trains(*dtype), kOp, "mp_policy.", field, " is ", dtype.value_or(at::kFloat), kTrains, " (unit ", unit,
                ')');
  };
  check(policy.param_dtype, "param_dtype");
  check(policy.reduce_dtype, "reduce_dtype");
  check(policy.output_dtype, "output_dtype");
}

void check_fusion(const FullyShardOptions& options, const std::string& unit) {
  const bool fused = options.comm_fusion || options.shard_layout == ShardLayout::kRagged;
  check_value(fused || !options.comm_fusion_zero_copy.value_or(false), kOp,
              "comm_fusion_zero_copy is true without comm_fusion, want comm_fusion too (unit ", unit, ')');
  check_value(options.bucket_size != 0, kOp, "bucket_size is 0, want a number of bytes, or -1 for one bucket (unit ", unit, ')');
  check_value(fused || options.bucket_size < 0, kOp, "bucket_size is ", options.bucket_size,
              " without comm_fusion, which makes the buckets (unit ", unit, ')');
  check_value(options.threshold >= 0, kOp, "threshold is ", options.threshold, ", want a number of bytes (unit ", unit, ')');
}

/// The unit's ways after forward: false for 1, true for all ranks, like PyTorch.
void normalize_reshard(FullyShardOptions& options, int shards, const std::string& unit) {
  if (!options.reshard_after_forward) return;
  if (const int* cuts = std::get_if<int>(&*options.reshard_after_forward)) {
    check_value(*cuts >= 1 && *cuts <= shards && shards % *cuts == 0, kOp, "reshard_after_forward is ", *cuts,
                ", want a factor of the ", shards, " ranks of the shard axis (unit ", unit, ')');
    if (*cuts == 1 || *cuts == shards) options.reshard_after_forward = *cuts == shards;
  } else if (const auto* budget = std::get_if<MemoryBudget>(&*options.reshard_after_forward)) {
    check_value(budget->bytes > 0, kOp, "memory budget is ", budget->bytes, " bytes, want more than 0 (unit ", unit, ')');
  }
}

/// The k consecutive ranks of the shard group among which this rank cuts and gathers after forward.
Comm post_forward_comm(const FullyShardOptions& options, const Comm& shard) {
  const int* cuts = options.reshard_after_forward ? std::get_if<int>(&*options.reshard_after_forward) : nullptr;
  if (cuts == nullptr) return {};
  std::vector<int> members(static_cast<std::size_t>(*cuts));
  std::iota(members.begin(), members.end(), shard.rank() / *cuts * *cuts);
  return shard.subgroup(members);
}

bool stays_whole(const ParameterSlot& slot, std::int64_t bytes, const FullyShardOptions& options) {
  const auto listed = [&](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl() == slot.parameter.unsafeGetTensorImpl();
  };
  return bytes < options.threshold || std::any_of(options.replicate_params.begin(), options.replicate_params.end(), listed);
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
  check_fusion(options, name);
  for (const at::Tensor& parameter : options.replicate_params) {
    check_value(parameter.defined(), kOp, "replicate_params has an undefined tensor, want parameters (unit ", name, ')');
  }
  for (const ParameterSlot& slot : slots) check_parameter(slot, options.mesh, name);
  SourcePlan sources = plan_sources(name, slots, options);
  std::vector<SlotPlan> plans;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor& parameter = slots[i].parameter;
    const std::int64_t numel = sources.blocks.empty() ? parameter.numel() : sources.blocks[i].largest_numel;
    const std::int64_t bytes = numel * static_cast<std::int64_t>(parameter.dtype().itemsize());
    const bool whole = stays_whole(slots[i], bytes, options);
    plans.push_back({.shard_dim = whole ? 0 : choose_dim(slots[i], options, name), .replicated = whole, .bytes = bytes});
  }
  for (const ChildUnit& child : children) {
    check_value(child.unit->runtime().idle(), kOp, "inner unit ", child.unit->name(),
                " is in the middle of a step, want it idle: call reset_iter_state() after an exception (unit ", name, ')');
    const Unit* outermost = child.unit.get();
    while (outermost->parent() != nullptr) outermost = outermost->parent();
    const bool inside = std::any_of(children.begin(), children.end(), [&](const auto& c) { return c.unit.get() == outermost; });
    check_value(inside, kOp, "inner unit ", child.unit->name(), " belongs to the tree of unit ", outermost->name(),
                ", want each unit in one tree: make one unit around both models (unit ", name, ')');
  }
  const bool hybrid = options.mesh.ndim() == 2;
  normalize_reshard(options, static_cast<int>(options.mesh.size(hybrid ? 1 : 0)), name);
  UnitComms comms;
  comms.shard = options.mesh.get_group(hybrid ? 1 : 0);
  if (hybrid) comms.replicate = options.mesh.get_group(std::int64_t{0});
  comms.data_parallel = hybrid ? options.mesh.flatten().get_group(std::int64_t{0}) : comms.shard;
  comms.post_forward = post_forward_comm(options, comms.shard);
  comms.mesh = sources.mesh;

  auto unit = std::make_shared<Unit>(name, options, sources.mesh, comms.shard, comms.data_parallel);
  unit->members = members;
  unit->add_groups(make_groups(name, std::move(slots), plans, std::move(sources.blocks), options, comms, unit->settings));
  unit->adopt(children);
  return unit;
}

}  // namespace hyper_parallel::fsdp
