// What changes while a step is under way: switches, factors, weights, frozen parameters, the graph itself.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/net_on_ranks.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {2, 2}};

torch::Tensor evaluate(Net& net) {
  const torch::NoGradGuard no_grad;
  return net(make_batch(2, 9).tokens);
}

// ---- switches and factors

TEST(Toggled, BetweenForwardAndBackward) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_mesh(mesh)), u3 = HSDPModule::of(net->u3);
      for (int step = 0; step < 2; ++step) {
        torch::Tensor loss = loss_of(net, rank, 1);
        root.set_requires_gradient_sync(false);
        loss.backward();
        loss = loss_of(net, rank, 2);
        root.set_requires_gradient_sync(true);
        root.set_requires_all_reduce(false);
        loss.backward();
        EXPECT_TRUE(root.named_grad_dtensors().empty());
        loss = loss_of(net, rank, 3);
        root.set_requires_all_reduce(true);
        root.set_reshard_after_forward(step == 0);
        loss.backward();
        EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({1, 2, 3})), 1e-5) << step;
        root.zero_grad(/*set_to_none=*/step == 0);
        u3.set_requires_gradient_sync(false);
        loss_of(net, rank, 4).backward();
        u3.set_requires_gradient_sync(true);
        loss_of(net, rank, 5).backward();
        EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({4, 5})), 1e-5) << step;
        root.zero_grad();
      }
    });
  }
}

/// recurse = false: this unit, and none below it.
TEST(Recurse, OneUnitOrAllBelow) {
  run_ranks(2, [](int rank) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all()), u2 = HSDPModule::of(net->u2), inner = HSDPModule::of(net->u2->inner);
    const auto has_gradient = [](const HSDPModule& unit) { return !unit.named_grad_dtensors(/*recurse=*/false).empty(); };
    const auto step = [&] {
      root.zero_grad();
      loss_of(net, rank, 1).backward();
    };
    u2.set_requires_gradient_sync(false, /*recurse=*/false);
    step();
    EXPECT_FALSE(has_gradient(u2));
    EXPECT_TRUE(has_gradient(inner) && has_gradient(root));
    u2.set_requires_gradient_sync(true, false);
    u2.set_requires_all_reduce(false, false);
    step();
    EXPECT_FALSE(has_gradient(u2));
    EXPECT_TRUE(has_gradient(inner));
    u2.set_requires_all_reduce(true);
    u2.set_reshard_after_forward(false, false);
    const torch::Tensor loss = loss_of(net, rank, 1);
    EXPECT_TRUE(u2.is_unsharded());
    EXPECT_FALSE(inner.is_unsharded());
    u2.set_reshard_after_backward(false, false);
    loss.backward();
    EXPECT_TRUE(u2.is_unsharded());
    EXPECT_FALSE(inner.is_unsharded());
    u2.set_reshard_after_backward(true, false);
    u2.reshard();

    step();
    const Tensors once = full_gradients(root);
    int hooked = 0;
    u2.set_gradient_divide_factor(1, false);  // two ranks: twice the average
    u2.set_all_reduce_hook([&](const at::Tensor&) { ++hooked; }, false);
    step();
    EXPECT_EQ(hooked, 1);
    for (const auto& [name, gradient] : full_gradients(root)) {
      const double factor = name.starts_with("u2.") && !name.starts_with("u2.inner.") ? 2 : 1;
      EXPECT_LT(relative_difference({{"", gradient}}, times({{"", once.at(name)}}, factor)), 1e-5) << name;
    }
  });
}

/// A reduction has the factors of its own backward, however late it ends.
TEST(Factors, OfReductionsInFlightStay) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {2, 1}}) {
    for (const bool low : {false, true}) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        for (const int what : {0, 1, 2}) {
          Mlp mlp(6, 5);
          seed_parameters(*mlp, 1);
          FullyShardOptions options = on_mesh(mesh);
          if (low) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kBFloat16};
          const HSDPModule unit = fully_shard(mlp, options);
          const auto backward = [&] { mlp(wave({3, 6}, rank)).to(torch::kFloat).square().mean().backward(); };
          backward();
          const Tensors want = full_gradients(unit);
          unit.zero_grad();
          unit.set_is_last_backward(false);
          backward();
          if (what == 0) unit.set_gradient_scaling_factor(8.0);
          if (what == 1) unit.set_reduce_op_type("sum");
          if (what == 2) unit.set_gradient_divide_factor(100.0);
          unit.wait_for_gradients();
          EXPECT_EQ(relative_difference(full_gradients(unit), want), 0) << what;
        }
      });
    }
  }
}

// ---- weights

/// Gathered parameters that stay over backward are gathered again when averages or an optimizer have written to the shards.
TEST(Kept, ParametersFollowAveragesAndOptimizers) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](int rank) {
      for (const bool muon : {false, true}) {
        FullyShardOptions options = on_all();
        options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
        Net net = make_net();
        const HSDPModule root = shard_net(net, options);
        Ema ema(root, {.decay = 0.5});
        optim::AdamW adamw(root, {.lr = 0.5});
        std::optional<optim::Muon> other;
        if (muon) other.emplace(root, optim::MuonOptions{.lr = 0.5});
        const auto optimize = [&] { muon ? other->step() : adamw.step(); };
        loss_of(net, rank, 1).backward();
        optimize();
        ema.update(0);
        const torch::Tensor trained = evaluate(net);
        ema.swap();
        const torch::Tensor averaged = evaluate(net);
        ema.restore();
        ASSERT_FALSE(torch::equal(averaged, trained));

        set_zero_level(root, ZeroLevel::k1, /*last_micro_batch=*/false);
        loss_of(net, rank, 2).backward();
        EXPECT_TRUE(torch::equal(evaluate(net), trained));
        ema.swap();
        EXPECT_TRUE(torch::equal(evaluate(net), averaged));
        ema.restore();
        EXPECT_TRUE(torch::equal(evaluate(net), trained));
        loss_of(net, rank, 2).backward();
        optimize();  // with the gradients of before
        EXPECT_FALSE(torch::equal(evaluate(net), trained));
      }
    });
  }
}

TEST(Frozen, BetweenAccumulationAndReduction) {
  for (const int world : {1, 2}) {
    for (const bool parked : {false, true}) {
      run_ranks(world, [&](int rank) {
        Net net = make_net();
        const HSDPModule root = shard_net(net, on_all());
        const auto waiting = [&](bool wait) {
          parked ? root.set_requires_all_reduce(!wait) : root.set_requires_gradient_sync(!wait);
        };
        waiting(true);
        loss_of(net, rank, 1).backward();
        waiting(false);
        for (auto& parameter : net->u1->parameters()) parameter.set_requires_grad(false);
        loss_of(net, rank, 2).backward();
        const Tensors before = mean_gradients({1}), both = mean_gradients({1, 2});
        for (const auto& [name, gradient] : full_gradients(root)) {
          const Tensors want = {{"", (name.starts_with("u1.") ? before : both).at(name)}};
          EXPECT_LT(relative_difference({{"", gradient}}, want), 1e-5) << name;
        }
        EXPECT_EQ(full_gradients(root).size(), both.size());
        root.zero_grad();
        for (auto& parameter : net->u1->parameters()) parameter.set_requires_grad(true);
        loss_of(net, rank, 3).backward();
        EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({3})), 1e-5)
            << "nothing is left of the first backward";
      });
    }
  }
}

// ---- the graph

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    nest = register_module("nest", Nest(6));
    weight = register_parameter("weight", torch::ones({6}));
    seed_parameters(*this, 3);
  }
  /// One run of the inner unit for each flag: checkpointed or not.
  torch::Tensor forward(torch::Tensor x, const std::vector<bool>& runs) {
    for (const bool checkpointed : runs) x = checkpointed ? checkpoint(nest, x * weight) : nest(x * weight);
    return x * weight;
  }
  Nest nest = nullptr;
  torch::Tensor weight;
};
HP_MODULE(Block);

/// The order in which units reduce is another one with a checkpoint around them than without.
TEST(Checkpointing, SwitchedOnAndOff) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](int rank) {
      Block block, plain;
      fully_shard(block->nest->inner, on_all());
      fully_shard(block->nest, on_all());
      const HSDPModule root = fully_shard(block, on_all());
      const std::vector<std::vector<bool>> steps = {{true}, {false}, {true}, {false, true}, {true, false}, {false, true, false},
                                                    {false}};
      for (const auto& runs : steps) {
        root.zero_grad(), plain->zero_grad();
        const std::vector<bool> as_plain(runs.size(), false);
        for (int r = 0; r < get_world_size(); ++r)
          (plain(wave({2, 6}, r), as_plain).square().mean() / get_world_size()).backward();
        block(wave({2, 6}, rank), runs).square().mean().backward();
        EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5) << ::testing::PrintToString(runs);
        for (const HSDPModule& unit : {HSDPModule::of(block->nest), HSDPModule::of(block->nest->inner)})
          EXPECT_FALSE(unit.is_unsharded());
      }
    });
  }
}

TEST(Checkpointing, AfterAPlainRunInTheFirstStep) {
  run_ranks(2, [](int rank) {
    Block block, plain;
    fully_shard(block->nest->inner, on_all());
    fully_shard(block->nest, on_all());
    const HSDPModule root = fully_shard(block, on_all());
    for (int r = 0; r < 2; ++r) (plain(wave({2, 6}, r), std::vector<bool>{false, false}).square().mean() / 2).backward();
    block(wave({2, 6}, rank), std::vector<bool>{false, true}).square().mean().backward();
    EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5);
  });
}

TEST(Evaluation, BetweenAForwardAndItsBackward) {
  run_ranks(4, [](int rank) {
    for (const auto layout : kLayouts) {
      for (const std::optional<ReshardAfterForward> reshard :
           {std::optional<ReshardAfterForward>(), std::optional<ReshardAfterForward>(true),
            std::optional<ReshardAfterForward>(false), std::optional<ReshardAfterForward>(2)}) {
        Net net = make_net();
        FullyShardOptions options = on_all(layout);
        options.reshard_after_forward = reshard;
        const HSDPModule root = shard_net(net, options);
        for (int step = 0; step < 3; ++step) {
          const torch::Tensor loss = loss_of(net, rank, 1);
          (void)evaluate(net);
          if (step == 1) root.reset_iter_state();
          loss.backward();
          EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({1})), 1e-5) << step;
          root.zero_grad();
        }
      }
    }
  });
}

/// B58: what was gathered ahead for a unit that did not run is not what it runs with after a step.
TEST(Prefetch, ForAUnitThatDoesNotRun) {
  for (const auto layout : kLayouts) {
    run_ranks(2, [&](int rank) {
      Net net = make_net(), plain = make_net();
      const HSDPModule root = shard_net(net, on_all(layout));
      torch::optim::SGD sgd(net->parameters(), 0.1), plain_sgd(plain->parameters(), 0.1);
      HSDPModule::of(net->u1).set_modules_to_forward_prefetch(std::vector<fsdp::UnitHandle>{HSDPModule::of(net->u4)});
      for (uint64_t step = 0; step < 6; ++step) {
        net->options.skip_last = plain->options.skip_last = step % 2 == 0;
        sgd.zero_grad(), plain_sgd.zero_grad();
        for (int r = 0; r < 2; ++r) (loss_of(plain, r, step) / 2).backward();
        loss_of(net, rank, step).backward();
        Tensors want = plain_gradients(*plain);
        want.erase("head.weight");
        EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5) << step;
        EXPECT_FALSE(HSDPModule::of(net->u4).is_unsharded());
        sgd.step(), plain_sgd.step();
      }
    });
  }
}

struct ListedImpl : torch::nn::Module {
  ListedImpl() {
    for (int i = 0; i < 3; ++i) parts.push_back(register_module(concat("part", i), Mlp(6, 4 + i)));
    seed_parameters(*this, 3);
    to(torch::kDouble);  // members that do not run double their input: single precision would cancel digits
  }
  /// Runs the members whose bits are set.
  torch::Tensor forward(torch::Tensor x, int which) {
    for (int i = 0; i < 3; ++i) x = ((which >> i) & 1) != 0 ? parts[static_cast<std::size_t>(i)](x) : x * 2;
    return x;
  }
  std::vector<Mlp> parts;
};
HP_MODULE(Listed);

TEST(Lists, RunPartlyInEveryMode) {
  for (const auto& mesh : kMeshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      for (const int mode : {0, 1, 2, 3, 4, 5}) {
        Listed listed, plain;
        const FullyShardOptions options = on_mesh(mesh, ShardLayout::kRagged, mode >= 3);
        fully_shard(listed->parts, options);
        const HSDPModule root = fully_shard(listed, options);
        torch::optim::SGD sgd(listed->parameters(), 0.1), plain_sgd(plain->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          sgd.zero_grad(), plain_sgd.zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            const int which = std::array{step % 2 == 0 ? 5 : 2, 7, step % 2 == 0 ? 1 : 6}[static_cast<std::size_t>(micro)];
            const auto loss = [&](Listed& model, int r) {
              return model(wave({2, 6}, r + micro).to(torch::kDouble), which).square().mean();
            };
            for (int r = 0; r < get_world_size(); ++r) (loss(plain, r) / get_world_size()).backward();
            if (mode % 3 == 1) root.set_requires_gradient_sync(micro == 2);
            if (mode % 3 == 2) root.set_requires_all_reduce(micro == 2);
            loss(listed, rank).backward();
            const torch::NoGradGuard no_grad;
            const torch::Tensor x = wave({2, 6}, 1).to(torch::kDouble);
            EXPECT_TRUE(torch::allclose(listed(x, 1 << micro), plain(x, 1 << micro)));
          }
          EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-10) << mode << ' ' << step;
          sgd.step(), plain_sgd.step();
        }
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
