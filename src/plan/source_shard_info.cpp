#include <hyper_parallel/plan/source_shard_info.h>

#include <algorithm>

#include "fsdp/unit_impl.h"
#include "mesh/mesh_impl.h"
#include "plan/resolve.h"

namespace hyper_parallel {
namespace {

/// The mesh that a sub-mesh was cut from.
DeviceMesh root_of(const DeviceMesh& mesh) { return make_root_mesh("source_shard_info", *mesh.impl().root); }

}  // namespace

NamedSourceShardInfos build_source_shard_info(const ShardingPlan& plan, const DeviceMesh& dense_source_mesh,
                                              const SourceShardInfoOptions& options) {
  constexpr std::string_view kOp = "build_source_shard_info";
  check_value(!plan.has_patterns(), kOp, "the plan has patterns, want ShardingPlan::expand before");
  plan::Problems problems;
  NamedSourceShardInfos infos = plan::list_source_infos(plan, plan::planned_by_name(plan),
                                                        plan::source_sides(plan, dense_source_mesh, options.expert_source_mesh),
                                                        options.tied_pairs.value_or(plan.tied_pairs), problems);
  problems.raise(kOp);
  return infos;
}

SourceShardMetaInfo default_source_shard_info(const DeviceMesh& unit_mesh) {
  constexpr std::string_view kOp = "default_source_shard_info";
  check_value(unit_mesh.defined(), kOp, "the unit's mesh is undefined, want the mesh that fully_shard gets");
  SourceShardMetaInfo info{.mesh = source_mesh(root_of(unit_mesh))};
  check_value(info.mesh.defined(), kOp, "no axis of ", root_of(unit_mesh).to_string(),
              " is a source axis, want one beside those of FSDP, e.g. tp");
  info.placements.resize(static_cast<std::size_t>(info.mesh.ndim()));
  return info;
}

double set_source_gradient_factor(const fsdp::UnitHandle& root, const DeviceMesh& dense_mesh,
                                  const SourceGradientOptions& options) {
  constexpr std::string_view kOp = "set_source_gradient_factor";
  check_value(root.defined(), kOp, "root is empty, want the handle that fully_shard returned");
  check_value(dense_mesh.defined(), kOp, "the dense mesh is undefined, want the axes of data and tensor parallelism");
  std::int64_t divisor = 1;
  for (std::int64_t axis = 0; axis < dense_mesh.ndim(); ++axis) {
    const bool data = is_fsdp_axis(dense_mesh.mesh_dim_names()[static_cast<std::size_t>(axis)]);
    if (data || !options.loss_parallel) divisor *= dense_mesh.size(axis);
  }
  const double factor = 1.0 / static_cast<double>(divisor);
  for (fsdp::Unit* unit : root.unit()->reached(true)) {
    unit->settings.reduce_op = ReduceOp::kSum;
    unit->settings.scaling_factor = factor;
  }
  return factor;
}

}  // namespace hyper_parallel
