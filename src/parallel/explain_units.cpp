// What parallelize did, as a table.
#include <hyper_parallel/parallel/parallelize.h>

#include <algorithm>

#include "plan/table.h"

namespace hyper_parallel::parallel {
namespace {

std::string axes_text(const DeviceMesh& mesh) {
  if (!mesh.defined()) return "-";
  std::string text;
  for (std::size_t axis = 0; axis < mesh.shape().size(); ++axis)
    text += concat(text.empty() ? "" : " ", mesh.mesh_dim_names()[axis], '=', mesh.shape()[axis]);
  return text;
}

std::string names_text(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text.empty() ? "-" : text;
}

std::string unit_text(const std::string& name) { return name.empty() ? "(model)" : name; }

}  // namespace

std::string ParallelModel::explain() const {
  const bool forward = options.forward_prefetch_depth.has_value(), backward = options.backward_prefetch_depth.has_value();
  std::vector<plan::Row> rows = {{"unit", "sharded over", "source axes", "parameters", "elements", "gradients"}};
  if (forward) rows.front().emplace_back("gathers ahead");
  if (backward) rows.front().emplace_back("in backward");
  for (const ParallelUnit& unit : units) {
    const bool summed = options.gradients == BoundaryGradients::kSumOfLosses;
    const std::string factor = unit.gradient_factor == 1.0 ? "" : concat(" * ", unit.gradient_factor);
    plan::Row row = {unit_text(unit.name),        concat(axes_text(unit.mesh), unit.expert ? " (experts)" : ""),
                     axes_text(unit.source_mesh), concat(unit.parameters.size()),
                     concat(unit.numel),          concat(summed ? "sum" : "mean", factor)};
    if (forward) row.push_back(names_text(unit.forward_prefetch));
    if (backward) row.push_back(names_text(unit.backward_prefetch));
    rows.push_back(std::move(row));
  }
  std::string text = plan::table(rows);
  for (const auto& [owner, other] : tied) {
    const auto unit = std::find_if(units.begin(), units.end(), [&, name = owner](const ParallelUnit& u) {
      return std::find(u.parameters.begin(), u.parameters.end(), name) != u.parameters.end();
    });
    text += concat("tied: ", owner, " = ", other, ", of unit ", unit == units.end() ? "?" : unit_text(unit->name), '\n');
  }
  return text;
}

}  // namespace hyper_parallel::parallel
