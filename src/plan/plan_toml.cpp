// The plan as a file.
#include <charconv>
#include <optional>
#include <sstream>

#include <toml++/toml.h>

#include "plan/resolve.h"

namespace hyper_parallel {
namespace {

constexpr std::string_view kOp = "ShardingPlan";

/// "Shard(0)", "Replicate()", "Replicate", "StridedShard(0, 2)", "Partial()": what Placement::to_string writes, spaces and
/// keywords aside.
std::optional<Placement> parse_placement(std::string_view given) {
  std::string text;
  for (const char c : given) {
    if (c != ' ' && c != '_') text += c;
  }
  for (const std::string_view key : {"dim=", "sf=", "splitfactor="}) {
    while (text.find(key) != std::string::npos) text.erase(text.find(key), key.size());
  }
  const std::size_t open = text.find('(');
  const std::string kind = text.substr(0, open);
  if (open != std::string::npos && text.back() != ')') return std::nullopt;
  std::vector<std::int64_t> numbers;
  std::istringstream in(open == std::string::npos ? "" : text.substr(open + 1, text.size() - open - 2));
  for (std::string item; std::getline(in, item, ',');) {
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), number);
    if (kind == "Partial" && item == "sum") continue;
    if (error != std::errc() || end != item.data() + item.size()) return std::nullopt;
    numbers.push_back(number);
  }
  if (kind == "Replicate" && numbers.empty()) return Replicate();
  if (kind == "Shard" && numbers.size() == 1) return Shard(numbers[0]);
  if (kind == "StridedShard" && numbers.size() == 2 && numbers[1] >= 1) return StridedShard(numbers[0], numbers[1]);
  if (kind == "Partial" && numbers.empty()) return Partial();
  return std::nullopt;
}

class Reader {
 public:
  explicit Reader(std::string_view name) : name_(name) {}

  ShardingPlan read(const toml::table& document) {
    ShardingPlan plan;
    for (const auto& [key, node] : document) {
      if (key == "axis_names") {
        plan.axis_names = strings(node, "axis_names");
      } else if (key == "expert_axis") {
        plan.expert_axis = text(node, "expert_axis");
      } else if (key == "tied_pairs") {
        read_ties(plan, node);
      } else if (key == "modules" && node.is_table()) {
        for (const auto& [pattern, module] : *node.as_table()) read_module(plan, std::string(pattern.str()), module);
      } else if (key == "modules") {
        wrong(node, "modules", "a table of modules");
      } else {
        problems_.add("unknown key ", key.str(), ", want axis_names, expert_axis, modules or tied_pairs", at(key.source()));
      }
    }
    problems_.raise(kOp);
    return plan;
  }

 private:
  [[nodiscard]] std::string at(const toml::source_region& region) const {
    return concat(" (", name_, ':', region.begin.line, ')');
  }
  void wrong(const toml::node& node, const std::string& what, std::string_view want) {
    std::ostringstream value;
    node.visit([&](const auto& v) { value << v; });
    problems_.add(what, " = ", value.str(), ", want ", want, at(node.source()));
  }
  std::string text(const toml::node& node, const std::string& what) {
    if (const auto value = node.value_exact<std::string>()) return *value;
    wrong(node, what, "a string");
    return {};
  }
  std::vector<std::string> strings(const toml::node& node, const std::string& what) {
    std::vector<std::string> items;
    if (!node.is_array()) {
      wrong(node, what, "a list of strings");
      return items;
    }
    for (const toml::node& item : *node.as_array()) items.push_back(text(item, what));
    return items;
  }

  void read_ties(ShardingPlan& plan, const toml::node& node) {
    if (!node.is_array()) return wrong(node, "tied_pairs", "a list of pairs of names");
    for (const toml::node& item : *node.as_array()) {
      const std::vector<std::string> pair = strings(item, "tied_pairs");
      if (pair.size() == 2) {
        plan.tie(pair[0], pair[1]);
      } else if (item.is_array()) {
        wrong(item, "tied_pairs", "pairs of names");
      }
    }
  }

  void read_module(ShardingPlan& plan, const std::string& pattern, const toml::node& node) {
    const std::string what = concat("modules.\"", pattern, '"');
    if (!node.is_table()) return wrong(node, what, "a table with params");
    ModuleShardingSpec spec;
    for (const auto& [key, value] : *node.as_table()) {
      if (key == "ep_size") {
        const auto size = value.value_exact<std::int64_t>();
        if (!size || *size < 0) wrong(value, concat(what, ".ep_size"), "an integer >= 0");
        spec.ep_size = size.value_or(0);
      } else if (key == "partial_gradient_axes") {
        spec.partial_gradient_axes = strings(value, concat(what, ".partial_gradient_axes"));
      } else if (key == "params" && value.is_table()) {
        for (const auto& [parameter, axes] : *value.as_table())
          spec.params[std::string(parameter.str())] = read_axes(axes, concat(what, ".params.", parameter.str()));
      } else if (key == "params") {
        wrong(value, concat(what, ".params"), "a table of parameters");
      } else {
        problems_.add("unknown key ", what, '.', key.str(), ", want ep_size, params or partial_gradient_axes", at(key.source()));
      }
    }
    plan.module(pattern, std::move(spec));
  }

  AxisPlacements read_axes(const toml::node& node, const std::string& what) {
    AxisPlacements axes;
    if (!node.is_table()) {
      wrong(node, what, "axes and placements, e.g. { tp = \"Shard(0)\" }");
      return axes;
    }
    for (const auto& [axis, value] : *node.as_table()) {
      const auto given = value.value_exact<std::string>();
      const auto placement = given ? parse_placement(*given) : std::nullopt;
      if (placement) {
        axes[std::string(axis.str())] = *placement;
      } else {
        wrong(value, concat(what, '.', axis.str()), "\"Shard(dim)\", \"StridedShard(dim, factor)\" or \"Replicate()\"");
      }
    }
    return axes;
  }

  std::string name_;
  plan::Problems problems_;
};

toml::array array_of(const std::vector<std::string>& items) {
  toml::array array;
  for (const std::string& item : items) array.push_back(item);
  return array;
}

std::string notation(const Placement& placement) {
  if (placement.is_strided_shard()) return concat("StridedShard(", placement.dim(), ", ", placement.split_factor(), ')');
  if (placement.is_shard()) return concat("Shard(", placement.dim(), ')');
  return placement.to_string();
}

}  // namespace

ShardingPlan ShardingPlan::from_toml(std::string_view text, std::string_view name) {
  try {
    return Reader(name).read(toml::parse(text, name));
  } catch (const toml::parse_error& error) {
    throw ValueError(concat('[', kOp, "] syntax: ", error.description(), " (", name, ':', error.source().begin.line, ')'));
  }
}

std::string ShardingPlan::to_toml() const {
  toml::table document;
  if (!axis_names.empty()) document.insert("axis_names", array_of(axis_names));
  if (expert_axis != ShardingPlan().expert_axis) document.insert("expert_axis", expert_axis);
  toml::array ties;
  for (const auto& [a, b] : tied_pairs) ties.push_back(array_of({a, b}));
  if (!ties.empty()) document.insert("tied_pairs", ties);
  toml::table all;
  for (const auto& [pattern, spec] : modules) {
    check_value(!all.contains(pattern), kOp, "module \"", pattern, "\" is there twice, want it once in a file");
    toml::table module, params;
    if (spec.ep_size > 0) module.insert("ep_size", spec.ep_size);
    if (!spec.partial_gradient_axes.empty()) module.insert("partial_gradient_axes", array_of(spec.partial_gradient_axes));
    for (const auto& [parameter, axes] : spec.params) {
      toml::table placements;
      for (const auto& [axis, placement] : axes) placements.insert(axis, notation(placement));
      params.insert(parameter, placements);
    }
    module.insert("params", params);
    all.insert(pattern, module);
  }
  document.insert("modules", all);
  std::ostringstream out;
  out << document << '\n';
  return out.str();
}

}  // namespace hyper_parallel
