// The plan as a table.
#include <algorithm>
#include <set>

#include <hyper_parallel/dtensor/layout.h>

#include "plan/resolve.h"
#include "plan/table.h"

namespace hyper_parallel {
namespace {

using plan::Row;
using plan::text_of;

std::string placement_text(const SourceShardMetaInfo& info, std::size_t axis) {
  const Placement& placement = info.placements[axis];
  if (placement.is_strided_shard()) return concat("cut ", placement.dim(), " after ", placement.split_factor());
  if (placement.is_shard()) return concat("cut ", placement.dim());
  const bool partial = !info.copy_gradients.empty() && info.copy_gradients[axis] == CopyGradient::kPartial;
  return partial ? "copy, partial gradient" : "copy";
}

/// Shape of the largest part of a rank; "<=" where the parts differ.
std::string part_text(const ParameterDescription& parameter, const SourceShardMetaInfo& info) {
  if (!info.mesh.defined()) return text_of(parameter.shape);
  const auto ndim = static_cast<std::int64_t>(parameter.shape.size());
  const Layout layout = Layout::from_placements(info.mesh.shape(), info.placements, ndim);
  bool even = true;
  for (std::int64_t d = 0; d < ndim; ++d) {
    std::int64_t ranks = 1;
    for (const std::int64_t axis : layout.axes(d)) ranks *= info.mesh.size(axis);
    even = even && parameter.shape[static_cast<std::size_t>(d)] % ranks == 0;
  }
  const std::vector<std::int64_t> first(info.mesh.shape().size(), 0);
  return concat(even ? "" : "<= ", text_of(layout.local_shape(parameter.shape, first)));
}

}  // namespace

std::string ShardingPlan::explain(const std::vector<ParameterDescription>& parameters, const PlanMeshes& meshes) const {
  validate(parameters, meshes);
  plan::Problems problems;
  const std::vector<plan::Planned> planned = plan::planned_for(*this, parameters, problems);
  const plan::SourceSides sides = plan::source_sides(*this, meshes.dense, meshes.expert);
  const NamedSourceShardInfos infos = plan::list_source_infos(*this, planned, sides, tied_pairs, problems);
  std::vector<std::string> axes = sides.dense.axes;
  for (const std::string& axis : sides.expert.axes) {
    if (meshes.expert.defined() && std::find(axes.begin(), axes.end(), axis) == axes.end()) axes.push_back(axis);
  }

  std::vector<Row> rows = {{"parameter", "shape"}};
  rows.front().insert(rows.front().end(), axes.begin(), axes.end());
  rows.front().insert(rows.front().end(), {"part of a rank", "mesh"});
  std::map<std::size_t, std::string> first_name;
  for (const ParameterDescription& parameter : parameters) {
    Row row = {parameter.name, text_of(parameter.shape)};
    const auto [alias, added] = first_name.emplace(parameter.tensor, parameter.name);
    const auto info = infos.find(parameter.name);
    if (!added && info == infos.end()) {
      rows.push_back({parameter.name, text_of(parameter.shape), concat("is ", alias->second)});
      continue;
    }
    if (info == infos.end()) {
      row.insert(row.end(), axes.size(), "-");
      row.insert(row.end(), {text_of(parameter.shape), "not planned: copies"});
      rows.push_back(std::move(row));
      continue;
    }
    const auto entry = std::find_if(planned.begin(), planned.end(), [&](const auto& p) { return p.name == parameter.name; });
    const bool expert = plan::is_expert(*this, *entry);
    const std::vector<std::string>& own = (expert ? sides.expert : sides.dense).axes;
    for (const std::string& axis : axes) {
      const auto found = std::find(own.begin(), own.end(), axis);
      row.push_back(found == own.end() ? "-" : placement_text(info->second, static_cast<std::size_t>(found - own.begin())));
    }
    row.insert(row.end(), {part_text(parameter, info->second), expert ? "expert" : "dense"});
    rows.push_back(std::move(row));
  }
  std::string text = plan::table(rows);
  for (const auto& [a, b] : tied_pairs) text += concat("tied: ", a, " = ", b, '\n');
  return text;
}

}  // namespace hyper_parallel
