#pragma once
// A plan matched with the names of a model, and the problems found on the way.
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/source_shard.h>
#include <hyper_parallel/plan/sharding_plan.h>
#include <hyper_parallel/plan/source_shard_info.h>

namespace hyper_parallel::plan {

/// What is wrong, collected so that one error can tell all of it.
class Problems {
 public:
  template <class... Args>
  void add(const Args&... args) {
    texts_.push_back(concat(args...));
  }
  [[nodiscard]] bool empty() const { return texts_.empty(); }
  void append(const Problems& other) { texts_.insert(texts_.end(), other.texts_.begin(), other.texts_.end()); }
  /// ValueError "[op] text", or a list when there are several.
  void raise(std::string_view op) const;

 private:
  std::vector<std::string> texts_;
};

/// A parameter and the entry of the plan that speaks of it.
struct Planned {
  std::string name;
  AxisPlacements axes;
  std::int64_t ep_size = 0;
  std::vector<std::string> partial_gradient_axes;
  std::string module;  ///< that the entry names
};

/// Meshes without the axes of FSDP, and the axes that placements are listed over.
struct SourceSide {
  DeviceMesh mesh;
  std::vector<std::string> axes;
};
struct SourceSides {
  SourceSide dense, expert;
};
[[nodiscard]] SourceSides source_sides(const ShardingPlan& plan, const DeviceMesh& dense, const DeviceMesh& expert);

/// The plan's entries one by one, as they are written.
[[nodiscard]] std::vector<Planned> planned_by_name(const ShardingPlan& plan);
/// The plan's entries for the parameters of a model, in their order; dimensions are not negative.
[[nodiscard]] std::vector<Planned> planned_for(const ShardingPlan& plan, const std::vector<ParameterDescription>& parameters,
                                               Problems& problems);
/// Whether the expert mesh carries the parameter.
[[nodiscard]] bool is_expert(const ShardingPlan& plan, const Planned& planned);
/// Source layouts of planned parameters, tied pairs settled.
[[nodiscard]] NamedSourceShardInfos list_source_infos(const ShardingPlan& plan, const std::vector<Planned>& planned,
                                                      const SourceSides& sides,
                                                      const std::vector<std::pair<std::string, std::string>>& tied_pairs,
                                                      Problems& problems);
/// Names of one tensor must have one layout.
void check_aliases(const std::vector<ParameterDescription>& parameters, const NamedSourceShardInfos& infos, Problems& problems);

}  // namespace hyper_parallel::plan
