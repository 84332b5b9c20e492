// From parallel layers to fully_shard: meshes, source layouts, and the same initial values for every mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/parallel_net.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

using namespace parallel;  // NOLINT: what is tested
using ::testing::HasSubstr;
using Names = std::vector<std::string>;
using Placements = std::vector<Placement>;
using Kinds = std::vector<CopyGradient>;

TEST(ParallelMeshes, AxesAndSizes) {
  run_ranks(8, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.dp_replicate = 2, .tp = 2, .ep = 2});
    EXPECT_EQ(meshes.dense, init_device_mesh("cpu", {2, 2, 1, 2}, {"dp_replicate", "dp_shard", "cp", "tp"}));
    EXPECT_EQ(meshes.expert, init_device_mesh("cpu", {2, 1, 2, 2}, {"edp_replicate", "edp_shard", "ep", "tp"}));
    EXPECT_EQ(data_mesh(meshes.dense).shape(), (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(data_mesh(meshes.dense).mesh_dim_names(), (Names{"dp_replicate", "dp_shard"}));
    EXPECT_EQ(expert_gradient_factor(meshes), 0.5);

    const PlanMeshes plain = init_parallel_meshes("cpu");
    EXPECT_EQ(plain.dense.shape(), (std::vector<int64_t>{8, 1, 1}));
    EXPECT_FALSE(plain.expert.defined());
    EXPECT_EQ(expert_gradient_factor(plain), 1.0);

    const PlanMeshes context = init_parallel_meshes("cpu", {.dp_shard = 2, .cp = 4, .ep = 8});
    EXPECT_EQ(context.expert.shape(), (std::vector<int64_t>{1, 8, 1}));
    EXPECT_EQ(data_mesh(context.dense), (context.dense[Names{"dp_shard", "cp"}].flatten()));
    EXPECT_EQ(data_mesh(init_parallel_meshes("cpu", {.tp = 8}).dense).mesh_dim_names(), Names{"dp_shard"});
    EXPECT_EQ(expert_gradient_factor(context), 0.125);
    // ep in the dense mesh: nothing is sharded over it, but its ranks have tokens of their own.
    EXPECT_EQ(expert_gradient_factor({.dense = init_device_mesh("cpu", {2, 2, 2}, {"dp", "ep", "tp"})}), 0.5);

    const DeviceMesh stages = init_device_mesh("cpu", {2, 2, 2}, {"pp", "dp", "tp"});
    EXPECT_EQ(data_mesh(stages), stages["dp"]);
  });
}

TEST(ParallelMeshes, Errors) {
  run_ranks(4, [] {
    const auto error = [](const ParallelSizes& sizes) { return value_error([&] { return init_parallel_meshes("cpu", sizes); }); };
    EXPECT_EQ(error({.tp = 0}), "[init_parallel_meshes] tp is 0, want 1 or more");
    EXPECT_EQ(error({.dp_shard = -2}), "[init_parallel_meshes] dp_shard is -2, want 1 or more, or -1");
    EXPECT_EQ(error({.tp = 3}), "[init_parallel_meshes] dp_replicate * cp * tp is 3, want a divisor of the 4 ranks");
    EXPECT_EQ(error({.dp_shard = 4, .tp = 2}),
              "[init_parallel_meshes] dp_replicate * dp_shard * cp * tp is 8, want the 4 ranks of the world");
    EXPECT_EQ(error({.tp = 2, .ep = 4}), "[init_parallel_meshes] ep is 4, want a divisor of dp_shard * cp, which is 2");
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "dp_replicate"});
    EXPECT_THAT(value_error([&] { return data_mesh(mesh); }), HasSubstr("stands to the right of dp_shard, want replicas first"));
    EXPECT_THAT(value_error([&] { return data_mesh(mesh["dp_replicate"]); }), HasSubstr("has no axis to shard over"));
    EXPECT_THAT(value_error([] { return data_mesh({}); }), HasSubstr("[data_mesh] the mesh is undefined"));
    EXPECT_THAT(value_error([] { return expert_gradient_factor({}); }), HasSubstr("the dense mesh is undefined"));
  });
}

TEST(SourceInfos, SayWhatTheLayersDo) {
  run_ranks(8, [] {
    const PlanMeshes meshes = init_parallel_meshes("cpu", {.tp = 2, .ep = 2});
    const DecoderOptions options = on_meshes({.layers = 1, .tied = true, .sequence = true, .experts = 3}, meshes);
    Decoder model(options);
    const SourceShardInfos infos = source_shard_infos(model, {.meshes = meshes});
    Tensors parameters;
    for (const auto& item : model->named_parameters()) parameters[item.key()] = item.value();
    std::map<std::string, std::vector<int64_t>> shapes = {{"head.weight", {11, 12}}};
    for (const auto& [name, cut] : parameter_cuts(model)) shapes[name] = cut.shape;
    const auto expect = [&](const std::string& name, const DeviceMesh& mesh, const Placements& placements, const Kinds& kinds) {
      const SourceShardInfos::Entry* entry = infos.find(parameters.at(name));
      ASSERT_NE(entry, nullptr) << name;
      EXPECT_EQ(entry->info.mesh, mesh) << name;
      EXPECT_EQ(entry->info.placements, placements) << name;
      EXPECT_EQ(entry->info.copy_gradients, kinds) << name;
      EXPECT_EQ(*entry->info.shape, shapes.at(name)) << name;
    };
    const auto op = CopyGradient::kUnitOp, whole = CopyGradient::kWhole, partial = CopyGradient::kPartial;
    const DeviceMesh tp = meshes.dense["tp"], both = meshes.expert[Names{"ep", "tp"}];
    expect("table.weight", tp, {Shard(0)}, {op});
    expect("head.weight", tp, {Shard(0)}, {op});  // follows its twin
    expect("norm.weight", tp, {Replicate()}, {partial});
    expect("layers.0.attention.q_proj.weight", tp, {Shard(0)}, {op});
    expect("layers.0.attention.o_proj.weight", tp, {Shard(1)}, {op});
    expect("layers.0.moe.router.weight", tp, {Replicate()}, {partial});
    expect("layers.0.moe.experts.gate_proj", both, {Shard(0), Shard(1)}, {op, op});
    expect("layers.0.moe.experts.down_proj", both, {Shard(0), Shard(2)}, {op, op});

    // Without sequence parallelism copies have whole gradients; heads that the ranks do not divide have partial ones.
    const DecoderOptions uneven = on_meshes({.heads = 3, .layers = 1}, meshes);
    Decoder other(uneven);
    const SourceShardInfos others = source_shard_infos(other, {.meshes = meshes});
    const DecoderBlock& block = other->layers[0];
    EXPECT_EQ(others.find(block->scale)->info.copy_gradients, Kinds{whole});
    EXPECT_EQ(others.find(block->mlp->down_proj->bias)->info.copy_gradients, Kinds{whole});
    EXPECT_EQ(others.find(block->attention_norm->weight)->info.copy_gradients, Kinds{whole});
    EXPECT_EQ(others.find(block->attention->q_proj->weight)->info.placements, Placements{Replicate()});
    EXPECT_EQ(others.find(block->attention->q_proj->weight)->info.copy_gradients, Kinds{partial});

    // Nothing but data-parallel axes: there are no source axes.
    Decoder plain(DecoderOptions{.layers = 1});
    const DeviceMesh data = init_device_mesh("cpu", {8}, {"dp"});
    EXPECT_FALSE(source_shard_infos(plain, {.meshes = {.dense = data}}).find(plain->norm->weight)->info.mesh.defined());
  });
}

/// Copies beside experts, and ep as an axis of the only mesh.
struct ScaledExpertsImpl : GroupedExpertsImpl {
  ScaledExpertsImpl(int64_t width, const MoEOptions& moe) : GroupedExpertsImpl(width, moe) {
    scale = register_parameter("scale", torch::ones({width}));
  }
  torch::Tensor scale;
};
HP_MODULE(ScaledExperts);

TEST(SourceInfos, CopiesAlongTheExpertAxis) {
  run_ranks(4, [] {
    const DeviceMesh one = init_device_mesh("cpu", {2, 2}, {"dp", "ep"});
    ScaledExperts experts(6, MoEOptions{.n_experts = 3, .ffn_dim = 4, .ep_mesh = one["ep"]});
    EXPECT_EQ(source_shard_infos(experts, {.meshes = {.dense = one}}).find(experts->scale)->info.copy_gradients,
              Kinds{CopyGradient::kPartial});
    Decoder model(DecoderOptions{.layers = 1});
    EXPECT_EQ(source_shard_infos(model, {.meshes = {.dense = one}}).find(model->norm->weight)->info.copy_gradients,
              Kinds{CopyGradient::kUnitOp});
  });
}

/// A layer that says what a test wants it to say.
struct TellingImpl : torch::nn::Module, ParallelModule {
  TellingImpl(const torch::Tensor& value, ParameterCut told) : cut(std::move(told)) {
    weight = register_parameter("weight", value);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight.sum(); }
  [[nodiscard]] ParameterCuts own_cuts() const override { return {{"weight", cut}}; }
  ParameterCut cut;
  torch::Tensor weight;
};
HP_MODULE(Telling);

struct PairImpl : torch::nn::Module {
  PairImpl(const ParameterCut& a, const ParameterCut& b) {
    first = register_module("first", Telling(torch::ones({2, 2}), a));
    second = register_module("second", Telling(first->weight, b));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
  Telling first{nullptr}, second{nullptr};
};
HP_MODULE(Pair);

TEST(SourceInfos, Errors) {
  run_ranks(4, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const auto error = [&](const ParameterCut& cut, const torch::Tensor& value) {
      return value_error([&] { return source_shard_infos(Telling(value, cut), {.meshes = {.dense = mesh}}); });
    };
    const torch::Tensor value = torch::ones({2, 4});
    EXPECT_EQ(error({{4, 4}, {{mesh["tp"], Shard(0)}}}, value), "no ValueError");
    EXPECT_THAT(error({{4, 4}, {{mesh["dp"], Shard(0)}}}, value),
                HasSubstr("[source_shard_infos] weight: Shard(dim=0) along dp, which FSDP owns, want a source axis, e.g. tp"));
    EXPECT_THAT(error({{4, 4}, {{mesh["tp"], Shard(1)}}}, value),
                HasSubstr("weight: shape [2, 4], want this rank's part of [4, 4], [4, 2]"));
    EXPECT_THAT(error({{4, 4}, {{mesh["tp"], Partial()}}}, value), HasSubstr("along tp, want Shard or Replicate"));
    const DeviceMesh two = init_device_mesh("cpu", {2, 2}, {"mp", "tp"});
    EXPECT_THAT(error({{4, 8}, {{mesh["tp"], Shard(0)}, {two["mp"], Shard(0)}}}, value),
                AllOf(HasSubstr("two axes cut dimension 0, want one"),
                      HasSubstr("weight: Shard(dim=0) along mp, which the dense mesh DeviceMesh(cpu, dp=2, tp=2) lacks")));
    const DeviceMesh swapped = init_device_mesh("cpu", {2, 2}, {"tp", "dp"});
    EXPECT_THAT(error({{4, 4}, {{swapped["tp"], Shard(0)}}}, value), HasSubstr("weight: the layer's tp has ranks"));
    EXPECT_THAT(error({{4, 4}, {{two["mp"], Shard(0)}}}, value), HasSubstr("along mp, which the dense mesh"));

    // Names of one tensor.
    const ParameterCut rows{{4, 2}, {{mesh["tp"], Shard(0)}}}, columns{{2, 4}, {{mesh["tp"], Shard(1)}}};
    const ParameterCut copy{{2, 2}, {{mesh["tp"], Replicate()}}}, summand{{2, 2}, {{mesh["tp"], Replicate(), true}}};
    EXPECT_THAT(
        value_error([&] { return source_shard_infos(Pair(rows, columns), {.meshes = {.dense = mesh}}); }),
        HasSubstr("first.weight and second.weight are one tensor with two layouts: [Shard(dim=0)] on DeviceMesh(cpu, tp=2) and "
                  "[Shard(dim=1)] on DeviceMesh(cpu, tp=2), want one"));
    EXPECT_THAT(value_error([&] { return source_shard_infos(Pair(copy, summand), {.meshes = {.dense = mesh}}); }),
                HasSubstr("[Replicate()] on DeviceMesh(cpu, tp=2) with partial gradients, want one"));

    Telling wrapped(value, ParameterCut{{4, 4}, {{mesh["tp"], Shard(0)}}});
    fully_shard(wrapped, {.mesh = mesh["dp"]});
    EXPECT_THAT(value_error([&] { return source_shard_infos(wrapped, {.meshes = {.dense = mesh}}); }),
                HasSubstr("manages it, want source layouts taken before fully_shard"));
    EXPECT_THAT(value_error([&] { return source_shard_infos(wrapped, {}); }), HasSubstr("meshes.dense is undefined"));
  });
}

/// Units of a decoder with the layouts that its layers tell.
HSDPModule shard_decoder(const Decoder& model, const PlanMeshes& meshes, ShardLayout layout) {
  const SourceShardInfos infos = source_shard_infos(model, {.meshes = meshes});
  FullyShardOptions dense{.mesh = data_mesh(meshes.dense)}, expert;
  dense.shard_layout = expert.shard_layout = layout;
  if (meshes.expert.defined()) expert.mesh = data_mesh(meshes.expert);
  const auto wrap = [&](const auto& holder, FullyShardOptions options) {
    options.source_shard_infos = managed_source_shard_infos(holder, options, infos);
    return fully_shard(holder, options);
  };
  for (const DecoderBlock& block : model->layers) {
    if (block->moe && meshes.expert.defined())
      wrap(block->moe->experts, expert).set_gradient_scaling_factor(expert_gradient_factor(meshes));
    wrap(block, dense);
  }
  return wrap(model, dense);
}

TEST(SourceInfos, ResetParametersIsTheSameModelForEveryMesh) {
  const std::vector<std::pair<int, ParallelSizes>> meshes = {{1, {}},
                                                             {2, {.tp = 2}},
                                                             {4, {.tp = 2, .ep = 2}},
                                                             {4, {.ep = 4}},
                                                             {3, {.tp = 3}},
                                                             {4, {.cp = 2, .ep = 2}},
                                                             {8, {.dp_replicate = 2, .tp = 2, .ep = 2}}};
  for (const bool experts : {false, true}) {
    for (const auto layout : kLayouts) {
      std::optional<Tensors> want;
      for (const auto& [world, sizes] : meshes) {
        std::mutex mutex;
        run_ranks(world, [&, sizes = sizes, world = world](int rank) {
          const PlanMeshes on = init_parallel_meshes("cpu", sizes);
          const DecoderOptions options = on_meshes({.heads = 3, .layers = 1, .sequence = true, .experts = experts ? 3 : 0}, on);
          Decoder model{nullptr};
          {
            const MetaInit no_memory;
            model = Decoder(options);
          }
          const HSDPModule root = shard_decoder(model, on, layout);
          root.reset_parameters(5);
          const Tensors got = full_parameters(root);
          const std::lock_guard lock(mutex);
          if (!want) want = got;
          EXPECT_EQ(relative_difference(got, *want), 0.0) << "W=" << world << " rank " << rank << " experts " << experts;
          for (const auto& [name, value] : got) EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
        });
      }
      EXPECT_GT(want->at("table.weight").std().item<double>(), 0.5);
      if (experts) {
        EXPECT_GT(want->at("layers.0.moe.experts.down_proj")[2].std().item<double>(), 0.1);
      }
    }
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
