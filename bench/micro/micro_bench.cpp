// The hot paths one by one: collectives against Gloo's own, the optimizer against torch's, a unit without any compute.
// Options are Google Benchmark's, e.g. --benchmark_filter=Adam
#include <memory>

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/optim/adamw.h>

#include "rank_pair.h"

namespace hp = hyper_parallel;

namespace {

c10::intrusive_ptr<c10d::ProcessGroupGloo> torch_group(int rank) {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kRanks, options);
}

hp::World our_world(int rank) { return hp::init_process_group({.rank = rank, .world_size = kRanks, .store = store}); }

/// `elements` is what one rank owns; `all` holds that of every rank.
struct Tensors {
  explicit Tensors(const benchmark::State& state)
      : own(torch::randn({state.range(0)})), all(torch::randn({kRanks * state.range(0)})), space(torch::empty_like(all)) {}
  torch::Tensor own, all, space;
};

void count_bytes(benchmark::State& state) { state.SetBytesProcessed(state.iterations() * state.range(0) * 4); }

void all_gather_gloo(benchmark::State& state) {
  torch::set_num_threads(1);
  const auto group = torch_group(state.thread_index());
  Tensors t(state);
  for (auto _ : state) group->_allgather_base(t.all, t.own)->wait();
  count_bytes(state);
}

void all_gather_ours(benchmark::State& state) {
  torch::set_num_threads(1);
  const hp::Comm comm = our_world(state.thread_index()).comm();
  const Tensors t(state);
  const torch::Tensor mine = t.all.narrow(0, comm.rank() * state.range(0), state.range(0));
  for (auto _ : state) comm.all_gather_single(t.all, mine).wait();
  count_bytes(state);
  hp::destroy_process_group();
}

void reduce_scatter_gloo(benchmark::State& state) {
  torch::set_num_threads(1);
  const auto group = torch_group(state.thread_index());
  Tensors t(state);
  for (auto _ : state) group->_reduce_scatter_base(t.own, t.all)->wait();
  count_bytes(state);
}

void reduce_scatter_ours(benchmark::State& state) {
  torch::set_num_threads(1);
  const hp::Comm comm = our_world(state.thread_index()).comm();
  const Tensors t(state);
  for (auto _ : state) comm.reduce_scatter_single(t.own, t.all, {.workspace = &t.space}).wait();
  count_bytes(state);
  hp::destroy_process_group();
}

#define HP_COLLECTIVE(NAME)  \
  BENCHMARK(NAME)            \
      ->Arg(1 << 10)         \
      ->Arg(1 << 20)         \
      ->Threads(kRanks)      \
      ->UseRealTime()        \
      ->Setup(new_store)     \
      ->Teardown(drop_store) \
      ->Unit(benchmark::kMicrosecond)
HP_COLLECTIVE(all_gather_gloo);
HP_COLLECTIVE(all_gather_ours);
HP_COLLECTIVE(reduce_scatter_gloo);
HP_COLLECTIVE(reduce_scatter_ours);

constexpr std::int64_t kDim = 512;
constexpr int kMatrices = 12;

/// Matrices that no forward multiplies with.
struct MatricesImpl : torch::nn::Module {
  MatricesImpl() {
    for (int i = 0; i < kMatrices; ++i)
      matrices.push_back(register_parameter(std::to_string(i), torch::randn({kDim, kDim}).mul_(0.02)));
  }
  torch::Tensor forward(torch::Tensor x) { return x + 1; }
  std::vector<torch::Tensor> matrices;
};
HP_MODULE(Matrices);

void set_gradients(const MatricesImpl& module) {
  for (const auto& parameter : module.parameters()) parameter.mutable_grad() = torch::randn_like(parameter);
}

void adamw_torch(benchmark::State& state) {
  torch::set_num_threads(1);
  const Matrices model;
  set_gradients(*model);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4).weight_decay(0.1));
  for (auto _ : state) optimizer.step();
}
BENCHMARK(adamw_torch)->Unit(benchmark::kMicrosecond);

/// A unit over ranks without peers: everything that the engine does, and nothing is sent.
hp::FullyShardOptions faked(int ranks, hp::ShardLayout layout, bool bf16) {
  std::vector<int> members(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) members[static_cast<std::size_t>(rank)] = rank;
  hp::FullyShardOptions options;
  options.mesh = hp::DeviceMesh::from_group({hp::Comm::fake(0, ranks)}, "cpu", {ranks}, members, {"dp"});
  if (bf16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  options.shard_layout = layout;
  return options;
}

struct Unit {
  Unit(int ranks, hp::ShardLayout layout, bool bf16) : root(hp::fully_shard(model, faked(ranks, layout, bf16))) {
    for (int i = 0; i < kMatrices; ++i)
      gradients.push_back(torch::randn({kDim, kDim}).to(bf16 ? torch::kBFloat16 : torch::kFloat));
  }
  void step() {
    benchmark::DoNotOptimize(model(x));
    torch::autograd::backward(model->matrices, gradients);
  }
  Matrices model;
  hp::HSDPModule root;
  std::vector<torch::Tensor> gradients;
  torch::Tensor x = torch::zeros({1});
};

void adamw_ours(benchmark::State& state) {
  torch::set_num_threads(1);
  Unit unit(1, hp::ShardLayout::kRagged, false);
  hp::optim::AdamW optimizer(unit.root, {.lr = 3e-4, .weight_decay = 0.1});
  unit.step();
  for (auto _ : state) optimizer.step();
}
BENCHMARK(adamw_ours)->Unit(benchmark::kMicrosecond);

/// Gather, hand over the parameters, pack the gradients, reduce: all copies of one forward and backward of a unit of 3.1 M
/// elements.
void unit_without_compute(benchmark::State& state, hp::ShardLayout layout, bool bf16) {
  torch::set_num_threads(1);
  Unit unit(kRanks, layout, bf16);
  for (auto _ : state) {
    unit.step();
    unit.root.zero_grad();
  }
}
BENCHMARK_CAPTURE(unit_without_compute, ragged_fp32, hp::ShardLayout::kRagged, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(unit_without_compute, per_parameter_fp32, hp::ShardLayout::kPerParameter, false)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(unit_without_compute, ragged_bf16, hp::ShardLayout::kRagged, true)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(unit_without_compute, per_parameter_bf16, hp::ShardLayout::kPerParameter, true)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
