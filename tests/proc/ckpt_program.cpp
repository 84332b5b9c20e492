// Two ranks (threads) that save checkpoints until they are killed: ckpt_program FOLDER save|save_async
#include <cstdio>
#include <string>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"

namespace hp = hyper_parallel;

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string folder = argv[1], how = argv[2];
  hp::testing::run_ranks(2, [&](int rank) {
    const hp::DTensor matrix = hp::distribute_tensor(torch::zeros({500, 300}), hp::init_device_mesh("cpu", {2}), {hp::Shard(0)});
    const torch::Tensor vector = torch::zeros({30000});
    hp::ckpt::StateDict state;
    state.add("matrix", matrix);
    state.add("vector", vector);
    hp::ckpt::Checkpointer checkpointer(folder, {.keep_last = 2});
    // Both ranks look before either writes.
    std::int64_t step = checkpointer.latest().value_or(0);
    hp::current_world().comm().barrier();
    while (true) {
      ++step;
      matrix.to_local().fill_(static_cast<double>(step));
      vector.fill_(static_cast<double>(step));
      if (how == "save") {
        checkpointer.save(step, state);
      } else {
        checkpointer.save_async(step, state);
        matrix.to_local().fill_(-1);
        checkpointer.wait();
      }
      if (rank == 0) {
        std::printf("saved %lld\n", static_cast<long long>(step));
        std::fflush(stdout);
      }
    }
  });
}
