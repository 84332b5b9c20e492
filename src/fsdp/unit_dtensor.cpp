// Managed parameters and gradients as distributed tensors.
#include <utility>

#include <hyper_parallel/dtensor/dtensor.h>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

Placement shard_placement(const GroupLayout& layout, std::size_t i) {
  if (layout.kind() == ShardLayout::kRagged) return RaggedShard(layout.ragged_dims(i), layout.ragged_units(i));
  if (!layout.parameter(i).shape.empty()) return Shard(layout.parameter(i).shard_dim);
  std::vector<std::int64_t> units(static_cast<std::size_t>(layout.world()), 0);
  units[0] = 1;
  return RaggedShard(0, units);
}

DTensor wrap(const at::Tensor& local, const Unit& unit, const ParamGroup& group, std::size_t i) {
  std::vector<Placement> placements;
  if (unit.options().mesh.ndim() == 2) placements.push_back(Replicate());
  placements.push_back(group.options().replicated ? Replicate() : shard_placement(group.layout(), i));
  const std::vector<std::int64_t>& shape = group.parameters()[i].full_shape;
  // A whole scalar is a row of one element in the ragged layout.
  return DTensor::from_local(group.options().replicated ? local.view(shape) : local, unit.options().mesh, placements,
                             {.shape = shape});
}

}  // namespace

std::vector<std::pair<std::string, DTensor>> UnitHandle::named_dtensors(bool recurse) const {
  std::vector<std::pair<std::string, DTensor>> result;
  visit(recurse, [&](Unit& unit, ParamGroup& group, std::size_t i) {
    const ManagedParameter& parameter = group.parameters()[i];
    result.emplace_back(unit.qualified(parameter), wrap(parameter.sharded.detach(), unit, group, i));
  });
  return result;
}

std::vector<std::pair<std::string, DTensor>> UnitHandle::named_grad_dtensors(bool recurse) const {
  std::vector<std::pair<std::string, DTensor>> result;
  visit(recurse, [&](Unit& unit, ParamGroup& group, std::size_t i) {
    ManagedParameter& parameter = group.parameters()[i];
    const at::Tensor& gradient = group.gradient(parameter);
    if (gradient.defined()) result.emplace_back(unit.qualified(parameter), wrap(gradient, unit, group, i));
  });
  return result;
}

}  // namespace hyper_parallel::fsdp
