// Shards inside a group of ranks, replicas across groups: a 2-D mesh, for clusters whose hosts are closely connected inside.
//   torchrun --standalone --no-python --nproc-per-node 4 build/examples/03_hsdp
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
  hp::init_process_group();
  const int world = hp::get_world_size();
  const int replicas = world % 2 == 0 ? 2 : 1;
  const auto mesh = hp::init_device_mesh("cpu", {replicas, world / replicas}, {"dp_replicate", "dp_shard"});

  torch::manual_seed(0);
  Net net;
  // The first axis replicates, the second shards. Parameters are gathered inside a replica; gradients are reduced inside it, then
  // averaged across replicas, where only one shard's worth of bytes travels.
  hp::HSDPModule root = hp::fully_shard(net, {.mesh = mesh, .shard_layout = hp::ShardLayout::kRagged});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05));  // any optimizer works on the shards

  torch::manual_seed(1 + hp::get_rank());
  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    const auto x = torch::randn({32, 16});
    const auto loss = torch::mse_loss(net(x), x.abs().sum(1, /*keepdim=*/true) / 4);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }

  int64_t owned = 0;
  for (const auto& parameter : net->parameters()) owned += parameter.numel();
  // Replicas hold the same bits: the sum over them is that many times this rank's shard.
  double difference = 0;
  for (const auto& parameter : net->parameters()) {
    const auto sum = parameter.detach().clone();
    mesh.get_group("dp_replicate").all_reduce(sum).wait();
    if (sum.numel() > 0) difference += (sum - replicas * parameter.detach()).abs().max().item<double>();
  }
  std::cout << hp::concat("rank ", hp::get_rank(), " in ", mesh.to_string(), ": ", owned, " elements here, loss ", first, " -> ",
                          last, ", replicas differ by ", difference, '\n');
  hp::destroy_process_group();
  return last < first && difference == 0 ? 0 : 1;
}
