// hp::parallelize: which modules become units, who owns tied parameters, meshes, factors, prefetch lists, plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/tp_net.h"
#include "fsdp/unit_impl.h"
#include "support/parallel_net.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

using parallel::init_parallel_meshes;
using parallel::ParallelUnit;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Names = std::vector<std::string>;

Names unit_names(const ParallelModel& model) {
  Names names;
  for (const ParallelUnit& unit : model.units) names.push_back(unit.name);
  return names;
}

const ParallelUnit& unit_of(const ParallelModel& model, const std::string& name) {
  const auto found = std::find_if(model.units.begin(), model.units.end(), [&](const auto& unit) { return unit.name == name; });
  if (found == model.units.end()) throw std::runtime_error("no unit " + name);
  return *found;
}

PlanMeshes data_only() { return {.dense = init_device_mesh("cpu", {get_world_size()}, {"dp"})}; }

// Units.

TEST(Units, ChildrenOfContainersExpertsAndExtras) {
  run_ranks(4, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.tp = 2, .ep = 2});
    Decoder model(on_meshes({.vocab = 13, .experts = 3}, meshes));
    const ParallelModel made = parallelize(model, meshes, {.extra_units = {"table", "**.attention"}});
    EXPECT_THAT(unit_names(made), ElementsAre("table", "layers.0", "layers.0.attention", "layers.0.moe.experts", "layers.1",
                                              "layers.1.attention", "layers.1.moe.experts", ""));
    const ParallelUnit& experts = unit_of(made, "layers.0.moe.experts");
    EXPECT_TRUE(experts.expert);
    EXPECT_EQ(experts.mesh, meshes.expert["edp_shard"]);
    EXPECT_EQ(experts.source_mesh, (meshes.expert[Names{"ep", "tp"}]));
    EXPECT_EQ(experts.gradient_factor, 0.5);
    EXPECT_THAT(experts.parameters,
                ElementsAre("layers.0.moe.experts.gate_proj", "layers.0.moe.experts.up_proj", "layers.0.moe.experts.down_proj"));
    EXPECT_EQ(experts.numel, 3 * 3 * 5 * 12);
    EXPECT_FALSE(unit_of(made, "layers.0").expert);
    EXPECT_EQ(unit_of(made, "layers.0").gradient_factor, 1.0);
    EXPECT_EQ(unit_of(made, "layers.0").source_mesh, meshes.dense["tp"]);
    EXPECT_THAT(unit_of(made, "").parameters, ElementsAre("norm.weight", "head.weight"));
    EXPECT_EQ(made.root.groups().size(), HSDPModule::of(model).groups().size());
    const Batch batch = decoder_batch(model->options, 2, 1);
    const torch::Tensor loss = model(batch.tokens, batch.targets);
    EXPECT_TRUE(made.root.is_unsharded()) << "the model stays gathered between forward and backward";
    EXPECT_FALSE(HSDPModule::of(model->layers[0]).is_unsharded());
    loss.backward();
  });
}

TEST(Units, ContainersByName) {
  run_ranks(2, [] {
    const PlanMeshes meshes = data_only();
    const auto names = [&](const ParallelizeOptions& options) {
      Decoder model(DecoderOptions{});
      return unit_names(parallelize(model, meshes, options));
    };
    EXPECT_THAT(names({}), ElementsAre("layers.0", "layers.1", ""));
    EXPECT_THAT(names({.containers = Names{"layers.1"}}),
                ElementsAre("layers.1.attention_norm", "layers.1.attention", "layers.1.mlp_norm", "layers.1.mlp", ""));
    EXPECT_THAT(names({.containers = Names{}, .extra_units = {"*.?"}}), ElementsAre("layers.0", "layers.1", ""));
    EXPECT_THAT(names({.containers = Names{}, .extra_units = {"**attention"}}),
                ElementsAre("layers.0.attention", "layers.1.attention", ""));
  });
}

TEST(Units, ExplainIsATable) {
  run_ranks(8, [](int rank) {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.dp_replicate = 2, .tp = 2, .ep = 2});
    Decoder model(on_meshes({.layers = 2, .tied = true, .experts = 4}, meshes));
    const ParallelModel made = parallelize(model, meshes, {.extra_units = {"head"}, .forward_prefetch_depth = 1});
    if (rank != 0) return;
    EXPECT_EQ('\n' + made.explain(), R"(
unit                  sharded over                           source axes  parameters  elements  gradients   gathers ahead
layers.0              dp_replicate=2 dp_shard=2              tp=2         12          588       mean        layers.0.moe.experts
layers.0.moe.experts  edp_replicate=2 edp_shard=1 (experts)  ep=2 tp=2    3           720       mean * 0.5  layers.1
layers.1              dp_replicate=2 dp_shard=2              tp=2         12          588       mean        layers.1.moe.experts
layers.1.moe.experts  edp_replicate=2 edp_shard=1 (experts)  ep=2 tp=2    3           720       mean * 0.5  head
head                  dp_replicate=2 dp_shard=2              tp=2         0           0         mean        -
(model)               dp_replicate=2 dp_shard=2              tp=2         2           144       mean        -
tied: table.weight = head.weight, of unit (model)
)");
  });
}

TEST(Units, OptionsOfFullyShardReachTheUnits) {
  run_ranks(2, [] {
    Decoder model(DecoderOptions{.layers = 1});
    const at::Tensor ignored = model->norm->weight, whole = model->layers[0]->scale;
    const ParallelModel made =
        parallelize(model, data_only(), {.fully_shard = {.ignored_params = {ignored}, .replicate_params = {whole}}});
    EXPECT_THAT(unit_of(made, "").parameters, ElementsAre("table.weight", "head.weight"));
    EXPECT_TRUE(model->norm->named_parameters()["weight"].is_same(ignored));
    EXPECT_EQ(model->layers[0]->named_parameters()["scale"].numel(), 12) << "whole on every rank";
    EXPECT_EQ(model->layers[0]->mlp->named_parameters()["gate_proj.weight"].numel(), 60);
    const Batch batch = decoder_batch(model->options, 2, 1);
    model(batch.tokens, batch.targets).backward();
    EXPECT_TRUE(ignored.grad().defined());
  });
}

/// ep as an axis of the only mesh: dense parameters are copies along it, like data-parallel replicas.
TEST(Units, ExpertsOnTheOnlyMesh) {
  for (const auto layout : kLayouts) {
    run_ranks(4, [&](int rank) {
      const PlanMeshes meshes{.dense = init_device_mesh("cpu", {2, 2}, {"dp", "ep"})};
      const DecoderOptions whole{.layers = 1, .experts = 3};
      DecoderOptions options = whole;
      options.ep = meshes.dense["ep"];
      Decoder model(options), plain(whole);
      const Tensors values = decoder_values(whole);
      parallel::load_whole(model, values);
      parallel::load_whole(plain, values);
      const ParallelModel made = parallelize(model, meshes, {.fully_shard = {.shard_layout = layout}});
      EXPECT_EQ(unit_of(made, "layers.0.moe.experts").gradient_factor, 0.5);
      const Batch batch = decoder_batch(whole, 4, 1), mine = batch.part(rank, 4);
      plain(batch.tokens, batch.targets).backward();
      model(mine.tokens, mine.targets).backward();
      const Tensors got = full_gradients(made.root), want = plain_gradients(*plain);
      EXPECT_EQ(got.size(), want.size());
      for (const auto& [name, value] : got)
        EXPECT_LT(relative_difference({{name, value}}, {{name, want.at(name)}}), 2e-5) << name;
    });
  }
}

// Tied parameters.

struct TieBlockImpl : torch::nn::Module {
  explicit TieBlockImpl(const torch::Tensor& with = {}) {
    w = register_parameter("w", with.defined() ? with : torch::empty({6, 6}));
    scale = register_parameter("scale", torch::empty({6}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::tanh(torch::matmul(x, w.t())) * scale; }
  torch::Tensor w, scale;
};
HP_MODULE(TieBlock);

struct TieStageImpl : torch::nn::Module {
  TieStageImpl() {
    auto list = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      blocks.push_back(blocks.empty() ? TieBlock() : TieBlock(blocks[0]->w));
      list->push_back(blocks.back().ptr());
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return blocks[1](blocks[0](x)); }
  std::vector<TieBlock> blocks;
};
HP_MODULE(TieStage);

struct TieNetImpl : torch::nn::Module {
  TieNetImpl() {
    first = register_module("first", TieStage());
    second = register_module("second", TieStage());
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  TieStage first{nullptr}, second{nullptr};
};
HP_MODULE(TieNet);

TEST(Units, TiedParametersBelongToTheDeepestUnitAroundThem) {
  for (const bool stages : {false, true}) {
    for (const auto layout : kLayouts) {
      run_ranks(3, [&] {
        const auto make = [] {
          TieNet net;
          seed_parameters(*net, 4);
          return net;
        };
        TieNet net = make(), plain = make();
        ParallelizeOptions options{.fully_shard = {.shard_layout = layout}};
        if (stages) options.extra_units = {"first", "second"};
        const ParallelModel made = parallelize(net, data_only(), options);
        EXPECT_THAT(unit_of(made, "first.blocks.0").parameters, ElementsAre("first.blocks.0.scale"));
        EXPECT_THAT(unit_of(made, "first.blocks.1").parameters, ElementsAre("first.blocks.1.scale"));
        if (stages) {
          EXPECT_THAT(unit_of(made, "first").parameters, ElementsAre("first.blocks.0.w"));
          EXPECT_THAT(unit_of(made, "").parameters, IsEmpty());
        } else {
          EXPECT_THAT(unit_of(made, "").parameters, ElementsAre("first.blocks.0.w", "second.blocks.0.w"));
        }
        EXPECT_THAT(made.explain(),
                    HasSubstr(concat("tied: second.blocks.0.w = second.blocks.1.w, of unit ", stages ? "second" : "(model)")));
        // One leaf under both names, the same that the optimizer sees.
        const auto named = net->named_parameters();
        EXPECT_TRUE(named["first.blocks.0.w"].is_same(named["first.blocks.1.w"]));
        const auto loss = [](TieNet& model, int part) { return model(wave({3, 6}, part)).square().mean(); };
        for (int step = 0; step < 2; ++step) {
          made.root.zero_grad();
          plain->zero_grad();
          for (int rank = 0; rank < 3; ++rank) (loss(plain, rank) / 3).backward();
          loss(net, get_rank()).backward();
          Tensors want = plain_gradients(*plain);
          want.erase("first.blocks.1.w");
          want.erase("second.blocks.1.w");
          EXPECT_LT(relative_difference(full_gradients(made.root), want), 1e-5);
        }
      });
    }
  }
}

// Prefetching.

TEST(Prefetch, DepthsInTheOrderOfTheUnits) {
  run_ranks(2, [] {
    const auto build = [](const ParallelizeOptions& options) {
      Decoder model(DecoderOptions{.layers = 3});
      seed_parameters(*model, 3);
      const ParallelModel made = parallelize(model, data_only(), options);
      const Batch batch = decoder_batch(model->options, 2, 1);
      for (int step = 0; step < 2; ++step) model(batch.tokens, batch.targets).backward();
      return std::pair(made, full_gradients(made.root));
    };
    const auto [learned, want] = build({});
    EXPECT_THAT(unit_of(learned, "layers.0").forward_prefetch, IsEmpty());
    const auto [two, gradients] = build({.forward_prefetch_depth = 2, .backward_prefetch_depth = 2});
    EXPECT_THAT(unit_of(two, "layers.0").forward_prefetch, ElementsAre("layers.1", "layers.2"));
    EXPECT_THAT(unit_of(two, "layers.2").forward_prefetch, IsEmpty());
    EXPECT_THAT(unit_of(two, "layers.2").backward_prefetch, ElementsAre("layers.1", "layers.0"));
    EXPECT_THAT(unit_of(two, "layers.0").backward_prefetch, IsEmpty());
    EXPECT_EQ(relative_difference(gradients, want), 0.0);
    const auto [turned, others] =
        build({.unit_order = {"layers.2", "layers.0", "layers.1"}, .forward_prefetch_depth = 1, .backward_prefetch_depth = 0});
    EXPECT_THAT(unit_names(turned), ElementsAre("layers.2", "layers.0", "layers.1", ""));
    EXPECT_THAT(unit_of(turned, "layers.2").forward_prefetch, ElementsAre("layers.0"));
    EXPECT_EQ(relative_difference(others, want), 0.0) << "a wrong order costs time, not numbers";
    // With a depth of one the next unit is on its way while this one computes.
    const auto next_is_coming = [](int depth) {
      Decoder model(DecoderOptions{.layers = 2});
      (void)parallelize(model, data_only(), {.forward_prefetch_depth = depth});
      const HSDPModule first = HSDPModule::of(model->layers[0]), second = HSDPModule::of(model->layers[1]);
      bool coming = false;
      const torch::NoGradGuard no_grad;
      (void)first.call(
          [&](const torch::Tensor& x) {
            coming = second.unit()->is_unsharding() || second.is_unsharded();
            return x;
          },
          torch::zeros({1}));
      second.unshard();
      second.reshard();
      return coming;
    };
    EXPECT_TRUE(next_is_coming(1));
    EXPECT_FALSE(next_is_coming(0));
  });
}

// Plans.

ShardingPlan tp_plan() {
  ShardingPlan plan;
  plan.axis_names = {"tp"};
  plan.module("", {.params = {{"table", {{"tp", Shard(0)}}}, {"head", {}}}})
      .module("block?", {.params = {{"a", {{"tp", Shard(0)}}}, {"a_bias", {{"tp", Shard(0)}}}, {"b", {{"tp", Shard(-1)}}}}})
      .tie("table", "head");
  return plan;
}

/// The tied head is replicated, the table is cut: both are. Blocks are no children of a container.
TEST(Plans, BothConventionsEqualThePlainModel) {
  for (const auto gradients : {BoundaryGradients::kOneLoss, BoundaryGradients::kSumOfLosses}) {
    for (const auto layout : kLayouts) {
      run_ranks(8, [&] {
        const bool one = gradients == BoundaryGradients::kOneLoss;
        const PlanMeshes meshes = init_parallel_meshes("cpu", {.dp_replicate = 2, .tp = 2});
        ShardingPlan plan = tp_plan();
        if (one) plan.module("block*", {.params = {{"token_norm", {}}}, .partial_gradient_axes = {"tp"}});
        TpNet net = make_tp_net(), plain = make_tp_net();
        net->tp.convention = one ? Convention::kWhole : Convention::kSummed;
        const ParallelModel made = parallelize(
            net, plan, meshes,
            {.fully_shard = {.shard_layout = layout}, .containers = Names{}, .extra_units = {"block?"}, .gradients = gradients});
        EXPECT_THAT(unit_names(made), ElementsAre("block0", "block1", ""));
        EXPECT_EQ(unit_of(made, "block0").gradient_factor, one ? 1.0 : 0.125);
        EXPECT_EQ(net->bound.meshes.dense, meshes.dense["tp"]);
        const int ranks = made.root.data_parallel_comm().size();
        for (int part = 0; part < ranks; ++part) (loss_of(plain, part) / ranks).backward();
        loss_of(net, made.root.data_parallel_comm().rank()).backward();
        Tensors want = plain_gradients(*plain);
        want.erase("head");
        EXPECT_LT(relative_difference(full_gradients(made.root), want), 1e-5) << "one loss " << one;
      });
    }
  }
}

/// Parallel layers, and a parameter between them that a plan speaks of.
TEST(Plans, TogetherWithParallelLayers) {
  run_ranks(4, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.tp = 2});
    const DecoderOptions whole{.sequence = true, .planned_scale = true};
    Decoder model(on_meshes(whole, meshes)), plain(whole);
    const Tensors values = decoder_values(whole);
    parallel::load_whole(model, values);
    parallel::load_whole(plain, values);
    ShardingPlan plan;
    plan.module("layers.*", {.params = {{"scale", {}}}, .partial_gradient_axes = {"tp"}});
    const ParallelModel made = parallelize(model, plan, meshes);
    const Batch batch = decoder_batch(whole, 4, 1), mine = batch.part(meshes.dense.get_local_rank("dp_shard"), 2);
    plain(batch.tokens, batch.targets).backward();
    model(mine.tokens, mine.targets).backward();
    const Tensors got = full_gradients(made.root), want = plain_gradients(*plain);
    EXPECT_TRUE(got.contains("layers.0.scale"));
    EXPECT_LT(relative_difference(got, want), 2e-5);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
