// hp::parallelize: every error, and that the model is unchanged after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/parallel_net.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

using parallel::init_parallel_meshes;
using ::testing::HasSubstr;
using Names = std::vector<std::string>;

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
    const PlanMeshes meshes = PlanMeshes{.dense = init_device_mesh("cpu", {get_world_size()}, {"dp"})};
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

/// Parameters cut along axes of both meshes in one module.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    w = register_parameter("w", torch::ones({2, 6, 6}));
    gate = register_parameter("gate", torch::ones({6, 6}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * w.sum() * gate.sum(); }
  torch::Tensor w, gate;
};
HP_MODULE(Mixed);
struct MixedNetImpl : torch::nn::Module {
  MixedNetImpl() { experts = register_module("experts", Mixed()); }
  torch::Tensor forward(const torch::Tensor& x) { return experts(x); }
  Mixed experts{nullptr};
};
HP_MODULE(MixedNet);

TEST_F(ParallelizeErrors, BothMeshesInOneUnit) {
  run_ranks(4, [] {
    const PlanMeshes meshes{.dense = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}),
                            .expert = init_device_mesh("cpu", {2, 2}, {"edp", "ep"})};
    ShardingPlan plan;
    plan.module("experts", {.params = {{"w", {{"ep", Shard(0)}}}, {"gate", {{"tp", Shard(0)}}}}, .ep_size = 2});
    MixedNet net;
    EXPECT_THAT(
        value_error([&] { return parallelize(net, plan, meshes, {.boundaries_elsewhere = true}); }),
        HasSubstr("experts.gate: lies on DeviceMesh(cpu, tp=2), but unit experts on DeviceMesh(cpu, ep=2), want one mesh in a "
                  "unit: make the experts a module of their own"));
    EXPECT_EQ(net->experts->w.sizes(), (std::vector<int64_t>{2, 6, 6}));
    // Experts in the model itself.
    ShardingPlan outside;
    outside.module("", {.params = {{"w", {{"ep", Shard(0)}}}}, .ep_size = 2});
    Mixed flat;
    EXPECT_THAT(value_error([&] { return parallelize(flat, outside, meshes, {.boundaries_elsewhere = true}); }),
                HasSubstr("no unit besides the model"));
    EXPECT_THAT(value_error([&] {
                  MixedNet other;
                  other->register_parameter("w", torch::ones({2, 6, 6}));
                  return parallelize(other, outside, meshes, {.extra_units = {"experts"}, .boundaries_elsewhere = true});
                }),
                HasSubstr("w: routed experts belong to unit the model, want a unit of their own"));
  });
}

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
    EXPECT_EQ(parallelize(plain, cut, meshes, {.boundaries_elsewhere = true}).units.size(), 2U);
    EXPECT_EQ(plain->layers[0]->scale.sizes(), (std::vector<int64_t>{6}));
  });
}

/// Ranks decide by what they hold, and those of one dense unit hold different experts.
TEST_F(ParallelizeErrors, MemoryBudgetWithExperts) {
  run_ranks(4, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.ep = 2});
    Decoder model(on_meshes({.layers = 1, .experts = 3}, meshes));
    const ParallelModel made =
        parallelize(model, meshes, {.fully_shard = {.reshard_after_forward = MemoryBudget{int64_t{1} << 30}}});
    const Batch batch = decoder_batch(model->options, 2, 1);
    const std::string want =
        "[fully_shard] memory budget in a tree whose units are sharded over different ranks: unit layers.0.moe.experts not over "
        "those of unit Decoder, want reshard_after_forward = true or false with experts";
    EXPECT_EQ(value_error([&] { (void)made.root.plan_memory(); }), want);
    EXPECT_EQ(value_error([&] { (void)model(batch.tokens, batch.targets); }), want);
    made.root.set_reshard_after_forward(true);
    model(batch.tokens, batch.targets).backward();
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
