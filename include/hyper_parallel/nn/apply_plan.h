#pragma once
// ShardingPlan for torch::nn modules: cutting their parameters, and telling fully_shard about it.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/plan/sharding_plan.h>
#include <hyper_parallel/plan/source_shard_info.h>

namespace hyper_parallel {

/// What a module learns about the cut of its parameters and of those of modules below it.
struct SourceBinding {
  PlanMeshes meshes = {};             ///< source axes only
  NamedSourceShardInfos params = {};  ///< by name below the module; those that the plan names
};

/// A module whose forward communicates over the source axes that cut parameters of it or below it. Anything else would compute
/// with parts of weights as if they were whole.
class HP_API SourceBoundary {
 public:
  virtual ~SourceBoundary();
  /// apply_plan has cut the parameters. Called once for each module, inner ones first.
  virtual void bind_source(const SourceBinding& binding) = 0;
};

struct ApplyPlanOptions {
  PlanMeshes meshes = {};  ///< whole meshes, or their source axes
  /// Modules need not be SourceBoundary: the program around them communicates.
  bool boundaries_elsewhere = false;
};

struct AppliedPlan {
  NamedSourceShardInfos named;  ///< by full name, both names of tied parameters, with whole shapes
  SourceShardInfos infos;       ///< the same by parameter
};

/// The parameters of a module and below, in the order of named_parameters, under all their names. Local.
[[nodiscard]] HP_API std::vector<ParameterDescription> describe_parameters(const torch::nn::Module& module);

/// Cuts the parameters of `module` as the plan says: each rank keeps its block of the values that it has, which are taken to be
/// equal on all ranks; what is on the meta device stays there. The tensors that modules hold stay the same objects, so that tied
/// parameters stay tied, with memory of the block's size. Then the boundaries are bound. Before fully_shard. Local.
///
/// ValueError, all problems at once and nothing changed: what ShardingPlan::validate refuses, a parameter that fully_shard
/// manages or that has a gradient, cut parameters that no SourceBoundary stands for.
HP_API AppliedPlan apply_plan(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan& plan,
                              const ApplyPlanOptions& options);
template <class Contained>
AppliedPlan apply_plan(const torch::nn::ModuleHolder<Contained>& holder, const ShardingPlan& plan,
                       const ApplyPlanOptions& options) {
  return apply_plan(std::shared_ptr<torch::nn::Module>(holder.ptr()), plan, options);
}

/// Source layouts by name, resolved to the parameters of a model that is already cut. nullopt in, nullopt out. Local.
///
/// \param source_ranks ranks of all source axes together
/// ValueError, all problems at once: no layouts although source_ranks is above 1, a name that is no parameter, a Partial
/// placement, two names of one parameter with different layouts (meshes compare by value).
[[nodiscard]] HP_API std::optional<SourceShardInfos> build_source_shard_info_by_param(
    const torch::nn::Module& module, const std::optional<NamedSourceShardInfos>& named, std::int64_t source_ranks);

/// FullyShardOptions::source_shard_infos for a unit of these modules: the entries of the parameters that
/// fully_shard(modules, options) would manage. Parameters without entry are copies along all source axes of the unit, which are
/// those of its other parameters, or else default_source_shard_info(options.mesh). nullopt in, nullopt out. Local.
/// ValueError: options.mesh is undefined, no source axis is left for a parameter without entry, parameters of the unit on
/// different source meshes.
[[nodiscard]] HP_API std::optional<SourceShardInfos> managed_source_shard_infos(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options,
    const std::optional<SourceShardInfos>& infos);
template <class Contained>
[[nodiscard]] std::optional<SourceShardInfos> managed_source_shard_infos(const torch::nn::ModuleHolder<Contained>& holder,
                                                                         const FullyShardOptions& options,
                                                                         const std::optional<SourceShardInfos>& infos) {
  return managed_source_shard_infos({std::shared_ptr<torch::nn::Module>(holder.ptr())}, options, infos);
}

}  // namespace hyper_parallel
