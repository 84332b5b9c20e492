// A training loop for tests that kill one of its ranks.
#include <chrono>
#include <iostream>
#include <string>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

int main(int argc, char** argv) {
  namespace hp = hyper_parallel;
  using namespace hp::testing;
  try {
    hp::init_process_group({.timeout = std::chrono::milliseconds(argc > 1 ? std::stoi(argv[1]) : 15000)});
    torch::set_num_threads(1);
    const auto mesh = hp::init_device_mesh("cpu", {hp::get_world_size()}, {"dp"});
    Net net = make_net();
    const hp::HSDPModule root = shard_net(net, {.mesh = mesh, .shard_layout = hp::ShardLayout::kRagged});
    if (argc > 2) {  // a mistake
      hp::nn::Linear wrapped(torch::nn::LinearOptions(1024, 64).bias(false));
      hp::fully_shard(wrapped, {.mesh = mesh, .shard_layout = hp::ShardLayout::kRagged});
      wrapped(torch::ones({1, 1024})).sum();
      torch::NoGradGuard no_grad;
      wrapped->weight.zero_();
      std::cout << "written" << std::endl;
      return 0;
    }
    hp::optim::AdamW adamw(root);
    for (int step = 0;; ++step) {
      const Batch batch = make_batch(8, static_cast<uint64_t>(step));
      net_loss(net(batch.tokens), batch.targets).backward();
      adamw.step();
      adamw.zero_grad();
      if (step == 3) std::cout << "training" << std::endl;
    }
  } catch (const hp::Error& error) {
    std::cerr << "Error: " << error.what() << std::endl;
    return 3;
  }
}
