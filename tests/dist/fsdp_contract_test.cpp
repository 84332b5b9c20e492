// What happens when the caller, or another rank, does something wrong; and what stays usable afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

void step(const Net& net, uint64_t seed = 3) {
  const Batch batch = make_batch(4, seed);
  net_loss(net(batch.tokens), batch.targets).backward();
}

TEST(BadInput, Messages) {
  run_ranks(2, [] {
    const FullyShardOptions good = on_all();
    EXPECT_THAT([] { (void)init_device_mesh("cpu", {3}, {"dp"}); }, ThrowsMessage<ValueError>(HasSubstr("[init_device_mesh]")));
    EXPECT_THAT([&] { (void)good.mesh["tp"]; }, ThrowsMessage<ValueError>(HasSubstr("tp")));
    EXPECT_THAT([] { fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{}); },
                ThrowsMessage<ValueError>(HasSubstr("[fully_shard] list of modules is empty")));
    Mlp first(4, 4);
    EXPECT_THAT(
        [&] {
          fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{first.ptr(), nullptr});
        },
        ThrowsMessage<ValueError>(HasSubstr("list element 1 is no module")));
    EXPECT_THAT([&] { fully_shard(std::shared_ptr<torch::nn::Module>()); },
                ThrowsMessage<ValueError>(HasSubstr("module is null")));
    torch::nn::Linear plain(4, 4);
    EXPECT_THAT([&] { fully_shard(plain, good); },
                ThrowsMessage<ValueError>(HasSubstr("has no hooks, want one declared with HP_MODULE")));

    FullyShardOptions dim = good;
    dim.shard_placement_fn = [](const std::string&, const at::Tensor&) { return std::optional<int64_t>(2); };
    EXPECT_THAT([&] { fully_shard(first, dim); },
                ThrowsMessage<ValueError>(HasSubstr("shard_placement_fn returned dim 2 for parameter")));
    dim.shard_placement_fn = [](const std::string&, const at::Tensor& p) {
      return p.dim() == 2 ? std::optional<int64_t>(1) : std::nullopt;
    };
    dim.shard_layout = ShardLayout::kRagged;
    EXPECT_THAT([&] { fully_shard(first, dim); }, ThrowsMessage<ValueError>(HasSubstr("the ragged layout cuts flat rows")));

    FullyShardOptions deep = good;
    deep.mesh = init_device_mesh("cpu", {1, 2, 1}, {"a", "b", "c"});
    EXPECT_THAT([&] { fully_shard(first, deep); },
                ThrowsMessage<ValueError>(HasSubstr("mesh has 3 dims, want 1 (shard) or 2 (replicate, shard)")));
    FullyShardOptions integer = good;
    integer.mp_policy.param_dtype = torch::kInt;
    EXPECT_THAT([&] { fully_shard(first, integer); },
                ThrowsMessage<ValueError>(HasSubstr("mp_policy.param_dtype is Int, want a floating type")));
    FullyShardOptions tiny = good;
    tiny.mp_policy.reduce_dtype = torch::kFloat8_e5m2;
    EXPECT_THAT(
        [&] { fully_shard(first, tiny); },
        ThrowsMessage<ValueError>(HasSubstr("mp_policy.reduce_dtype is Float8_e5m2, want a floating type of 16 bits or more")));
    EXPECT_THAT([&] { (void)HSDPModule::of(first); }, ThrowsMessage<ValueError>(HasSubstr("is not sharded")));

    // Nothing was changed by any of these: the module still wraps and trains.
    for (const auto& parameter : first->parameters()) EXPECT_TRUE(parameter.is_leaf());
    fully_shard(first, good);
    EXPECT_THAT([&] { fully_shard(first, good); }, ThrowsMessage<ValueError>(HasSubstr("already a unit")));
    first(torch::ones({2, 4})).sum().backward();
    EXPECT_TRUE(first->a->named_parameters()["weight"].grad().defined());
  });
}

TEST(BadInput, TiedAcrossUnitsNamesBothPlaces) {
  run_ranks(2, [] {
    Mlp first(4, 4), second(4, 4);
    second->a->register_parameter("shared", first->a->weight);
    const FullyShardOptions options = on_all();
    fully_shard(first, options);
    EXPECT_THAT([&] { fully_shard(second, options); },
                ThrowsMessage<ValueError>(
                    ::testing::AllOf(HasSubstr("already managed by unit Mlp"), HasSubstr("parameter a.shared of unit Mlp"))));
  });
}

struct DictImpl : torch::nn::Module {
  DictImpl() { dict = register_module("dict", torch::nn::ParameterDict()), dict->insert("w", torch::ones({2})); }
  torch::Tensor forward(const torch::Tensor& x) { return x * dict->get("w"); }
  torch::nn::ParameterDict dict = nullptr;
};
HP_MODULE(Dict);

struct EncodedImpl : torch::nn::Module {
  explicit EncodedImpl(const std::string& name, const Mlp& encoder_) : encoder(register_module(name, encoder_)) {
    last = register_parameter("last", torch::ones({4}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return encoder(x) * last; }
  Mlp encoder;
  torch::Tensor last;
};
HP_MODULE(Encoded);

TEST(BadInput, UnitOfAnotherTree) {
  run_ranks(2, [] {
    const Mlp encoder(4, 5);
    Encoded actor("encoder", encoder), critic("shared", encoder);
    fully_shard(encoder, on_all());
    const HSDPModule root = fully_shard(actor, on_all());
    EXPECT_THAT([&] { fully_shard(critic, on_all()); },
                ThrowsMessage<ValueError>(HasSubstr("inner unit encoder belongs to the tree of unit Encoded")));
    EXPECT_EQ(HSDPModule::of(encoder).name(), "encoder");
    EXPECT_TRUE(critic->named_parameters()["last"].is_same(critic->last)) << "nothing was changed";
    actor(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(full_gradients(root).size(), 6U);
  });
}

struct PhaseImpl : torch::nn::Module {
  PhaseImpl() { phase = register_parameter("phase", torch::ones({2}, torch::kComplexFloat)); }
  torch::Tensor forward(const torch::Tensor& x) { return x * torch::real(phase); }
  torch::Tensor phase;
};
HP_MODULE(Phase);

TEST(BadInput, ComplexParametersMayBeFrozenOnly) {
  run_ranks(2, [] {
    Phase module;
    EXPECT_THAT([&] { fully_shard(module, on_all()); },
                ThrowsMessage<ValueError>(HasSubstr("trainable parameter is ComplexFloat, want a floating type")));
    module->phase.set_requires_grad(false);
    fully_shard(module, on_all());
    EXPECT_TRUE((module(torch::ones({2})) == 1).all().item<bool>());
  });
}

TEST(BadInput, EmptyHandles) {
  const HSDPModule empty;
  const auto message = HasSubstr("[HSDPModule] the handle is empty, want the one that fully_shard returned");
  EXPECT_THAT([&] { (void)empty.unshard(); }, ThrowsMessage<ValueError>(message));
  EXPECT_THAT([&] { empty.reshard(); }, ThrowsMessage<ValueError>(message));
  EXPECT_THAT([&] { empty.zero_grad(); }, ThrowsMessage<ValueError>(message));
  EXPECT_THAT([&] { empty.set_requires_gradient_sync(true); }, ThrowsMessage<ValueError>(message));
  EXPECT_THAT([&] { (void)empty.named_dtensors(); }, ThrowsMessage<ValueError>(message));
  EXPECT_THAT([&] { fsdp::to_empty(empty); }, ThrowsMessage<ValueError>(message));
}

TEST(BadInput, ParameterDictIsRefused) {
  run_ranks(2, [] {
    Dict dict;
    EXPECT_THAT([&] { fully_shard(dict, on_all()); }, ThrowsMessage<ValueError>(HasSubstr("ParameterList or ParameterDict")));
  });
}

/// Runs `body` on all ranks, each of which must fail; returns the messages.
std::vector<std::string> messages(int world, const std::function<void(int)>& body) {
  std::vector<std::string> texts(static_cast<std::size_t>(world));
  run_ranks(world, {.timeout = std::chrono::seconds(5)}, [&](int rank) {
    try {
      body(rank);
    } catch (const Error& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return texts;
}

TEST(Disagreement, DifferentShapes) {
  for (const std::string& text : messages(3, [](int rank) {
         Mlp mlp(6, rank == 1 ? 5 : 4);
         fully_shard(mlp, on_all());
         (void)mlp(torch::ones({2, 6}));
       })) {
    EXPECT_THAT(text, HasSubstr("[fully_shard]"));
    EXPECT_THAT(text, HasSubstr("a.weight"));
    EXPECT_THAT(text, HasSubstr("[5, 6]"));
    EXPECT_THAT(text, HasSubstr("[4, 6]"));
  }
}

TEST(Disagreement, DifferentDtypes) {
  for (const std::string& text : messages(2, [](int rank) {
         Mlp mlp(6, 4);
         if (rank == 1) mlp->to(torch::kDouble);
         fully_shard(mlp, on_all());
         (void)mlp(torch::ones({2, 6}, rank == 1 ? torch::kDouble : torch::kFloat));
       })) {
    EXPECT_THAT(text, HasSubstr("Double"));
    EXPECT_THAT(text, HasSubstr("Float"));
  }
}

struct TwoPathsImpl : torch::nn::Module {
  TwoPathsImpl() {
    left = register_module("left", Mlp(6, 4));
    right = register_module("right", Mlp(6, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, bool left_first) { return left_first ? right(left(x)) : left(right(x)); }
  Mlp left = nullptr, right = nullptr;
};
HP_MODULE(TwoPaths);

/// Equal sizes, so that without a check the wrong weights would be gathered silently.
TEST(Disagreement, DifferentOrderOfUnits) {
  for (const std::string& text : messages(2, [](int rank) {
         TwoPaths net;
         fully_shard(net->left, on_all());
         fully_shard(net->right, on_all());
         fully_shard(net, on_all());
         (void)net(torch::ones({2, 6}), rank == 0);
       })) {
    EXPECT_THAT(text, HasSubstr("all-gather of unit left"));
    EXPECT_THAT(text, HasSubstr("all-gather of unit right"));
  }
}

TEST(Disagreement, LaterOrderTimesOutWithNames) {
  for (const std::string& text : messages(2, [](int rank) {
         TwoPaths net;
         fully_shard(net->left, on_all());
         fully_shard(net->right, on_all());
         fully_shard(net, on_all());
         for (int i = 0; i < 2; ++i) net(torch::ones({2, 6}), true).sum().backward();
         // Rank 0 has what it needs of the first of these, and notices in the next.
         for (int i = 0; i < 2; ++i) net(torch::ones({2, 6}), rank == 0).sum().backward();
       })) {
    EXPECT_THAT(text, ::testing::AnyOf(HasSubstr("unit left"), HasSubstr("unit right"), HasSubstr("left,"), HasSubstr("right,")))
        << text;
    EXPECT_THAT(text, HasSubstr("all_gather_single"));
  }
}

TEST(Guard, ForwardBehindTheHooks) {
  run_ranks(2, [] {
    Net net = make_net();
    shard_net(net, on_all());
    auto* raw = net->u1->as<MlpImpl>();
    EXPECT_THAT(
        [&] {
          (void)raw->forward(torch::ones({2, 12}));
        },
        ThrowsMessage<std::exception>(
            ::testing::AllOf(HasSubstr("the parameters of unit u1 are resharded"), HasSubstr("unshard()"))));
    // With the parameters gathered by hand the same call is fine.
    const HSDPModule unit = HSDPModule::of(net->u1);
    unit.unshard();
    EXPECT_TRUE(unit.is_unsharded());
    EXPECT_EQ(raw->forward(torch::ones({2, 12})).size(0), 2);
    unit.reshard();
    EXPECT_FALSE(unit.is_unsharded());
    auto handle = unit.unshard(/*async_op=*/true);
    EXPECT_FALSE(unit.is_unsharded());
    handle.wait();
    handle.wait();
    EXPECT_TRUE(unit.is_unsharded());
    unit.reshard();
    handle = unit.unshard(/*async_op=*/true);
    unit.reshard();
    handle.wait();
    EXPECT_FALSE(unit.is_unsharded()) << "it was freed in between";
  });
}

TEST(Guard, StrictAlsoInAWorldOfOne) {
  run_ranks(1, [] {
    ::setenv("HP_STRICT_GUARD", "1", 1);
    Net net = make_net(), loose = make_net();
    const HSDPModule root = shard_net(net, on_all());
    ::setenv("HP_STRICT_GUARD", "0", 1);
    const HSDPModule loose_root = shard_net(loose, on_all());
    ::unsetenv("HP_STRICT_GUARD");
    EXPECT_THROW((void)net->u1->as<MlpImpl>()->forward(torch::ones({2, 12})), std::exception);
    EXPECT_NO_THROW((void)loose->u1->as<MlpImpl>()->forward(torch::ones({2, 12})));
    for (int i = 0; i < 3; ++i) step(net), step(loose);
    EXPECT_EQ(relative_difference(full_gradients(root), full_gradients(loose_root)), 0.0);
    EXPECT_EQ(root.memory_use().pool, root.plan_memory().pool);
  });
}

TEST(TorchLoad, ShardsAreAdoptedAgain) {
  for (const auto layout : {ShardLayout::kPerParameter, ShardLayout::kRagged}) {
    for (const int world : {1, 2}) {
      run_ranks(world, [&] {
        Net net = make_net({}, 1), other = make_net({}, 2);
        const HSDPModule root = shard_net(net, on_all(layout)), source = shard_net(other, on_all(layout));
        torch::optim::SGD sgd(net->parameters(), 0.1);
        step(net);
        std::stringstream file;
        torch::save(other, file);
        torch::load(net, file);
        EXPECT_EQ(relative_difference(full_parameters(root), full_parameters(source)), 0.0);
        // The same optimizer goes on with the loaded values.
        root.zero_grad();
        step(net), step(other);
        EXPECT_LT(relative_difference(full_gradients(root), full_gradients(source)), 1e-6);
        const Tensors before = full_parameters(root);
        sgd.step();
        EXPECT_GT(relative_difference(full_parameters(root), before), 0.0);
      });
    }
  }
}

TEST(TorchLoad, WholeTensorsAreCut) {
  run_ranks(3, [] {
    Mlp whole(6, 5);
    seed_parameters(*whole, 9);
    std::stringstream file;
    torch::save(whole, file);
    const auto want = [&] {
      Tensors tensors;
      for (auto& entry : whole->named_parameters()) tensors[entry.key()] = entry.value().detach().clone();
      return tensors;
    }();
    Mlp mlp(6, 5);
    const HSDPModule root = fully_shard(mlp, on_all());
    torch::load(mlp, file);
    EXPECT_EQ(relative_difference(full_parameters(root), want), 0.0);
  });
}

TEST(ModuleTo, OfAPartOfAGroupIsRefusedByName) {
  run_ranks(2, [] {
    Mlp mlp(6, 5);
    fully_shard(mlp, on_all());
    mlp->a->to(torch::kDouble);
    EXPECT_THAT(
        [&] {
          (void)mlp(torch::ones({2, 6}));
        },
        ThrowsMessage<ValueError>(HasSubstr("parameter a.weight of unit Mlp became Double")));
    mlp->a->to(torch::kFloat);
    EXPECT_EQ(mlp(torch::ones({2, 6})).size(0), 2) << "and works again when it is taken back";
  });
}

struct ThrowingImpl : torch::nn::Module {
  ThrowingImpl() {
    before = register_module("before", Mlp(6, 4));
    after = register_module("after", Mlp(6, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, int where) {
    auto h = before(x);
    if (where == 1) throw std::runtime_error("user error in forward");
    if (where == 2) {
      h.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("user error in backward"); });
    }
    return after(h);
  }
  Mlp before = nullptr, after = nullptr;
};
HP_MODULE(Throwing);

TEST(Recovery, AfterExceptionsInForwardAndBackward) {
  for (const int world : {1, 2}) {
    run_ranks(world, [&] {
      Throwing net;
      seed_parameters(*net, 4);
      fully_shard(net->before, on_all()), fully_shard(net->after, on_all());
      const HSDPModule root = fully_shard(net, on_all());
      const auto run = [&](int where) { net(torch::ones({3, 6}), where).sum().backward(); };
      run(0), run(0);
      root.zero_grad();
      run(0);
      const Tensors want = full_gradients(root);
      for (const int where : {1, 2}) {
        root.zero_grad();
        EXPECT_THROW(run(where), std::runtime_error);
        root.zero_grad();
        run(0);
        EXPECT_EQ(relative_difference(full_gradients(root), want), 0.0) << "after an exception at " << where;
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
