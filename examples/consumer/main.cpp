// One training step with an installed copy of the library.
#include <iostream>

#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(8, 1)); }
  torch::Tensor forward(torch::Tensor x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
HP_MODULE(Net);

int main() {
  hp::init_process_group();
  Net net;
  hp::HSDPModule root = hp::fully_shard(net);
  hp::optim::AdamW optimizer(root, {.lr = 0.05});

  const auto x = torch::ones({4, 8});
  const auto loss = [&] { return torch::mse_loss(net(x), torch::zeros({4, 1}) + 3.0); };
  const auto before = loss();
  before.backward();
  hp::clip_grad_norm_(root, 1.0);
  optimizer.step();
  optimizer.zero_grad();
  const double after = loss().item<double>();
  std::cout << "consumer: loss " << before.item<double>() << " -> " << after << '\n';
  return after < before.item<double>() ? 0 : 1;
}
