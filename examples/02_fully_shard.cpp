// A model whose parameters, gradients and optimizer state are divided among the ranks.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/02_fully_shard
#include <cstdio>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

// An ordinary torch module; only the last line differs: HP_MODULE instead of TORCH_MODULE.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
HP_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl(int64_t dim, int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(dim)));
    head = register_module("head", torch::nn::Linear(dim, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
HP_MODULE(Model);

int main() {
  hp::init_process_group();
  const auto mesh = hp::init_device_mesh("cpu", {hp::get_world_size()});
  torch::manual_seed(0);  // equal initial parameters on all ranks
  Model model(32, 4);

  // Each block is gathered just before it runs and freed right after; the rest belongs to the root unit.
  for (auto& block : model->blocks) hp::fully_shard(block, {.mesh = mesh});
  hp::HSDPModule root = hp::fully_shard(model, {.mesh = mesh});
  hp::optim::AdamW optimizer(root, {.lr = 1e-2});

  torch::manual_seed(1 + hp::get_rank());  // different data on each rank
  double first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    const auto x = torch::randn({64, 32});
    const auto y = x.slice(1, 0, 4).abs().sum(1, /*keepdim=*/true);
    const auto loss = torch::mse_loss(model(x), y);
    loss.backward();  // gradients are averaged over the ranks, each keeps its part
    const double norm = hp::clip_grad_norm_(root, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
    if (hp::get_rank() == 0 && step % 20 == 19) std::printf("step %3d  loss %.4f  grad norm %.3f\n", step + 1, last, norm);
  }
  hp::destroy_process_group();
  return last < 0.2 * first ? 0 : 1;
}
