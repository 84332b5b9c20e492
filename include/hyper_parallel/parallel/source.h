#pragma once
// From parallel layers to fully_shard: meshes for composed parallelism, and the source layouts of layers that are built cut.
//
//   dense mesh    [dp_replicate] dp_shard cp tp      everything but routed experts
//   expert mesh   [edp_replicate] edp_shard ep tp    the same ranks in the same order
//                 \___ data_mesh() ___/ \source axes/
#include <cstdint>
#include <string>
#include <string_view>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/fsdp/source_shard.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/plan/sharding_plan.h>

namespace hyper_parallel::parallel {

/// Ranks along the axes of composed parallelism.
struct ParallelSizes {
  std::int64_t dp_replicate = 1;  ///< replicas of HSDP
  std::int64_t dp_shard = -1;     ///< -1: the ranks that the others leave
  std::int64_t cp = 1;            ///< ranks that share a sequence; data-parallel ranks for the parameters
  std::int64_t tp = 1;
  std::int64_t ep = 1;  ///< divides dp_shard * cp: ranks of one ep group have different tokens
};

/// Meshes over all ranks of the world. `dense`: [dp_replicate, ] dp_shard, cp, tp, with dp_replicate where it is above 1.
/// `expert`: [edp_replicate, ] edp_shard, ep, tp, undefined where ep is 1. Local. ValueError: a size below 1, a product that is
/// not the number of ranks, an ep that does not divide dp_shard * cp.
[[nodiscard]] HP_API PlanMeshes init_parallel_meshes(std::string_view device_type, const ParallelSizes& sizes = {});

/// The mesh for fully_shard out of a whole one: the axes that FSDP owns, pp left out; those whose name ends in `_replicate`
/// become its first axis, the others, but those of one rank, are joined to the axis that shards. Local. ValueError: no axis that
/// shards, replicas to the right of it.
[[nodiscard]] HP_API DeviceMesh data_mesh(const DeviceMesh& mesh);

/// The factor for the units of routed experts where gradients are averaged: their gradients hold the tokens of all ranks of an ep
/// group, but are averaged over fewer ranks than those of other parameters. (Data-parallel ranks of the expert mesh) /
/// (ranks with different tokens). Local. ValueError: an undefined dense mesh.
[[nodiscard]] HP_API double expert_gradient_factor(const PlanMeshes& meshes, std::string_view expert_axis = "ep");

struct SourceLayoutOptions {
  PlanMeshes meshes = {};          ///< whole meshes, as for data_mesh
  std::string expert_axis = "ep";  ///< the axis that cuts routed experts
};

/// What parameter_cuts says, as source layouts of all parameters of `root`, under all of their names: pass the entries of a
/// unit's parameters (managed_source_shard_infos) to fully_shard.
///
/// Parameters of modules that hold routed experts lie on the expert mesh (if there is one), all others on the dense mesh. A
/// parameter that no layer cuts is a copy along its source axes, of which every rank computes the whole gradient (kWhole);
/// partial gradients (AxisCut::partial_gradient) are kPartial. Copies along the expert axis see different tokens: beside experts,
/// whose unit has expert_gradient_factor, they are kPartial, elsewhere they are averaged like data-parallel ranks.
///
/// Local, before fully_shard. ValueError, all problems at once: a cut along an axis that FSDP owns, that the mesh lacks or that
/// has other ranks there, along one dimension twice, a placement that is no cut, a parameter of another shape than its part or
/// that a unit manages, names of one tensor that are cut in different ways.
[[nodiscard]] HP_API SourceShardInfos source_shard_infos(const torch::nn::Module& root, const SourceLayoutOptions& options);
template <class Contained>
[[nodiscard]] SourceShardInfos source_shard_infos(const torch::nn::ModuleHolder<Contained>& holder,
                                                  const SourceLayoutOptions& options) {
  return source_shard_infos(*holder, options);
}

}  // namespace hyper_parallel::parallel
