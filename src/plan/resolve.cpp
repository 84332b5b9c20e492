#include "plan/resolve.h"

#include <algorithm>
#include <optional>
#include <set>

#include <hyper_parallel/dtensor/layout.h>

namespace hyper_parallel {

bool matches_pattern(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.front() == '*') {
    const bool dots = pattern.starts_with("**");
    const std::string_view rest = pattern.substr(dots ? 2 : 1);
    for (std::size_t taken = 0; taken <= name.size(); ++taken) {
      if (!dots && taken > 0 && name[taken - 1] == '.') return false;
      if (matches_pattern(rest, name.substr(taken))) return true;
    }
    return false;
  }
  if (name.empty() || (pattern.front() == '?' ? name.front() == '.' : name.front() != pattern.front())) return false;
  return matches_pattern(pattern.substr(1), name.substr(1));
}

bool is_fsdp_axis(std::string_view axis) {
  constexpr std::string_view kOwned[] = {"dp",  "dp_replicate",   "dp_shard",   "dp_cp",         "cp",        "pp",
                                         "edp", "fsdp_replicate", "fsdp_shard", "edp_replicate", "edp_shard", "ep_shard"};
  return std::find(std::begin(kOwned), std::end(kOwned), axis) != std::end(kOwned);
}

std::vector<std::string> source_axes(const DeviceMesh& mesh, const std::vector<std::string>& otherwise) {
  std::vector<std::string> axes = mesh.defined() ? mesh.mesh_dim_names() : otherwise;
  std::erase_if(axes, [](const std::string& axis) { return is_fsdp_axis(axis); });
  return axes;
}

DeviceMesh source_mesh(const DeviceMesh& mesh) {
  const std::vector<std::string> axes = source_axes(mesh);
  return axes.empty() ? DeviceMesh() : mesh[axes];
}

namespace plan {
namespace {

bool is_pattern(std::string_view text) { return text.find_first_of("*?") != std::string_view::npos; }

std::string join_names(const std::string& module, const std::string& parameter) {
  return module.empty() ? parameter : concat(module, '.', parameter);
}

std::string join(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items) text += concat(text.empty() ? "" : ", ", item);
  return text.empty() ? "none" : text;
}

bool contains(const std::vector<std::string>& items, const std::string& item) {
  return std::find(items.begin(), items.end(), item) != items.end();
}

Planned planned(const std::string& module, const ModuleShardingSpec& spec, std::string name, const AxisPlacements& axes) {
  return {.name = std::move(name),
          .axes = axes,
          .ep_size = spec.ep_size,
          .partial_gradient_axes = spec.partial_gradient_axes,
          .module = module};
}

bool says_the_same(const Planned& a, const Planned& b) {
  return a.axes == b.axes && a.ep_size == b.ep_size && a.partial_gradient_axes == b.partial_gradient_axes;
}

void normalise_dims(Planned& entry, const ParameterDescription& parameter, Problems& problems) {
  const auto ndim = static_cast<std::int64_t>(parameter.shape.size());
  for (auto& [axis, placement] : entry.axes) {
    if (!placement.is_shard()) continue;
    const std::int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
    if (dim < 0 || dim >= ndim) {
      problems.add(entry.name, ", axis ", axis, ": ", placement, ", want a dimension of a parameter with ", ndim);
      continue;
    }
    placement = placement.is_strided_shard() ? StridedShard(dim, placement.split_factor()) : Shard(dim);
  }
}

/// The common placements of two tied parameters; nullopt if they contradict each other.
std::optional<std::vector<Placement>> tied_placements(const std::vector<Placement>& a, const std::vector<Placement>& b) {
  if (a.size() != b.size()) return std::nullopt;
  std::vector<Placement> both;
  for (std::size_t axis = 0; axis < a.size(); ++axis) {
    if (a[axis].is_shard() && b[axis].is_shard() && a[axis] != b[axis]) return std::nullopt;
    both.push_back(a[axis].is_shard() ? a[axis] : b[axis]);
  }
  return both;
}

/// What is wrong with what the axes of one parameter do.
void check_axes(const ShardingPlan& plan, const Planned& entry, const SourceSides& sides, Problems& problems) {
  const bool expert = is_expert(plan, entry);
  const SourceSide& side = expert ? sides.expert : sides.dense;
  const auto known = [&](const std::string& axis) {
    return contains(sides.dense.axes, axis) || contains(sides.expert.axes, axis) || contains(plan.axis_names, axis) ||
           is_fsdp_axis(axis) || (axis == plan.expert_axis && entry.ep_size > 0);
  };
  const auto about = [&](const std::string& axis) { return concat(entry.name, ", axis ", axis, ": "); };
  for (const auto& [axis, placement] : entry.axes) {
    if (!known(axis)) {
      problems.add(about(axis), "unknown axis, want one of ", join(side.axes));
    } else if (is_fsdp_axis(axis) && !placement.is_replicate()) {
      problems.add(about(axis), placement,
                   ", want Replicate(): FSDP or pipeline parallelism owns this axis, its ranks would cut twice");
    } else if (placement.is_partial() || placement.is_ragged_shard()) {
      problems.add(about(axis), placement, ", want Shard or Replicate");
    } else if (axis == plan.expert_axis && placement.is_shard() && entry.ep_size == 0) {
      problems.add(about(axis), placement, " in a module whose ep_size is 0, want the number of ranks that share the experts");
    } else if (placement.is_shard() && !contains(side.axes, axis) && !(expert && !side.mesh.defined())) {
      problems.add(about(axis), placement, ", but the ", expert ? "expert" : "dense", " mesh has no such axis, want one of ",
                   join(side.axes));
    }
  }
  for (const std::string& axis : entry.partial_gradient_axes) {
    if (!known(axis)) problems.add(about(axis), "unknown axis in partial_gradient_axes, want one of ", join(side.axes));
  }
  if (!expert) return;
  if (!side.mesh.defined()) {
    problems.add(entry.name, ": routed experts (ep_size ", entry.ep_size, ") without expert mesh, want one with axis ",
                 plan.expert_axis);
  } else if (contains(side.axes, plan.expert_axis) && side.mesh.size(side.mesh.axis(plan.expert_axis)) != entry.ep_size) {
    problems.add(entry.name, ": ep_size is ", entry.ep_size, ", want the ", side.mesh.size(side.mesh.axis(plan.expert_axis)),
                 " ranks of axis ", plan.expert_axis);
  }
}

SourceShardMetaInfo info_of(const Planned& entry, const SourceSide& side) {
  SourceShardMetaInfo info{.mesh = side.mesh};
  for (const std::string& axis : side.axes) {
    const auto found = entry.axes.find(axis);
    info.placements.push_back(found == entry.axes.end() ? Replicate() : found->second);
    const bool partial = info.placements.back().is_replicate() && contains(entry.partial_gradient_axes, axis);
    info.copy_gradients.push_back(partial ? CopyGradient::kPartial : CopyGradient::kUnitOp);
  }
  const auto plain = [](CopyGradient kind) { return kind == CopyGradient::kUnitOp; };
  if (std::all_of(info.copy_gradients.begin(), info.copy_gradients.end(), plain)) info.copy_gradients.clear();
  return info;
}

}  // namespace

void Problems::raise(std::string_view op) const {
  if (texts_.empty()) return;
  if (texts_.size() == 1) throw ValueError(concat('[', op, "] ", texts_.front()));
  std::string text = concat('[', op, "] ", texts_.size(), " problems:");
  for (const std::string& problem : texts_) text += concat("\n  - ", problem);
  throw ValueError(text);
}

SourceSides source_sides(const ShardingPlan& plan, const DeviceMesh& dense, const DeviceMesh& expert) {
  return {.dense = {source_mesh(dense), source_axes(dense, plan.axis_names)},
          .expert = {source_mesh(expert), source_axes(expert, {plan.expert_axis})}};
}

std::vector<Planned> planned_by_name(const ShardingPlan& plan) {
  std::vector<Planned> all;
  for (const auto& [module, spec] : plan.modules) {
    for (const auto& [parameter, axes] : spec.params) all.push_back(planned(module, spec, join_names(module, parameter), axes));
  }
  return all;
}

std::vector<Planned> planned_for(const ShardingPlan& plan, const std::vector<ParameterDescription>& parameters,
                                 Problems& problems) {
  const std::vector<Planned> written = planned_by_name(plan);
  std::vector<bool> used(written.size(), false);
  std::vector<Planned> result;
  for (const ParameterDescription& parameter : parameters) {
    const Planned* chosen = nullptr;
    bool exact = false;
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (!matches_pattern(written[i].name, parameter.name)) continue;
      used[i] = true;
      const bool names_it = !is_pattern(written[i].name);
      if (chosen == nullptr || (names_it && !exact)) {
        chosen = &written[i];
        exact = names_it;
      } else if (names_it == exact && !says_the_same(*chosen, written[i])) {
        problems.add(parameter.name, ": \"", chosen->name, "\" and \"", written[i].name,
                     "\" say different things, want one of them");
      }
    }
    if (chosen == nullptr) continue;
    Planned entry = *chosen;
    entry.name = parameter.name;
    const std::size_t dot = parameter.name.rfind('.');
    if (is_pattern(chosen->name)) entry.module = dot == std::string::npos ? "" : parameter.name.substr(0, dot);
    normalise_dims(entry, parameter, problems);
    result.push_back(std::move(entry));
  }
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (!used[i]) problems.add("\"", written[i].name, "\" matches no parameter of the model");
  }
  return result;
}

bool is_expert(const ShardingPlan& plan, const Planned& planned) {
  const auto placement = planned.axes.find(plan.expert_axis);
  return planned.ep_size > 0 && placement != planned.axes.end() && placement->second.is_shard();
}

NamedSourceShardInfos list_source_infos(const ShardingPlan& plan, const std::vector<Planned>& planned, const SourceSides& sides,
                                        const std::vector<std::pair<std::string, std::string>>& tied_pairs, Problems& problems) {
  NamedSourceShardInfos infos;
  for (const Planned& entry : planned) {
    check_axes(plan, entry, sides, problems);
    const SourceShardMetaInfo info = info_of(entry, is_expert(plan, entry) ? sides.expert : sides.dense);
    const auto [place, added] = infos.emplace(entry.name, info);
    if (!added && !(place->second == info)) problems.add(entry.name, ": planned twice with different layouts, want one");
  }
  for (const auto& [a, b] : tied_pairs) {
    const auto left = infos.find(a), right = infos.find(b);
    if (left == infos.end() || right == infos.end()) continue;  // what is not planned follows its twin
    if (left->second.placements == right->second.placements) continue;
    const auto both = tied_placements(left->second.placements, right->second.placements);
    if (!both) {
      problems.add(a, " and ", b, " are tied, but cut differently: ", to_string(left->second.placements), " and ",
                   to_string(right->second.placements), ", want one way");
      continue;
    }
    left->second.placements = right->second.placements = *both;
  }
  return infos;
}

void check_aliases(const std::vector<ParameterDescription>& parameters, const NamedSourceShardInfos& infos, Problems& problems) {
  std::map<std::size_t, const ParameterDescription*> first;
  for (const ParameterDescription& parameter : parameters) {
    const auto info = infos.find(parameter.name);
    if (info == infos.end()) continue;
    const auto [known, added] = first.emplace(parameter.tensor, &parameter);
    if (added) continue;
    const SourceShardMetaInfo& other = infos.at(known->second->name);
    if (info->second.mesh == other.mesh && info->second.placements == other.placements) continue;
    problems.add(known->second->name, " and ", parameter.name, " are one tensor with two layouts: ", to_string(other.placements),
                 " on ", other.mesh.to_string(), " and ", to_string(info->second.placements), " on ",
                 info->second.mesh.to_string(), ", want one (a tied pair settles cut against whole)");
  }
}

}  // namespace plan
}  // namespace hyper_parallel
