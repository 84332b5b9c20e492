// What users do between the calls of a step: switches of single units, evaluations, resets, other trees.
#include <array>
#include <variant>

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_gradients.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {2, 2}};

torch::Tensor loss_of(Net& net, int rank, uint64_t seed) {
  const Batch part = make_batch(int64_t{2} * get_world_size(), seed).part(rank, get_world_size());
  return net_loss(net(part.tokens), part.targets);
}

/// Gradients of the plain model on the mean loss of all ranks, summed over the batches of `seeds`.
Tensors mean_gradients(const std::vector<uint64_t>& seeds, const NetOptions& options = {}) {
  Net plain = make_net(options);
  for (const uint64_t seed : seeds) {
    for (int rank = 0; rank < get_world_size(); ++rank) (loss_of(plain, rank, seed) / get_world_size()).backward();
  }
  Tensors want = plain_gradients(*plain);
  want.erase("head.weight");  // tied: one owner in the sharded model
  return want;
}

void expect_gradients(const HSDPModule& root, const std::vector<uint64_t>& seeds, const char* what = "") {
  EXPECT_LT(relative_difference(full_gradients(root), mean_gradients(seeds)), 1e-5) << what;
}

void evaluate(Net& net) {
  const torch::NoGradGuard no_grad;
  (void)net(make_batch(2, 1).tokens);
}

bool has_gradient(const Mlp& mlp) { return mlp->named_parameters()["a.weight"].grad().defined(); }

// ---- one unit only: recurse = false

/// u2 is a unit with a unit inside: what is set on it without `recurse` must not reach the inner one.
struct NestedUnits {
  Net net;
  HSDPModule root, outer, inner;
  explicit NestedUnits(const FullyShardOptions& options)
      : net(make_net()), root(shard_net(net, options)), outer(HSDPModule::of(net->u2)), inner(HSDPModule::of(net->u2->inner)) {}
  [[nodiscard]] bool outer_has() const { return net->u2->p->named_parameters()["weight"].grad().defined(); }
  [[nodiscard]] bool inner_has() const { return has_gradient(net->u2->inner); }
};

TEST(OneUnit, GradientSynchronisation) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      NestedUnits t(on_mesh(mesh));
      t.outer.set_requires_gradient_sync(false, /*recurse=*/false);
      loss_of(t.net, rank, 1).backward();
      EXPECT_FALSE(t.outer_has());
      EXPECT_TRUE(t.inner_has());
      t.outer.set_requires_gradient_sync(true, false);
      loss_of(t.net, rank, 2).backward();
      expect_gradients(t.root, {1, 2});
    });
  }
}

TEST(OneUnit, AllReduce) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      NestedUnits t(on_mesh(mesh));
      t.outer.set_requires_all_reduce(false, /*recurse=*/false);
      loss_of(t.net, rank, 1).backward();
      EXPECT_FALSE(t.outer_has());
      EXPECT_TRUE(t.inner_has());
      t.outer.set_requires_all_reduce(true, false);
      loss_of(t.net, rank, 2).backward();
      expect_gradients(t.root, {1, 2});
    });
  }
}

TEST(OneUnit, Residency) {
  run_ranks(2, [](int rank) {
    NestedUnits t(on_all(ShardLayout::kPerParameter, true));
    t.outer.set_reshard_after_forward(false, /*recurse=*/false);
    const torch::Tensor loss = loss_of(t.net, rank, 1);
    EXPECT_TRUE(t.outer.is_unsharded());
    EXPECT_FALSE(t.inner.is_unsharded());
    loss.backward();
    t.outer.set_reshard_after_forward(true, false);
    t.outer.set_reshard_after_backward(false, /*recurse=*/false);
    loss_of(t.net, rank, 2).backward();
    EXPECT_TRUE(t.outer.is_unsharded());
    EXPECT_FALSE(t.inner.is_unsharded());
    expect_gradients(t.root, {1, 2});
  });
}

TEST(OneUnit, SetReshardAfterForwardReachesAllUnitsBelow) {
  run_ranks(2, [](int rank) {
    NestedUnits t(on_all(ShardLayout::kPerParameter, true));
    t.root.set_reshard_after_forward(false);
    const torch::Tensor loss = loss_of(t.net, rank, 1);
    EXPECT_TRUE(t.root.is_unsharded() && t.outer.is_unsharded() && t.inner.is_unsharded());
    t.root.set_reshard_after_forward(true);  // from the next forward on
    loss.backward();
    const torch::Tensor next = loss_of(t.net, rank, 2);
    EXPECT_FALSE(t.root.is_unsharded() || t.outer.is_unsharded() || t.inner.is_unsharded());
    next.backward();
    expect_gradients(t.root, {1, 2});
  });
}

TEST(OneUnit, DivideFactorAndAllReduceHook) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      NestedUnits t(on_mesh(mesh));
      t.outer.set_gradient_divide_factor(static_cast<double>(get_world_size()) / 4, /*recurse=*/false);
      t.outer.set_all_reduce_hook([](const at::Tensor& gradient) { gradient.mul_(3); }, /*recurse=*/false);
      loss_of(t.net, rank, 1).backward();
      const Tensors got = full_gradients(t.root), want = mean_gradients({1});
      for (const auto& [name, value] : want) {
        const bool own = name.starts_with("u2.") && !name.starts_with("u2.inner.");
        EXPECT_LT(relative_difference({{name, got.at(name)}}, {{name, value * (own ? 12 : 1)}}), 1e-5) << name;
      }
    });
  }
}

/// Units that get no gradient are left out only where that was asked for.
TEST(OneUnit, ReduceScatterUnusedParams) {
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

TEST(Between, Evaluation) {
  const std::vector<std::variant<bool, int>> modes = {true, false, 2};
  for (const ShardLayout layout : kLayouts) {
    for (const auto& mode : modes) {
      run_ranks(4, [&](int rank) {
        FullyShardOptions options = on_all(layout);
        std::visit([&](auto value) { options.reshard_after_forward = value; }, mode);
        Net net = make_net();
        const HSDPModule root = shard_net(net, options);
        for (uint64_t step = 0; step < 3; ++step) {
          const torch::Tensor loss = loss_of(net, rank, step);
          evaluate(net);
          loss.backward();
          expect_gradients(root, {step});
          root.zero_grad();
        }
      });
    }
  }
}

TEST(Between, SwitchesCountWhenBackwardRuns) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_mesh(mesh));
      const torch::Tensor first = loss_of(net, rank, 1);
      root.set_requires_gradient_sync(false);
      first.backward();
      const torch::Tensor second = loss_of(net, rank, 2);
      root.set_requires_gradient_sync(true);
      root.set_requires_all_reduce(false);
      second.backward();
      EXPECT_TRUE(root.named_grad_dtensors().empty());
      const torch::Tensor third = loss_of(net, rank, 3);
      root.set_requires_all_reduce(true);
      root.set_reshard_after_forward(false);
      third.backward();
      expect_gradients(root, {1, 2, 3});
    });
  }
}

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

/// A unit that was gathered ahead and does not run must not keep what it gathered over an optimizer step.
TEST(Between, PrefetchedUnitThatDoesNotRun) {
  for (const ShardLayout layout : kLayouts) {
    run_ranks(2, [&](int rank) {
      Net net = make_net(), plain = make_net();
      const HSDPModule root = shard_net(net, on_all(layout));
      const HSDPModule last = HSDPModule::of(net->u4);
      HSDPModule::of(net->u1).set_modules_to_forward_prefetch(std::vector<fsdp::UnitHandle>{last});
      optim::SGD sgd(root, {.lr = 0.3});
      for (uint64_t step = 0; step < 5; ++step) {
        net->options.skip_last = plain->options.skip_last = step % 2 == 0;
        sgd.zero_grad();
        plain->zero_grad();
        for (int r = 0; r < 2; ++r) (loss_of(plain, r, step) / 2).backward();
        loss_of(net, rank, step).backward();
        Tensors want = plain_gradients(*plain);
        want.erase("head.weight");
        EXPECT_LT(relative_difference(full_gradients(root), want), 2e-5) << step;
        EXPECT_FALSE(last.is_unsharded());
        sgd.step();
        const torch::NoGradGuard no_grad;
        for (const auto& entry : plain->named_parameters()) {
          const bool tied = entry.key() == "head.weight";
          if (!tied && entry.value().grad().defined()) torch::Tensor(entry.value()).sub_(entry.value().grad(), 0.3);
        }
      }
    });
  }
}

// ---- lists, trees, worlds

struct ListedImpl : torch::nn::Module {
  ListedImpl() {
    for (int i = 0; i < 3; ++i) parts.push_back(register_module(concat("part", i), Mlp(6, 4 + i)));
    weight = register_parameter("weight", torch::ones({6}));
  }
  torch::Tensor forward(torch::Tensor x, int mask) {
    for (int i = 0; i < 3; ++i) {
      if ((mask >> i & 1) != 0) x = parts[static_cast<std::size_t>(i)](x);
    }
    return x * weight;
  }
  std::vector<Mlp> parts;
  torch::Tensor weight;
};
HP_MODULE(Listed);

enum class Micro { kEach, kLocal, kParked };

/// Some members of a list run in some micro-batches, with evaluations of other members in between.
TEST(ListUnit, RunPartlyUnderAccumulation) {
  for (const auto& mesh : kMeshes) {
    for (const Micro micro : {Micro::kEach, Micro::kLocal, Micro::kParked}) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        Listed model, plain;
        seed_parameters(*model, 3);
        seed_parameters(*plain, 3);
        const FullyShardOptions options = on_mesh(mesh, ShardLayout::kRagged, true);
        fully_shard(model->parts, options);
        const HSDPModule root = fully_shard(model, options);
        for (int step = 0; step < 3; ++step) {
          root.zero_grad();
          plain->zero_grad();
          const std::array<int, 3> masks = {step % 2 != 0 ? 5 : 2, 7, step % 2 != 0 ? 1 : 6};
          for (int k = 0; k < 3; ++k) {
            const int mask = masks[static_cast<std::size_t>(k)];
            const auto loss = [&](Listed& m, int r) { return m(wave({2, 6}, r + k + step), mask).square().mean(); };
            for (int r = 0; r < get_world_size(); ++r) (loss(plain, r) / get_world_size()).backward();
            if (micro == Micro::kLocal) root.set_requires_gradient_sync(k == 2);
            if (micro == Micro::kParked) root.set_requires_all_reduce(k == 2);
            loss(model, rank).backward();
            const torch::NoGradGuard no_grad;
            EXPECT_TRUE(torch::allclose(model(wave({2, 6}, 1), 1 << k), plain(wave({2, 6}, 1), 1 << k), 1e-5, 1e-6));
          }
          EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5) << step;
        }
      });
    }
  }
}

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
