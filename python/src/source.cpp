// Source layouts and plans. Placements are tuples: ("replicate",), ("shard", dim), ("strided_shard", dim, split_factor),
// ("partial",).
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/plan/source_shard_info.h>

#include "bind.h"
#include "unit.h"

namespace hyper_parallel::python {
namespace {

Placement to_placement(const py::handle given) {
  const auto fields = given.cast<py::tuple>();
  const auto kind = fields[0].cast<std::string>();
  if (kind == "shard") return Shard(fields[1].cast<std::int64_t>());
  if (kind == "strided_shard") return StridedShard(fields[1].cast<std::int64_t>(), fields[2].cast<std::int64_t>());
  return kind == "partial" ? Partial() : Replicate();
}

py::tuple from_placement(const Placement& placement) {
  if (placement.is_strided_shard()) return py::make_tuple("strided_shard", placement.dim(), placement.split_factor());
  if (placement.is_shard()) return py::make_tuple("shard", placement.dim());
  return py::make_tuple("replicate");
}

CopyGradient to_copy_gradient(const std::string& name) {
  if (name == "whole") return CopyGradient::kWhole;
  return name == "partial" ? CopyGradient::kPartial : CopyGradient::kUnitOp;
}

std::string from_copy_gradient(CopyGradient kind) {
  if (kind == CopyGradient::kWhole) return "whole";
  return kind == CopyGradient::kPartial ? "partial" : "unit_op";
}

/// From a list of (module, {parameter: {axis: placement}}, ep_size, partial_gradient_axes).
ShardingPlan to_plan(const py::list& modules, std::vector<std::pair<std::string, std::string>> tied_pairs,
                     std::vector<std::string> axis_names, std::string expert_axis) {
  ShardingPlan plan;
  for (const py::handle entry : modules) {
    const auto fields = entry.cast<py::tuple>();
    ModuleShardingSpec spec{.ep_size = fields[2].cast<std::int64_t>(),
                            .partial_gradient_axes = fields[3].cast<std::vector<std::string>>()};
    for (const auto& [parameter, axes] : fields[1].cast<py::dict>()) {
      AxisPlacements& placements = spec.params[parameter.cast<std::string>()];
      for (const auto& [axis, placement] : axes.cast<py::dict>()) placements[axis.cast<std::string>()] = to_placement(placement);
    }
    plan.module(fields[0].cast<std::string>(), std::move(spec));
  }
  plan.tied_pairs = std::move(tied_pairs);
  plan.axis_names = std::move(axis_names);
  plan.expert_axis = std::move(expert_axis);
  return plan;
}

/// A list of (name, axes of the source mesh, whether they are the expert mesh's, placements, gradients of copies).
py::list build_infos(const ShardingPlan& plan, const std::optional<DeviceMesh>& dense_mesh,
                     const std::optional<DeviceMesh>& expert,
                     std::optional<std::vector<std::pair<std::string, std::string>>> tied_pairs) {
  const DeviceMesh dense = dense_mesh.value_or(DeviceMesh()), expert_mesh = expert.value_or(DeviceMesh());
  py::list result;
  for (const auto& [name, info] :
       build_source_shard_info(plan, dense, {.expert_source_mesh = expert_mesh, .tied_pairs = std::move(tied_pairs)})) {
    py::list placements, kinds;
    for (const Placement& placement : info.placements) placements.append(from_placement(placement));
    for (const CopyGradient kind : info.copy_gradients) kinds.append(from_copy_gradient(kind));
    const auto axes = info.mesh.defined() ? info.mesh.mesh_dim_names() : std::vector<std::string>();
    const bool is_expert = info.mesh.defined() && info.mesh != source_mesh(dense);
    result.append(py::make_tuple(name, axes, is_expert, placements, kinds));
  }
  return result;
}

}  // namespace

SourceShardInfos to_sources(const py::object& entries) {
  SourceShardInfos infos;
  for (const py::handle entry : entries) {
    const auto fields = entry.cast<py::tuple>();
    SourceShardMetaInfo info;
    if (!fields[2].is_none()) info.mesh = fields[2].cast<DeviceMesh>();
    for (const py::handle placement : fields[3].cast<py::iterable>()) info.placements.push_back(to_placement(placement));
    info.shape = fields[4].cast<std::optional<std::vector<std::int64_t>>>();
    for (const py::handle kind : fields[5].cast<py::iterable>())
      info.copy_gradients.push_back(to_copy_gradient(kind.cast<std::string>()));
    info.origin_is_dtensor = fields[6].cast<bool>();
    infos.set(fields[0].cast<at::Tensor>(), std::move(info), fields[1].cast<std::string>());
  }
  return infos;
}

void bind_sources(py::module_& m) {
  py::class_<ShardingPlan>(m, "ShardingPlan").def(py::init(&to_plan));
  m.def("build_source_shard_info", &build_infos);
  m.def("is_fsdp_axis", &is_fsdp_axis);
  m.def("set_source_gradient_factor", [](const PyUnit& root, const DeviceMesh& dense, bool loss_parallel) {
    return set_source_gradient_factor(root.handle(), dense, {.loss_parallel = loss_parallel});
  });
}

}  // namespace hyper_parallel::python
