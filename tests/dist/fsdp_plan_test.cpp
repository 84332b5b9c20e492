// For each option: plan_memory says to the byte what the engine takes from the allocator, and from the third step on nothing is
// taken, by engine or groups.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <memory>
#include <tuple>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/counting_allocator.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

std::vector<HSDPModule> units_of(const Net& net) {
  return {HSDPModule::of(net->u1), HSDPModule::of(net->u2->inner), HSDPModule::of(net->u2),
          HSDPModule::of(net->u3), HSDPModule::of(net->u4),        HSDPModule::of(net)};
}

void forward_backward(const Net& net) {
  const Batch batch = make_batch(6, 5);
  net_loss(net(batch.tokens), batch.targets).backward();
}

void one_backward(const Net& net, const HSDPModule&) { forward_backward(net); }

/// What a backward of a step is for.
enum class Part { kAccumulate, kPark, kComplete };

/// A step of several backwards.
auto backwards(std::vector<Part> parts) {
  return [parts = std::move(parts)](const Net& net, const HSDPModule& root) {
    for (const Part part : parts) {
      root.set_requires_gradient_sync(part != Part::kAccumulate);
      root.set_requires_all_reduce(part != Part::kPark);
      forward_backward(net);
    }
  };
}

auto zero_level(ZeroLevel level) {
  return [level](const Net& net, const HSDPModule& root) {
    for (const bool last : {false, true}) {
      set_zero_level(root, level, last);
      forward_backward(net);
    }
  };
}

struct Case {
  std::string name;
  /// Completes the options: those of mesh, layout and dtypes are set.
  std::function<void(FullyShardOptions&, const Net&)> choose = [](FullyShardOptions&, const Net&) {};
  std::function<void(const Net&, const HSDPModule&)> after_wrapping = [](const Net&, const HSDPModule&) {};
  std::function<void(const Net&, const HSDPModule&)> step = one_backward;
  fsdp::Accumulation accumulation = {};
  bool set_to_none = true;  ///< false: gradients stay, zeroed
  bool planned = true;      ///< a schedule that plan_memory knows: every unit once, in the order of the modules, then one backward
  /// Steps until nothing more is taken. A pool that already holds blocks serves some requests from other blocks than at first.
  int settled = 2;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// What every case is combined with.
struct Shape {
  std::string name;
  ShardLayout layout = ShardLayout::kPerParameter;
  bool fusion = true;
  bool low_precision = false;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const bool low : {false, true}) {
    const std::string dtype = low ? " bf16" : " fp32";
    all.push_back({.name = "fused" + dtype, .low_precision = low});
    all.push_back({.name = "unfused" + dtype, .fusion = false, .low_precision = low});
    all.push_back({.name = "ragged" + dtype, .layout = ShardLayout::kRagged, .low_precision = low});
  }
  return all;
}

FullyShardOptions options_of(const std::vector<int64_t>& mesh, const Shape& shape) {
  FullyShardOptions options = on_mesh(mesh, shape.layout);
  options.comm_fusion = shape.fusion;
  if (shape.low_precision) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  return options;
}

/// All ranks' numbers in one place. Barriers and sums of the group would allocate.
struct Meeting {
  explicit Meeting(int ranks) : barrier(ranks) {}
  std::barrier<> barrier;
  std::atomic<int64_t> used{0};
  int64_t live = 0;
};

/// Runs on every rank; rank 0 looks at the counts, which are those of all.
void check(const Case& c, const std::vector<int64_t>& mesh, const Shape& shape, Meeting& meeting, int rank) {
  const auto meet = [&] { meeting.barrier.arrive_and_wait(); };
  FullyShardOptions options = options_of(mesh, shape);
  {
    Net net = make_net();
    c.choose(options, net);
    HSDPModule root = shard_net(net, options);
    options.ignored_params.clear();
    options.replicate_params.clear();
    c.after_wrapping(net, root);
    const fsdp::MemoryUse plan = root.plan_memory(c.accumulation);
    const auto steps = [&](int count) {
      for (int step = 0; step < count; ++step) c.step(net, root), root.zero_grad(c.set_to_none);
    };
    steps(c.settled);
    meet();
    if (rank == 0) reset_allocation_counts();
    meet();
    steps(3);
    meet();
    EXPECT_EQ(allocation_counts().allocations, 0) << "after " << c.settled << " steps";
    const fsdp::MemoryUse use = root.memory_use();
    EXPECT_EQ(use.shards, plan.shards);
    // Alone, the flat gradient is what accumulates, beside the one that .grad refers to.
    const bool two = ranks_of(mesh) == 1 && c.accumulation.local && !c.set_to_none;
    EXPECT_EQ(use.gradients, (two ? 2 : 1) * plan.gradients);
    if (c.planned) {
      EXPECT_EQ(use.pool, plan.pool);
    }
    meeting.used += use.total();
    if (rank == 0) meeting.live = allocation_counts().live;
    meet();
  }
  // What goes with the model was its own: messages of the groups stay.
  meet();
  if (rank == 0) {
    EXPECT_EQ(meeting.live - allocation_counts().live, meeting.used.load()) << "the allocator has seen as much";
  }
  meet();
  if (rank == 0) meeting.used = 0;
  meet();
}

class Plan : public ::testing::TestWithParam<std::tuple<std::vector<int64_t>, Case>> {};

TEST_P(Plan, IsWhatTheAllocatorGives) {
  const auto& [mesh, c] = GetParam();
  Meeting meeting(ranks_of(mesh));
  run_ranks(ranks_of(mesh), {.allocator = counting_allocator()}, [&](int rank) {
    for (const Shape& shape : shapes()) {
      SCOPED_TRACE(shape.name);
      check(c, mesh, shape, meeting, rank);
    }
  });
}

CommWait custom_gather(const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
  auto work = std::make_shared<Work>(comm.all_gather_single(output, input));
  return [work] { work->wait(); };
}

/// Brings its own receive space, as communication of the user's own must.
CustomReduceScatter custom_scatter() {
  auto space = std::make_shared<at::Tensor>(torch::empty({0}));
  return [space](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
    if (space->scalar_type() != input.scalar_type() || space->numel() < input.numel()) *space = torch::empty_like(input);
    comm.reduce_scatter_single(output, input, {.workspace = space.get()}).wait();
    return CommWait();
  };
}

std::vector<Case> cases() {
  const auto custom_reduction = [](const Net& net, const HSDPModule&) {
    for (const HSDPModule& unit : units_of(net)) unit.set_custom_reduce_scatter(custom_scatter());
  };
  const auto hooked = [](const Net&, const HSDPModule& root) {
    root.set_all_reduce_hook([](const at::Tensor& gradient) { gradient.mul_(2); });
  };
  const auto accumulating = backwards({Part::kAccumulate, Part::kComplete});
  const auto parking = backwards({Part::kPark, Part::kComplete});
  const auto stay = [](const Net&, const HSDPModule& root) { root.set_reshard_after_backward(false); };
  const fsdp::Accumulation local{.local = true}, partial{.partial = true};
  std::vector<Case> all;
  all.push_back({.name = "Default"});
  all.push_back({.name = "Threshold", .choose = [](FullyShardOptions& o, const Net&) { o.threshold = 200; }});
  all.push_back({.name = "ThresholdLocal",
                 .choose = [](FullyShardOptions& o, const Net&) { o.threshold = 200; },
                 .step = accumulating,
                 .accumulation = local});
  all.push_back({.name = "Replicated", .choose = [](FullyShardOptions& o, const Net& net) {
                   o.replicate_params = {net->u1->a->weight, net->u2->q->bias, net->table->weight};
                 }});
  all.push_back({.name = "ReplicatedParked",
                 .choose = [](FullyShardOptions& o, const Net& net) { o.replicate_params = {net->u1->a->weight}; },
                 .step = parking,
                 .accumulation = partial,
                 .settled = 3});
  all.push_back({.name = "BucketSize", .choose = [](FullyShardOptions& o, const Net&) {
                   if (o.comm_fusion) o.bucket_size = 600;
                 }});
  all.push_back({.name = "CustomGather", .after_wrapping = [](const Net& net, const HSDPModule&) {
                   for (const HSDPModule& unit : units_of(net)) unit.set_custom_all_gather(custom_gather);
                 }});
  all.push_back({.name = "CustomScatter", .after_wrapping = custom_reduction});
  all.push_back({.name = "CustomScatterLocal", .after_wrapping = custom_reduction, .step = accumulating, .accumulation = local});
  all.push_back({.name = "CustomScatterParked", .after_wrapping = custom_reduction, .step = parking, .accumulation = partial});
  all.push_back({.name = "Hook", .after_wrapping = hooked});
  all.push_back({.name = "HookParked", .after_wrapping = hooked, .step = parking, .accumulation = partial, .settled = 3});
  all.push_back({.name = "Local", .step = accumulating, .accumulation = local});
  all.push_back({.name = "LocalKept", .step = accumulating, .accumulation = local, .set_to_none = false});
  all.push_back({.name = "ReducedKept", .set_to_none = false});
  all.push_back({.name = "Parked", .step = parking, .accumulation = partial});
  all.push_back({.name = "LocalAndParked",
                 .step = backwards({Part::kAccumulate, Part::kPark, Part::kComplete}),
                 .accumulation = {.local = true, .partial = true}});
  all.push_back({.name = "ReduceEach", .step = backwards({Part::kComplete, Part::kComplete})});
  for (const auto level : {ZeroLevel::k1, ZeroLevel::k2, ZeroLevel::k3}) {
    all.push_back({.name = concat("Zero", static_cast<int>(level)),
                   .after_wrapping = [level](const Net&, const HSDPModule& root) { set_zero_level(root, level, true); },
                   .step = zero_level(level),
                   .accumulation = {.local = level == ZeroLevel::k1, .partial = level == ZeroLevel::k2}});
  }
  all.push_back({.name = "Offload", .choose = [](FullyShardOptions& o, const Net&) { o.offload_policy = CPUOffloadPolicy{}; }});
  all.push_back({.name = "MainGradients",
                 .choose = [](FullyShardOptions& o, const Net&) { o.mp_policy.apply_grad_on_fp32_main_grad = true; },
                 .step = parking,
                 .accumulation = partial});
  all.push_back(
      {.name = "KeptAfterForward", .choose = [](FullyShardOptions& o, const Net&) { o.reshard_after_forward = false; }});
  all.push_back({.name = "FreedEverywhere", .choose = [](FullyShardOptions& o, const Net&) { o.reshard_after_forward = true; }});
  all.push_back({.name = "KeptAfterBackward", .after_wrapping = stay});
  all.push_back({.name = "KeptAfterBoth",
                 .choose = [](FullyShardOptions& o, const Net&) { o.reshard_after_forward = false; },
                 .after_wrapping = stay,
                 .step = accumulating,
                 .accumulation = local});
  all.push_back({.name = "NotInBackward",
                 .choose = [](FullyShardOptions& o, const Net&) { o.reshard_after_forward = false; },
                 .after_wrapping =
                     [](const Net& net, const HSDPModule&) {
                       for (const HSDPModule& unit : units_of(net)) unit.set_unshard_in_backward(false);
                     }});
  all.push_back({.name = "Frozen", .choose = [](FullyShardOptions&, const Net& net) {
                   net->u1->a->weight.set_requires_grad(false);
                   net->u2->q->bias.set_requires_grad(false);
                   for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
                 }});
  return all;
}

/// Schedules that plan_memory does not know: nothing is taken in the steady state all the same.
std::vector<Case> schedules() {
  const auto loss = [](const torch::Tensor& logits) { return net_loss(logits, make_batch(6, 5).targets); };
  std::vector<Case> all;
  all.push_back({.name = "CheckpointAround",
                 .step =
                     [loss](const Net& net, const HSDPModule&) {
                       const auto run = [module = net.ptr()](const torch::Tensor& x) { return module->forward(x); };
                       loss(checkpoint(run, make_batch(6, 5).tokens)).backward();
                     },
                 .planned = false});
  all.push_back({.name = "UnshardScope",
                 .step =
                     [](const Net& net, const HSDPModule& root) {
                       {
                         const UnshardScope scope(root);
                         const torch::NoGradGuard no_grad;
                         (void)net(make_batch(6, 5).tokens);
                       }
                       forward_backward(net);
                     },
                 .planned = false});
  all.push_back({.name = "NotWaitedFor",
                 .step =
                     [](const Net& net, const HSDPModule& root) {
                       for (const bool last : {false, true}) {
                         root.set_is_last_backward(last);
                         forward_backward(net);
                       }
                     },
                 .planned = false});
  all.push_back({.name = "Prefetch",
                 .after_wrapping =
                     [](const Net& net, const HSDPModule&) {
                       const std::vector<HSDPModule> units = units_of(net);
                       units[0].set_modules_to_forward_prefetch({{units[1], units[2], units[3]}});
                       units[4].set_modules_to_backward_prefetch({{units[3], units[2]}});
                     },
                 .planned = false});
  all.push_back({.name = "TwoForwards",
                 .step =
                     [loss](const Net& net, const HSDPModule&) {
                       const torch::Tensor first = loss(net(make_batch(6, 5).tokens)),
                                           second = loss(net(make_batch(6, 6).tokens));
                       (first + second).backward();
                     },
                 .planned = false});
  all.push_back({.name = "ReplicasBroadcast",
                 .choose = [](FullyShardOptions& o, const Net&) { o.replica_init = ReplicaInit::kBroadcast; }});
  return all;
}

std::vector<Case> recut() {
  std::vector<Case> all;
  for (const int k : {1, 2, 4}) {
    all.push_back(
        {.name = concat("CutOver", k), .choose = [k](FullyShardOptions& o, const Net&) { o.reshard_after_forward = k; }});
    all.push_back({.name = concat("CutOver", k, "Local"),
                   .choose = [k](FullyShardOptions& o, const Net&) { o.reshard_after_forward = k; },
                   .step = backwards({Part::kAccumulate, Part::kComplete}),
                   .accumulation = {.local = true}});
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::vector<int64_t>, Case>>& info) {
  const auto& [mesh, c] = info.param;
  std::string name = c.name + "On";
  for (std::size_t i = 0; i < mesh.size(); ++i) name += concat(i == 0 ? "" : "x", mesh[i]);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Options, Plan,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                              std::vector<int64_t>{3}, std::vector<int64_t>{2, 2},
                                                              std::vector<int64_t>{2, 1}),
                                            ::testing::ValuesIn(cases())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Schedules, Plan,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(schedules())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Recut, Plan,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{4}), ::testing::ValuesIn(recut())), name_of);

}  // namespace
}  // namespace hyper_parallel::testing
