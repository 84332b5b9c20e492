// Unusual loops: losses on shards, hooks, reloads, own gradients, changed orders, autograd::grad, lost graphs and lost ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/same_gradients.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Mlp make_mlp(uint64_t seed = 1) {
  Mlp mlp(6, 5);
  seed_parameters(*mlp, seed);
  return mlp;
}

struct PairImpl : torch::nn::Module {
  PairImpl() {
    left = register_module("left", Mlp(6, 5));
    right = register_module("right", Mlp(6, 4));
    scale = register_parameter("scale", torch::ones({6}));
    seed_parameters(*this, 9);
  }
  torch::Tensor forward(const torch::Tensor& x, bool left_first = true) {
    return scale * (left_first ? right(left(x)) : left(right(x)));
  }
  Mlp left = nullptr, right = nullptr;
  torch::Tensor scale;
};
HP_MODULE(Pair);

HSDPModule shard_pair(Pair& pair, const FullyShardOptions& options) {
  fully_shard(pair->left, options), fully_shard(pair->right, options);
  return fully_shard(pair, options);
}

torch::Tensor pair_loss(Pair& pair, int step) { return pair(wave({2, 6}, step)).square().mean(); }

TEST(Loops, PenaltyOnTheShardsBeforeAndAfterTheForward) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [] {
      for (const bool before : {true, false}) {
        Pair pair, plain;
        const HSDPModule root = shard_pair(pair, on_all());
        const auto loss = [&](Pair& m, int rank) {
          const auto penalty = [&] {
            torch::Tensor sum = torch::zeros({});
            for (auto& parameter : m->parameters()) sum = sum + parameter.square().sum();
            return sum;
          };
          if (!before) {
            auto y = pair_loss(m, rank);
            return y + 0.1 * penalty();
          }
          const auto p = penalty();
          return 0.1 * p + pair_loss(m, rank);
        };
        for (int i = 0; i < 2; ++i) expect_same_gradients(pair, root, plain, loss, before ? "before" : "after");
      }
    });
  }
}

TEST(Loops, HooksOnTheModelsHandles) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Mlp mlp = make_mlp(), plain = make_mlp();
      int calls = 0;
      const auto twice = [&calls](const torch::Tensor& g) { return ++calls, g * 2; };
      for (auto* m : {&mlp, &plain}) (*m)->a->weight.register_hook(twice);
      const HSDPModule root = fully_shard(mlp, on_all());
      for (auto* m : {&mlp, &plain}) (*m)->b->weight.register_hook(twice);
      for (auto* m : {&mlp, &plain}) (*m)->a->weight.register_hook(twice);
      expect_same_gradients(mlp, root, plain, [](Mlp& m, int rank) { return m(wave({2, 6}, rank)).sum(); });
      EXPECT_EQ(calls, 3 * (get_world_size() + 1));
    });
  }
}

TEST(Loops, ReloadInTheMiddle) {
  for (const int world : {1, 3}) {
    run_ranks(world, [](int rank) {
      for (const auto layout : kLayouts) {
        Pair pair;
        shard_pair(pair, on_all(layout));
        torch::optim::SGD sgd(pair->parameters(), 0.3);
        const auto step = [&](int i) {
          sgd.zero_grad();
          const auto loss = pair_loss(pair, rank + i);
          loss.backward();
          sgd.step();
          return loss.item<float>();
        };
        step(0), step(1);
        std::stringstream file;
        torch::save(pair, file);
        const float want = step(2), next = step(3);
        torch::load(pair, file);
        // Nothing but the forward looks at the parameters in between: prefetched units must see the new values too.
        EXPECT_EQ(step(2), want);
        EXPECT_EQ(step(3), next);
        // A reload between backward and step keeps the gradients, as it does for plain modules.
        std::stringstream again;
        torch::save(pair, again);
        const auto before = pair->left->a->named_parameters()["weight"].detach().clone();
        pair_loss(pair, rank).backward();
        torch::load(pair, again);
        (void)pair(wave({2, 6}, 0));
        sgd.step();
        EXPECT_TRUE(before.numel() == 0 || !torch::equal(pair->left->a->named_parameters()["weight"], before));
      }
    });
  }
}

TEST(Loops, ZeroedReplacedAndMissingGradients) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_all());
      const auto loss = [](Pair& m, int rank) { return pair_loss(m, rank); };
      expect_same_gradients(pair, root, plain, loss, "first");
      root.zero_grad(/*set_to_none=*/false), plain->zero_grad(false);
      expect_same_gradients(pair, root, plain, loss, "zeroed");
      for (auto* m : {&pair, &plain}) {
        auto parameters = (*m)->named_parameters();
        parameters["left.a.weight"].mutable_grad() = torch::ones_like(parameters["left.a.weight"]);
        parameters["left.b.bias"].mutable_grad() = torch::Tensor();
        parameters["scale"].mutable_grad() = torch::Tensor();
      }
      expect_same_gradients(pair, root, plain, loss, "replaced");
    });
  }
}

TEST(Loops, SynchronisationInOddOrders) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {3}, {2, 2}}) {
    const int world = ranks_of(mesh);
    run_ranks(world, [&](int rank) {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_mesh(mesh));
      int i = 0;
      for (const bool sync : {false, true, true, false, false, true, false, true}) {
        root.set_requires_gradient_sync(sync);
        for (int r = 0; r < world; ++r) (pair_loss(plain, r + i) / world).backward();
        auto y = pair_loss(pair, rank + i);
        if (i % 3 == 0) {
          (y * 0.25).backward({}, /*retain_graph=*/true);
          (y * 0.75).backward();
        } else {
          y.backward();
        }
        if (sync) {
          EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5) << i;
        }
        ++i;
      }
    });
  }
}

/// zero_grad drops .grad, not what was accumulated since the last synchronisation; the same for every number of ranks.
TEST(Loops, ZeroGradBetweenAccumulationAndSynchronisation) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](int rank) {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_all());
      pair_loss(pair, rank + 7).backward();
      root.set_requires_gradient_sync(false);
      pair_loss(pair, rank).backward();
      root.zero_grad();
      root.set_requires_gradient_sync(true);
      pair_loss(pair, rank + 1).backward();
      for (int r = 0; r < get_world_size(); ++r) ((pair_loss(plain, r) + pair_loss(plain, r + 1)) / get_world_size()).backward();
      EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5);
    });
  }
}

TEST(Loops, ChangedOrderKeepsWhatWasAccumulated) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {2}, {2, 2}}) {
    const int world = ranks_of(mesh);
    run_ranks(world, [&](int rank) {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_mesh(mesh));
      for (const bool accumulate : {true, false}) {
        for (int i = 0; i < 4; ++i) {
          root.set_requires_gradient_sync(!accumulate || i % 2 == 1);
          const auto loss = [&](Pair& m, int r) { return m(wave({2, 6}, r + i), i % 4 < 2).square().mean(); };
          for (int r = 0; r < world; ++r) (loss(plain, r) / world).backward();
          loss(pair, rank).backward();
          // The other way round from the one that the schedule has learned.
          const auto other = [&](Pair& m, int r) { return m(wave({2, 6}, r - i), i % 4 >= 2).square().mean(); };
          root.set_requires_gradient_sync(true);
          for (int r = 0; r < world; ++r) (other(plain, r) / world).backward();
          other(pair, rank).backward();
          EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5) << accumulate << ' ' << i;
          root.zero_grad(), plain->zero_grad();
        }
      }
    });
  }
}

TEST(Loops, GradientsOfInputsOnlyLeaveTheParametersAlone) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_all());
      for (int i = 0; i < 2; ++i) {
        const auto input_gradient = [&](Pair& m) {
          auto x = wave({2, 6}, i).requires_grad_();
          return torch::autograd::grad({m(x).square().mean()}, {x})[0];
        };
        EXPECT_LT((input_gradient(pair) - input_gradient(plain)).abs().max().item<float>(), 1e-6F);
        EXPECT_EQ(full_gradients(root).empty(), i == 0);
        expect_same_gradients(pair, root, plain, [](Pair& m, int rank) { return pair_loss(m, rank); });
      }
    });
  }
}

/// Gradient penalty: right at world size 1; elsewhere the second backward needs parameters that the first one freed, and says so.
TEST(Loops, DoubleBackward) {
  for (const int world : {1, 2}) {
    run_ranks(world, [&] {
      Pair pair, plain;
      const HSDPModule root = shard_pair(pair, on_all());
      const auto loss = [](Pair& m, int rank) {
        auto x = wave({2, 6}, rank).requires_grad_();
        const auto y = m(x).square().mean();
        const auto gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
        return y + gradient.square().sum();
      };
      if (world == 1) {
        expect_same_gradients(pair, root, plain, loss);
      } else {
        EXPECT_THAT([&] { loss(pair, get_rank()).backward(); },
                    ThrowsMessage<std::exception>(AllOf(HasSubstr("are resharded"), HasSubstr("unshard()"))));
        expect_same_gradients(
            pair, root, plain, [](Pair& m, int rank) { return pair_loss(m, rank); }, "and goes on");
      }
    });
  }
}

struct ForcesImpl : torch::nn::Module {
  ForcesImpl() { energy = register_module("energy", Mlp(6, 5)), out = register_module("out", torch::nn::Linear(6, 6)); }
  torch::Tensor forward(const torch::Tensor& x) {
    auto position = x.detach().requires_grad_();
    const auto force = torch::autograd::grad({energy(out(position)).square().sum()}, {position})[0];
    return energy(out(x + force));
  }
  Mlp energy = nullptr;
  torch::nn::Linear out = nullptr;
};
HP_MODULE(Forces);

TEST(Loops, AutogradGradInsideTheForward) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Forces forces, plain;
      seed_parameters(*forces, 3), seed_parameters(*plain, 3);
      fully_shard(forces->energy, on_all());
      const HSDPModule root = fully_shard(forces, on_all());
      for (int i = 0; i < 3; ++i) {
        expect_same_gradients(forces, root, plain, [](Forces& m, int rank) { return m(wave({2, 6}, rank)).sum(); });
      }
    });
  }
}

struct TableImpl : torch::nn::Module {
  TableImpl() { weight = register_parameter("weight", torch::ones({4, 6})); }
  torch::Tensor forward() { return weight; }
  torch::Tensor weight;
};
HP_MODULE(Table);

TEST(Loops, ParameterAsOutputIsNotTheHandleItself) {
  run_ranks(2, [] {
    Table table;
    const HSDPModule root = fully_shard(table, on_all(ShardLayout::kPerParameter, false));
    for (int i = 0; i < 3; ++i) {
      root.zero_grad();
      const auto y = table();
      EXPECT_FALSE(y.is_same(table->weight)) << "a hook on the handle would stay there for ever";
      y.sum().backward();
      EXPECT_TRUE((full_gradients(root).at("weight") == 1).all().item<bool>());
    }
  });
}

TEST(Loops, WrappedAfterSomeStepsThenFrozenAndUnfrozen) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Pair pair, plain;
      for (auto* m : {&pair, &plain}) {
        pair_loss(*m, 5).backward();
        for (auto& parameter : (*m)->left->parameters()) parameter.set_requires_grad(false);
      }
      const HSDPModule root = shard_pair(pair, on_all(ShardLayout::kRagged));
      plain->zero_grad();
      const auto loss = [](Pair& m, int rank) { return pair_loss(m, rank); };
      expect_same_gradients(pair, root, plain, loss, "left frozen");
      for (auto* m : {&pair, &plain}) {
        for (auto& parameter : (*m)->left->parameters()) parameter.set_requires_grad(true);
      }
      {
        torch::InferenceMode inference;
        EXPECT_LT((pair(wave({2, 6}, 1)) - plain(wave({2, 6}, 1))).abs().max().item<float>(), 1e-6F);
      }
      for (int i = 0; i < 2; ++i) expect_same_gradients(pair, root, plain, loss, "unfrozen");
    });
  }
}

TEST(Lifetimes, GraphOutlivesTheModel) {
  run_ranks(2, [] {
    torch::Tensor y, kept;
    fsdp::UnitHandle handle;
    {
      Pair pair;
      shard_pair(pair, on_all());
      for (int i = 0; i < 3; ++i) pair_loss(pair, i).backward();
      y = pair(wave({2, 6}, 0)).sum();
      Mlp alone = make_mlp();
      handle = fully_shard(alone, on_all(ShardLayout::kPerParameter, false));
      kept = alone(wave({2, 6}, 0)).sum();
    }
    EXPECT_THAT([&] { y.backward(); }, ThrowsMessage<std::exception>(HasSubstr("parameters of unit right are resharded")));
    kept.backward();
    EXPECT_EQ(full_gradients(HSDPModule(nullptr, handle.unit())).size(), 5U) << "the handle keeps its unit";
  });
}

/// A gradient that the user kept is not overwritten by the next step once zero_grad has let go of it.
TEST(Lifetimes, KeptGradientKeepsItsValues) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Mlp mlp = make_mlp();
      const HSDPModule root = fully_shard(mlp, on_all());
      mlp(wave({2, 6}, 0)).sum().backward();
      const torch::Tensor kept = mlp->a->named_parameters()["weight"].grad();
      const torch::Tensor copy = kept.clone();
      root.zero_grad();
      mlp(wave({2, 6}, 3)).sum().backward();
      EXPECT_TRUE(torch::equal(kept, copy));
    });
  }
}

TEST(Optimizers, GradientsThatOnlyTheUserMade) {
  run_ranks(2, [] {
    Mlp mlp = make_mlp();
    const HSDPModule root = fully_shard(mlp, on_all());
    optim::AdamW adamw(root, {.lr = 0.1, .weight_decay = 0});
    torch::Tensor shard = mlp->a->named_parameters()["weight"];
    const auto before = shard.detach().clone();
    shard.mutable_grad() = torch::ones_like(shard);
    adamw.step();
    EXPECT_TRUE(torch::allclose(shard, before - 0.1, 1e-4, 1e-5));
  });
}

TEST(Optimizers, BuiltBeforeTheLastWrap) {
  run_ranks(2, [] {
    Pair pair;
    const HSDPModule left = fully_shard(pair->left, on_all());
    optim::AdamW adamw(left);
    const HSDPModule root = fully_shard(pair, on_all());
    pair_loss(pair, 0).backward();
    const Tensors before = full_parameters(root);
    adamw.step();
    const Tensors after = full_parameters(root);
    for (const auto& [name, value] : before) EXPECT_EQ(torch::equal(after.at(name), value), !name.starts_with("left.")) << name;
  });
}

TEST(Optimizers, NormOfAShardWithNan) {
  run_ranks(2, [](int rank) {
    Mlp mlp = make_mlp();
    const HSDPModule root = fully_shard(mlp, on_all());
    mlp(wave({2, 6}, 0)).sum().backward();
    if (rank == 1) mlp->b->named_parameters()["weight"].grad().fill_(NAN);
    for (const double p : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_THROW((void)clip_grad_norm_(root, 1.0, {.norm_type = p, .error_if_nonfinite = true}), Error) << p;
    }
  });
}

/// One rank's own error: the others stop within their timeout and say where they waited.
TEST(Failures, OneRankThrows) {
  for (const int where : {0, 1}) {
    std::vector<std::string> texts(3);
    run_ranks(3, {.timeout = std::chrono::seconds(3)}, [&](int rank) {
      Pair pair;
      shard_pair(pair, on_all());
      try {
        for (int i = 0; i < 3; ++i) pair_loss(pair, i).backward();
        auto y = pair(wave({2, 6}, 0));
        if (rank == 1 && where == 0) throw std::runtime_error("own error");
        if (rank == 1) y.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("own error"); });
        y.sum().backward();
      } catch (const std::exception& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
    EXPECT_THAT(texts[1], HasSubstr("own error"));
    // A slow rank may still be in its forward when the connection goes.
    for (const int rank : {0, 2}) {
      EXPECT_THAT(
          texts[static_cast<std::size_t>(rank)],
          AllOf(AnyOf(HasSubstr("unit left"), HasSubstr("unit right"), HasSubstr("unit Pair")), HasSubstr("_single] peer rank")));
    }
  }
}

int64_t resident_kilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  }
  return -1;
}

TEST(LongRuns, MemoryDoesNotGrow) {
  run_ranks(2, [](int rank) {
    Net net = make_net({.first_twice = true});
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
    optim::AdamW adamw(root);
    int64_t before = 0;
    for (int step = 0; step < 200; ++step) {
      const Batch batch = make_batch(2, static_cast<uint64_t>(step % 5)).part(rank, 2);
      net_loss(net(batch.tokens), batch.targets).backward();
      (void)clip_grad_norm_(root, 1.0);
      adamw.step(), adamw.zero_grad();
      torch::NoGradGuard no_grad;
      (void)net(batch.tokens);
      if (step == 40) before = resident_kilobytes();
    }
    EXPECT_GT(before, 0);
    EXPECT_LT(resident_kilobytes() - before, 2048);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
