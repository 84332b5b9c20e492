// The torch::nn front end: every way of calling a module goes through its unit, whatever its forward takes and returns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

/// Freed after every forward, so that one behind the hooks trips over the guard.
FullyShardOptions freed() { return on_all(ShardLayout::kPerParameter, /*reshard=*/true); }

struct DefaultsImpl : torch::nn::Module {
  explicit DefaultsImpl(int64_t dim) { layer = register_module("layer", torch::nn::Linear(dim, dim)); }
  torch::Tensor forward(torch::Tensor x, double scale = 2.0) { return layer(std::move(x)) * scale; }
  torch::nn::Linear layer = nullptr;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(2.0)})
};
HP_MODULE(Defaults);

/// True when the call ran (the guard did not trip) and its backward reduced the gradients.
template <class Call>
bool trains(Defaults& module, Call call) {
  HSDPModule::of(module).zero_grad();
  torch::Tensor y = call();
  y.sum().backward();
  return module->layer->named_parameters()["weight"].grad().defined();
}

TEST(Calls, EveryWayGoesThroughTheHooks) {
  run_ranks(2, [] {
    Defaults m(4);
    fully_shard(m, freed());
    const auto x = torch::ones({3, 4});
    EXPECT_TRUE(trains(m, [&] { return m(x); })) << "default argument kept";
    EXPECT_TRUE(trains(m, [&] { return m(x, 3.0); }));
    EXPECT_TRUE(trains(m, [&] { return m->forward(x, 3.0); }));
    torch::nn::AnyModule any(m.ptr());
    EXPECT_TRUE(trains(m, [&] { return any.forward<torch::Tensor>(torch::Tensor(x), 2.0); }));
    torch::nn::Sequential sequential;
    sequential->push_back(torch::nn::ReLU());
    sequential->push_back(m);
    EXPECT_TRUE(trains(m, [&] { return sequential->forward(x); }));
    torch::nn::ModuleList list;
    list->push_back(m);
    EXPECT_TRUE(trains(m, [&] { return list[0]->as<Defaults::ContainedType>()->forward(x, 2.0); }));
    const Defaults& constant = m;
    EXPECT_TRUE(trains(m, [&] { return constant(x); }));
    EXPECT_THROW((void)m->as<DefaultsImpl>()->forward(x), std::exception) << "the guard catches the one way around";
    EXPECT_NEAR(m(x).sum().item<float>() * 1.5F, m(x, 3.0).sum().item<float>(), 1e-4F);
  });
}

struct Output {
  torch::Tensor logits;
  std::optional<torch::Tensor> extra;
  template <class F>
  void walk_tensors(F& f) {
    nn::walk_tensors(logits, f);
    nn::walk_tensors(extra, f);
  }
};

struct StructuredImpl : torch::nn::Module {
  StructuredImpl() { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  Output forward(const torch::Tensor& x, const std::vector<torch::Tensor>& more) const {
    auto h = torch::nn::functional::linear(x, layer->weight, layer->bias);
    return {torch::tanh(h), more.empty() ? std::optional<torch::Tensor>() : torch::sin(h) + more[0]};
  }
  torch::nn::Linear layer = nullptr;
};
HP_MODULE(Structured);

struct OuterImpl : torch::nn::Module {
  OuterImpl() { inner = register_module("inner", Structured()); }
  std::tuple<std::vector<torch::Tensor>, std::map<std::string, torch::Tensor>, int> forward(const torch::Tensor& x) {
    auto out = inner(x, std::vector<torch::Tensor>{x});
    return {{out.logits, *out.extra}, {{"sum", out.logits + *out.extra}}, 7};
  }
  Structured inner = nullptr;
};
HP_MODULE(Outer);

struct InPlaceImpl : torch::nn::Module {
  InPlaceImpl() { layer = register_module("layer", torch::nn::Linear(4, 4)); }
  void forward(torch::Tensor& x, std::unique_ptr<int> moved) {
    count += *moved;
    x = layer(x);
  }
  torch::nn::Linear layer = nullptr;
  int count = 0;
};
HP_MODULE(InPlace);

TEST(Calls, ReferencesAndMoveOnlyArguments) {
  run_ranks(2, [] {
    InPlace module;
    fully_shard(module, freed());
    auto x = torch::ones({2, 4});
    module(x, std::make_unique<int>(3));
    EXPECT_EQ(module->count, 3);
    EXPECT_TRUE(x.requires_grad());
  });
}

/// B60: custom signatures, structs, nested custom modules. The gradient arrives through any one of the outputs.
TEST(Outputs, TensorsAreFoundInEveryContainer) {
  run_ranks(2, [] {
    Outer model;
    fully_shard(model->inner, freed());
    const HSDPModule root = fully_shard(model, freed());
    const auto x = torch::ones({2, 4}) * 0.1;
    for (int which = 0; which < 3; ++which) {
      root.zero_grad();
      auto [list, map, number] = model(x);
      EXPECT_EQ(number, 7);
      (which < 2 ? list[static_cast<std::size_t>(which)] : map.at("sum")).sum().backward();
      EXPECT_TRUE(model->inner->layer->named_parameters()["weight"].grad().defined()) << which;
    }
  });
}

TEST(Outputs, HooksDoNotPileUpOnThePassedThroughInput) {
  struct PassImpl : torch::nn::Module {
    PassImpl() { weight = register_parameter("weight", torch::ones({3})); }
    torch::Tensor forward(const torch::Tensor& x) { return x; }
    torch::Tensor weight;
  };
  run_ranks(2, [] {
    nn::HookedHolder<PassImpl> pass;
    fully_shard(pass, freed());
    auto x = torch::ones({3}).requires_grad_();
    for (int i = 0; i < 3; ++i) {
      auto y = pass(x);
      EXPECT_FALSE(y.is_same(x));
      y.sum().backward();
    }
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 3.0)));
  });
}

/// Several modules as one unit: gathered for the first, freed after the last (B63).
TEST(Lists, OneUnitOfThreeModules) {
  for (const bool reshard : {true, false}) {
    run_ranks(2, [&](int rank) {
      struct ChainImpl : torch::nn::Module {
        ChainImpl() {
          for (int i = 0; i < 3; ++i) parts.push_back(register_module("part" + std::to_string(i), Mlp(6, 4)));
        }
        torch::Tensor forward(torch::Tensor x) {
          for (auto& part : parts) x = part(x);
          return x;
        }
        std::vector<Mlp> parts;
      };
      using Chain = nn::HookedHolder<ChainImpl>;
      Chain chain, plain;
      seed_parameters(*chain, 6), seed_parameters(*plain, 6);
      FullyShardOptions options = freed();
      options.reshard_after_forward = reshard;
      const std::vector<HSDPModule> handles = fully_shard(chain->parts, options);
      EXPECT_EQ(handles.size(), 3U);
      EXPECT_EQ(handles[0].unit(), handles[2].unit());
      const HSDPModule root = fully_shard(chain, options);
      const auto x = torch::sin(torch::arange(24, torch::kFloat)).view({4, 6});
      plain(x).square().mean().backward();
      const Comm comm = options.mesh.get_group();
      for (int step = 0; step < 3; ++step) {
        root.zero_grad();
        const auto before = comm.counters().calls;
        auto y = chain(x.narrow(0, rank * 2, 2));
        EXPECT_EQ(handles[0].is_unsharded(), !reshard);
        EXPECT_EQ(comm.counters().calls - before, step == 0 ? 3 : 1)
            << "one gather for the three, after two comparisons in the first step";
        y.square().mean().backward();
        EXPECT_FALSE(handles[0].is_unsharded());
        EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5);
      }
    });
  }
}

/// Children of listed modules are dropped from the list, which still returns a handle for each.
TEST(Lists, ChildrenOfListedModulesAreDropped) {
  run_ranks(2, [] {
    Nest nest(6);
    const std::vector<HSDPModule> handles =
        fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{nest.ptr(), nest->inner.ptr()}, freed());
    ASSERT_EQ(handles.size(), 2U);
    EXPECT_EQ(handles[0].unit(), handles[1].unit());
    EXPECT_EQ(handles[0].groups().front().parameters.size(), 8U);
    nest(torch::ones({2, 6})).sum().backward();
  });
}

TEST(Ignored, ParametersStayAsTheyAre) {
  run_ranks(2, [] {
    Mlp mlp(6, 4);
    const torch::Tensor bias = mlp->a->bias;
    FullyShardOptions options = freed();
    options.ignored_params = {bias};
    const HSDPModule root = fully_shard(mlp, options);
    EXPECT_EQ(root.named_dtensors().size(), 4U);
    EXPECT_TRUE(mlp->a->named_parameters()["bias"].is_same(bias));
    mlp(torch::ones({2, 6})).sum().backward();
    EXPECT_EQ(bias.grad().sizes(), bias.sizes());
  });
}

/// Without a mesh: one axis over the whole world.
TEST(Mesh, DefaultIsTheWholeWorld) {
  run_ranks(3, [] {
    Mlp mlp(6, 4);
    const HSDPModule root = fully_shard(mlp);
    EXPECT_EQ(root.data_parallel_comm().size(), 3);
    mlp(torch::ones({2, 6})).sum().backward();
    EXPECT_EQ(full_gradients(root).size(), 5U);
  });
}

/// Evaluation without gradients between training steps; weights gathered before an optimizer step are never used after it.
TEST(Evaluation, BetweenStepsSeesTheNewWeights) {
  for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional(false), std::optional(true)}) {
    run_ranks(2, [&](int rank) {
      Net net = make_net(), plain = make_net();
      FullyShardOptions options = freed();
      options.reshard_after_forward = reshard;
      const HSDPModule root = shard_net(net, options);
      torch::optim::SGD sgd(net->parameters(), 0.2), plain_sgd(plain->parameters(), 0.2);
      for (int step = 0; step < 3; ++step) {
        const Batch batch = make_batch(4, static_cast<uint64_t>(step));
        const Batch mine = batch.part(rank, 2);
        sgd.zero_grad(), plain_sgd.zero_grad();
        net_loss(net(mine.tokens), mine.targets).backward();
        net_loss(plain(batch.tokens), batch.targets).backward();
        {
          torch::NoGradGuard no_grad;
          EXPECT_LT((net(batch.tokens) - plain(batch.tokens)).abs().max().item<float>(), 1e-4F);
        }
        sgd.step(), plain_sgd.step();
        torch::NoGradGuard no_grad;
        EXPECT_LT((net(batch.tokens) - plain(batch.tokens)).abs().max().item<float>(), 1e-4F);
      }
    });
  }
}

/// A unit called alone, then the root: the tree has no memory of who came first (G37).
TEST(Tree, ChildAloneThenRoot) {
  run_ranks(2, [] {
    Net net = make_net();
    const HSDPModule root = shard_net(net, freed());
    net->u1(torch::ones({2, 12})).sum().backward();
    EXPECT_TRUE(net->u1->a->named_parameters()["weight"].grad().defined());
    const Batch batch = make_batch(2, 1);
    net_loss(net(batch.tokens), batch.targets).backward();
    EXPECT_EQ(full_gradients(root).size(), root.named_dtensors().size());
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
