#pragma once
// What trains, put together as a configuration says: by a run, and by a plan of one.
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/train/llama.h>
#include <hyper_parallel/train/memory_plan.h>

#include "train/meshes.h"
#include "train/updater.h"

namespace hyper_parallel::train {

struct ShardedLlama {
  Llama model{nullptr};
  HSDPModule root = {};
};

/// The decoder without values, sharded. Local.
[[nodiscard]] ShardedLlama assemble(const Config& config, const TrainMeshes& meshes);

/// Sets what the next forward and backward of a step reduce. Local. \param last they are the last of the step
void begin_micro_batch(const Config& config, const HSDPModule& root, bool last);

/// What this rank will hold, from the engine and the optimizer. Local, before the first step.
[[nodiscard]] EngineBytes plan_engine(const Config& config, const BatchPlan& batches, const HSDPModule& root,
                                      const Updater& updater);

}  // namespace hyper_parallel::train
