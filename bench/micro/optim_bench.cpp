// One step of each optimizer over 3.1 M elements (12 matrices of 512 x 512), ours against torch's, on one thread.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <ATen/ops/_fused_adamw.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/optim/ema.h>
#include <hyper_parallel/optim/muon.h>
#include <hyper_parallel/optim/sgd.h>

namespace hp = hyper_parallel;

namespace {

constexpr std::int64_t kDim = 512;
constexpr int kMatrices = 12;

struct WeightsImpl : torch::nn::Module {
  explicit WeightsImpl(torch::Dtype dtype) {
    for (int i = 0; i < kMatrices; ++i) register_parameter(std::to_string(i), torch::randn({kDim, kDim}).mul_(0.02).to(dtype));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
};
HP_MODULE(Weights);

/// A unit of a world of one with gradients of `gradient`.
struct Model {
  explicit Model(torch::Dtype dtype = torch::kFloat, torch::Dtype gradient = torch::kFloat) : weights(dtype) {
    torch::set_num_threads(1);
    hp::FullyShardOptions options;
    options.mesh = hp::DeviceMesh::from_group({hp::Comm::fake(0, 1)}, "cpu", {1}, {0}, {"dp"});
    options.shard_layout = hp::ShardLayout::kRagged;
    root = hp::fully_shard(weights, options);
    for (auto& parameter : weights->parameters()) parameter.mutable_grad() = torch::randn(parameter.sizes()).to(gradient);
  }
  Weights weights;
  hp::HSDPModule root;
};

template <class Optimizer>
void steps(benchmark::State& state, Optimizer& optimizer) {
  optimizer.step();
  for (auto _ : state) optimizer.step();
}

void optim_adamw(benchmark::State& state, torch::Dtype dtype, torch::Dtype moments, bool master) {
  const Model model(dtype);
  hp::optim::AdamW optimizer(model.root, {.weight_decay = 0.1, .state_dtype = moments, .master_weights = master});
  steps(state, optimizer);
}
BENCHMARK_CAPTURE(optim_adamw, fp32, torch::kFloat, torch::kFloat, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(optim_adamw, fp32_bf16_moments, torch::kFloat, torch::kBFloat16, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(optim_adamw, bf16, torch::kBFloat16, torch::kFloat, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(optim_adamw, bf16_master, torch::kBFloat16, torch::kFloat, true)->Unit(benchmark::kMicrosecond);

/// torch's fused kernel on one flat tensor: the least that AdamW costs there.
void optim_adamw_fused_kernel(benchmark::State& state) {
  torch::set_num_threads(1);
  const std::int64_t numel = kMatrices * kDim * kDim;
  std::vector<torch::Tensor> p = {torch::randn(numel)}, g = {torch::randn(numel)}, m = {torch::zeros(numel)},
                             v = {torch::zeros(numel)};
  std::vector<torch::Tensor> step = {torch::ones({})};
  for (auto _ : state) at::_fused_adamw_(p, g, m, v, {}, step, 1e-3, 0.9, 0.999, 0.1, 1e-8, false, false);
}
BENCHMARK(optim_adamw_fused_kernel)->Unit(benchmark::kMicrosecond);

void optim_sgd(benchmark::State& state) {
  const Model model;
  hp::optim::SGD optimizer(model.root, {.momentum = 0.9, .weight_decay = 0.1});
  steps(state, optimizer);
}
BENCHMARK(optim_sgd)->Unit(benchmark::kMicrosecond);

void optim_sgd_torch(benchmark::State& state) {
  const Model model;
  torch::optim::SGD optimizer(model.weights->parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9).weight_decay(0.1));
  steps(state, optimizer);
}
BENCHMARK(optim_sgd_torch)->Unit(benchmark::kMicrosecond);

void optim_muon(benchmark::State& state, torch::Dtype dtype) {
  const Model model;
  hp::optim::Muon optimizer(model.root, {.ns_dtype = dtype});
  steps(state, optimizer);
}
BENCHMARK_CAPTURE(optim_muon, fp32, torch::kFloat)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(optim_muon, bf16, torch::kBFloat16)->Unit(benchmark::kMicrosecond);

void optim_ema(benchmark::State& state) {
  const Model model;
  hp::Ema ema(model.root);
  for (auto _ : state) ema.update(0);
}
BENCHMARK(optim_ema)->Unit(benchmark::kMicrosecond);

}  // namespace
