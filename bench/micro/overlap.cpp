// How much communication hides behind computation: a step over a slow network against the longer of the two alone.
//
// Computation is a sleep in forward and one twice as long in backward. The network (tests/support/slow_network.h) is so slow that
// the gather of a unit takes as long as its forward, and its gather and its reduction together as long as its backward. Two ranks
// are threads of one process. A perfect overlap would print 1.00; what is left is the first gather and the last reduction of a
// pass, which nothing can hide, and the engine's own time.
//
// usage: overlap_bench [units] [milliseconds of one forward] [steps]
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/nap.h"
#include "support/rank_threads.h"
#include "support/slow_network.h"
#include "support/small_net.h"

namespace hp = hyper_parallel;
namespace hpt = hyper_parallel::testing;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

struct Setting {
  const char* name;
  bool by_bytes;  ///< every rank has one line of limited speed; otherwise each message takes the same time
  hp::ShardLayout layout = hp::ShardLayout::kRagged;
  std::optional<bool> reshard = {};
  std::vector<std::int64_t> mesh = {2};
};

struct Times {
  double forward = 0, backward = 0;  ///< ms, of the fastest steps
};

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

/// Whatever else the machine does only ever adds.
double least(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

constexpr std::int64_t kNumel = 1 << 16;

Times run(const Setting& setting, int units, microseconds forward, bool computes, bool communicates, int steps) {
  hpt::SlowNetwork network({});
  Times result;
  hpt::run_ranks(hpt::ranks_of(setting.mesh), [&](int rank) {
    hpt::NapStack stack(units, kNumel);
    const hp::FullyShardOptions options = hpt::on_mesh(setting.mesh, setting.layout, setting.reshard);
    const hp::HSDPModule root = hpt::shard_stack(stack, options);
    network.carry(root.data_parallel_comm());
    for (std::int64_t axis = 0; axis < static_cast<std::int64_t>(setting.mesh.size()) && setting.mesh.size() > 1; ++axis)
      network.carry(options.mesh.get_group(axis));
    if (computes) stack->set_naps(forward, 2 * forward);
    std::vector<double> forwards, backwards;
    for (int step = -2; step < steps; ++step) {
      root.data_parallel_comm().barrier();
      if (step == 0 && rank == 0 && communicates) {
        // One gather or reduction sends half of the parameters.
        const double bytes = kNumel * 4.0 / 2;
        if (setting.by_bytes) {
          network.set_options({.bytes_per_second = bytes / std::chrono::duration<double>(forward).count()});
        } else {
          network.set_options({.latency = forward});
        }
      }
      if (step == 0) root.data_parallel_comm().barrier();
      const auto begin = Clock::now();
      const torch::Tensor loss = stack(torch::ones({2}, torch::requires_grad())).sum();
      const auto middle = Clock::now();
      loss.backward();
      const auto end = Clock::now();
      root.zero_grad();
      if (step < 0) continue;
      forwards.push_back(milliseconds(middle - begin));
      backwards.push_back(milliseconds(end - middle));
    }
    if (rank == 0) result = {least(forwards), least(backwards)};
  });
  return result;
}

int argument(int argc, char** argv, int index, int otherwise) { return argc > index ? std::atoi(argv[index]) : otherwise; }

}  // namespace

int main(int argc, char** argv) {
  const int units = argument(argc, argv, 1, 16);
  const microseconds forward(1000 * argument(argc, argv, 2, 10));
  const int steps = argument(argc, argv, 3, 8);
  const std::array settings = {
      Setting{.name = "line, ragged", .by_bytes = true},
      Setting{.name = "line, per-parameter", .by_bytes = true, .layout = hp::ShardLayout::kPerParameter},
      Setting{.name = "line, kept after forward", .by_bytes = true, .reshard = false},
      Setting{.name = "latency, ragged", .by_bytes = false},
      Setting{.name = "latency, per-parameter", .by_bytes = false, .layout = hp::ShardLayout::kPerParameter},
      Setting{.name = "latency, HSDP 2 x 2", .by_bytes = false, .mesh = {2, 2}},
  };
  std::printf("%d units, %lld us forward, twice that backward; fastest of %d steps in ms\n", units,
              static_cast<long long>(forward.count()), steps);
  std::printf("%-26s %31s %31s %7s\n", "", "forward", "backward", "step");
  std::printf("%-26s %8s %8s %6s %6s %8s %8s %6s %6s %7s\n", "", "compute", "network", "both", "ratio", "compute", "network",
              "both", "ratio", "ratio");
  for (const Setting& setting : settings) {
    const Times compute = run(setting, units, forward, true, false, steps);
    const Times network = run(setting, units, forward, false, true, steps);
    const Times both = run(setting, units, forward, true, true, steps);
    const auto longer = [](double a, double b) { return std::max(a, b); };
    std::printf("%-26s %8.1f %8.1f %6.1f %6.2f %8.1f %8.1f %6.1f %6.2f %7.2f\n", setting.name, compute.forward, network.forward,
                both.forward, both.forward / longer(compute.forward, network.forward), compute.backward, network.backward,
                both.backward, both.backward / longer(compute.backward, network.backward),
                (both.forward + both.backward) / longer(compute.forward + compute.backward, network.forward + network.backward));
  }
  return 0;
}
