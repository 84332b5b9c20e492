// Every way of sharding gives the losses, gradients and weights of the plain single-rank run.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

constexpr int kSteps = 3;
constexpr int64_t kRows = 24;  // divisible by every number of ranks and micro-batches used here

struct Record {
  std::vector<double> losses;
  std::vector<Tensors> gradients;
  Tensors parameters;
};

/// Plain SGD on one rank over the global batch; the yardstick.
Record plain_run(const NetOptions& options, int micro_batches, bool frozen = false) {
  Net net = make_net(options);
  if (frozen) {
    for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
    net->u1->a->bias.set_requires_grad(false);
    net->u4->a->weight.set_requires_grad(false);  // its backward comes after the last gradient of the unit
  }
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  Record run;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(kRows, 100 + static_cast<uint64_t>(step));
    sgd.zero_grad();
    double loss = 0;
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      const Batch part = batch.part(micro, micro_batches);
      const auto value = net_loss(net(part.tokens), part.targets) / micro_batches;
      value.backward();
      loss += value.item<double>();
    }
    run.losses.push_back(loss);
    run.gradients.push_back(plain_gradients(*net));
    sgd.step();
  }
  for (auto& entry : net->named_parameters()) run.parameters[entry.key()] = entry.value().detach().clone();
  return run;
}

struct Case {
  std::string name;
  std::vector<int64_t> mesh = {2};
  ShardLayout layout = ShardLayout::kPerParameter;
  bool fusion = true;
  std::optional<bool> reshard = {};
  bool sync_each = true;  ///< reduce after every micro-batch, or only after the last
  int micro_batches = 1;
  NetOptions net = {};
  bool frozen = false;
  int64_t dim = 0;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

Record sharded_run(const Case& c) {
  Net net = make_net(c.net);
  if (c.frozen) {
    for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
    net->u1->a->bias.set_requires_grad(false);
    net->u4->a->weight.set_requires_grad(false);  // its backward comes after the last gradient of the unit
  }
  FullyShardOptions options = on_mesh(c.mesh, c.layout, c.reshard);
  options.comm_fusion = c.fusion;
  if (c.dim != 0)
    options.shard_placement_fn = [dim = c.dim](const std::string&, const at::Tensor& p) {
      return p.dim() > 1 ? std::optional(dim) : std::nullopt;
    };
  HSDPModule root = shard_net(net, options);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const int world = get_world_size();
  Record run;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(kRows, 100 + static_cast<uint64_t>(step));
    sgd.zero_grad();
    double loss = 0;
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      root.set_requires_gradient_sync(c.sync_each || micro + 1 == c.micro_batches);
      const Batch mine = batch.part(micro, c.micro_batches).part(get_rank(), world);
      const auto value = net_loss(net(mine.tokens), mine.targets) / c.micro_batches;
      value.backward();
      loss += value.item<double>();
    }
    auto total = torch::tensor({loss}, torch::kDouble);
    root.data_parallel_comm().all_reduce(total, {.op = ReduceOp::kAvg}).wait();
    run.losses.push_back(total.item<double>());
    run.gradients.push_back(full_gradients(root));
    sgd.step();
  }
  run.parameters = full_parameters(root);
  return run;
}

/// The tied head has two names in the plain model and one owner in the sharded one.
Tensors without_alias(Tensors tensors) {
  tensors.erase("head.weight");
  return tensors;
}

class Equivalence : public ::testing::TestWithParam<Case> {};

TEST_P(Equivalence, EqualsPlainRun) {
  const Case& c = GetParam();
  const Record want = plain_run(c.net, c.micro_batches, c.frozen);
  run_ranks(ranks_of(c.mesh), [&](int) {
    const Record got = sharded_run(c);
    for (int step = 0; step < kSteps; ++step) {
      const auto s = static_cast<std::size_t>(step);
      EXPECT_NEAR(got.losses[s], want.losses[s], 1e-5 * std::abs(want.losses[s])) << "step " << step;
      EXPECT_LT(relative_difference(got.gradients[s], without_alias(want.gradients[s])), 1e-5) << "step " << step;
    }
    EXPECT_LT(relative_difference(got.parameters, without_alias(want.parameters)), 1e-5);
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> meshes = {
      {"w1", {1}},        {"w2", {2}},        {"w3", {3}},        {"w4", {4}},
      {"hsdp22", {2, 2}}, {"hsdp14", {1, 4}}, {"hsdp41", {4, 1}}, {"hsdp11", {1, 1}}};
  for (const auto& [mesh_name, mesh] : meshes) {
    for (const auto layout : {0, 1, 2}) {
      for (const int mode : {0, 1, 2, 3}) {
        Case c;
        c.mesh = mesh;
        c.layout = layout == 2 ? ShardLayout::kRagged : ShardLayout::kPerParameter;
        c.fusion = layout != 1;
        c.reshard = mode == 0 ? std::optional<bool>() : std::optional(mode % 2 == 1);
        c.micro_batches = mode >= 2 ? 2 : 1;
        c.sync_each = mode == 3;
        c.name = mesh_name + std::array{"Fused", "Unfused", "Ragged"}[static_cast<std::size_t>(layout)] +
                 std::array{"Default", "Reshard", "NoSync", "SyncEach"}[static_cast<std::size_t>(mode)];
        all.push_back(c);
      }
    }
  }
  for (const auto layout : {ShardLayout::kPerParameter, ShardLayout::kRagged}) {
    for (const int64_t world : {1, 2, 3}) {
      const std::string suffix = concat(layout == ShardLayout::kRagged ? "Ragged" : "Fused", "W", world);
      all.push_back({.name = "Twice" + suffix, .mesh = {world}, .layout = layout, .net = {.first_twice = true}});
      all.push_back({.name = "Skipped" + suffix, .mesh = {world}, .layout = layout, .net = {.skip_last = true}});
      all.push_back({.name = "Dropped" + suffix, .mesh = {world}, .layout = layout, .net = {.drop_last = true}});
      all.push_back({.name = "DroppedNoSync" + suffix,
                     .mesh = {world},
                     .layout = layout,
                     .sync_each = false,
                     .micro_batches = 2,
                     .net = {.drop_last = true}});
      all.push_back({.name = "Frozen" + suffix, .mesh = {world}, .layout = layout, .frozen = true});
      if (layout == ShardLayout::kPerParameter) {
        all.push_back({.name = "DimOne" + suffix, .mesh = {world}, .dim = 1});
        all.push_back({.name = "DimMinusOneUnfused" + suffix, .mesh = {world}, .fusion = false, .dim = -1});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Equivalence, ::testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

TEST(Determinism, TwoRunsAreBitwiseEqual) {
  for (const auto layout : {ShardLayout::kPerParameter, ShardLayout::kRagged}) {
    Case c{.name = "repeat", .mesh = {3}, .layout = layout};
    std::vector<Record> first(3);
    run_ranks(3, [&](int rank) { first[static_cast<std::size_t>(rank)] = sharded_run(c); });
    run_ranks(3, [&](int rank) {
      const Record second = sharded_run(c);
      for (std::size_t s = 0; s < kSteps; ++s) {
        EXPECT_EQ(relative_difference(second.gradients[s], first[static_cast<std::size_t>(rank)].gradients[s]), 0.0);
      }
    });
  }
}

TEST(Determinism, WorldOfOneIsBitwiseThePlainRun) {
  for (const auto layout : {ShardLayout::kPerParameter, ShardLayout::kRagged}) {
    const Record want = plain_run({}, 1);
    run_ranks(1, [&](int) {
      Case c{.name = "one", .mesh = {1}, .layout = layout};
      const Record got = sharded_run(c);
      for (std::size_t s = 0; s < kSteps; ++s) {
        EXPECT_EQ(got.losses[s], want.losses[s]);
        EXPECT_EQ(relative_difference(got.gradients[s], without_alias(want.gradients[s])), 0.0);
      }
      EXPECT_EQ(relative_difference(got.parameters, without_alias(want.parameters)), 0.0);
    });
  }
}

/// HSDP(1,N) = FSDP(N) = HSDP(N,1), bit for bit: sums run in rank order and are scaled once.
TEST(Determinism, HybridEndsAgree) {
  std::vector<Record> runs;
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{4}, {1, 4}, {4, 1}}) {
    Record& run = runs.emplace_back();
    run_ranks(4, [&](int rank) {
      const Record mine = sharded_run({.name = "", .mesh = mesh});
      if (rank == 0) run = mine;
    });
  }
  for (std::size_t i = 1; i < runs.size(); ++i) {
    for (std::size_t s = 0; s < kSteps; ++s) EXPECT_EQ(relative_difference(runs[i].gradients[s], runs[0].gradients[s]), 0.0) << i;
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
