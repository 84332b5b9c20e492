// What a trace of the engine shows: every phase of every unit, and that communication is hidden behind computation. Order of
// events, never durations: computation is a sleep, and the network is slow on purpose.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/nap.h"
#include "support/rank_threads.h"
#include "support/read_trace.h"
#include "support/slow_network.h"
#include "support/small_net.h"
#include "support/temp_folder.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using Spans = std::vector<TraceSpan>;

const std::vector<std::string> kUnits = {"u1", "u2.inner", "u2", "u3", "u4", "Net"};

void train_step(const Net& net, const HSDPModule& root, optim::AdamW& optimizer) {
  const Batch batch = make_batch(4, 5).part(get_rank(), get_world_size());
  net_loss(net(batch.tokens), batch.targets).backward();
  clip_grad_norm_(root, 1.0);
  optimizer.step();
  optimizer.zero_grad();
}

Spans spans_of_rank(const TempFolder& folder, int rank) {
  return spans_of(read_json(folder.file("t-" + std::to_string(rank) + ".json")));
}

TEST(EngineTrace, ShowsEveryPhaseOfEveryUnit) {
  const TempFolder folder;
  TraceRecording recording(folder.file("t-%r.json"));
  run_ranks(2, [] {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    optim::AdamW optimizer(root, {.lr = 1e-2});
    train_step(net, root, optimizer);
    root.set_requires_gradient_sync(false);
    train_step(net, root, optimizer);
  });
  ASSERT_EQ(recording.stop().size(), 2U);
  for (int rank = 0; rank < 2; ++rank) {
    const auto json = read_json(folder.file("t-" + std::to_string(rank) + ".json"));
    EXPECT_EQ(json["otherData"]["dropped"], 0);
    EXPECT_EQ(json["otherData"]["unfinished"], 0);
    const Spans spans = spans_of(json);
    for (const TraceSpan& span : spans) EXPECT_EQ(span.pid, rank) << span.kind;
    for (const std::string& unit : kUnits) {
      const std::size_t gathers = unit == "Net" ? 2 : 4;  // the root keeps its parameters from forward to backward
      EXPECT_EQ(select(spans, "forward", unit).size(), 2U) << unit;
      EXPECT_EQ(select(spans, "backward", unit).size(), 2U) << unit;
      EXPECT_EQ(select(spans, "unshard", unit).size(), gathers) << unit;
      EXPECT_EQ(select(spans, "wait unshard", unit).size(), gathers) << unit;
      EXPECT_EQ(select(spans, "reshard", unit).size(), gathers) << unit;
      EXPECT_EQ(select(spans, "reduce", unit).size(), 1U) << unit;
      EXPECT_EQ(select(spans, "accumulate", unit).size(), 1U) << unit;
      // The engine's spans enclose the operations that they wait for.
      for (const TraceSpan& gather : select(spans, "all_gather_single", unit)) {
        const Spans unshards = select(spans, "unshard", unit);
        EXPECT_TRUE(std::any_of(unshards.begin(), unshards.end(), [&](const TraceSpan& unshard) {
          return unshard.begin <= gather.begin && gather.end <= unshard.end && unshard.tid == gather.tid;
        })) << unit;
      }
      const TraceSpan reduce = select(spans, "reduce", unit).at(0);
      for (const TraceSpan& scatter : select(spans, "reduce_scatter_single", unit)) {
        EXPECT_LE(reduce.begin, scatter.begin) << unit;
        EXPECT_LE(scatter.end, reduce.end) << unit;
        EXPECT_EQ(scatter.tid, reduce.tid);
      }
    }
    // Nested units lie inside their parents.
    EXPECT_GE(select(spans, "forward", "u2.inner").at(0).begin, select(spans, "forward", "u2").at(0).begin);
    EXPECT_LE(select(spans, "forward", "u2.inner").at(0).end, select(spans, "forward", "u2").at(0).end);
    EXPECT_EQ(select(spans, "optim", "AdamW").size(), 2U);
    EXPECT_EQ(select(spans, "clip").size(), 2U);
    EXPECT_EQ(select(spans, "finish backward").size(), 2U);
    EXPECT_TRUE(select(spans, "all_gather_single", "gradients present").empty()) << "the reductions tell";
  }
}

TEST(EngineTrace, BytesAreThoseOfTheGroup) {
  const TempFolder folder;
  TraceRecording recording(folder.file("t-%r.json"));
  int64_t sent = 0;
  run_ranks(2, [&](int rank) {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const Comm comm = root.data_parallel_comm();
    const int64_t before = comm.counters().bytes_sent;
    const Batch batch = make_batch(4, 5);
    net_loss(net(batch.tokens), batch.targets).backward();
    if (rank == 0) sent = comm.counters().bytes_sent - before;
  });
  recording.stop();
  int64_t traced = 0;  // whole operations: with two ranks, half of it is sent
  for (const TraceSpan& span : spans_of_rank(folder, 0)) traced += std::max<int64_t>(span.bytes, 0);
  const auto notes = static_cast<int64_t>(kUnits.size());  // the reduction of each unit carries a byte about gradients
  EXPECT_EQ(traced, 2 * (sent - notes));
}

TEST(EngineTrace, NothingChangesInTheResult) {
  const TempFolder folder;
  const auto train = [&](bool traced) {
    Tensors result;
    std::optional<TraceRecording> recording;
    if (traced) recording.emplace(folder.file("t.json"));
    run_ranks(2, [&](int rank) {
      const Net net = make_net();
      const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
      optim::AdamW optimizer(root, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) train_step(net, root, optimizer);
      const Tensors parameters = full_parameters(root);
      if (rank == 0) result = parameters;
    });
    return result;
  };
  EXPECT_EQ(relative_difference(train(true), train(false)), 0.0);
  EXPECT_EQ(select(spans_of(read_json(folder.file("t.json"))), "optim").size(), 6U) << "two ranks in one file";
}

/// Throws in forward or in backward when told to.
struct FaultyImpl : torch::nn::Module {
  FaultyImpl() { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) {
    if (fault == 1) throw std::runtime_error("forward fault");
    auto y = layer(x);
    if (fault == 2) y.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("backward fault"); });
    return y * 1;
  }
  torch::nn::Linear layer = nullptr;
  int fault = 0;
};
HP_MODULE(Faulty);

struct FaultyPairImpl : torch::nn::Module {
  FaultyPairImpl() {
    first = register_module("first", Faulty());
    second = register_module("second", Faulty());
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  Faulty first = nullptr, second = nullptr;
};
HP_MODULE(FaultyPair);

TEST(EngineTrace, ExceptionsLeaveSpansClosed) {
  const TempFolder folder;
  TraceRecording recording(folder.file("t-%r.json"));
  run_ranks(2, [] {
    FaultyPair net;
    fully_shard(net->first, on_all());
    fully_shard(net->second, on_all());
    const HSDPModule root = fully_shard(net, on_all());
    const auto run = [&](int fault) {
      net->second->fault = fault;
      net(torch::ones({2, 4})).sum().backward();
    };
    run(0);
    EXPECT_THROW(run(1), std::runtime_error);
    run(0);
    EXPECT_THROW(run(2), std::runtime_error);
    root.reset_iter_state();
    run(0);
  });
  recording.stop();
  const auto json = read_json(folder.file("t-0.json"));
  EXPECT_EQ(json["otherData"]["unfinished"], 0);
  const Spans spans = spans_of(json);
  EXPECT_EQ(select(spans, "forward", "first").size(), 5U);
  EXPECT_EQ(select(spans, "forward", "second").size(), 5U);
  EXPECT_EQ(select(spans, "backward", "second").size(), 4U);
  EXPECT_EQ(select(spans, "backward", "first").size(), 3U);
}

// --- Overlap ---

struct OverlapCase {
  std::string name;
  std::vector<int64_t> mesh = {2};
  ShardLayout layout = ShardLayout::kPerParameter;
  std::optional<bool> reshard = {};
  [[nodiscard]] bool gathers() const { return mesh.back() > 1; }
};
std::ostream& operator<<(std::ostream& out, const OverlapCase& c) { return out << c.name; }

constexpr int kLayers = 5;
constexpr int kSteps = 3;

std::string layer(int i) { return "layers" + std::to_string(i); }

/// The spans of each step, of one rank, by the number of the step from 0.
std::vector<Spans> trace_steps(const OverlapCase& c, int rank_to_read) {
  const TempFolder folder;
  SlowNetwork network({.latency = 2ms});
  TraceRecording recording(folder.file("t-%r.json"));
  run_ranks(ranks_of(c.mesh), [&] {
    NapStack stack(kLayers, 64);
    stack->set_naps(3ms, 3ms);
    const FullyShardOptions options = on_mesh(c.mesh, c.layout, c.reshard);
    const HSDPModule root = shard_stack(stack, options);
    network.carry(root.data_parallel_comm());
    if (c.mesh.size() == 2) {
      network.carry(options.mesh.get_group(int64_t{0}));
      network.carry(options.mesh.get_group(int64_t{1}));
    }
    for (int step = 0; step < kSteps; ++step) {
      const std::string number = std::to_string(step);
      const trace::Span span("step", number);
      stack(torch::ones({2}, torch::requires_grad())).sum().backward();
      root.zero_grad();
    }
  });
  recording.stop();
  EXPECT_GT(network.delivered(), 0);
  const Spans all = spans_of_rank(folder, rank_to_read);
  std::vector<Spans> steps;
  for (int step = 0; step < kSteps; ++step) {
    const TraceSpan whole = select(all, "step", std::to_string(step)).at(0);
    Spans& inside = steps.emplace_back();
    for (const TraceSpan& span : all) {
      if (whole.begin <= span.begin && span.end <= whole.end) inside.push_back(span);
    }
  }
  return steps;
}

/// No rank waits while it has something to compute.
void expect_no_wait_inside(const Spans& spans, const TraceSpan& compute) {
  for (const TraceSpan& span : spans) {
    const bool waits = span.kind.starts_with("wait ");
    EXPECT_FALSE(waits && span.overlaps(compute))
        << span.kind << ' ' << span.label << " in " << compute.kind << ' ' << compute.label;
  }
}

class Overlap : public ::testing::TestWithParam<OverlapCase> {};

TEST_P(Overlap, ForwardGathersTheNextUnitMeanwhile) {
  const std::vector<Spans> steps = trace_steps(GetParam(), 1);
  for (int step = 0; step < kSteps; ++step) {
    const Spans& spans = steps[static_cast<std::size_t>(step)];
    for (int i = 0; i + 1 < kLayers; ++i) {
      const TraceSpan forward = select(spans, "forward", layer(i)).at(0);
      expect_no_wait_inside(spans, forward);
      if (!GetParam().gathers()) {
        EXPECT_TRUE(select(spans, "unshard").empty());
        continue;
      }
      const TraceSpan next = select(spans, "unshard", layer(i + 1)).at(0);
      EXPECT_GE(select(spans, "wait unshard", layer(i + 1)).at(0).begin, forward.end) << layer(i) << " in step " << step;
      if (step == 0) {
        EXPECT_GE(next.begin, forward.end) << "nobody knows yet what comes after " << layer(i);
        continue;
      }
      // Where no memory is at stake, it is on its way before this unit's own gather is waited for.
      const TraceSpan own = select(spans, "wait unshard", layer(i)).at(0);
      const bool in_place = GetParam().layout == ShardLayout::kRagged;
      EXPECT_LE(next.begin, in_place ? own.begin : forward.begin) << layer(i) << " in step " << step;
      EXPECT_GE(next.end, forward.end) << layer(i) << " in step " << step;
    }
  }
}

TEST_P(Overlap, BackwardGathersAndReducesMeanwhile) {
  const std::size_t gathers = !GetParam().gathers() ? 0 : GetParam().reshard.value_or(true) ? 2 : 1;
  const std::vector<Spans> steps = trace_steps(GetParam(), 0);
  for (int step = 0; step < kSteps; ++step) {
    const Spans& spans = steps[static_cast<std::size_t>(step)];
    for (int i = kLayers - 1; i > 0; --i) {
      const TraceSpan backward = select(spans, "backward", layer(i)).at(0);
      const TraceSpan before = select(spans, "backward", layer(i - 1)).at(0);
      expect_no_wait_inside(spans, backward);
      EXPECT_LE(backward.end, before.begin);
      // The reduction of this unit travels while the unit before it computes.
      const TraceSpan reduce = select(spans, "reduce", layer(i)).at(0);
      EXPECT_GE(reduce.begin, backward.end) << layer(i) << " in step " << step;
      EXPECT_LE(reduce.begin, before.begin) << layer(i) << " in step " << step;
      EXPECT_GE(reduce.end, before.end) << layer(i) << " in step " << step;
      EXPECT_GE(select(spans, "wait reduce", layer(i)).at(0).begin, before.end) << layer(i) << " in step " << step;
      // So does the gather of the unit before, as soon as the order is known.
      const Spans unshards = select(spans, "unshard", layer(i - 1));
      ASSERT_EQ(unshards.size(), gathers);
      if (gathers < 2 || step == 0) continue;
      EXPECT_LE(unshards[1].begin, backward.begin) << layer(i) << " in step " << step;
      EXPECT_GE(unshards[1].end, backward.end) << layer(i) << " in step " << step;
    }
    expect_no_wait_inside(spans, select(spans, "backward", layer(0)).at(0));
  }
}

INSTANTIATE_TEST_SUITE_P(All, Overlap,
                         ::testing::Values(OverlapCase{.name = "PerParameter"},
                                           OverlapCase{.name = "Ragged", .layout = ShardLayout::kRagged},
                                           OverlapCase{.name = "Keep", .reshard = false},
                                           OverlapCase{.name = "Hybrid", .mesh = {2, 2}},
                                           OverlapCase{.name = "Replicas", .mesh = {2, 1}, .layout = ShardLayout::kRagged}),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace hyper_parallel::testing
