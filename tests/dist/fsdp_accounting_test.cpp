// Memory and bytes on the wire are what the formulas of docs/design/005-memory-and-traffic.md say, exactly.
#include <gtest/gtest.h>

#include <barrier>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/adapter_net.h"
#include "support/counting_allocator.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

struct Case {
  std::string name;
  std::vector<int64_t> mesh = {2};
  ShardLayout layout = ShardLayout::kPerParameter;
  bool fusion = true;
  std::optional<bool> reshard = {};
  bool low_precision = false;  ///< bf16 parameters, fp32 reduction
  bool accumulate = false;     ///< one backward without, one with gradient synchronisation
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

FullyShardOptions options_of(const Case& c) {
  FullyShardOptions options = on_mesh(c.mesh, c.layout, c.reshard);
  options.comm_fusion = c.fusion;
  if (c.low_precision) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  return options;
}

void train_step(const Net& net, const HSDPModule& root, bool accumulate) {
  const Batch batch = make_batch(6, 5);
  for (const bool sync : {false, true}) {
    if (!sync && !accumulate) continue;
    root.set_requires_gradient_sync(sync);
    net_loss(net(batch.tokens), batch.targets).backward();
  }
  root.zero_grad();
}

std::vector<HSDPModule> units_of(const Net& net) {
  return {HSDPModule::of(net->u1), HSDPModule::of(net->u2->inner), HSDPModule::of(net->u2),
          HSDPModule::of(net->u3), HSDPModule::of(net->u4),        HSDPModule::of(net)};
}

/// Which of its parameters have a gradient: what a reduction tells each peer.
int64_t presence_bytes(const fsdp::ShardedGroup& group) { return (static_cast<int64_t>(group.parameters.size()) + 7) / 8; }

/// Bytes that one rank sends over the shard axis in a step: each forward gathers, and each backward again where the forward
/// freed; one reduction, in the compute dtype where nothing was accumulated in fp32 before.
int64_t shard_axis_bytes(const Case& c, const Net& net, int64_t world) {
  int64_t bytes = 0;
  const int64_t compute = c.low_precision ? 2 : 4;
  for (const HSDPModule& unit : units_of(net)) {
    const bool root = unit.unit() == HSDPModule::of(net).unit();
    const bool gathers_twice = c.reshard.value_or(!root);
    for (const auto& group : unit.groups(false)) {
      const int64_t numel = group.shard.numel();
      bytes += (world - 1) * numel * compute * (gathers_twice ? 2 : 1) * (c.accumulate ? 2 : 1);
      bytes += (world - 1) * (numel * (c.accumulate ? 4 : compute) + presence_bytes(group));
    }
  }
  return bytes;
}

/// All-reduce in two phases of ceil chunks; below 4 KiB whole tensors in one phase.
int64_t replicate_axis_bytes(const Net& net, int64_t replicas, int64_t rank) {
  int64_t bytes = 0;
  for (const HSDPModule& unit : units_of(net)) {
    for (const auto& group : unit.groups(false)) {
      const int64_t numel = group.shard.numel();
      bytes += (replicas - 1) * presence_bytes(group);
      if (numel * 4 <= 4096) {
        bytes += (replicas - 1) * numel * 4;
        continue;
      }
      const int64_t chunk = (numel + replicas - 1) / replicas;
      const int64_t own = std::min(numel, (rank + 1) * chunk) - std::min(numel, rank * chunk);
      bytes += (numel - own) * 4 + (replicas - 1) * own * 4;
    }
  }
  return bytes;
}

class Accounting : public ::testing::TestWithParam<Case> {};

TEST_P(Accounting, MemoryAndTraffic) {
  const Case& c = GetParam();
  const int world = ranks_of(c.mesh);
  const int64_t live_before = allocation_counts().live;
  std::barrier meet(world);  // of the threads: a barrier of the group would allocate
  run_ranks(world, {.allocator = counting_allocator()}, [&](int rank) {
    Net net = make_net();
    const FullyShardOptions options = options_of(c);
    HSDPModule root = shard_net(net, options);
    const Comm all = root.data_parallel_comm();
    const fsdp::MemoryUse plan = root.plan_memory({.local = c.accumulate});
    for (int step = 0; step < 3; ++step) train_step(net, root, c.accumulate);

    const fsdp::MemoryUse use = root.memory_use();
    EXPECT_EQ(use.shards, plan.shards);
    EXPECT_EQ(use.gradients, plan.gradients);
    EXPECT_EQ(use.pool, plan.pool);

    // From step 3 on nothing is allocated, and what is there is exactly the plan.
    auto total = torch::tensor({use.total()}, torch::kLong);
    all.all_reduce(total).wait();
    meet.arrive_and_wait();
    if (rank == 0) reset_allocation_counts();
    meet.arrive_and_wait();
    const int64_t held = allocation_counts().live - live_before;
    meet.arrive_and_wait();
    const Comm shard_axis = options.mesh.get_group(options.mesh.ndim() - 1);
    const CommCounters before = shard_axis.counters();
    const CommCounters before_replicate = options.mesh.get_group(int64_t{0}).counters();
    train_step(net, root, c.accumulate);
    const CommCounters after = shard_axis.counters();
    const CommCounters after_replicate = options.mesh.get_group(int64_t{0}).counters();
    train_step(net, root, c.accumulate);
    meet.arrive_and_wait();
    EXPECT_EQ(allocation_counts().allocations, 0) << "steady state";
    EXPECT_GE(held, total.item<int64_t>());
    EXPECT_LE(held - total.item<int64_t>(), world * 64 * 1024) << "control messages of the groups";

    const bool hybrid = c.mesh.size() == 2;
    const int64_t shards = c.mesh.back();
    EXPECT_EQ(after.bytes_sent - before.bytes_sent, shards > 1 ? shard_axis_bytes(c, net, shards) : 0);
    if (hybrid && c.mesh[0] > 1) {
      const auto coordinate = options.mesh.get_coordinate();
      EXPECT_EQ(after_replicate.bytes_sent - before_replicate.bytes_sent, replicate_axis_bytes(net, c.mesh[0], (*coordinate)[0]));
    }
  });
  EXPECT_EQ(allocation_counts().live, live_before) << "everything is freed with the last handle";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> meshes = {
      {"w1", {1}}, {"w2", {2}}, {"w3", {3}}, {"hsdp22", {2, 2}}};
  for (const auto& [mesh_name, mesh] : meshes) {
    for (const int layout : {0, 1, 2}) {
      for (const int mode : {0, 1, 2, 3, 4}) {
        Case c{.name = mesh_name + std::array{"Fused", "Unfused", "Ragged"}[static_cast<std::size_t>(layout)] +
                       std::array{"Default", "Reshard", "Keep", "LowPrecision",
                                  "LowPrecisionAccumulate"}[static_cast<std::size_t>(mode)],
               .mesh = mesh,
               .layout = layout == 2 ? ShardLayout::kRagged : ShardLayout::kPerParameter,
               .fusion = layout != 1};
        if (mode == 1 || mode == 2) c.reshard = mode == 1;
        c.low_precision = mode >= 3;
        c.accumulate = mode == 4;
        all.push_back(c);
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Accounting, ::testing::ValuesIn(cases()), [](const auto& instance) { return instance.param.name; });

struct EndsImpl : torch::nn::Module {
  static constexpr int64_t kDim = 512, kVocab = 2048;
  EndsImpl() {
    first = register_module("first", nn::Linear(torch::nn::LinearOptions(kDim, kVocab).bias(false)));
    last = register_module("last", nn::Linear(kVocab, kDim));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(first(x)); }
  nn::Linear first = nullptr, last = nullptr;
};
HP_MODULE(Ends);

/// The first unit's block lies idle in backward. The last unit is larger by a vector, and still uses it.
TEST(AccountingOfBlocks, LargeUnitsThatDifferALittleShareThem) {
  run_ranks(2, [](int rank) {
    Ends net;
    const FullyShardOptions options = on_all(ShardLayout::kPerParameter, /*reshard=*/true);
    const HSDPModule first = fully_shard(net->first, options), last = fully_shard(net->last, options);
    const HSDPModule root = fully_shard(net, options);
    first.set_unshard_in_backward(false);  // its input has no gradient
    const int64_t matrix = EndsImpl::kDim * EndsImpl::kVocab * 4;
    EXPECT_LT(root.plan_memory().pool, 7 * matrix / 2) << "full, packed gradients, and what is received";
    for (int step = 0; step < 3; ++step) {
      net(wave({2, EndsImpl::kDim}, rank + step)).sum().backward();
      root.zero_grad();
    }
    EXPECT_EQ(root.memory_use().pool, root.plan_memory().pool);
  });
}

/// Units that are frozen in part or as a whole: backward never holds more than two of them.
struct FrozenCase {
  std::string name;
  std::vector<int64_t> mesh;
  ShardLayout layout = ShardLayout::kPerParameter;
  bool adapted = false;  ///< every block has a trained adapter; otherwise two of three are frozen, the third is trained
  bool low_precision = false, accumulate = false;
};

std::ostream& operator<<(std::ostream& out, const FrozenCase& c) { return out << c.name; }

/// Bytes of the pool after three steps, which are those of the plan.
int64_t frozen_pool(const FrozenCase& c, std::size_t blocks) {
  int64_t pool = 0;
  const int world = ranks_of(c.mesh);
  const int64_t live_before = allocation_counts().live;
  std::barrier meet(world);
  run_ranks(world, {.allocator = counting_allocator()}, [&](int rank) {
    std::vector<BlockKind> kinds;
    for (std::size_t i = 0; i < blocks; ++i)
      kinds.push_back(c.adapted ? BlockKind::kAdapted : i % 3 == 0 ? BlockKind::kTrained : BlockKind::kFrozen);
    AdaptedNet net = make_adapted(kinds, 32);
    FullyShardOptions options = on_mesh(c.mesh, c.layout);
    if (c.low_precision) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
    const HSDPModule root = shard_adapted(net, options);
    const fsdp::MemoryUse plan = root.plan_memory({.local = c.accumulate});
    const Batch batch = make_batch(2, 5);
    const auto step = [&] {
      for (const bool sync : {false, true}) {
        if (!sync && !c.accumulate) continue;
        root.set_requires_gradient_sync(sync);
        net_loss(net(batch.tokens), batch.targets).backward();
      }
      root.zero_grad();
    };
    for (int i = 0; i < 3; ++i) step();
    const fsdp::MemoryUse use = root.memory_use();
    EXPECT_EQ(use.shards, plan.shards);
    EXPECT_EQ(use.gradients, plan.gradients);
    EXPECT_EQ(use.pool, plan.pool);
    auto total = torch::tensor({use.total()}, torch::kLong);
    root.data_parallel_comm().all_reduce(total).wait();
    meet.arrive_and_wait();
    if (rank == 0) reset_allocation_counts();
    meet.arrive_and_wait();
    const int64_t held = allocation_counts().live - live_before;
    meet.arrive_and_wait();
    step();
    meet.arrive_and_wait();
    EXPECT_EQ(allocation_counts().allocations, 0) << "steady state";
    EXPECT_GE(held, total.item<int64_t>());
    EXPECT_LE(held - total.item<int64_t>(), world * 64 * 1024) << "control messages of the groups";
    if (rank == 0) pool = use.pool;
    meet.arrive_and_wait();
  });
  EXPECT_EQ(allocation_counts().live, live_before);
  return pool;
}

class FrozenAccounting : public ::testing::TestWithParam<FrozenCase> {};

TEST_P(FrozenAccounting, BackwardHoldsAFewBlocksHoweverManyThereAre) {
  const FrozenCase& c = GetParam();
  const int64_t few = frozen_pool(c, 10), many = frozen_pool(c, 19);
  if (!c.accumulate) {  // that keeps the gradients of every trained block
    EXPECT_EQ(many, few);
  }
}

std::vector<FrozenCase> frozen_cases() {
  std::vector<FrozenCase> all;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> meshes = {{"w1", {1}}, {"w2", {2}}, {"hsdp22", {2, 2}}};
  for (const auto& [mesh_name, mesh] : meshes) {
    for (const ShardLayout layout : kLayouts) {
      for (const bool adapted : {true, false}) {
        for (const int mode : {0, 1, 2}) {
          all.push_back({.name = mesh_name + (layout == ShardLayout::kRagged ? "Ragged" : "Fused") +
                                 (adapted ? "Adapters" : "FrozenBlocks") +
                                 std::array{"", "LowPrecision", "Accumulate"}[static_cast<std::size_t>(mode)],
                         .mesh = mesh,
                         .layout = layout,
                         .adapted = adapted,
                         .low_precision = mode == 1,
                         .accumulate = mode == 2});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, FrozenAccounting, ::testing::ValuesIn(frozen_cases()),
                         [](const auto& instance) { return instance.param.name; });

/// Wrapping frees the original parameters: what is left is the shards.
TEST(Wrapping, FreesTheOriginalParameters) {
  CountCpuAllocations count;
  std::barrier meet(2);  // of the threads: a barrier of the group would allocate
  run_ranks(2, RankOptions{.allocator = counting_allocator()}, [&](int rank) {
    meet.arrive_and_wait();
    if (rank == 0) {
      auto make = [] {
        nn::Linear layer(torch::nn::LinearOptions(512, 512).bias(false));
        return layer;
      };
      const int64_t before = allocation_counts().live;
      nn::Linear layer = make();
      EXPECT_GE(allocation_counts().live - before, 512 * 512 * 4);
    }
    meet.arrive_and_wait();
    nn::Linear layer(torch::nn::LinearOptions(512, 512).bias(false));
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"});
    meet.arrive_and_wait();
    const int64_t with_parameters = allocation_counts().live;
    meet.arrive_and_wait();
    fully_shard(layer, {.mesh = mesh});
    meet.arrive_and_wait();
    // Two ranks each held the whole and now hold a half.
    EXPECT_EQ(with_parameters - allocation_counts().live, 512 * 512 * 4);
    meet.arrive_and_wait();
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
