// A model that is larger than one rank's memory while it is built: no memory, then shards, then values, one parameter at a time.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/07_meta_start
#include <iostream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    up = register_module("up", torch::nn::Linear(dim, 4 * dim));
    down = register_module("down", torch::nn::Linear(4 * dim, dim));
    gain = register_parameter("gain", torch::empty({dim}));
  }
  // What torch's own modules have; it may also change the values of the modules inside.
  void reset_parameters() {
    torch::nn::init::ones_(gain);
    torch::nn::init::normal_(down->weight, 0.0, 0.01);
  }
  torch::Tensor forward(torch::Tensor x) { return x + gain * down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::Tensor gain;
};
HP_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t dim) {
    torch::nn::ModuleList list = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) {
      blocks.emplace_back(dim);
      list->push_back(blocks.back().ptr());
    }
    head = register_module("head", torch::nn::Linear(dim, 1));
    scale = register_buffer("scale", torch::full({1}, 0.5));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (Block& block : blocks) x = block(x);
    return head(x) * scale;
  }
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
  torch::Tensor scale;
};
HP_MODULE(Net);

double checksum(const hp::HSDPModule& root) {
  double sum = 0;
  for (const auto& [name, parameter] : root.named_dtensors()) sum += parameter.full_tensor().abs().sum().item<double>();
  return sum;
}

int main() {
  hp::init_process_group();
  const hp::FullyShardOptions options{.mesh = hp::init_device_mesh("cpu", {hp::get_world_size()}, {"dp"})};
  Net net{nullptr};
  {
    const hp::MetaInit no_memory;
    net = Net(64);
  }
  for (Block& block : net->blocks) hp::fully_shard(block, options);
  const hp::HSDPModule root = hp::fully_shard(net, options);
  hp::optim::AdamW optimizer(root, {.lr = 1e-2});  // the parameters stay the same tensors
  const int64_t planned = root.plan_memory().shards, before = root.memory_use().shards;

  // Values from a seed: the same for every number of ranks. The buffer is ours to fill.
  root.reset_parameters(/*seed=*/1);
  {
    const torch::NoGradGuard no_grad;
    net->scale.fill_(0.5);
  }
  const double at_start = checksum(root);

  double first = 0, last = 0;
  torch::manual_seed(1 + hp::get_rank());
  for (int step = 0; step < 20; ++step) {
    const torch::Tensor x = torch::randn({32, 64});
    const torch::Tensor loss = torch::mse_loss(net(x), x.sum(1, /*keepdim=*/true) / 8);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    (step == 0 ? first : last) = loss.item<double>();
  }

  // Rank 0 has a file, or a model of its own; the others get their parts of it.
  hp::fsdp::NamedTensors whole;
  if (hp::get_rank() == 0) {
    for (const auto& group : root.groups()) {
      for (const auto& parameter : group.parameters) whole.emplace_back(parameter.name, torch::full(parameter.full_shape, 0.25));
    }
    whole.emplace_back("scale", torch::ones({1}));
  }
  root.load_from_rank0(whole);
  const bool loaded =
      net->scale.item<double>() == 1.0 && root.named_dtensors()[0].second.full_tensor().min().item<double>() == 0.25;

  root.bfloat16();
  const bool converted = net(torch::ones({1, 64}, torch::kBFloat16)).scalar_type() == torch::kBFloat16;
  std::cout << hp::concat("rank ", hp::get_rank(), ": shards before ", before, " B, planned ", planned, " B; sum of weights ",
                          at_start, "; loss ", first, " -> ", last, '\n');
  hp::destroy_process_group();
  return before == 0 && loaded && converted && last < first ? 0 : 1;
}
