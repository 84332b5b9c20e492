#pragma once
// What a run will need, asked of the engine without training: the model is put together and sharded, but has no values.
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/memory_plan.h>

namespace hyper_parallel::train {

/// Of one rank.
struct DryRun {
  BatchPlan batches = {};
  EngineBytes engine = {};  ///< what run_training will announce: memory_table, plan_memory
};

/// Shards the decoder that `config` describes over all ranks of `world`, reads no data and writes no file. Memory: a few
/// megabytes. Groups are made, so that it is collective over the world; a faked one (InitOptions::backend "fake") has any number
/// of ranks in one process, none of which shares memory with another. ValueError on all ranks alike: the configuration does not
/// fit the world.
[[nodiscard]] DryRun dry_run(const Config& config, const World& world);

}  // namespace hyper_parallel::train
