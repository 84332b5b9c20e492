// A plan applied to modules: blocks, ties, memory, boundaries; units completed with their own source axes; experts on their own
// mesh; and the gradients of the plain model.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/source_support.h"
#include "dist/tp_net.h"
#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_gradients.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ShardingPlan net_plan() {
  ShardingPlan plan;
  plan.module("", {.params = {{"table", {{"tp", Shard(0)}}}, {"head", {}}}})
      .module("block?", {.params = {{"a", {{"tp", Shard(0)}}}, {"a_bias", {{"tp", Shard(0)}}}, {"b", {{"tp", Shard(-1)}}}}})
      .module("block*", {.params = {{"token_norm", {}}}, .partial_gradient_axes = {"tp"}})
      .tie("table", "head");
  return plan;
}

TEST(ApplyPlan, CutsParametersInPlace) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp_shard", "tp"});
    const TpNet whole = make_tp_net();
    TpNet net = make_tp_net();
    const torch::Tensor handle = net->blocks[0]->a;
    const AppliedPlan applied = apply_plan(net, net_plan(), {.meshes = {.dense = mesh}});
    EXPECT_TRUE(handle.is_same(net->blocks[0]->named_parameters()["a"]));
    EXPECT_TRUE(handle.is_leaf() && handle.requires_grad());
    EXPECT_TRUE(torch::equal(handle, whole->blocks[0]->a.narrow(0, 4 * rank, 4)));
    EXPECT_TRUE(torch::equal(net->blocks[0]->b, whole->blocks[0]->b.narrow(1, 4 * rank, 4)));
    EXPECT_TRUE(torch::equal(net->blocks[1]->a, whole->blocks[1]->a.narrow(0, 4 * rank, 4 - rank)));
    Bag bag;
    bag->add(torch::empty({5, 4}, torch::kMeta));
    ShardingPlan on_meta;
    on_meta.module("", {.params = {{"p0", {{"tp", Shard(0)}}}}});
    (void)apply_plan(bag, on_meta, {.meshes = {.dense = mesh}, .boundaries_elsewhere = true});
    EXPECT_TRUE(bag->handles[0].is_meta() && bag->handles[0].requires_grad());
    EXPECT_EQ(bag->handles[0].sizes(), (std::vector<int64_t>{3 - rank, 4}));
    EXPECT_TRUE(torch::equal(net->table, whole->table.narrow(0, 6 * rank, 6 - rank)));
    EXPECT_TRUE(net->table.is_same(net->head)) << "tied";
    EXPECT_TRUE(torch::equal(net->blocks[0]->norm, whole->blocks[0]->norm));
    EXPECT_EQ(applied.named.at("head").placements, std::vector<Placement>{Shard(0)});
    EXPECT_EQ(applied.named.at("head").shape, (std::vector<int64_t>{11, 10}));
    EXPECT_EQ(applied.named.at("block1.token_norm").copy_gradients, std::vector<CopyGradient>{CopyGradient::kPartial});
    EXPECT_EQ(applied.infos.size(), 9U) << "the table once, four of each block";
    EXPECT_EQ(applied.infos.find(net->blocks[0]->norm), nullptr) << "not planned";
    EXPECT_EQ(net->bound.params, applied.named);
    EXPECT_EQ(net->bound.meshes.dense, mesh["tp"]);
  });
}

TEST(ApplyPlan, FreesWhatIsNotKept) {
  const CountCpuAllocations count;
  std::barrier meet(2);
  run_ranks(2, {.allocator = counting_allocator()}, [&](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp_shard", "tp"});
    torch::nn::Linear layer(torch::nn::LinearOptions(512, 256).bias(false));
    ShardingPlan plan;
    plan.module("", {.params = {{"weight", {{"tp", Shard(0)}}}}});
    meet.arrive_and_wait();
    const int64_t before = allocation_counts().live;
    meet.arrive_and_wait();
    const AppliedPlan applied = apply_plan(layer, plan, {.meshes = {.dense = mesh}, .boundaries_elsewhere = true});
    meet.arrive_and_wait();
    EXPECT_EQ(before - allocation_counts().live, 512 * 256 * 4) << "each of two ranks keeps a half";
    meet.arrive_and_wait();
  });
}

/// HSDP x TP from a plan, units completed by managed_source_shard_infos.
TEST(ApplyPlan, TrainsLikeThePlainModel) {
  for (const auto layout : kLayouts) {
    run_ranks(8, [&] {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2, 2}, {"dp_replicate", "dp_shard", "tp"});
      TpNet net = make_tp_net();
      const std::optional<SourceShardInfos> infos = apply_plan(net, net_plan(), {.meshes = {.dense = mesh}}).infos;
      FullyShardOptions options{.mesh = mesh[std::vector<std::string>{"dp_replicate", "dp_shard"}]};
      options.shard_layout = layout;
      for (TpBlock& block : net->blocks) {
        options.source_shard_infos = managed_source_shard_infos(block, options, infos);
        EXPECT_EQ(options.source_shard_infos->size(), 7U);
        fully_shard(block, options);
      }
      options.source_shard_infos = managed_source_shard_infos(net, options, infos);
      EXPECT_EQ(options.source_shard_infos->size(), 1U) << "what inner units manage is theirs";
      const HSDPModule root = fully_shard(net, options);
      EXPECT_EQ(managed_source_shard_infos(net, options, std::nullopt), std::nullopt);
      TpNet plain = make_tp_net();
      const int ranks = root.data_parallel_comm().size();
      for (int part = 0; part < ranks; ++part) (loss_of(plain, part) / ranks).backward();
      loss_of(net, root.data_parallel_comm().rank()).backward();
      Tensors want = plain_gradients(*plain);
      want.erase("head");
      EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5);
    });
  }
}

/// Modules initialise whole parameters and see whole shapes: the values are those of the model that is not cut.
TEST(ApplyPlan, ModulesInitialiseWholeParameters) {
  run_ranks(4, [] {
    const auto options = torch::nn::LinearOptions(6, 5);
    nn::Linear plain(options), layer(options);
    const HSDPModule want = fully_shard(plain, on_all());
    want.reset_parameters(11);
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
    ShardingPlan plan;
    plan.module("", {.params = {{"weight", {{"tp", Shard(1)}}}}});
    const AppliedPlan applied = apply_plan(layer, plan, {.meshes = {.dense = mesh}, .boundaries_elsewhere = true});
    FullyShardOptions sharded{.mesh = mesh["dp_shard"]};
    sharded.source_shard_infos = managed_source_shard_infos(layer, sharded, applied.infos);
    const HSDPModule root = fully_shard(layer, sharded);
    root.reset_parameters(11);
    EXPECT_EQ(relative_difference(full_parameters(root), full_parameters(want)), 0.0);
  });
}

TEST(ApplyPlan, ErrorsAllAtOnce) {
  run_ranks(2, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp_shard", "tp"});
    nn::Linear layer(torch::nn::LinearOptions(6, 4));
    layer->weight.mutable_grad() = torch::ones({4, 6});
    ShardingPlan plan;
    plan.module("", {.params = {{"weight", {{"tp", Shard(0)}}}, {"bias", {{"tp", Shard(0)}}}}});
    EXPECT_THAT(value_error([&] { return apply_plan(layer, plan, {.meshes = {.dense = mesh}}); }),
                AllOf(HasSubstr("[apply_plan] 3 problems:"), HasSubstr("weight: has a gradient"),
                      HasSubstr("bias: cut, but no module around it is a SourceBoundary")));
    EXPECT_EQ(layer->weight.sizes(), (std::vector<int64_t>{4, 6})) << "nothing is changed";
    layer->weight.mutable_grad() = torch::Tensor();
    plan.module("deep", {.params = {{"weight", {}}}});
    EXPECT_THAT(value_error([&] { return apply_plan(layer, plan, {.meshes = {.dense = mesh}}); }),
                HasSubstr("[ShardingPlan] \"deep.weight\" matches no parameter"));
    plan.modules.pop_back();
    fully_shard(layer, {.mesh = mesh["dp_shard"]});
    EXPECT_THAT(value_error([&] { return apply_plan(layer, plan, {.meshes = {.dense = mesh}, .boundaries_elsewhere = true}); }),
                HasSubstr("weight: unit Linear as weight manages it, want the plan applied before fully_shard"));
    EXPECT_THAT(value_error([&] { return apply_plan(nullptr, plan, {}); }), HasSubstr("module is null"));
  });
}

TEST(ByParameter, NamesBecomeParameters) {
  run_ranks(4, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
    const DeviceMesh again = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
    const TpNet net = make_tp_net();
    const SourceShardMetaInfo cut{.mesh = mesh["tp"], .placements = {Shard(0)}};
    const auto resolve = [&](const NamedSourceShardInfos& named) { return build_source_shard_info_by_param(*net, named, 2); };
    // Aliases agree by value: another handle of an equal mesh is the same mesh.
    const auto infos = resolve({{"table", cut}, {"head", {.mesh = again["tp"], .placements = {Shard(0)}}}});
    ASSERT_TRUE(infos.has_value());
    EXPECT_EQ(infos->size(), 1U);
    EXPECT_EQ(infos->find(net->table)->info, cut);
    EXPECT_THAT(value_error([&] {
                  return resolve({{"table", cut}, {"head", {.mesh = mesh["tp"], .placements = {Shard(1)}}}});
                }),
                HasSubstr("head and table are one tensor with two layouts"));
    EXPECT_THAT(value_error([&] {
                  return resolve({{"table", cut}, {"head", {.mesh = mesh["dp_shard"], .placements = {Shard(0)}}}});
                }),
                HasSubstr("head and table are one tensor with two layouts"));
    EXPECT_THAT(value_error([&] {
                  return resolve({{"no", cut}, {"block0.a", {.mesh = mesh["tp"], .placements = {Partial()}}}});
                }),
                AllOf(HasSubstr("2 problems"), HasSubstr("no: the model has no such parameter"),
                      HasSubstr("block0.a: [Partial(sum)], want Shard or Replicate")));
    EXPECT_EQ(build_source_shard_info_by_param(*net, std::nullopt, 1), std::nullopt);
    EXPECT_EQ(build_source_shard_info_by_param(*net, NamedSourceShardInfos{}, 1)->size(), 0U);
    for (const auto& none : {std::optional<NamedSourceShardInfos>(), std::optional(NamedSourceShardInfos())})
      EXPECT_THAT(value_error([&] { return build_source_shard_info_by_param(*net, none, 2); }),
                  HasSubstr("no source layouts for 2 source ranks"));
  });
}

/// Tokens of all ranks of a group, and back: each rank's rows of the sum.
struct GatherTokens : torch::autograd::Function<GatherTokens> {
  static torch::Tensor gather(const torch::Tensor& x, const Comm& comm) {
    torch::Tensor all = torch::empty({x.size(0) * comm.size(), x.size(1)});
    comm.all_gather_single(all, x.contiguous()).wait();
    return all;
  }
  static torch::Tensor own_sum(const torch::Tensor& x, const Comm& comm) {
    const torch::Tensor sum = summed(x, comm);
    return sum.narrow(0, comm.rank() * (x.size(0) / comm.size()), x.size(0) / comm.size()).clone();
  }
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, const Comm* comm) {
    context->saved_data["comm"] = reinterpret_cast<int64_t>(comm);
    return gather(x, *comm);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {own_sum(grads[0], *reinterpret_cast<const Comm*>(context->saved_data["comm"].toInt())), {}};
  }
};
struct ReturnTokens : torch::autograd::Function<ReturnTokens> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, const Comm* comm) {
    context->saved_data["comm"] = reinterpret_cast<int64_t>(comm);
    return GatherTokens::own_sum(x, *comm);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {GatherTokens::gather(grads[0], *reinterpret_cast<const Comm*>(context->saved_data["comm"].toInt())), {}};
  }
};

constexpr int64_t kWidth = 6, kExperts = 3;

/// Experts that are cut over a group, three on two ranks, and a scale of the rank's own tokens that no plan names.
struct ExpertsImpl : torch::nn::Module, SourceBoundary {
  ExpertsImpl() {
    w = register_parameter("w", torch::empty({kExperts, kWidth, kWidth}));
    scale = register_parameter("scale", torch::empty({kWidth}));
  }
  void bind_source(const SourceBinding& binding) override { comm = binding.meshes.expert.get_group("ep"); }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& gates) {
    const bool cut = comm.defined();
    const torch::Tensor tokens = cut ? GatherTokens::apply(x * scale, &comm) : x * scale;
    const torch::Tensor weights = cut ? GatherTokens::apply(gates, &comm) : gates;
    torch::Tensor out = torch::zeros_like(tokens);
    const int64_t first = cut ? comm.rank() * ((kExperts + comm.size() - 1) / comm.size()) : 0;
    for (int64_t e = 0; e < w.size(0); ++e)
      out = out + torch::tanh(torch::matmul(tokens, w[e])) * weights.narrow(1, first + e, 1);
    return cut ? ReturnTokens::apply(out, &comm) : out;
  }
  Comm comm;
  torch::Tensor w, scale;
};
HP_MODULE(Experts);

struct MoeImpl : torch::nn::Module {
  MoeImpl() {
    gate = register_parameter("gate", torch::empty({kExperts, kWidth}));
    experts = register_module("experts", Experts());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor scores = torch::softmax(torch::matmul(x, gate.t()), 1);
    const torch::Tensor top = (scores == std::get<0>(scores.max(1, true))).to(torch::kFloat);
    return x + experts(x, scores * top);
  }
  torch::Tensor gate;
  Experts experts = nullptr;
};
HP_MODULE(Moe);

/// FSDP x EP: three experts on two ranks of ep, two of edp. The gradients of experts hold all tokens of the ep group, so all
/// units add and have the dense factor; the parameter that no plan names is completed with the unit's own axis, ep (G27).
TEST(Experts, OnTheirOwnMesh) {
  for (const auto layout : kLayouts) {
    run_ranks(4, [&](int rank) {
      const PlanMeshes meshes{.dense = init_device_mesh("cpu", {4}, {"fsdp_shard"}),
                              .expert = init_device_mesh("cpu", {2, 2}, {"edp_shard", "ep"})};
      const auto make = [] {
        Moe model;
        seed_parameters(*model, 5);
        return model;
      };
      const auto loss = [](Moe& model, int part) { return model(wave({5, kWidth}, part)).square().mean(); };
      Moe model = make();
      ShardingPlan plan;
      plan.module("experts", {.params = {{"w", {{"ep", Shard(0)}}}}, .ep_size = 2}).module("", {.params = {{"gate", {}}}});
      const std::optional<SourceShardInfos> infos = apply_plan(model, plan, {.meshes = meshes}).infos;
      EXPECT_EQ(model->experts->w.size(0), rank % 2 == 0 ? 2 : 1);
      FullyShardOptions expert_options{.mesh = meshes.expert["edp_shard"], .shard_layout = layout};
      expert_options.source_shard_infos = managed_source_shard_infos(model->experts, expert_options, infos);
      EXPECT_EQ(expert_options.source_shard_infos->find(model->experts->scale)->info.mesh, meshes.expert["ep"]);
      fully_shard(model->experts, expert_options);
      FullyShardOptions options{.mesh = meshes.dense, .shard_layout = layout};
      options.source_shard_infos = managed_source_shard_infos(model, options, infos);
      const HSDPModule root = fully_shard(model, options);
      EXPECT_EQ(set_source_gradient_factor(root, meshes.dense), 0.25);
      Moe plain = make();
      expect_same_gradients(model, root, plain, loss, "experts");
      // The norm counts each element once, whatever mesh it lies on.
      std::vector<torch::Tensor> parameters = plain->parameters();
      const double want = torch::nn::utils::clip_grad_norm_(parameters, 1e6);
      EXPECT_NEAR(get_total_norm(root), want, 1e-5 * want);
    });
  }
}

/// The same in one call, in both conventions: their boundaries over ep are adjoint ones, and its ranks have losses of their own.
TEST(Experts, Parallelized) {
  for (const auto gradients : {BoundaryGradients::kOneLoss, BoundaryGradients::kSumOfLosses}) {
    for (const auto layout : kLayouts) {
      run_ranks(4, [&] {
        const PlanMeshes meshes{.dense = init_device_mesh("cpu", {4}, {"fsdp_shard"}),
                                .expert = init_device_mesh("cpu", {2, 2}, {"edp_shard", "ep"})};
        const auto make = [] {
          Moe model;
          seed_parameters(*model, 5);
          return model;
        };
        Moe model = make(), plain = make();
        ShardingPlan plan;
        // The scale is planned as a copy, which speaks of the dense mesh; in the experts' unit it is one along ep.
        plan.module("experts", {.params = {{"w", {{"ep", Shard(0)}}}, {"scale", {}}}, .ep_size = 2});
        const ParallelModel made =
            parallelize(model, plan, meshes, {.fully_shard = {.shard_layout = layout}, .gradients = gradients});
        ASSERT_EQ(made.units.size(), 2U);
        EXPECT_EQ(made.units[0].name, "experts");
        EXPECT_EQ(made.units[0].gradient_factor, gradients == BoundaryGradients::kOneLoss ? 0.5 : 0.25);
        const auto loss = [](Moe& net, int part) { return net(wave({5, kWidth}, part)).square().mean(); };
        expect_same_gradients(model, made.root, plain, loss, "experts");
      });
    }
  }
}

TEST(Experts, BelongToNoDenseUnit) {
  run_ranks(4, [] {
    const PlanMeshes meshes{.dense = init_device_mesh("cpu", {2, 2}, {"fsdp_shard", "tp"}),
                            .expert = init_device_mesh("cpu", {2, 2}, {"edp_shard", "ep"})};
    Moe model;
    ShardingPlan plan;
    plan.module("experts", {.params = {{"w", {{"ep", Shard(0)}}}}, .ep_size = 2}).module("", {.params = {{"gate", {}}}});
    const std::optional<SourceShardInfos> infos = apply_plan(model, plan, {.meshes = meshes}).infos;
    const FullyShardOptions options{.mesh = meshes.dense["fsdp_shard"]};
    EXPECT_THAT(value_error([&] { return managed_source_shard_infos(model, options, infos); }),
                AllOf(HasSubstr("want one source mesh in a unit"), HasSubstr("experts.w lies on DeviceMesh(cpu, ep=2)")));
    EXPECT_THAT(value_error([&] { return managed_source_shard_infos(model, {}, infos); }),
                HasSubstr("options.mesh is undefined"));
    EXPECT_THAT(value_error([&] { return set_source_gradient_factor({}, meshes.dense); }), HasSubstr("root is empty"));
    const HSDPModule root = fully_shard(model->experts, {.mesh = meshes.expert["edp_shard"]});
    EXPECT_THAT(value_error([&] { return set_source_gradient_factor(root, {}); }), HasSubstr("the dense mesh is undefined"));
    EXPECT_EQ(set_source_gradient_factor(root, meshes.dense), 0.25);
    EXPECT_EQ(set_source_gradient_factor(root, meshes.dense, {.loss_parallel = true}), 0.5);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
