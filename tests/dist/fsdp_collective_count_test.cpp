// No collective more than docs/design/005-memory-and-traffic.md lists: every operation of a step, by kind and unit, for each
// option. A case says how a step runs and what its units then gather and reduce; everything else is shared.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <variant>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/collective_count.h"
#include "support/rank_threads.h"
#include "support/read_trace.h"
#include "support/temp_folder.h"

namespace hyper_parallel::testing {
namespace {

/// Groups of a unit by what they take part in: one that stays whole on every rank is neither gathered nor scattered. Gathers of
/// several groups are one.
struct UnitSize {
  int gathered = 0, scattered = 0, all_reduced = 0;
};

std::map<std::string, UnitSize> sizes_of(const Net& net, const FullyShardOptions& options, bool maps) {
  const bool ragged = options.shard_layout == ShardLayout::kRagged;
  const bool together = (ragged ? !maps : options.comm_fusion) && options.bucket_size < 0;
  std::map<std::string, UnitSize> sizes;
  const std::vector<HSDPModule> units = {HSDPModule::of(net->u1), HSDPModule::of(net->u2->inner), HSDPModule::of(net->u2),
                                         HSDPModule::of(net->u3), HSDPModule::of(net->u4),        HSDPModule::of(net)};
  for (const HSDPModule& unit : units) {
    for (const auto& group : unit.groups(false)) {
      UnitSize& size = sizes[unit.name()];
      const bool cut = group.shard_comm.size() > 1;
      const bool replicated = group.replicate_comm.defined() && group.replicate_comm.size() > 1;
      size.gathered += cut && !(together && size.gathered > 0) ? 1 : 0;
      size.scattered += cut && group.trainable ? 1 : 0;
      size.all_reduced += replicated && group.trainable ? 1 : 0;
    }
  }
  return sizes;
}

/// The table, for a mesh of `ranks` ranks.
Counts want_counts(const Case& c, const std::map<std::string, UnitSize>& sizes, int ranks) {
  Counts counts;
  const auto add = [&](const char* kind, const std::string& label, int count) {
    if (count > 0) counts[{kind, label}] += count;
  };
  for (const auto& [unit, size] : sizes) {
    const PerGroup each = c.want(unit);
    add(kGather, each.by_the_user ? kUser : unit, each.gathers * size.gathered);
    add(kScatter, each.by_the_user ? kUser : unit, each.reductions * size.scattered);
    add(kReduce, unit, each.all_reduces.value_or(each.reductions) * size.all_reduced);
  }
  if (ranks > 1) add(kGather, "gradients present", c.presence_exchanges);
  return counts;
}

/// What happened in each "step" span of rank 0, from the trace.
std::vector<Counts> traced_counts(const std::string& file) {
  const auto spans = spans_of(read_json(file));
  std::vector<Counts> steps;
  for (const TraceSpan& step : select(spans, "step")) {
    Counts& counts = steps.emplace_back();
    for (const TraceSpan& span : spans) {
      const bool operation = span.kind.find('_') != std::string::npos || span.kind == "barrier" || span.kind == kBroadcast;
      if (operation && step.begin <= span.begin && span.end <= step.end) ++counts[{span.kind, span.label}];
    }
  }
  return steps;
}

/// The integer of reshard_after_forward, otherwise 0.
int cut_over(const FullyShardOptions& options) {
  const auto* k = options.reshard_after_forward ? std::get_if<int>(&*options.reshard_after_forward) : nullptr;
  return k != nullptr ? *k : 0;
}

std::string text_of(const Counts& counts) {
  std::string text;
  for (const auto& [key, count] : counts) text += key.first + " " + key.second + ": " + std::to_string(count) + "\n";
  return text;
}

int total(const Counts& counts) {
  int sum = 0;
  for (const auto& [key, count] : counts) sum += count;
  return sum;
}

TEST_P(CollectiveCount, IsThatOfTheTable) {
  const auto& [mesh, c] = GetParam();
  const int64_t shards = mesh.back(), replicas = mesh.size() == 2 ? mesh.front() : 1;
  constexpr int kSteps = 3;
  const TempFolder folder;
  TraceRecording recording(folder.file("t-%r.json"));
  std::map<std::string, UnitSize> sizes;
  std::array<int64_t, kSteps> counted{};  // by the groups' own counters
  bool maps = false;
  run_ranks(ranks_of(mesh), [&](int rank) {
    const Net net = make_net(c.net);
    c.before_wrapping(net);
    FullyShardOptions options = c.options;
    options.mesh = on_mesh(mesh).mesh;
    c.choose(options, net);
    const HSDPModule root = shard_net(net, options);
    c.after_wrapping(root);
    std::vector<Comm> comms = {root.data_parallel_comm()};
    for (int64_t axis = 0; axis < options.mesh.ndim(); ++axis) {
      const Comm comm = options.mesh.get_group(axis);
      const bool known =
          std::any_of(comms.begin(), comms.end(), [&](const Comm& other) { return other.ranks() == comm.ranks(); });
      if (!known && comm.size() > 1) comms.push_back(comm);
    }
    if (const auto k = cut_over(options); k > 1) {
      const Comm shard = options.mesh.get_group(options.mesh.ndim() - 1);
      std::vector<int> block;
      for (int i = 0; i < k; ++i) block.push_back(shard.rank() / k * k + i);
      if (k < shard.size()) comms.push_back(shard.subgroup(block));
    }
    const auto calls = [&] {
      int64_t sum = 0;
      for (const Comm& comm : comms) sum += comm.size() > 1 ? comm.counters().calls : 0;
      return sum;
    };
    for (int step = 0; step < kSteps; ++step) {
      const int64_t before = calls();
      {
        const trace::Span span("step");
        c.step ? c.step(net, root) : default_step(net, root);
      }
      if (rank == 0) counted[static_cast<std::size_t>(step)] = calls() - before;
    }
    if (rank == 0) maps = root.memory_use().copies > 0;
    if (rank == 0) sizes = sizes_of(net, options, maps);
  });
  recording.stop();
  const std::vector<Counts> steps = traced_counts(folder.file("t-0.json"));
  ASSERT_EQ(steps.size(), kSteps);
  const Counts want = want_counts(c, sizes, ranks_of(mesh));
  for (std::size_t step = 1; step < kSteps; ++step) {
    EXPECT_EQ(text_of(steps[step]), text_of(want)) << "step " << step + 1;
    EXPECT_EQ(counted[step], total(want)) << "step " << step + 1;
  }
  // The first step compares: the plan once, and each unit's first gather and first reduction.
  Counts first = want;
  if (replicas * shards > 1) {
    ++first[{kGather, "agreement of units"}];
    // Alone on its axis, a unit whose parameters are not cast has nothing to gather.
    const bool gathers = shards > 1 || c.options.mp_policy.param_dtype.has_value();
    for (const auto& [unit, size] : sizes) {
      const PerGroup each = c.want(unit);
      first[{kGather, "order of units"}] += (gathers && each.gathers > 0 ? 1 : 0) + (each.reductions > 0 ? 1 : 0);
      if (maps && each.gathers > 0) first[{kGather, "mapped shards"}] += 2 * size.gathered;
    }
  }
  for (const auto& [key, count] : c.more_at_first) {
    const bool among_replicas = key.first == kReduce || key.first == kBroadcast || key.second == kCompared;
    if (among_replicas ? replicas > 1 : shards > 1) first[key] += count;
  }
  EXPECT_EQ(text_of(steps[0]), text_of(first));
  EXPECT_EQ(counted[0], total(first));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({.name = "Default"});
  all.push_back({.name = "Ragged", .options = {.shard_layout = ShardLayout::kRagged}});
  all.push_back({.name = "Unfused", .options = {.comm_fusion = false}});
  all.push_back({.name = "Keep", .options = {.reshard_after_forward = false}, .want = [](const std::string&) {
                   return PerGroup{.gathers = 1};
                 }});
  all.push_back(
      {.name = "ReshardRoot", .options = {.reshard_after_forward = true}, .want = [](const std::string&) { return PerGroup{}; }});
  all.push_back({.name = "Bucketed", .options = {.bucket_size = 500}});
  all.push_back({.name = "SmallOnesWhole", .options = {.threshold = 100}});
  all.push_back({.name = "Offload", .options = {.offload_policy = CPUOffloadPolicy{}}});
  all.push_back(
      {.name = "LowPrecision", .options = {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}});
  return all;
}

/// Parameters cut over two of the ranks between forward and backward: the second gather is among those.
std::vector<Case> recut() {
  const auto everywhere = [](const std::string&) { return PerGroup{}; };
  return {{.name = "CutOverTwo", .options = {.reshard_after_forward = 2}, .want = everywhere},
          {.name = "CutOverTwoRagged",
           .options = {.reshard_after_forward = 2, .shard_layout = ShardLayout::kRagged},
           .want = everywhere},
          {.name = "CutOverOne", .options = {.reshard_after_forward = 1}, .want = [](const std::string&) {
             return PerGroup{.gathers = 1};
           }}};
}

/// Several backwards in one step.
std::vector<Case> accumulations() {
  const auto sync = [](const HSDPModule& root, bool last) { root.set_requires_gradient_sync(last); };
  const auto all_reduce = [](const HSDPModule& root, bool last) { root.set_requires_all_reduce(last); };
  const auto wait = [](const HSDPModule& root, bool last) { root.set_is_last_backward(last); };
  const auto kept = [sync](const HSDPModule& root, bool last) {
    root.set_reshard_after_backward(false);
    sync(root, last);
  };
  const auto each = [](const HSDPModule&, bool) {};
  const auto twice_reduced = [](const std::string& unit) { return PerGroup{.gathers = unit == kRoot ? 2 : 4, .reductions = 2}; };
  std::vector<Case> all;
  all.push_back({.name = "Accumulation", .step = micro_batches({false, false, true}, sync), .want = [](const std::string& unit) {
                   return PerGroup{.gathers = unit == kRoot ? 3 : 6};
                 }});
  all.push_back({.name = "ReduceEveryMicroBatch", .step = micro_batches({false, true}, each), .want = twice_reduced});
  all.push_back(
      {.name = "AllReduceLast", .step = micro_batches({false, false, true}, all_reduce), .want = [](const std::string& unit) {
         return PerGroup{.gathers = unit == kRoot ? 3 : 6, .reductions = 3, .all_reduces = 1};
       }});
  all.push_back({.name = "WaitAtTheLastBackward", .step = micro_batches({false, true}, wait), .want = twice_reduced});
  all.push_back({.name = "KeptOverMicroBatches",
                 .options = {.reshard_after_forward = false},
                 .step = micro_batches({false, false, true}, kept),
                 .want = [](const std::string&) { return PerGroup{.gathers = 1}; }});
  return all;
}

/// Other ways to run a step.
std::vector<Case> schedules() {
  std::vector<Case> all;
  all.push_back({.name = "NoGradients",
                 .step =
                     [](const Net& net, const HSDPModule&) {
                       const torch::NoGradGuard no_grad;
                       (void)net(make_batch(6, 5).tokens);
                     },
                 .want = [](const std::string&) { return PerGroup{.gathers = 1, .reductions = 0}; }});
  all.push_back({.name = "NotInBackward",
                 .options = {.reshard_after_forward = false},
                 .after_wrapping = [](const HSDPModule& root) { root.set_unshard_in_backward(false); },
                 .want = [](const std::string&) { return PerGroup{.gathers = 1}; }});
  // Backward reaches u1 before u2, and reduces it after u2; the first one does so, too.
  all.push_back({.name = "OneUnitTwice", .net = {.first_twice = true}, .want = [](const std::string& unit) {
                   return PerGroup{.gathers = unit == kRoot ? 1 : unit == "u1" ? 3 : 2};
                 }});
  all.push_back({.name = "OneUnitSkipped", .net = {.skip_last = true}, .want = [](const std::string& unit) {
                   return unit == "u4" ? PerGroup{.gathers = 0, .reductions = 0} : PerGroup{.gathers = unit == kRoot ? 1 : 2};
                 }});
  // Its output is not part of the loss: zeros, because other ranks may have gradients for it.
  all.push_back({.name = "OneUnitUnused", .net = {.drop_last = true}});
  const auto freeze = [](const Net& net) {
    net->u1->a->weight.set_requires_grad(false);
    net->u2->q->bias.set_requires_grad(false);
  };
  all.push_back({.name = "FrozenParameters", .before_wrapping = freeze});
  all.push_back({.name = "FrozenParametersRagged", .options = {.shard_layout = ShardLayout::kRagged}, .before_wrapping = freeze});
  all.push_back({.name = "FrozenParametersBucketed", .options = {.bucket_size = 500}, .before_wrapping = freeze});
  all.push_back({.name = "Held",
                 .step =
                     [](const Net& net, const HSDPModule& root) {
                       HSDPModule::of(net->u3).unshard();
                       default_step(net, root);
                     },
                 .want = [](const std::string& unit) { return PerGroup{.gathers = unit == kRoot ? 1 : 2}; }});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Options, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                              std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 2},
                                                              std::vector<int64_t>{2, 1}),
                                            ::testing::ValuesIn(cases())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Recut, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{4}),
                                            ::testing::ValuesIn(recut())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Accumulations, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(accumulations())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Schedules, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(schedules())),
                         name_of);
}  // namespace
}  // namespace hyper_parallel::testing
