// Layers of tensor and expert parallelism, forward and backward, two ranks (threads) against one rank that has everything.
#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/parallel/attention.h>
#include <hyper_parallel/parallel/moe.h>

#include "rank_pair.h"

namespace hp = hyper_parallel;

namespace {

/// Of one axis over the threads of the benchmark; undefined for one.
hp::DeviceMesh mesh_of(const benchmark::State& state) {
  torch::set_num_threads(1);
  if (state.threads() == 1) return {};
  hp::init_process_group({.rank = state.thread_index(), .world_size = state.threads(), .store = store});
  return hp::init_device_mesh("cpu", {state.threads()}, {"axis"});
}

/// Column- and row-parallel linear with silu in between: what a rank does with `tokens` tokens that all ranks have.
void tp_swiglu(benchmark::State& state, bool sequence_parallel) {
  const hp::DeviceMesh mesh = mesh_of(state);
  constexpr std::int64_t kTokens = 512, kDim = 512, kHidden = 2048;
  hp::parallel::ParallelSwiGLU layer(kDim, kHidden,
                                     hp::parallel::ParallelSwiGLUOptions{.mesh = mesh, .sequence_parallel = sequence_parallel});
  const std::int64_t own = sequence_parallel ? kTokens / state.threads() : kTokens;
  const torch::Tensor x = torch::randn({1, own, kDim}).requires_grad_(), gradient = torch::randn({1, own, kDim});
  for (auto _ : state) layer(x).backward(gradient);
  if (mesh.defined()) hp::destroy_process_group();
}

/// All tokens together are equally many for every number of ranks.
void moe(benchmark::State& state, std::int64_t ffn_dim) {
  const hp::DeviceMesh mesh = mesh_of(state);
  constexpr std::int64_t kTokens = 1024, kDim = 512;
  hp::parallel::MixtureOfExperts layer(kDim,
                                       hp::parallel::MoEOptions{.n_experts = 8, .top_k = 2, .ffn_dim = ffn_dim, .ep_mesh = mesh});
  const std::int64_t own = kTokens / state.threads();
  const torch::Tensor x = torch::randn({own, kDim}).requires_grad_(), gradient = torch::randn({own, kDim});
  for (auto _ : state) layer(x).output.backward(gradient);
  if (mesh.defined()) hp::destroy_process_group();
}

void configure(benchmark::internal::Benchmark* benchmark) {
  benchmark->Threads(1)->Threads(kRanks)->UseRealTime()->Setup(new_store)->Teardown(drop_store)->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(tp_swiglu, whole_sequence, false)->Apply(configure);
BENCHMARK_CAPTURE(tp_swiglu, sequence_parallel, true)->Apply(configure);
// Hardly any work in the experts: routing, dispatch and combine.
BENCHMARK_CAPTURE(moe, dispatch, 8)->Apply(configure);
BENCHMARK_CAPTURE(moe, experts_of_1024, 1024)->Apply(configure);

}  // namespace
