#pragma once
// From a ShardingPlan to what fully_shard wants to know of it.
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/source_shard.h>
#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/plan/sharding_plan.h>

namespace hyper_parallel {

/// Source layouts by full name of the parameter.
using NamedSourceShardInfos = std::map<std::string, SourceShardMetaInfo>;

struct SourceShardInfoOptions {
  DeviceMesh expert_source_mesh = {};  ///< of routed experts
  /// Instead of those of the plan.
  std::optional<std::vector<std::pair<std::string, std::string>>> tied_pairs = {};
};

/// The source layout of every parameter that the plan names: one placement for each source axis of its mesh, in mesh order;
/// Replicate where the plan says nothing. Parameters that the expert axis cuts lie on the expert mesh, the others on the dense
/// one. Tied pairs get the same placements if both are in the plan. Local.
///
/// ValueError, all problems at once: a plan with patterns (expand it first), cuts on axes that FSDP owns or that the mesh lacks,
/// axes that no mesh and no axis_names knows, placements that are no cut, experts without mesh or of another size, tied
/// parameters that contradict each other.
[[nodiscard]] HP_API NamedSourceShardInfos build_source_shard_info(const ShardingPlan& plan, const DeviceMesh& dense_source_mesh,
                                                                   const SourceShardInfoOptions& options = {});

/// What a parameter that no plan names has in a unit on `unit_mesh`: copies along all axes that the mesh's root has beside those
/// of FSDP. Local. ValueError: there are none.
[[nodiscard]] HP_API SourceShardMetaInfo default_source_shard_info(const DeviceMesh& unit_mesh);

struct SourceGradientOptions {
  /// Each rank of the source axes computes its own part of the loss; false: all compute the same loss.
  bool loss_parallel = false;
};

/// For models whose boundaries compute the gradients of the sum of all ranks' losses (the adjoint of every communication): all
/// units of the tree add gradients and multiply them by 1 / (data-parallel ranks x ranks that compute the same loss), which
/// `dense_mesh`, the whole dense mesh, tells. Expert axes are not part of it. Local; call it alike on all ranks, after the last
/// fully_shard. \return the factor
HP_API double set_source_gradient_factor(const fsdp::UnitHandle& root, const DeviceMesh& dense_mesh,
                                         const SourceGradientOptions& options = {});

}  // namespace hyper_parallel
