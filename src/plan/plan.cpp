// The plan itself: building, expanding, checking.
#include <algorithm>

#include <hyper_parallel/dtensor/layout.h>

#include "plan/resolve.h"

namespace hyper_parallel {
namespace {

constexpr std::string_view kOp = "ShardingPlan";

/// Whether the placements of a parameter make a layout.
void check_layout(const ParameterDescription& parameter, const SourceShardMetaInfo& info, plan::Problems& problems) {
  if (!info.mesh.defined()) return;
  try {
    (void)Layout::from_placements(info.mesh.shape(), info.placements, static_cast<std::int64_t>(parameter.shape.size()));
  } catch (const ValueError& error) {
    problems.add(parameter.name, ": ", to_string(info.placements), " on ", info.mesh.to_string(), ": ", error.what());
  }
}

void check_ties(const ShardingPlan& plan, const std::vector<ParameterDescription>& parameters, plan::Problems& problems) {
  for (const auto& [a, b] : plan.tied_pairs) {
    const ParameterDescription* ends[2] = {nullptr, nullptr};
    for (const ParameterDescription& parameter : parameters) {
      if (parameter.name == a) ends[0] = &parameter;
      if (parameter.name == b) ends[1] = &parameter;
    }
    if (ends[0] == nullptr) problems.add("tied pair ", a, " and ", b, ": the model has no parameter ", a);
    if (ends[1] == nullptr) problems.add("tied pair ", a, " and ", b, ": the model has no parameter ", b);
    if (ends[0] != nullptr && ends[1] != nullptr && ends[0]->tensor != ends[1]->tensor)
      problems.add("tied pair ", a, " and ", b, ": two tensors in the model, want one that is registered under both names");
  }
}

}  // namespace

ShardingPlan& ShardingPlan::module(std::string pattern, ModuleShardingSpec spec) {
  modules.emplace_back(std::move(pattern), std::move(spec));
  return *this;
}

ShardingPlan& ShardingPlan::tie(std::string a, std::string b) {
  tied_pairs.emplace_back(std::move(a), std::move(b));
  return *this;
}

bool ShardingPlan::has_patterns() const {
  const std::vector<plan::Planned> all = plan::planned_by_name(*this);
  return std::any_of(all.begin(), all.end(),
                     [](const auto& entry) { return entry.name.find_first_of("*?") != std::string::npos; });
}

ShardingPlan ShardingPlan::expand(const std::vector<ParameterDescription>& parameters) const {
  plan::Problems problems;
  const std::vector<plan::Planned> planned = plan::planned_for(*this, parameters, problems);
  problems.raise(kOp);
  ShardingPlan expanded{.tied_pairs = tied_pairs, .axis_names = axis_names, .expert_axis = expert_axis};
  for (const plan::Planned& entry : planned) {
    ModuleShardingSpec spec{.ep_size = entry.ep_size, .partial_gradient_axes = entry.partial_gradient_axes};
    auto place = std::find_if(expanded.modules.begin(), expanded.modules.end(), [&](const auto& known) {
      return known.first == entry.module && known.second.ep_size == spec.ep_size &&
             known.second.partial_gradient_axes == spec.partial_gradient_axes;
    });
    if (place == expanded.modules.end()) place = expanded.modules.insert(place, {entry.module, spec});
    place->second.params[entry.module.empty() ? entry.name : entry.name.substr(entry.module.size() + 1)] = entry.axes;
  }
  return expanded;
}

void ShardingPlan::validate(const std::vector<ParameterDescription>& parameters, const PlanMeshes& meshes) const {
  plan::Problems problems;
  const std::vector<plan::Planned> planned = plan::planned_for(*this, parameters, problems);
  const NamedSourceShardInfos infos =
      plan::list_source_infos(*this, planned, plan::source_sides(*this, meshes.dense, meshes.expert), tied_pairs, problems);
  check_ties(*this, parameters, problems);
  plan::check_aliases(parameters, infos, problems);
  if (problems.empty()) {
    for (const ParameterDescription& parameter : parameters) {
      if (const auto info = infos.find(parameter.name); info != infos.end()) check_layout(parameter, info->second, problems);
    }
  }
  problems.raise(kOp);
}

}  // namespace hyper_parallel
