// What users do between the calls of a step: resets, exceptions, other trees, other options for some units.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/net_on_ranks.h"
#include "support/rank_threads.h"
#include "support/same_gradients.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {2, 2}};

void expect_gradients(const HSDPModule& root, const std::vector<uint64_t>& seeds, const char* what = "") {
  EXPECT_LT(relative_difference(full_gradients(root), mean_gradients(seeds)), 1e-5) << what;
}

// ---- switches

TEST(Switches, SetReshardAfterForwardReachesAllUnitsBelow) {
  run_ranks(2, [](int rank) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kPerParameter, true));
    const HSDPModule outer = HSDPModule::of(net->u2), inner = HSDPModule::of(net->u2->inner);
    root.set_reshard_after_forward(false);
    const torch::Tensor loss = loss_of(net, rank, 1);
    EXPECT_TRUE(root.is_unsharded() && outer.is_unsharded() && inner.is_unsharded());
    root.set_reshard_after_forward(true);  // from the next forward on
    loss.backward();
    const torch::Tensor next = loss_of(net, rank, 2);
    EXPECT_FALSE(root.is_unsharded() || outer.is_unsharded() || inner.is_unsharded());
    next.backward();
    expect_gradients(root, {1, 2});
  });
}

/// Units that get no gradient are left out only where that was asked for.
TEST(Switches, ReduceScatterUnusedParams) {
  run_ranks(2, [](int rank) {
    Net net = make_net({.skip_last = true});
    const HSDPModule root = shard_net(net, on_all());
    const auto reductions = [&] {
      const auto before = root.data_parallel_comm().counters().calls;
      loss_of(net, rank, 1).backward();
      root.zero_grad();
      return root.data_parallel_comm().counters().calls - before;
    };
    net->options = {.drop_last = true};
    (void)reductions();
    const auto with_zeros = reductions();
    root.set_reduce_scatter_unused_params(false, /*recurse=*/false);  // of the root, which does get gradients
    EXPECT_EQ(reductions(), with_zeros);
    HSDPModule::of(net->u4).set_reduce_scatter_unused_params(false);
    EXPECT_EQ(reductions(), with_zeros - 1);
  });
}

// ---- between forward and backward

TEST(Between, ResetIterState) {
  for (const auto& mesh : kMeshes) {
    for (const bool tree : {true, false}) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        Net net = make_net();
        const HSDPModule root = shard_net(net, on_mesh(mesh));
        for (int step = 0; step < 3; ++step) {
          const torch::Tensor loss = loss_of(net, rank, 1);
          root.reset_iter_state(tree);
          loss.backward();
          expect_gradients(root, {1}, tree ? "tree" : "unit");
          root.zero_grad();
        }
      });
    }
  }
}

TEST(Between, ExceptionInBackwardWithParkedGradients) {
  for (const ShardLayout layout : kLayouts) {
    for (const bool reset : {false, true}) {
      run_ranks(4, [&](int rank) {
        Net net = make_net();
        const HSDPModule root = shard_net(net, on_mesh({2, 2}, layout));
        for (int round = 0; round < 2; ++round) {
          root.set_requires_all_reduce(false);
          loss_of(net, rank, 4).backward();
          const torch::Tensor loss = loss_of(net, rank, 5);
          torch::Tensor& weight = net->u2->inner->a->weight;
          const auto hook = weight.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("stop"); });
          EXPECT_ANY_THROW(loss.backward());
          weight.remove_hook(hook);
          if (reset) root.reset_iter_state();
          root.zero_grad();
          root.set_requires_all_reduce(true);
          loss_of(net, rank, 6).backward();
          expect_gradients(root, {6}, reset ? "reset" : "by itself");
          root.zero_grad();
        }
      });
    }
  }
}

// ---- trees, worlds

struct HollowImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x.t().t() * 2; }
};
HP_MODULE(Hollow);

TEST(Trees, RootWithoutParameters) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Hollow hollow;
      const HSDPModule unit = fully_shard(hollow, on_all());
      const torch::Tensor x = wave({2, 6}, 1).requires_grad_();
      for (int step = 0; step < 3; ++step) hollow(x).sum().backward();
      EXPECT_TRUE((x.grad() == 6).all().item<bool>());
      unit.unshard();
      unit.reshard();
      { const UnshardScope scope(unit); }
      unit.zero_grad();
      unit.reset_iter_state();
      unit.to_empty();
      unit.reset_parameters(1);
      unit.load_full({});
      unit.load_from_rank0({});
      unit.to(torch::kBFloat16);
      EXPECT_TRUE(unit.named_dtensors().empty());
      EXPECT_EQ(clip_grad_norm_(unit, 1.0), 0);
      EXPECT_EQ(unit.plan_memory().total(), 0);
      EXPECT_EQ(unit.memory_use().total(), 0);
      set_zero_level(unit, ZeroLevel::k1, true);
      optim::AdamW(unit).step();
      Ema ema(unit, {});
      ema.update(1);
      ema.swap();
      ema.restore();
    });
  }
}

/// Units of one tree may communicate in different ways.
TEST(Trees, FusedAndUnfusedUnits) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}}) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      Net net = make_net();
      FullyShardOptions fused = on_mesh(mesh), unfused = fused, small = fused;
      unfused.comm_fusion = false;
      small.bucket_size = 300;
      fully_shard(net->u1, unfused);
      fully_shard(net->u2->inner, small);
      fully_shard(net->u2, unfused);
      fully_shard(net->u3, small);
      const HSDPModule root = fully_shard(net, fused);
      for (uint64_t step = 0; step < 3; ++step) {
        loss_of(net, rank, step).backward();
        expect_gradients(root, {step});
        root.zero_grad();
      }
    });
  }
}

TEST(Trees, SyncStreamEndsTheReductionsOfAllOfThem) {
  run_ranks(2, [](int rank) {
    Net a = make_net(), b = make_net();
    const HSDPModule root_a = shard_net(a, on_all()), root_b = shard_net(b, on_all(ShardLayout::kRagged));
    root_a.set_is_last_backward(false);
    root_b.set_is_last_backward(false);
    loss_of(a, rank, 1).backward();
    loss_of(b, rank, 2).backward();
    EXPECT_TRUE(root_a.named_grad_dtensors().empty());
    EXPECT_TRUE(root_b.named_grad_dtensors().empty());
    hsdp_sync_stream();
    expect_gradients(root_a, {1});
    expect_gradients(root_b, {2});
  });
}

TEST(Trees, EightRanks) {
  for (const auto& mesh : {std::vector<int64_t>{8}, {4, 2}, {2, 4}, {1, 8}, {8, 1}}) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(8, [&](int rank) {
        Net net = make_net();
        FullyShardOptions options = on_mesh(mesh, layout, true);
        options.mp_policy.reduce_dtype = torch::kFloat;
        const HSDPModule root = shard_net(net, options);
        for (int step = 0; step < 2; ++step) {
          root.set_requires_all_reduce(false);
          loss_of(net, rank, 1).backward();
          root.set_requires_all_reduce(true);
          loss_of(net, rank, 2).backward();
          expect_gradients(root, {1, 2});
          root.zero_grad();
        }
      });
    }
  }
}

// ---- errors

struct OddTypesImpl : torch::nn::Module {
  explicit OddTypesImpl(torch::Dtype dtype) { weight = register_parameter("weight", torch::ones({4}, dtype), false); }
  torch::Tensor forward(torch::Tensor x) { return x * weight.to(torch::kFloat); }
  torch::Tensor weight;
};
HP_MODULE(OddTypes);

TEST(Errors, TrainableParametersMustBeFloating) {
  OddTypes model(torch::kComplexFloat);
  model->named_parameters()["weight"].set_requires_grad(true);
  const std::string message = value_error([&] { fully_shard(model); });
  EXPECT_NE(message.find("weight"), std::string::npos) << message;
  EXPECT_NE(message.find("floating"), std::string::npos) << message;
  OddTypes frozen(torch::kInt);
  const HSDPModule unit = fully_shard(frozen);
  EXPECT_TRUE((frozen(torch::ones({4})) == 1).all().item<bool>());
}

/// A unit whose backward does read its parameters, although it was told not to gather them there.
TEST(Errors, UnshardInBackwardSwitchedOffWrongly) {
  run_ranks(2, [](int rank) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kPerParameter, true));
    HSDPModule::of(net->u3).set_unshard_in_backward(false);
    std::string message;
    try {
      loss_of(net, rank, 1).backward();
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("u3"), std::string::npos) << message;
    EXPECT_NE(message.find("set_unshard_in_backward"), std::string::npos) << message;
    HSDPModule::of(net->u3).set_unshard_in_backward(true);
    root.zero_grad();
    loss_of(net, rank, 2).backward();
    expect_gradients(root, {2});
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
