// State dictionaries of optimizers: ours and torch's, every form, and checkpoints of them.
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// parameters() lists the tied table twice.
std::vector<torch::Tensor> parameters_once(const torch::nn::Module& module) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& parameter : module.parameters()) {
    if (std::none_of(result.begin(), result.end(), [&](const torch::Tensor& known) { return known.is_same(parameter); }))
      result.push_back(parameter);
  }
  return result;
}

/// An optimizer of one kind: made, stepped, referred to.
struct Optimizer {
  std::shared_ptr<torch::optim::Optimizer> of_torch;
  std::shared_ptr<optim::FlatOptimizer> ours;
  [[nodiscard]] OptimizerRefs refs() const { return of_torch ? OptimizerRefs(*of_torch) : OptimizerRefs(*ours); }
  void step() const {
    if (of_torch) {
      of_torch->step();
    } else {
      ours->step();
    }
  }
};

using Make = std::function<Optimizer(const Net&, const HSDPModule&)>;

template <class T, class Options>
Make torch_kind(Options options) {
  return [options](const Net& net, const HSDPModule&) {
    const std::vector<torch::Tensor> all = parameters_once(*net);
    // Two groups, the second with a rate of its own.
    auto slow = options;
    slow.lr(options.lr() / 2);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<torch::Tensor>(all.begin(), all.begin() + 3), std::make_unique<Options>(options));
    groups.emplace_back(std::vector<torch::Tensor>(all.begin() + 3, all.end()), std::make_unique<Options>(slow));
    return Optimizer{std::make_shared<T>(groups, options), nullptr};
  };
}

const std::vector<std::pair<std::string, Make>>& kinds() {
  namespace to = torch::optim;
  static const std::vector<std::pair<std::string, Make>> all = {
      {"Adam", torch_kind<to::Adam>(to::AdamOptions(0.01))},
      {"AdamW amsgrad", torch_kind<to::AdamW>(to::AdamWOptions(0.01).amsgrad(true).weight_decay(0.1))},
      {"SGD momentum", torch_kind<to::SGD>(to::SGDOptions(0.05).momentum(0.9).nesterov(true))},
      {"SGD plain", torch_kind<to::SGD>(to::SGDOptions(0.05))},
      {"Adagrad", torch_kind<to::Adagrad>(to::AdagradOptions(0.05).initial_accumulator_value(0.1).lr_decay(0.01))},
      {"RMSprop", torch_kind<to::RMSprop>(to::RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"our AdamW",
       [](const Net&, const HSDPModule& root) {
         return Optimizer{nullptr,
                          std::make_shared<optim::AdamW>(
                              root, optim::AdamWOptions{.lr = 0.01, .groups = {{.names = {"u1.a.weight"}, .lr = 0.003}}})};
       }},
      {"our SGD",
       [](const Net&, const HSDPModule& root) {
         return Optimizer{nullptr, std::make_shared<optim::SGD>(root, optim::SGDOptions{.lr = 0.05, .momentum = 0.9})};
       }},
      {"our Muon",
       [](const Net&, const HSDPModule& root) {
         return Optimizer{nullptr,
                          std::make_shared<optim::Muon>(root, optim::MuonOptions{.lr = 0.01, .not_matrices = {"table.weight"}})};
       }},
  };
  return all;
}

/// A sharded net and its optimizer.
struct Trained {
  Trained(const std::vector<int64_t>& mesh, ShardLayout layout, const Make& make, uint64_t seed = 1,
          const NetOptions& net_options = {})
      : net(make_net(net_options, seed)), root(shard_net(net, on_mesh(mesh, layout))), optimizer(make(net, root)) {}
  void step(int index) {
    const Batch batch = make_batch(12, static_cast<uint64_t>(100 + index)).part(get_rank(), get_world_size());
    root.zero_grad();
    net_loss(net(batch.tokens), batch.targets).backward();
    optimizer.step();
  }
  Net net;
  HSDPModule root;
  Optimizer optimizer;
};

bool same(const Tensors& a, const Tensors& b) { return relative_difference(a, b) == 0.0; }

struct Form {
  const char* name;
  StateDictOptions get, set;
};

const std::vector<Form> kForms = {
    {"parts", {}, {}},
    {"flat parts", {.flatten_optimizer_state_dict = true}, {.flatten_optimizer_state_dict = true}},
    {"full", {.full_state_dict = true}, {.full_state_dict = true}},
    {"rank 0",
     {.full_state_dict = true, .cpu_offload = true},
     {.full_state_dict = true, .cpu_offload = true, .broadcast_from_rank0 = true}},
    {"flat rank 0",
     {.full_state_dict = true, .cpu_offload = true, .flatten_optimizer_state_dict = true},
     {.full_state_dict = true, .broadcast_from_rank0 = true, .flatten_optimizer_state_dict = true}},
};

TEST(OptimizerStateDict, EveryKindInEveryFormGoesOnBitForBit) {
  for (const auto& [kind, make] : kinds()) {
    for (const Form& form : kForms) {
      run_ranks(2, [&, &make = make, &kind = kind](int rank) {
        Trained run({2}, ShardLayout::kPerParameter, make);
        run.step(0);
        run.step(1);
        // Of another layout, other values and another state.
        Trained fresh({2}, ShardLayout::kRagged, make, 7), used({2}, ShardLayout::kPerParameter, make, 8);
        used.step(5);
        const std::vector<torch::Tensor> leaves = used.net->parameters();
        const StateDicts saved = get_state_dict(run.net, run.optimizer.refs(), form.get);
        EXPECT_EQ(saved.model.empty(), form.get.cpu_offload && rank != 0);
        if (!form.get.flatten_optimizer_state_dict && (rank == 0 || !form.get.cpu_offload)) {
          EXPECT_TRUE(saved.optimizer.flat.empty());
          EXPECT_EQ(saved.optimizer.state.contains("u2.inner.scale"), kind != "SGD plain");
        } else {
          EXPECT_TRUE(saved.optimizer.state.empty());
        }
        set_state_dict(fresh.net, fresh.optimizer.refs(), saved, form.set);
        set_state_dict(used.net, used.optimizer.refs(), saved, form.set);
        run.step(2);
        fresh.step(2);
        used.step(2);
        const Tensors want = full_parameters(run.root);
        EXPECT_TRUE(same(full_parameters(fresh.root), want)) << kind << ' ' << form.name;
        EXPECT_TRUE(same(full_parameters(used.root), want)) << kind << ' ' << form.name;
        const std::vector<torch::Tensor> after = used.net->parameters();
        for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(after[i].is_same(leaves[i]));
      });
    }
  }
}

/// B41: whole dictionaries do not know the number of ranks.
TEST(OptimizerStateDict, FromTwoRanksToOthers) {
  for (const auto& [kind, make] : kinds()) {
    StateDicts saved;
    Tensors want;
    run_ranks(2, [&, &make = make](int rank) {
      Trained run({2}, ShardLayout::kPerParameter, make);
      run.step(0);
      const StateDicts all = get_state_dict(run.net, run.optimizer.refs(), {.full_state_dict = true, .cpu_offload = true});
      if (rank == 0) saved = all;
      run.step(1);
      const Tensors parameters = full_parameters(run.root);
      if (rank == 0) want = parameters;
    });
    for (const auto& mesh : std::vector<std::vector<int64_t>>{{1}, {4}, {2, 2}}) {
      run_ranks(ranks_of(mesh), [&, &make = make, &kind = kind](int rank) {
        Trained run(mesh, ShardLayout::kRagged, make, 7);
        set_state_dict(run.net, run.optimizer.refs(), rank == 0 ? saved : StateDicts(),
                       {.full_state_dict = true, .broadcast_from_rank0 = true});
        run.step(1);
        EXPECT_LT(relative_difference(full_parameters(run.root), want), 1e-4) << kind << ' ' << at::IntArrayRef(mesh);
      });
    }
  }
}

TEST(OptimizerStateDict, SettingsComeWithIt) {
  run_ranks(2, [] {
    const Make& make = kinds()[1].second;
    Trained run({2}, ShardLayout::kPerParameter, make), other({2}, ShardLayout::kPerParameter, make);
    static_cast<torch::optim::AdamWOptions&>(run.optimizer.of_torch->param_groups()[1].options())
        .lr(0.7)
        .betas({0.5, 0.6})
        .amsgrad(false);
    const OptimizerStateDict saved = get_optimizer_state_dict(run.net, *run.optimizer.of_torch);
    ASSERT_EQ(saved.param_groups.size(), 2U);
    EXPECT_EQ(saved.param_groups[1].settings.at("lr"), std::vector<double>{0.7});
    EXPECT_EQ(saved.param_groups[1].settings.at("betas"), (std::vector<double>{0.5, 0.6}));
    EXPECT_EQ(saved.param_groups[0].params.size(), 3U);
    const OptimizerStateDict flat = flatten(saved);
    EXPECT_TRUE(flat.flat.contains("param_groups.u1.a.weight.betas"));
    set_optimizer_state_dict(other.net, *other.optimizer.of_torch, unflatten(flat));
    const auto& options = static_cast<torch::optim::AdamWOptions&>(other.optimizer.of_torch->param_groups()[1].options());
    EXPECT_EQ(options.lr(), 0.7);
    EXPECT_EQ(options.betas(), std::make_tuple(0.5, 0.6));
    EXPECT_FALSE(options.amsgrad());
    EXPECT_EQ(other.optimizer.of_torch->param_groups()[0].options().get_lr(), 0.01);
    Trained ours({2}, ShardLayout::kPerParameter, kinds()[6].second), again({2}, ShardLayout::kPerParameter, kinds()[6].second);
    ours.optimizer.ours->set_lrs({0.25, 0.5});
    set_optimizer_state_dict(again.net, *again.optimizer.ours, get_optimizer_state_dict(ours.net, *ours.optimizer.ours));
    EXPECT_EQ(again.optimizer.ours->lrs(), (std::vector<double>{0.25, 0.5}));
  });
}

/// B47: parameters that never had a step, and frozen ones, are no obstacle; a state that there is none of is taken away.
TEST(OptimizerStateDict, PartialState) {
  for (const std::size_t kind : {std::size_t{0}, std::size_t{4}, std::size_t{6}}) {
    run_ranks(2, [&] {
      const Make& make = kinds()[kind].second;
      Trained run({2}, ShardLayout::kPerParameter, make, 1, {.skip_last = true});  // u4 gets no gradient
      run.root.set_reduce_scatter_unused_params(false);
      run.step(0);
      Trained used({2}, ShardLayout::kRagged, make, 3), fresh({2}, ShardLayout::kRagged, make, 3);
      used.step(5);
      const OptimizerStateDict saved = get_optimizer_state_dict(run.net, run.optimizer.refs());
      EXPECT_FALSE(saved.state.contains("u4.a.weight"));
      EXPECT_TRUE(saved.state.contains("u1.a.weight"));
      set_optimizer_state_dict(used.net, used.optimizer.refs(), saved);
      set_optimizer_state_dict(fresh.net, fresh.optimizer.refs(), saved);
      set_model_state_dict(used.net, get_model_state_dict(fresh.net));
      used.step(6);
      fresh.step(6);
      EXPECT_TRUE(same(full_parameters(used.root), full_parameters(fresh.root))) << kinds()[kind].first;
      // Names that the dictionary does not have at all keep their state.
      OptimizerStateDict part = get_optimizer_state_dict(run.net, run.optimizer.refs());
      part.state = {{"u1.a.weight", part.state.at("u1.a.weight")}};
      part.param_groups.clear();
      const auto before = get_optimizer_state_dict(used.net, used.optimizer.refs(), {.full_state_dict = true});
      set_optimizer_state_dict(used.net, used.optimizer.refs(), part);
      const auto after = get_optimizer_state_dict(used.net, used.optimizer.refs(), {.full_state_dict = true});
      ASSERT_EQ(before.state.size(), after.state.size());
      for (const auto& [name, tensors] : after.state) {
        for (const auto& [slot, value] : tensors) {
          const bool equal =
              torch::equal(std::get<torch::Tensor>(value), std::get<torch::Tensor>(before.state.at(name).at(slot)));
          EXPECT_EQ(equal, name != "u1.a.weight") << name << ' ' << slot;
        }
      }
    });
  }
}

TEST(OptimizerStateDict, FrozenParametersAreFiltered) {
  run_ranks(2, [] {
    const Net net = make_net();
    net->u3->a->weight.set_requires_grad(false);
    const HSDPModule root = shard_net(net, on_all());
    optim::AdamW optimizer(root, {.lr = 0.01});
    const auto groups = get_optimizer_state_dict(root, optimizer, {.ignore_frozen_params = true}).param_groups;
    const auto all = get_optimizer_state_dict(root, optimizer).param_groups;
    EXPECT_EQ(groups[0].params.size() + 1, all[0].params.size());
  });
}

TEST(OptimizerStateDict, MistakesAreToldToAllRanksAndChangeNothing) {
  run_ranks(2, [](int rank) {
    Trained run({2}, ShardLayout::kPerParameter, kinds()[0].second);
    run.step(0);
    torch::optim::Optimizer& adam = *run.optimizer.of_torch;
    const OptimizerStateDict good = get_optimizer_state_dict(run.net, adam, {.full_state_dict = true});
    const auto set = [&](const OptimizerStateDict& values, const StateDictOptions& options = {}) {
      return value_error([&] {
        set_optimizer_state_dict(run.net, adam, values, options);
        return 0;
      });
    };
    const auto changed = [&](const std::function<void(OptimizerStateDict&)>& change) {
      OptimizerStateDict values = good;
      if (rank == 1) change(values);
      return values;
    };
    EXPECT_THAT(set(changed([](auto& v) { v.state["nobody"]["exp_avg"] = torch::ones({2}); })), HasSubstr("unexpected: nobody"));
    EXPECT_THAT(set(changed([](auto& v) { v.state["u1.a.bias"]["exp_avg"] = torch::ones({3}); })),
                HasSubstr("u1.a.bias.exp_avg has shape [3], want [20]"));
    EXPECT_THAT(set(changed([](auto& v) { v.state["u1.a.bias"].erase("exp_avg"); })), HasSubstr("missing: u1.a.bias.exp_avg"));
    EXPECT_THAT(set(changed([](auto& v) { v.state["u1.a.bias"]["sum"] = torch::ones({20}); })),
                HasSubstr("has a tensor sum, want those of Adam"));
    EXPECT_THAT(set(changed([](auto& v) { v.state["u1.a.bias"]["step"] = torch::ones({2}); })),
                HasSubstr("u1.a.bias.step is no tensor of one number"));
    EXPECT_THAT(set(changed([](auto& v) { v.param_groups[0].settings["betas"] = {1.0}; })),
                HasSubstr("setting betas has 1 value(s), want 2"));
    EXPECT_THAT(set(changed([](auto& v) { std::swap(v.param_groups[0].params[0], v.param_groups[1].params[0]); })),
                HasSubstr("have different settings"));
    EXPECT_THAT(set(changed([](auto& v) { v.state["u1.a.bias"]["step"] = torch::tensor(7); })), HasSubstr("ranks disagree"));
    EXPECT_THAT(set(flatten(good)), HasSubstr("the state dictionary is flat"));
    EXPECT_THAT(set(good, {.flatten_optimizer_state_dict = true}), HasSubstr("[unflatten] the state dictionary is not flat"));
    OptimizerStateDict bad;
    bad.flat["exp_avg"] = torch::ones({2});
    EXPECT_THAT(set(bad, {.flatten_optimizer_state_dict = true}), HasSubstr("is no name of a flat state dictionary"));
    const OptimizerStateDict after = get_optimizer_state_dict(run.net, adam, {.full_state_dict = true});
    for (const auto& [name, tensors] : good.state) {
      for (const auto& [slot, value] : tensors)
        EXPECT_TRUE(torch::equal(std::get<torch::Tensor>(value), std::get<torch::Tensor>(after.state.at(name).at(slot))));
    }
    // Both or none: a mistake in the optimizer's part leaves the model.
    const Tensors before = full_parameters(run.root);
    StateDicts both{get_model_state_dict(make_net({}, 9)), good};
    both.optimizer.state["nobody"]["exp_avg"] = torch::ones({2});
    EXPECT_THAT(value_error([&] { return set_state_dict(run.net, adam, both).missing_keys; }), HasSubstr("unexpected: nobody"));
    EXPECT_TRUE(same(full_parameters(run.root), before));
  });
}

TEST(OptimizerStateDict, OptimizersThatAreRefused) {
  run_ranks(1, [] {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const std::vector<torch::Tensor> once = parameters_once(*net);
    torch::optim::LBFGS lbfgs(once);
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(net, lbfgs); }), HasSubstr("torch::optim::LBFGS"));
    torch::optim::SGD twice(net->parameters(), torch::optim::SGDOptions(0.1));
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(net, twice); }),
                HasSubstr("parameter table.weight is listed twice and would be updated twice"));
    torch::optim::SGD stranger({torch::ones({2}, torch::requires_grad())}, torch::optim::SGDOptions(0.1));
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(net, stranger); }),
                HasSubstr("parameter 0 of group 0 is no parameter of the model"));
    torch::optim::SGD sgd(once, torch::optim::SGDOptions(0.1));
    optim::AdamW adamw(root, {.lr = 0.1});
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(net, {&sgd, &adamw}); }), HasSubstr("is in two optimizers"));
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(net, std::initializer_list<OptimizerRefs::Ref>{}); }),
                HasSubstr("there are no optimizers"));
    const Net other = make_net();
    EXPECT_THAT(value_error([&] { return get_optimizer_state_dict(other, adamw); }), HasSubstr("is no parameter of the model"));
  });
}

/// Several optimizers, each with a part of the model.
TEST(OptimizerStateDict, TwoOptimizers) {
  run_ranks(2, [] {
    const auto make = [](uint64_t seed) {
      const Net net = make_net({}, seed);
      const HSDPModule root = shard_net(net, on_all());
      auto ours = std::make_shared<optim::AdamW>(
          root, optim::AdamWOptions{.lr = 0.01,
                                    .parameters = [](const std::string& name, const auto&) { return name.starts_with("u1."); }});
      auto of_torch = std::make_shared<torch::optim::AdamW>(net->u2->parameters(), torch::optim::AdamWOptions(0.02));
      return std::tuple(net, root, ours, of_torch);
    };
    const auto step = [](auto& run) {
      auto& [net, root, ours, of_torch] = run;
      const Batch batch = make_batch(4, 3).part(get_rank(), 2);
      root.zero_grad();
      net_loss(net(batch.tokens), batch.targets).backward();
      ours->step();
      of_torch->step();
    };
    auto a = make(1), b = make(2);
    step(a);
    const OptimizerRefs of_a{std::get<2>(a).get(), std::get<3>(a).get()}, of_b{std::get<2>(b).get(), std::get<3>(b).get()};
    const StateDicts saved = get_state_dict(std::get<0>(a), of_a);
    EXPECT_EQ(saved.optimizer.param_groups.size(), 2U);
    set_state_dict(std::get<1>(b), of_b, saved);
    step(a);
    step(b);
    EXPECT_TRUE(same(full_parameters(std::get<1>(a)), full_parameters(std::get<1>(b))));
  });
}

/// torch's optimizers in checkpoints, from two ranks to three, and into ours.
TEST(OptimizerStateDict, CheckpointsOfTorchOptimizers) {
  const TempFolder folder;
  for (const auto& [kind, make] : kinds()) {
    if (kind.starts_with("our")) continue;
    const std::filesystem::path path = folder / kind;
    Tensors want;
    run_ranks(2, [&, &make = make](int rank) {
      Trained run({2}, ShardLayout::kPerParameter, make);
      run.step(0);
      run.step(1);
      ckpt::StateDict state;
      state.add_model(run.root);
      state.add_optimizer(TorchOptimizer(run.net, *run.optimizer.of_torch));
      ckpt::save(path, state);
      run.step(2);
      const Tensors parameters = full_parameters(run.root);
      if (rank == 0) want = parameters;
    });
    for (const int world : {2, 3}) {
      run_ranks(world, [&, &make = make, &kind = kind] {
        for (const bool used : {false, true}) {
          Trained run({world}, ShardLayout::kRagged, make, 7);
          if (used) run.step(9);
          TorchOptimizer by_name(run.net, *run.optimizer.of_torch);
          ckpt::StateDict state;
          state.add_model(run.root);
          state.add_optimizer(by_name, ckpt::read_info(path));
          ckpt::load(path, state);
          run.step(2);
          EXPECT_LT(relative_difference(full_parameters(run.root), want), world == 2 ? 1e-12 : 1e-4)
              << kind << ' ' << world << used;
        }
      });
    }
  }
  run_ranks(2, [&] {
    Trained run({2}, ShardLayout::kRagged, kinds()[6].second, 7);
    ckpt::StateDict state;
    state.add_model(run.root);
    state.add_optimizer(*run.optimizer.ours, ckpt::read_info(folder / "Adam"));
    ckpt::load(folder / "Adam", state);
    for (const optim::ParameterState& entry : run.optimizer.ours->state()) EXPECT_EQ(entry.step, 2) << entry.name;
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
