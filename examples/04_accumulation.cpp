// Several micro-batches per step: gradients stay on this rank, in full, until the last one; only then do they travel.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/04_accumulation
#include <iostream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    in = register_module("in", torch::nn::Linear(16, 64));
    out = register_module("out", torch::nn::Linear(64, 1));
  }
  torch::Tensor forward(torch::Tensor x) { return out(torch::relu(in(x))); }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
HP_MODULE(Net);

int main() {
  constexpr int kMicroBatches = 4;
  hp::init_process_group();
  const auto mesh = hp::init_device_mesh("cpu", {hp::get_world_size()}, {"dp"});
  torch::manual_seed(0);
  Net net;
  hp::HSDPModule root = hp::fully_shard(net, {.mesh = mesh});
  hp::optim::AdamW optimizer(root, {.lr = 1e-2});

  torch::manual_seed(1 + hp::get_rank());
  const auto x = torch::randn({kMicroBatches * 8, 16});
  const auto y = x.sum(1, /*keepdim=*/true);

  // The same gradient in one piece, to compare with.
  torch::mse_loss(net(x), y).backward();
  std::vector<torch::Tensor> whole;
  for (const auto& parameter : net->parameters()) whole.push_back(parameter.grad().clone());
  optimizer.zero_grad();

  for (int i = 0; i < kMicroBatches; ++i) {
    root.set_requires_gradient_sync(i == kMicroBatches - 1);
    const auto rows = torch::indexing::Slice(i * 8, (i + 1) * 8);
    (torch::mse_loss(net(x.index({rows})), y.index({rows})) / kMicroBatches).backward();
  }

  double difference = 0;
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].numel() > 0)
      difference = std::max(difference, (parameters[i].grad() - whole[i]).abs().max().item<double>());
  }
  optimizer.step();
  std::cout << hp::concat("rank ", hp::get_rank(), ": accumulated and whole gradients differ by at most ", difference, '\n');
  hp::destroy_process_group();
  return difference < 1e-5 ? 0 : 1;
}
