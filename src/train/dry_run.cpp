#include <hyper_parallel/train/dry_run.h>

#include "train/assemble.h"

namespace hyper_parallel::train {

DryRun dry_run(const Config& config, const World& world) {
  DryRun run{.batches = plan_batches(config, world.size())};
  const ShardedLlama sharded = assemble(config, make_meshes(config, run.batches));
  const Updater updater(config, sharded.root);
  run.engine = plan_engine(config, run.batches, sharded.root, updater);
  return run;
}

}  // namespace hyper_parallel::train
