// Training for tests that kill one of its ranks or compare the ways in which shards travel:
//   fsdp_program <timeout in ms>                        trains until it fails
//   fsdp_program <timeout in ms> write                  writes to gathered parameters
//   fsdp_program <timeout in ms> bits <folder> [case]   prints what some steps give, and saves a checkpoint of each case
#include <bit>
#include <chrono>
#include <iostream>
#include <string>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"
#include "support/wide_net.h"

namespace hp = hyper_parallel;

namespace {

using namespace hp::testing;

hp::FullyShardOptions ragged() { return on_all(hp::ShardLayout::kRagged); }

void train() {
  Wide model;
  seed_parameters(*model, 3);
  const hp::HSDPModule root = shard_wide(model, ragged());
  hp::optim::AdamW adamw(root);
  for (int step = 0;; ++step) {
    model(wave({4, WideImpl::kDim}, 10 * step + hp::get_rank())).square().mean().backward();
    adamw.step();
    adamw.zero_grad();
    if (step == 3) std::cout << "training, " << root.memory_use().mapped << " bytes mapped" << std::endl;
  }
}

void write_to_gathered() {
  hp::nn::Linear wrapped(torch::nn::LinearOptions(1024, 64).bias(false));
  hp::fully_shard(wrapped, ragged());
  wrapped(torch::ones({1, 1024})).sum();
  torch::NoGradGuard no_grad;
  wrapped->weight.zero_();
  std::cout << "written" << std::endl;
}

/// FNV-1a.
std::uint64_t mixed(std::uint64_t sum, const torch::Tensor& tensor) {
  const torch::Tensor whole = tensor.contiguous();
  const auto* bytes = static_cast<const unsigned char*>(whole.const_data_ptr());
  for (std::size_t i = 0; i < whole.nbytes(); ++i) sum = (sum ^ bytes[i]) * 0x100000001b3U;
  return sum;
}

struct Case {
  std::string name;
  std::vector<int64_t> mesh = {hp::get_world_size()};
  bool bf16 = false, recompute = false, accumulate = false, offload = false;
  std::optional<hp::ReshardAfterForward> reshard = {};
};

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({.name = "plain"});
  all.push_back({.name = "bf16", .bf16 = true, .recompute = true, .accumulate = true});
  all.push_back({.name = "offload", .accumulate = true, .offload = true});
  all.push_back({.name = "keep", .recompute = true, .reshard = false});
  const int64_t world = hp::get_world_size();
  if (world % 2 != 0 || world < 4) return all;
  all.push_back({.name = "cut", .recompute = true, .reshard = 2});
  all.push_back({.name = "hybrid", .mesh = {world / 2, 2}, .bf16 = true, .accumulate = true});
  return all;
}

std::string transports(const hp::HSDPModule& root) {
  const auto& group = root.groups().at(0);
  std::string text(group.shard_comm.transport_name());
  if (group.replicate_comm.defined() && group.replicate_comm.size() > 1)
    text += '/' + std::string(group.replicate_comm.transport_name());
  return text;
}

void print_bits(const Case& c, const std::string& folder) {
  Wide model;
  seed_parameters(*model, 3);
  hp::FullyShardOptions options = on_mesh(c.mesh, hp::ShardLayout::kRagged);
  options.reshard_after_forward = c.reshard;
  if (c.bf16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (c.offload) options.offload_policy = hp::CPUOffloadPolicy{};
  const hp::HSDPModule root = shard_wide(model, options);
  hp::optim::AdamW adamw(root, {.lr = 1e-2});
  std::uint64_t sum = 0xcbf29ce484222325U;
  double norm = 0;
  for (int step = 0; step < 3; ++step) {
    for (const bool sync : {false, true}) {
      if (!sync && !c.accumulate) continue;
      root.set_requires_gradient_sync(sync);
      const torch::Tensor x = wave({4, WideImpl::kDim}, 20 * step + 10 * (sync ? 1 : 0) + hp::get_rank());
      const auto forward = [&](const torch::Tensor& input) { return model(input); };
      const torch::Tensor y = c.recompute ? hp::checkpoint(forward, x) : forward(x);
      const torch::Tensor loss = y.to(torch::kFloat).square().mean();
      sum = mixed(sum, loss.detach());
      loss.backward();
    }
    norm = hp::clip_grad_norm_(root, 0.5);
    adamw.step();
    adamw.zero_grad();
  }
  for (const auto& [name, value] : full_parameters(root)) sum = mixed(sum, value);
  hp::ckpt::StateDict state;
  state.add_model(root);
  state.add_optimizer(adamw);
  hp::ckpt::save(std::filesystem::path(folder) / c.name, state);
  std::cout << c.name << ", rank " << hp::get_rank() << ": sum " << std::hex << sum << ", norm "
            << std::bit_cast<std::uint64_t>(norm) << std::dec << " [" << transports(root) << ", "
            << (root.memory_use().mapped > 0 ? "mapped" : "not mapped") << ']' << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    hp::init_process_group({.timeout = std::chrono::milliseconds(argc > 1 ? std::stoi(argv[1]) : 15000)});
    torch::set_num_threads(1);
    const std::string mode = argc > 2 ? argv[2] : "";
    if (mode.empty()) train();
    if (mode == "write") write_to_gathered();
    if (mode == "bits" && argc > 3) {
      for (const Case& c : cases()) {
        if (argc < 5 || c.name == argv[4]) print_bits(c, argv[3]);
      }
    }
    return 0;
  } catch (const hp::Error& error) {
    std::cerr << "Error: " << error.what() << std::endl;
    return 3;
  }
}
