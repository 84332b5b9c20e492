#include "ranks.h"

#include <exception>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/comm/world.h>

namespace hyper_parallel::apps {

std::vector<train::DryRun> plan_host(const train::Config& config, int ranks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<train::DryRun> runs(static_cast<std::size_t>(ranks));
  std::mutex mutex;
  std::exception_ptr first;
  const auto plan = [&](int rank) {
    try {
      const World world = init_process_group({.rank = rank, .world_size = ranks, .local_rank = rank, .store = store});
      runs[static_cast<std::size_t>(rank)] = train::dry_run(config, world);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    destroy_process_group();
  };
  std::vector<std::thread> threads;
  threads.reserve(runs.size());
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(plan, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return runs;
}

train::DryRun plan_network(const train::Config& config, int ranks, int rank) {
  const World world = init_process_group({.backend = "fake", .rank = rank, .world_size = ranks});
  train::DryRun run = train::dry_run(config, world);
  destroy_process_group();
  return run;
}

}  // namespace hyper_parallel::apps
