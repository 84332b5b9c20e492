// The optimizers over flat shards: bits that do not depend on the cut, groups, dtypes, state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/counting_allocator.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;

bool is_matrix(const std::string&, const std::vector<int64_t>& shape) { return shape.size() >= 2; }

/// `make(root)` builds an optimizer; five steps with the same whole gradients must end in the same bits everywhere.
template <class Make>
void expect_bits_independent_of_the_cut(Make make) {
  Tensors want;
  on_every_mesh(kMeshes, [&](const HSDPModule& root, int rank, const std::string& where) {
    auto optimizer = make(root);
    for (int step = 0; step < 5; ++step) {
      set_gradients(root, step);
      optimizer.step();
    }
    const Tensors got = full_parameters(root);
    if (rank != 0) return;
    if (want.empty()) want = got;  // the first mesh has one rank
    expect_same_bits(got, want, where);
  });
}

TEST(FlatOptimizer, TheCutDoesNotChangeABit) {
  expect_bits_independent_of_the_cut(
      [](const HSDPModule& root) { return optim::AdamW(root, {.lr = 0.02, .weight_decay = 0.1, .decays = is_matrix}); });
  expect_bits_independent_of_the_cut([](const HSDPModule& root) {
    return optim::SGD(root, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
  });
}

TEST(FlatOptimizer, TheOrderOfGroupsDoesNotChangeABit) {
  run_ranks(2, [] {
    const optim::ParamGroup matrices{.predicate = is_matrix, .lr = 0.03};
    const optim::ParamGroup scales{.names = {"u1.scale", "u3.scale"}, .weight_decay = 0.5};
    Tensors first;
    for (const auto& groups : {std::vector{matrices, scales}, std::vector{scales, matrices}}) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all());
      optim::AdamW adamw(root, {.lr = 0.02, .groups = groups});
      for (int step = 0; step < 3; ++step) set_gradients(root, step), adamw.step();
      if (first.empty()) first = full_parameters(root);
      expect_same_bits(full_parameters(root), first, "swapped groups");
    }
  });
}

/// Large parameters are shared among the threads of a rank.
TEST(FlatOptimizer, ThreadsDoNotChangeABit) {
  run_ranks(1, [] {
    Tensors first;
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      nn::Linear layer(torch::nn::LinearOptions(700, 301));
      seed_parameters(*layer, 5);
      const HSDPModule root = fully_shard(layer, on_all());
      optim::AdamW adamw(root, {.lr = 0.02});
      optim::SGD sgd(root, {.lr = 0.1, .momentum = 0.9});
      for (int step = 0; step < 3; ++step) set_gradients(root, step), adamw.step(), sgd.step();
      if (first.empty()) first = full_parameters(root);
      expect_same_bits(full_parameters(root), first, concat(threads, " threads"));
    }
    at::set_num_threads(1);
  });
}

/// Groups by name and by predicate against torch's parameter groups.
TEST(FlatOptimizer, ParameterGroupsAreTorchs) {
  run_ranks(2, [] {
    for (const auto layout : kLayouts) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all(layout));
      optim::AdamW adamw(root, {.lr = 0.02,
                                .weight_decay = 0.1,
                                .groups = {{.names = {"u1.a.weight", "u3.scale"}, .lr = 0.05, .weight_decay = 0.0},
                                           {.predicate = is_matrix, .betas = {{0.5, 0.6}}, .eps = 1e-3}}});
      Tensors whole = full_parameters(root);
      std::vector<torch::Tensor> named, matrices, others;
      for (auto& [name, tensor] : whole) {
        tensor.set_requires_grad(true);
        (name == "u1.a.weight" || name == "u3.scale" ? named : tensor.dim() >= 2 ? matrices : others).push_back(tensor);
      }
      const auto options = [](double lr, double decay) { return torch::optim::AdamWOptions(lr).weight_decay(decay); };
      torch::optim::AdamW first(named, options(0.05, 0.0)), rest(others, options(0.02, 0.1)),
          second(matrices, options(0.02, 0.1).betas({0.5, 0.6}).eps(1e-3));
      for (int step = 0; step < 4; ++step) {
        set_gradients(root, step), set_whole_gradients(whole, step);
        adamw.step(), first.step(), second.step(), rest.step();
      }
      EXPECT_LT(relative_difference(full_parameters(root), whole), 2e-6);
      EXPECT_EQ(adamw.lrs(), (std::vector<double>{0.05, 0.02, 0.02}));
      adamw.set_lr(0.0);
      const Tensors before = full_parameters(root);
      set_gradients(root, 9), adamw.step();
      expect_same_bits(full_parameters(root), before, "rate 0");
    }
  });
}

TEST(SGD, EqualsTorch) {
  struct Case {
    double momentum, dampening, decay;
    bool nesterov;
  };
  for (const Case& c : {Case{0, 0, 0, false}, Case{0, 0, 0.1, false}, Case{0.9, 0, 0, false}, Case{0.9, 0.3, 0.1, false},
                        Case{0.9, 0, 0.1, true}}) {
    run_ranks(3, [&] {
      for (const auto layout : kLayouts) {
        Net net = make_net();
        const HSDPModule root = shard_net(net, on_all(layout));
        optim::SGD sgd(
            root, {.lr = 0.1, .momentum = c.momentum, .dampening = c.dampening, .weight_decay = c.decay, .nesterov = c.nesterov});
        Tensors whole = full_parameters(root);
        torch::optim::SGD reference(
            as_leaves(whole),
            torch::optim::SGDOptions(0.1).momentum(c.momentum).dampening(c.dampening).weight_decay(c.decay).nesterov(c.nesterov));
        for (int step = 0; step < 4; ++step) {
          set_gradients(root, step), set_whole_gradients(whole, step);
          sgd.step(), reference.step();
        }
        EXPECT_LT(relative_difference(full_parameters(root), whole), 5e-6) << c.momentum << ' ' << c.dampening;
      }
    });
  }
}

TEST(FlatOptimizer, MaximizeIsTheNegatedGradient) {
  run_ranks(2, [] {
    const auto run = [](auto make, bool negate) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all());
      auto optimizer = make(root, !negate);
      for (int step = 0; step < 3; ++step) {
        set_gradients(root, step);
        for (auto& group : root.groups()) {
          for (auto& parameter : group.parameters) parameter.grad.mul_(negate ? -1 : 1);
        }
        optimizer.step();
      }
      return full_parameters(root);
    };
    const auto adamw = [](const HSDPModule& root, bool maximize) { return optim::AdamW(root, {.maximize = maximize}); };
    const auto sgd = [](const HSDPModule& root, bool maximize) {
      return optim::SGD(root, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .maximize = maximize});
    };
    expect_same_bits(run(adamw, false), run(adamw, true), "AdamW");
    expect_same_bits(run(sgd, false), run(sgd, true), "SGD");
  });
}

/// Every dtype of shard, gradient and state against torch in fp32 (fp64), rounded where memory rounds.
void check_dtypes(torch::Dtype shard, torch::Dtype gradient, torch::Dtype state, bool master) {
  Mlp mlp(13, 7);
  seed_parameters(*mlp, 1);
  mlp->to(shard);
  const HSDPModule root = fully_shard(mlp, on_all(ShardLayout::kRagged));
  optim::AdamW adamw(root, {.lr = 0.02, .weight_decay = 0.1, .state_dtype = state, .master_weights = master});
  Tensors whole;
  for (auto& [name, tensor] : full_parameters(root)) whole[name] = tensor.to(torch::kDouble);
  torch::optim::AdamW reference(as_leaves(whole), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  for (int step = 0; step < 3; ++step) {
    set_gradients(root, step, gradient);
    for (auto& [name, tensor] : whole)
      tensor.mutable_grad() = whole_gradient(name, tensor.sizes().vec(), step).to(gradient).to(torch::kDouble);
    adamw.step(), reference.step();
  }
  Tensors got;
  for (auto& [name, tensor] : full_parameters(root)) got[name] = tensor.to(torch::kDouble);
  // The roundings of three steps: of the shard, unless a master keeps the rest, and of the state.
  const auto unit = [](torch::Dtype dtype) {
    return dtype == torch::kBFloat16 ? 0x1p-8 : dtype == torch::kHalf ? 0x1p-11 : 1e-6;
  };
  const double tolerance = (master ? 1 : 3) * unit(shard) + 0.3 * unit(state);
  EXPECT_LT(relative_difference(got, whole), tolerance) << shard << ' ' << gradient << ' ' << state << ' ' << master;
}

TEST(FlatOptimizer, EveryCombinationOfDtypes) {
  run_ranks(2, [] {
    for (const auto shard : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
      for (const auto gradient : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
        for (const auto state : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
          for (const bool master : {false, true}) check_dtypes(shard, gradient, state, master);
        }
      }
    }
  });
}

/// Without a master copy, steps that are small against the parameter are lost; with it they add up.
TEST(FlatOptimizer, MasterWeightsKeepSmallSteps) {
  run_ranks(2, [] {
    for (const bool master : {false, true}) {
      nn::Linear layer(torch::nn::LinearOptions(8, 8).bias(false));
      layer->to(torch::kBFloat16);
      torch::Tensor weight = layer->weight;
      torch::NoGradGuard no_grad;
      weight.fill_(1.0);
      const HSDPModule root = fully_shard(layer, on_all());
      optim::SGD sgd(root, {.lr = 1e-4, .master_weights = master});
      for (int step = 0; step < 200; ++step) {
        for (auto& parameter : layer->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
        sgd.step();
      }
      for (auto& parameter : layer->parameters())
        EXPECT_EQ(parameter.to(torch::kFloat).max().item<float>(), master ? 0.98046875F : 1.0F);
      if (!master) continue;
      EXPECT_NEAR(sgd.state()[0].at("master").mean().item<double>(), 0.98, 1e-5);
      for (auto& parameter : layer->parameters()) parameter.fill_(3.0);  // a load, or a user
      sgd.step();
      EXPECT_NEAR(sgd.state()[0].at("master").mean().item<double>(), 2.9999, 1e-5);
    }
  });
}

TEST(FlatOptimizer, StateGoesOnWhereItStopped) {
  run_ranks(3, [] {
    const auto check = [](auto make) {
      for (const auto layout : kLayouts) {
        Net net = make_net(), other = make_net();
        net->to(torch::kBFloat16), other->to(torch::kBFloat16);
        const HSDPModule root = shard_net(net, on_all(layout)), copy = shard_net(other, on_all(layout));
        auto optimizer = make(root), resumed = make(copy);
        for (int step = 0; step < 3; ++step) set_gradients(root, step), optimizer.step();
        {
          torch::NoGradGuard no_grad;
          auto from = net->parameters(), to = other->parameters();
          for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
        }
        auto state = optimizer.state();
        std::reverse(state.begin(), state.end());
        resumed.load_state(state);
        for (int step = 3; step < 5; ++step) {
          set_gradients(root, step), optimizer.step();
          set_gradients(copy, step), resumed.step();
        }
        expect_same_bits(full_parameters(copy), full_parameters(root), "resumed");
      }
    };
    check([](const HSDPModule& root) { return optim::AdamW(root, {.lr = 0.02, .master_weights = true}); });
    check([](const HSDPModule& root) { return optim::SGD(root, {.lr = 0.1, .momentum = 0.9, .dampening = 0.5}); });
  });
}

TEST(FlatOptimizer, StepsAllocateNothing) {
  run_ranks(1, [] {
    Net net = make_net();
    net->to(torch::kBFloat16);
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
    optim::AdamW adamw(root, {.master_weights = true});
    optim::SGD sgd(root, {.momentum = 0.9});
    set_gradients(root, 0);
    adamw.step(), sgd.step();
    const CountCpuAllocations counting;
    reset_allocation_counts();
    adamw.step(), sgd.step();
    EXPECT_EQ(allocation_counts().allocations, 0);
  });
}

TEST(FlatOptimizer, LeavesFrozenAndUnchosenParametersAlone) {
  run_ranks(2, [] {
    Net net = make_net();
    for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
    const HSDPModule root = shard_net(net, on_all());
    optim::AdamW adamw(root, {.parameters = [](const std::string& name, const auto&) { return !name.starts_with("u1."); }});
    const Tensors before = full_parameters(root);
    set_gradients(root, 0);
    adamw.step();
    const Tensors after = full_parameters(root);
    for (const auto& [name, value] : before) {
      const bool still = name.starts_with("u1.") || name.starts_with("u3.");
      EXPECT_EQ(torch::equal(value, after.at(name)), still) << name;
    }
    for (const auto& state : adamw.state()) EXPECT_EQ(state.step, state.name.starts_with("u3.") ? 0 : 1) << state.name;
  });
}

TEST(FlatOptimizer, Errors) {
  run_ranks(1, [] {
    nn::Linear layer(4, 4);
    const HSDPModule root = fully_shard(layer, on_all());
    const auto adamw = [&](optim::AdamWOptions options) {
      return value_error([&] { return optim::AdamW(root, std::move(options)); });
    };
    EXPECT_THAT(adamw({.groups = {{.lr = 1}}}), HasSubstr("[AdamW] parameter group 0 has neither names nor a predicate"));
    EXPECT_THAT(adamw({.groups = {{.names = {"wieght"}}}}), HasSubstr("parameter group lists wieght, want the name"));
    EXPECT_THAT(adamw({.groups = {{.names = {"bias"}}, {.names = {"bias"}}}}), HasSubstr("parameter groups list bias twice"));
    EXPECT_THAT(adamw({.groups = {{.names = {"bias"}, .lr = -1}}}), HasSubstr("lr is -1"));
    EXPECT_THAT(adamw({.state_dtype = torch::kHalf}), HasSubstr("state_dtype is Half, want float32, float64 or bfloat16"));
    const auto sgd = [&](optim::SGDOptions options) { return value_error([&] { return optim::SGD(root, std::move(options)); }); };
    EXPECT_THAT(sgd({.momentum = -1}), HasSubstr("[SGD] momentum is -1"));
    EXPECT_THAT(sgd({.nesterov = true}), HasSubstr("[SGD] nesterov with momentum 0"));
    EXPECT_THAT(sgd({.groups = {{.names = {"bias"}, .eps = 1}}}), HasSubstr("sets betas or eps, want lr and weight_decay only"));

    optim::AdamW optimizer(root);
    EXPECT_THAT(value_error([&] { optimizer.set_lrs({1, 2}); }), HasSubstr("2 learning rates, want 1"));
    EXPECT_THAT(value_error([&] { optimizer.set_lr(-1); }), HasSubstr("[AdamW] lr is -1"));
    EXPECT_THAT(value_error([&] { optimizer.set_lr(NAN); }), HasSubstr("[AdamW] lr is nan"));
    auto state = optimizer.state();
    EXPECT_THAT(value_error([&] { return state[0].at("exp_avg"); }), HasSubstr("has no exp_avg"));
    EXPECT_THAT(value_error([&] { optimizer.load_state({state[0]}); }), HasSubstr("the state lacks"));
    EXPECT_THAT(value_error([&] { optimizer.load_state({state[0], state[0]}); }), HasSubstr("twice"));
    state[1].tensors = {{"exp_avg", torch::zeros({3})}};
    EXPECT_THAT(value_error([&] { optimizer.load_state(state); }), HasSubstr("has 3 elements, want the 4 of this rank's part"));
    state[1].tensors = {{"momentum", torch::zeros({4})}};
    EXPECT_THAT(value_error([&] { optimizer.load_state(state); }), HasSubstr("has a tensor momentum"));
    state[1] = {.name = "other"};
    EXPECT_THAT(value_error([&] { optimizer.load_state(state); }), HasSubstr("the state lacks bias"));

    layer->parameters()[0].mutable_grad() = torch::zeros({2, 4});
    layer->parameters()[1].mutable_grad() = torch::ones({4});
    const Tensors before = full_parameters(root);
    EXPECT_THAT(value_error([&] { optimizer.step(); }), HasSubstr("the gradient of weight is Float [2, 4]"));
    expect_same_bits(full_parameters(root), before, "a step that failed");
    layer->parameters()[0].mutable_grad() = torch::ones({4, 8}).slice(1, 0, 8, 2);
    optimizer.step();
    EXPECT_EQ(optimizer.state()[0].step, 1);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
