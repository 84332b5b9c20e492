#include "support/rank_threads.h"

#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/comm/world.h>

namespace hyper_parallel::testing {

void run_rank_threads(int world_size, const RankOptions& options, const std::function<void(int)>& body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::condition_variable finished;
  std::vector<bool> done(static_cast<std::size_t>(world_size), false);
  std::optional<RankError> first;
  const auto run = [&](int rank) {
    try {
      at::set_num_threads(1);
      init_process_group({.timeout = options.timeout,
                          .rank = rank,
                          .world_size = world_size,
                          .local_rank = rank,
                          .store = store,
                          .allocator = options.allocator});
      body(rank);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex);
      if (!first) {
        first.emplace(rank, "rank " + std::to_string(rank) + "/" + std::to_string(world_size) + ": " + error.what(),
                      std::current_exception());
      }
    }
    destroy_process_group();
    const std::lock_guard lock(mutex);
    done[static_cast<std::size_t>(rank)] = true;
    finished.notify_all();
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run, rank);
  {
    std::unique_lock lock(mutex);
    const auto all_done = [&] {
      for (const bool one : done) {
        if (!one) return false;
      }
      return true;
    };
    if (!finished.wait_for(lock, options.watchdog, all_done)) {
      std::cerr << "[run_ranks] after " << options.watchdog.count() << " ms these ranks of " << world_size << " still run:";
      for (int rank = 0; rank < world_size; ++rank) {
        if (!done[static_cast<std::size_t>(rank)]) std::cerr << ' ' << rank;
      }
      std::cerr << (first ? std::string("; ") + first->what() : std::string()) << std::endl;
      std::abort();
    }
  }
  for (auto& thread : threads) thread.join();
  if (first) throw *first;
}

}  // namespace hyper_parallel::testing
