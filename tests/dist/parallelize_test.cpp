// hp::parallelize: which modules become units, who owns tied parameters, meshes, factors, prefetch lists, plans, and every error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/tp_net.h"
#include "fsdp/unit_impl.h"
#include "support/message_of.h"
#include "support/parallel_net.h"
#include "support/rank_threads.h"
#include "support/same_gradients.h"

namespace hyper_parallel::testing {
namespace {

using parallel::init_parallel_meshes;
using parallel::ParallelUnit;
using ::testing::AllOf;
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

TpNet make_tp_net() {
  TpNet net(std::vector<int64_t>{8, 7});
  seed_parameters(*net, 3);
  return net;
}

torch::Tensor loss_of(TpNet net, int part) {
  const Batch batch = make_batch(2, 70 + static_cast<uint64_t>(part));
  return torch::nn::functional::cross_entropy(net(batch.tokens).flatten(0, 1), batch.targets.flatten());
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

// Errors.

class ParallelizeErrors : public ::testing::Test {
 protected:
  /// The message, and that the model can be parallelized afterwards as if nothing had been tried.
  static std::string error(const DecoderOptions& net, const PlanMeshes& meshes, const ParallelizeOptions& options) {
    Decoder model(net);
    const std::string message = value_error([&] { return parallelize(model, meshes, options); });
    (void)parallelize(model, init_parallel_meshes("cpu"));
    return message;
  }
};

TEST_F(ParallelizeErrors, Units) {
  run_ranks(2, [] {
    const PlanMeshes meshes = data_only();
    const auto fails = [&](const ParallelizeOptions& options) { return error({.layers = 1}, meshes, options); };
    EXPECT_EQ(
        fails({.containers = Names{"blocks"}}),
        "[parallelize] 2 problems:\n  - containers: \"blocks\" matches no module\n  - no unit besides the model: no container "
        "with modules that have parameters, no extra_units, no experts, want at least one");
    EXPECT_EQ(
        fails({.containers = Names{}}),
        "[parallelize] no unit besides the model: no container with modules that have parameters, no extra_units, no experts, "
        "want at least one");
    EXPECT_EQ(fails({.extra_units = {"layers.7"}}), "[parallelize] extra_units: \"layers.7\" matches no module");
    EXPECT_EQ(fails({.extra_units = {"**"}}),
              "[parallelize] extra_units: \"**\" matches the model itself, which is a unit anyway, want modules below it");
    EXPECT_THAT(fails({.extra_units = {"layers"}}),
                HasSubstr("layers: the module has no hooks, want one declared with HP_MODULE"));
    EXPECT_EQ(
        fails({.unit_order = {"layers.0", "layers.0", "x"}}),
        "[parallelize] 2 problems:\n  - unit_order: \"layers.0\" is no unit, or stands there twice\n  - unit_order: \"x\" is no "
        "unit, or stands there twice");
    EXPECT_EQ(fails({.extra_units = {"norm"}, .unit_order = {"norm"}}),
              "[parallelize] unit_order: layers.0 is missing, want every unit once");
    EXPECT_EQ(fails({.forward_prefetch_depth = -1}), "[parallelize] forward_prefetch_depth is -1, want 0 or more");
    EXPECT_EQ(fails({.backward_prefetch_depth = -2}), "[parallelize] backward_prefetch_depth is -2, want 0 or more");
    EXPECT_THAT(fails({.loss_parallel = true}), HasSubstr("loss_parallel is true with kOneLoss"));
    EXPECT_THAT(fails({.fully_shard = {.mesh = meshes.dense}}), HasSubstr("options.fully_shard.mesh is set"));
    EXPECT_THAT(fails({.fully_shard = {.source_shard_infos = SourceShardInfos()}}),
                HasSubstr("options.fully_shard.source_shard_infos is set"));
    // What fully_shard refuses, before any unit is made.
    EXPECT_THAT(fails({.fully_shard = {.bucket_size = 0}}), HasSubstr("bucket_size is 0"));
    EXPECT_THAT(fails({.fully_shard = {.shard_placement_fn =
                                           [](const std::string& name, const at::Tensor&) {
                                             return name == "norm.weight" ? std::optional<int64_t>(3) : std::nullopt;
                                           }}}),
                HasSubstr("shard_placement_fn returned dim 3 for parameter norm.weight"));
    EXPECT_EQ(value_error([&] { return parallelize(std::shared_ptr<torch::nn::Module>(), meshes); }),
              "[parallelize] module is null, want a torch::nn module");
    Decoder again(DecoderOptions{.layers = 1});
    fully_shard(again->layers[0], {.mesh = meshes.dense});
    EXPECT_THAT(value_error([&] { return parallelize(again, meshes); }), HasSubstr("manages it"));
  });
}

TEST_F(ParallelizeErrors, Meshes) {
  run_ranks(4, [] {
    const auto fails = [&](const PlanMeshes& meshes) { return error({.layers = 1}, meshes, {}); };
    EXPECT_EQ(fails({}), "[parallelize] meshes.dense is undefined, want the mesh of data parallelism, whole");
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
    EXPECT_THAT(fails({.dense = mesh["tp"]}), HasSubstr("[data_mesh] DeviceMesh(cpu, tp=2) has no axis to shard over"));
    EXPECT_THAT(fails({.dense = mesh, .expert = mesh["dp_shard"]}), HasSubstr("have different ranks, want the same"));
    EXPECT_THAT(fails({.dense = mesh, .expert = init_device_mesh("cpu", {2, 2}, {"tp", "edp_shard"})}),
                HasSubstr("axis tp has ranks"));
    EXPECT_THAT(fails({.dense = mesh, .expert = mesh["tp"]}), HasSubstr("have different ranks, want the same"));
    EXPECT_THAT(fails({.dense = mesh, .expert = init_device_mesh("cpu", {4}, {"ep"})}), HasSubstr("has no axis to shard over"));
    // Layers on other ranks than the mesh.
    Decoder model(DecoderOptions{.layers = 1, .tp = init_device_mesh("cpu", {2, 2}, {"tp", "dp"})["tp"]});
    EXPECT_THAT(value_error([&] { return parallelize(model, {.dense = mesh}); }), HasSubstr("the layer's tp has ranks"));
    EXPECT_THAT(value_error([&] { return parallelize(model, {.dense = mesh["dp_shard"]}); }),
                HasSubstr("along tp, which the dense mesh DeviceMesh(cpu, dp_shard=2) lacks"));
  });
}

/// Experts whose parameters something outside of them registers, too.
struct LeakingImpl : torch::nn::Module {
  explicit LeakingImpl(const DeviceMesh& ep) {
    experts = register_module("experts",
                              parallel::GroupedExperts(6, parallel::MoEOptions{.n_experts = 2, .ffn_dim = 4, .ep_mesh = ep}));
    copy = register_parameter("copy", experts->gate_proj);
    other = register_module("other", nn::Linear(6, 6));
  }
  torch::Tensor forward(const torch::Tensor& x) { return other(x); }
  parallel::GroupedExperts experts{nullptr};
  nn::Linear other{nullptr};
  torch::Tensor copy;
};
HP_MODULE(Leaking);

TEST_F(ParallelizeErrors, ExpertsAndPlans) {
  run_ranks(4, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.tp = 2, .ep = 2});
    Leaking leaking(meshes.expert["ep"]);
    EXPECT_THAT(value_error([&] { return parallelize(leaking, meshes); }),
                HasSubstr("copy: routed experts belong to unit the model, want a unit of their own on the expert mesh"));
    // A unit around experts and others on the expert mesh.
    Decoder model(on_meshes({.layers = 1, .experts = 3}, meshes));
    ShardingPlan plan;
    plan.module("norm", {.params = {{"weight", {}}}});
    EXPECT_THAT(value_error([&] { return parallelize(model, plan, meshes); }),
                HasSubstr("norm.weight: a parallel layer holds it, want a plan without it"));
    EXPECT_THAT(value_error([&] { return parallelize(model, meshes, {.gradients = BoundaryGradients::kSumOfLosses}); }),
                HasSubstr("table.weight: a parallel layer cuts it, want kOneLoss"));
    ShardingPlan unknown;
    unknown.module("nothing", {.params = {{"weight", {{"tp", Shard(0)}}}}});
    EXPECT_THAT(value_error([&] { return parallelize(model, unknown, meshes); }),
                HasSubstr("\"nothing.weight\" matches no parameter of the model"));
    // apply_plan's own refusal comes after everything else, and nothing has changed by then.
    Decoder plain(DecoderOptions{.layers = 1});
    ShardingPlan cut;
    cut.module("layers.0", {.params = {{"scale", {{"tp", Shard(0)}}}}});
    EXPECT_THAT(value_error([&] { return parallelize(plain, cut, meshes); }),
                HasSubstr("layers.0.scale: cut, but no module around it is a SourceBoundary"));
    EXPECT_EQ(plain->layers[0]->scale.sizes(), (std::vector<int64_t>{12}));
    EXPECT_EQ(unit_names(parallelize(plain, cut, meshes, {.boundaries_elsewhere = true})), (Names{"layers.0", ""}));
    EXPECT_EQ(plain->layers[0]->scale.sizes(), (std::vector<int64_t>{6}));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
