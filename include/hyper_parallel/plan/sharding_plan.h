#pragma once
// ShardingPlan: what tensor and expert parallelism do to the parameters of a model, by module and parameter.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/placement.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

/// What each named mesh axis does to a parameter; axes that are not named replicate it.
using AxisPlacements = std::map<std::string, Placement>;

/// The parameters of one boundary module.
struct ModuleShardingSpec {
  /// By name below the module. `*` stands for any part of a name without dots, `**` for any part with dots, `?` for one
  /// character.
  std::map<std::string, AxisPlacements> params = {};
  /// Above 0: the module holds routed experts, cut over that many ranks. Those of its parameters that the expert axis cuts lie on
  /// the expert mesh.
  std::int64_t ep_size = 0;
  /// Axes along which ranks compute summands of the gradients of parameters that the axis replicates, e.g. a norm of the own part
  /// of the sequence. See CopyGradient::kPartial.
  std::vector<std::string> partial_gradient_axes = {};

  friend bool operator==(const ModuleShardingSpec&, const ModuleShardingSpec&) = default;
};

/// A parameter as a plan sees it.
struct ParameterDescription {
  std::string name;                 ///< full name
  std::vector<std::int64_t> shape;  ///< of the whole parameter
  std::size_t tensor = 0;           ///< equal for the names of one tensor
};

/// Meshes that a plan is for: whole meshes or their source axes alone, see source_mesh(). Undefined where there is none.
struct PlanMeshes {
  DeviceMesh dense = {};
  DeviceMesh expert = {};
};

/// module → parameter → axis → placement, which parameters are tied, and which source axes there are. A value.
class HP_API ShardingPlan {
 public:
  /// Module names or patterns, and what happens to their parameters; "" is the model itself. An exact name counts before
  /// patterns.
  std::vector<std::pair<std::string, ModuleShardingSpec>> modules = {};
  /// Full names of parameters that are one tensor. If one is cut and the other is not, both are.
  std::vector<std::pair<std::string, std::string>> tied_pairs = {};
  /// Source axes, in the order of placements where no mesh tells it.
  std::vector<std::string> axis_names = {};
  /// The axis that cuts routed experts.
  std::string expert_axis = "ep";

  ShardingPlan& module(std::string pattern, ModuleShardingSpec spec);
  ShardingPlan& tie(std::string a, std::string b);

  /// Reads what to_toml writes; see docs/guide/tensor_parallel.md. \param name of the text, for messages. ValueError: syntax,
  /// with the line; otherwise all problems at once: unknown keys, wrong types, placements that cannot be read.
  [[nodiscard]] static ShardingPlan from_toml(std::string_view text, std::string_view name = "plan");
  [[nodiscard]] std::string to_toml() const;

  [[nodiscard]] bool has_patterns() const;
  /// The same plan for these parameters, without patterns: one entry for each module, dimensions not negative. ValueError, all
  /// problems at once: patterns and names that match nothing, entries that contradict each other, dimensions out of range.
  [[nodiscard]] ShardingPlan expand(const std::vector<ParameterDescription>& parameters) const;
  /// ValueError, all problems at once, unless the plan fits these parameters and meshes: what `expand` refuses, unknown axes,
  /// cuts on axes that FSDP owns or that the parameter's mesh lacks, placements that are no cut, experts without mesh or of
  /// another size, tied or aliased parameters that contradict each other.
  void validate(const std::vector<ParameterDescription>& parameters, const PlanMeshes& meshes) const;
  /// A table of all parameters: shape, what each axis does, largest part of a rank, mesh. ValueError as validate.
  [[nodiscard]] std::string explain(const std::vector<ParameterDescription>& parameters, const PlanMeshes& meshes) const;

  friend bool operator==(const ShardingPlan&, const ShardingPlan&) = default;
};

/// Whether `name` matches `pattern`, where `*` stands for any part without dots, `**` for any part, `?` for one character but a
/// dot. Local.
[[nodiscard]] HP_API bool matches_pattern(std::string_view pattern, std::string_view name);

/// Whether cutting parameters along this axis is the business of FSDP or of pipeline parallelism: dp, dp_replicate, dp_shard,
/// dp_cp, cp, pp, fsdp_replicate, fsdp_shard, edp, edp_replicate, edp_shard, ep_shard.
[[nodiscard]] HP_API bool is_fsdp_axis(std::string_view axis);
/// The axes of `mesh` that FSDP does not own, in mesh order; without a mesh those of `otherwise`. Local.
[[nodiscard]] HP_API std::vector<std::string> source_axes(const DeviceMesh& mesh, const std::vector<std::string>& otherwise = {});
/// The sub-mesh of the source axes; undefined for an undefined mesh and where none is left. Local.
[[nodiscard]] HP_API DeviceMesh source_mesh(const DeviceMesh& mesh);

}  // namespace hyper_parallel
