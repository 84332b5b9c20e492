// What fully_shard and its units are given: parameters, meshes and values that are refused, and structs whose tensors are found.
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {

/// A struct of somebody else's, which cannot be given a member.
struct Pair {
  torch::Tensor first;
  std::vector<torch::Tensor> rest;
};

}  // namespace hyper_parallel::testing

template <>
struct hyper_parallel::nn::TensorWalker<hyper_parallel::testing::Pair> {
  template <class F>
  static void walk(hyper_parallel::testing::Pair& pair, F& f) {
    walk_tensors(pair.first, f);
    walk_tensors(pair.rest, f);
  }
};

namespace hyper_parallel::testing {
namespace {

/// An Mlp, and a parameter that a test chooses.
struct OddImpl : torch::nn::Module {
  explicit OddImpl(const torch::Tensor& odd, bool trainable) {
    mlp = register_module("mlp", Mlp(6, 5));
    register_parameter("odd", odd, trainable);
  }
  torch::Tensor forward(const torch::Tensor& x) { return mlp->forward(x); }
  Mlp mlp = nullptr;
};
HP_MODULE(Odd);

/// The refusal of a module with this parameter, which leaves everything as it was.
std::string refusal(const torch::Tensor& parameter, bool trainable = true) {
  Odd odd(parameter, trainable);
  const std::string message = value_error([&] { fully_shard(odd, on_all()); });
  EXPECT_TRUE(odd->named_parameters(/*recurse=*/false)["odd"].is_same(parameter));
  EXPECT_NO_THROW(fully_shard(odd->mlp, on_all())) << "the call that threw changed nothing";
  EXPECT_EQ(odd->forward(torch::ones({2, 6})).size(0), 2);
  return message;
}

TEST(BadParameter, NotStrided) {
  run_ranks(2, [](int) {
    const auto sparse = torch::sparse_coo_tensor(torch::tensor({{0, 2}}), torch::ones({2}), {3});
    EXPECT_EQ(refusal(sparse), "[fully_shard] parameter is Sparse, want Strided (parameter odd of unit Odd)");
  });
}

TEST(BadParameter, NoLeaf) {
  run_ranks(2, [](int) {
    const auto computed = torch::ones({3}, torch::requires_grad()) * 2;
    EXPECT_EQ(refusal(computed), "[fully_shard] parameter is not a leaf, want a torch::nn parameter (parameter odd of unit Odd)");
  });
}

TEST(BadParameter, IntegersAreTakenWhenTheyAreFrozen) {
  run_ranks(2, [](int) {
    Odd frozen(torch::ones({3}, torch::kLong), false);
    EXPECT_NO_THROW(fully_shard(frozen, on_all()));
    EXPECT_EQ(frozen(torch::ones({2, 6})).size(0), 2);
  });
}

TEST(BadParameter, OnAnotherDeviceThanTheMesh) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    FullyShardOptions options;
    options.mesh = init_device_mesh("cuda", {2}, {"dp"});
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] parameter is on cpu, want cuda, the device of the mesh (parameter scale of unit Mlp)");
    // One on meta has no device yet.
    Odd odd(torch::ones({4}, torch::kMeta), true);
    const HSDPModule root = fully_shard(odd, on_all());
    root.to_empty();
    root.load_full({{"odd", torch::ones({4})}}, /*strict=*/false);
    EXPECT_EQ(odd(torch::ones({2, 6})).size(0), 2);
  });
}

/// Refused where the mesh is made, so that no mesh without this rank reaches fully_shard.
TEST(BadMesh, OfOtherRanks) {
  run_ranks(3, [](int rank) {
    const Comm world = current_world().comm();
    const std::string message = value_error([&] {
      const Comm group = rank < 2 ? world.subgroup(std::vector<int>{0, 1}) : world.self();
      Mlp mlp(6, 5);
      FullyShardOptions options;
      options.mesh = DeviceMesh::from_group({group}, "cpu", {2}, {0, 1}, {"dp"});
      fully_shard(mlp, options);
      EXPECT_EQ(mlp(torch::ones({2, 6})).size(0), 2);
    });
    EXPECT_EQ(message, rank < 2 ? "no ValueError" : "[DeviceMesh::from_group] rank 2 is not part of DeviceMesh(cpu, dp=2)");
  });
}

TEST(BadLists, UndefinedTensorInIgnoredParams) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    FullyShardOptions options = on_all();
    options.ignored_params = {mlp->a->bias, at::Tensor()};
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] ignored_params has an undefined tensor, want parameters of the module");
    EXPECT_NO_THROW(fully_shard(mlp, on_all()));
  });
}

/// torch::load replaces what a leaf is: a shape that is neither this rank's part nor the whole is named at the next use.
TEST(BadValues, LoadedTensorsOfAnotherShape) {
  run_ranks(2, [](int rank) {
    for (const auto layout : kLayouts) {
      Mlp mlp(6, 5), other(6, 8);
      const HSDPModule unit = fully_shard(mlp, on_all(layout));
      const Tensors before = full_parameters(unit);
      std::stringstream file;
      torch::save(other, file);
      torch::load(mlp, file);
      const int64_t rows = rank == 0 ? 3 : 2;  // of 5
      const std::string part =
          layout == ShardLayout::kRagged ? "" : concat("this rank's part [", rows, ", 6] or the whole [5, 6]");
      const std::string start = "[fully_shard] parameter a.weight of unit Mlp was replaced by a tensor of shape [8, 6], want ";
      for (int attempt = 0; attempt < 2; ++attempt) {
        const std::string message = attempt == 0 ? value_error([&] {
          (void)mlp(torch::ones({2, 6}));
        })
                                                 : value_error([&] { (void)unit.groups(); });
        EXPECT_EQ(message.substr(0, start.size() + part.size()), start + part);
        EXPECT_NE(message.find("or the whole [5, 6]"), std::string::npos) << message;
      }
      // Values of the right shape set it right again.
      Mlp good(6, 5);
      seed_parameters(*good, 9);
      std::stringstream right;
      torch::save(good, right);
      torch::load(mlp, right);
      Tensors want;
      for (auto& entry : good->named_parameters()) want[entry.key()] = entry.value().detach();
      EXPECT_EQ(relative_difference(full_parameters(unit), want), 0.0);
      EXPECT_TRUE(torch::allclose(mlp(torch::ones({2, 6})), good(torch::ones({2, 6}))));
    }
  });
}

/// Whatever the next backward is: a .grad that the user keeps beyond zero_grad is his.
TEST(KeptGradients, KeepTheirValues) {
  for (const auto& mesh : {std::vector<int64_t>{1}, {2}, {2, 1}}) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      for (const auto layout : kLayouts) {
        for (const bool main_grad : {false, true}) {
          for (const bool sync : {true, false}) {
            for (const bool all_reduce : {true, false}) {
              Mlp mlp(6, 5);
              seed_parameters(*mlp, 1);
              FullyShardOptions options = on_mesh(mesh, layout);
              options.mp_policy.apply_grad_on_fp32_main_grad = main_grad;
              const HSDPModule unit = fully_shard(mlp, options);
              const auto backward = [&](int step) { mlp(wave({3, 6}, rank + step)).square().sum().backward(); };
              backward(0);
              Tensors kept, want;
              for (const auto& group : unit.groups()) {
                for (const auto& parameter : group.parameters)
                  kept[parameter.name] = parameter.grad, want[parameter.name] = parameter.grad.clone();
              }
              unit.zero_grad();
              unit.set_requires_gradient_sync(sync);
              unit.set_requires_all_reduce(all_reduce);
              backward(1);
              unit.set_requires_gradient_sync(true);
              unit.set_requires_all_reduce(true);
              backward(2);
              EXPECT_EQ(relative_difference(kept, want), 0.0) << "sync " << sync << ", all-reduce " << all_reduce;
            }
          }
        }
      }
    });
  }
}

// ---- structs

struct PairedImpl : torch::nn::Module {
  PairedImpl() { mlp = register_module("mlp", Mlp(6, 5)); }
  Pair forward(const Pair& x) {
    dtypes = {x.first.scalar_type(), x.rest.at(0).scalar_type()};
    const torch::Tensor h = mlp->forward(x.first);
    return {h, {h * 2, x.rest.at(0) + h}};
  }
  std::vector<at::ScalarType> dtypes;
  Mlp mlp = nullptr;
};
HP_MODULE(Paired);

/// Inputs and outputs are cast, and a gradient through any of the outputs leads the backward to the unit.
TEST(Structs, SpecialisedTensorWalker) {
  run_ranks(2, [](int) {
    Paired model;
    FullyShardOptions options = on_all();
    options.reshard_after_forward = true;
    options.mp_policy = {.param_dtype = torch::kBFloat16,
                         .reduce_dtype = torch::kFloat,
                         .output_dtype = torch::kDouble,
                         .cast_forward_inputs = true};
    const HSDPModule unit = fully_shard(model, options);
    const Pair input{wave({2, 6}, 0), {wave({2, 6}, 1)}};
    for (int which = 0; which < 3; ++which) {
      unit.zero_grad();
      Pair output = model(input);
      EXPECT_EQ(model->dtypes, (std::vector{torch::kBFloat16, torch::kBFloat16}));
      EXPECT_EQ(output.first.scalar_type(), torch::kDouble);
      EXPECT_EQ(output.rest.at(1).scalar_type(), torch::kDouble);
      EXPECT_FALSE(unit.is_unsharded());
      (which == 0 ? output.first : output.rest.at(static_cast<std::size_t>(which) - 1)).sum().backward();
      EXPECT_EQ(unit.named_grad_dtensors().size(), 5U) << which;
    }
    EXPECT_EQ(input.first.scalar_type(), torch::kFloat) << "the caller's struct is not changed";
  });
}

// ---- set_reshard_after_forward

/// Names of the units that are gathered between forward and backward; the gradients are those of the plain run.
std::set<std::string> gathered_after_forward(Net& net, const HSDPModule& root) {
  Net plain = make_net();
  const auto loss = [](Net& model, int rank) {
    const Batch part = make_batch(int64_t{4} * get_world_size(), 3).part(rank, get_world_size());
    return net_loss(model(part.tokens), part.targets);
  };
  for (int rank = 0; rank < get_world_size(); ++rank) (loss(plain, rank) / get_world_size()).backward();
  Tensors want = plain_gradients(*plain);
  want.erase("head.weight");
  const torch::Tensor mine = loss(net, get_rank());
  std::set<std::string> gathered;
  for (const HSDPModule& unit : {HSDPModule::of(net->u1), HSDPModule::of(net->u2), HSDPModule::of(net->u2->inner),
                                 HSDPModule::of(net->u3), HSDPModule::of(net->u4), root}) {
    if (unit.is_unsharded()) gathered.insert(unit.name());
  }
  mine.backward();
  EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5);
  root.zero_grad();
  return gathered;
}

TEST(ReshardAfterForward, IsSetForOneUnitOrTheTree) {
  using Names = std::set<std::string>;
  const Names all = {"Net", "u1", "u2", "u2.inner", "u3", "u4"};
  const std::vector<std::optional<ReshardAfterForward>> options = {std::nullopt, true, false, 2, MemoryBudget{1}};
  for (const auto& mesh : {std::vector<int64_t>{4}, {2, 2}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      for (const auto& option : options) {
        FullyShardOptions how = on_mesh(mesh);
        how.reshard_after_forward = option;
        Net net = make_net();
        const HSDPModule root = shard_net(net, how);
        if (!option) {
          EXPECT_EQ(gathered_after_forward(net, root), Names{"Net"}) << "the default";
        }
        root.set_reshard_after_forward(false);
        EXPECT_EQ(gathered_after_forward(net, root), all);
        HSDPModule::of(net->u2).set_reshard_after_forward(true, /*recurse=*/false);
        EXPECT_EQ(gathered_after_forward(net, root), (Names{"Net", "u1", "u2.inner", "u3", "u4"}));
        HSDPModule::of(net->u2).set_reshard_after_forward(true);
        HSDPModule::of(net->u4).set_reshard_after_forward(true);
        EXPECT_EQ(gathered_after_forward(net, root), (Names{"Net", "u1", "u3"}));
        root.set_reshard_after_forward(true);
        EXPECT_EQ(gathered_after_forward(net, root), Names{});
        root.set_reshard_after_forward(false, /*recurse=*/false);
        EXPECT_EQ(gathered_after_forward(net, root), Names{"Net"});
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
