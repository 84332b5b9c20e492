#pragma once
// How the ranks of a run are arranged.
//
//   dense     ([dp_replicate,] dp_shard x cp, tp)       tp varies fastest; cp is part of what fully_shard cuts over
//   experts   ([dp_replicate,] the ranks with the same experts, ep)       ep varies fastest: its groups span ranks of tp, cp
//                                                       and dp_shard, in this order
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/llama.h>

namespace hyper_parallel::train {

struct TrainMeshes {
  DeviceMesh dense;     ///< of the units but those of experts, for fully_shard
  DeviceMesh experts;   ///< of the units of experts, for fully_shard; undefined without experts
  LlamaParallel model;  ///< for the decoder
  int data_rank = 0;    ///< ranks with the same one are given the same sequences
};

/// Local; on all ranks of the thread's world.
[[nodiscard]] TrainMeshes make_meshes(const Config& config, const BatchPlan& plan);

}  // namespace hyper_parallel::train
