#pragma once
// Composed parallelism in one call: which modules are units of fully_shard, on which mesh, in which order, and what their
// gradients are multiplied by.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/plan/sharding_plan.h>

namespace hyper_parallel::parallel {

/// Whose gradients the boundaries of a model compute; see docs/design/015.
enum class BoundaryGradients {
  kOneLoss,      ///< those of one loss that every rank along the source axes has (hp::parallel's layers)
  kSumOfLosses,  ///< those of the sum of all ranks' losses: the backward of each communication is its adjoint
};

/// Options of parallelize. Aggregate: use designated initialisers in this order.
struct ParallelizeOptions {
  /// Of all units. `mesh` and `source_shard_infos` are set here and must be left out; `reshard_after_forward` is that of the
  /// units below the model itself, which stays gathered.
  FullyShardOptions fully_shard = {};
  /// Names or patterns of modules whose children are units. Unset: every ModuleList, ModuleDict and Sequential that is not inside
  /// of such a child.
  std::optional<std::vector<std::string>> containers = {};
  /// Further units: of the modules that a pattern matches, those with the fewest dots in their names.
  std::vector<std::string> extra_units = {};
  /// The order for the two depths below: all units but the model itself, by name. Empty: that of the modules.
  std::vector<std::string> unit_order = {};
  /// How many of the next units in that order are gathered while one computes. Unset: as fully_shard learns it.
  std::optional<int> forward_prefetch_depth = {};
  std::optional<int> backward_prefetch_depth = {};  ///< the same for the previous units
  BoundaryGradients gradients = BoundaryGradients::kOneLoss;
  /// With kSumOfLosses: each rank along the source axes has its own part of the loss.
  bool loss_parallel = false;
  /// Modules of the plan need not be SourceBoundary; see ApplyPlanOptions.
  bool boundaries_elsewhere = false;
};

/// What became of one unit.
struct ParallelUnit {
  std::string name;  ///< of its module; "" is the model
  HSDPModule handle = {};
  bool expert = false;                       ///< on the expert mesh
  DeviceMesh mesh = {};                      ///< for fully_shard
  DeviceMesh source_mesh = {};               ///< undefined: no source axes
  std::vector<std::string> parameters = {};  ///< full names, one for each parameter
  std::int64_t numel = 0;                    ///< elements of its whole parameters
  double gradient_factor = 1.0;
  std::vector<std::string> forward_prefetch = {}, backward_prefetch = {};  ///< names of units
};

struct HP_API ParallelModel {
  HSDPModule root = {};
  std::vector<ParallelUnit> units = {};                        ///< in the order of prefetching, the model itself last
  std::vector<std::pair<std::string, std::string>> tied = {};  ///< names of one parameter: the owner's, another
  ParallelizeOptions options = {};

  /// A table of the units, and where tied parameters went. Local.
  [[nodiscard]] std::string explain() const;
};

/// Makes a model ready for training on all meshes at once:
///  1. cuts the parameters that `plan` names (apply_plan) and takes the source layouts of those that parallel layers hold
///     (source_shard_infos); both may occur in one model
///  2. chooses units: children of containers, modules of routed experts, extra_units, the model itself
///  3. gives each parameter to the deepest unit around all modules that register it; ties across units end up in an outer one
///  4. wraps the units, deepest first: experts on data_mesh(meshes.expert), all others on data_mesh(meshes.dense)
///  5. sets what gradients are multiplied by (with kOneLoss expert_gradient_factor for units of experts, otherwise
///     set_source_gradient_factor) and the prefetch lists
///
/// The model is called as before. Local (groups of ranks that meet for the first time: collective), on all ranks alike. The
/// model's modules must be declared with HP_MODULE where they become units.
///
/// ValueError, all problems of a step at once, the model is unchanged then: a mesh that is undefined or has no axis to shard
/// over, meshes over other ranks, meshes that disagree about a shared source axis; options.fully_shard with mesh or
/// source_shard_infos, and what fully_shard refuses of a unit; a plan that does not fit (ShardingPlan::validate, apply_plan) or
/// names parameters of parallel layers; no unit besides the model, a unit without hooks or wrapped before; a pattern that matches
/// no module or the model itself; routed experts that no unit of experts owns; a unit with parameters on both meshes; unit_order
/// that is no permutation of the units; a negative depth; loss_parallel without kSumOfLosses, kSumOfLosses with parallel layers.
HP_API ParallelModel parallelize(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan& plan,
                                 const PlanMeshes& meshes, const ParallelizeOptions& options = {});
template <class Contained>
ParallelModel parallelize(const torch::nn::ModuleHolder<Contained>& holder, const ShardingPlan& plan, const PlanMeshes& meshes,
                          const ParallelizeOptions& options = {}) {
  return parallelize(std::shared_ptr<torch::nn::Module>(holder.ptr()), plan, meshes, options);
}

/// The same for models of parallel layers, without a plan.
HP_API ParallelModel parallelize(const std::shared_ptr<torch::nn::Module>& module, const PlanMeshes& meshes,
                                 const ParallelizeOptions& options = {});
template <class Contained>
ParallelModel parallelize(const torch::nn::ModuleHolder<Contained>& holder, const PlanMeshes& meshes,
                          const ParallelizeOptions& options = {}) {
  return parallelize(std::shared_ptr<torch::nn::Module>(holder.ptr()), meshes, options);
}

}  // namespace hyper_parallel::parallel

namespace hyper_parallel {

using parallel::BoundaryGradients;
using parallel::parallelize;
using parallel::ParallelizeOptions;
using parallel::ParallelModel;

}  // namespace hyper_parallel
