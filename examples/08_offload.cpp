// A model of bf16 parameters in host memory: CPU offload, fp32 main gradients, bf16 optimizer state with fp32 master weights, and
// how much memory each part takes. On a CPU mesh the host is the device, so that offload changes nothing but the intention; the
// same program offloads on an accelerator.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/08_offload
#include <iostream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
HP_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module(hp::concat("block", i), Block(32)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<Block> blocks;
};
HP_MODULE(Net);

int main() {
  hp::init_process_group();
  const auto mesh = hp::init_device_mesh("cpu", {hp::get_world_size()}, {"dp_shard"});
  torch::manual_seed(0);
  Net net;
  net->to(torch::kBFloat16);
  const hp::FullyShardOptions options = {.mesh = mesh,
                                         .mp_policy = {.reduce_dtype = torch::kFloat, .apply_grad_on_fp32_main_grad = true},
                                         .offload_policy = hp::CPUOffloadPolicy{.pin_memory = true}};
  for (auto& block : net->blocks) hp::fully_shard(block, options);
  const hp::HSDPModule root = hp::fully_shard(net, options);
  hp::optim::AdamW optimizer(root, {.lr = 1e-2, .state_dtype = torch::kBFloat16, .master_weights = true});

  torch::manual_seed(1 + hp::get_rank());
  const auto x = torch::randn({16, 32}).to(torch::kBFloat16);
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    const auto loss = (net(x) - 2 * x).to(torch::kFloat).square().mean();
    loss.backward();
    hp::clip_grad_norm_(root, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const hp::fsdp::MemoryUse use = root.memory_use();
  std::cout << hp::concat("rank ", hp::get_rank(), ": loss ", first, " -> ", last, "; bytes: shards ", use.shards, ", gradients ",
                          use.gradients, ", optimizer ", optimizer.state_bytes(), ", on the device ", use.pool, '\n');
  hp::destroy_process_group();
  return last < first ? 0 : 1;
}
