// ShardingPlan: building, files, patterns, checks with all problems at once, the table, and source layouts from it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// A plan for a small transformer with experts.
ShardingPlan moe_plan() {
  ShardingPlan plan;
  plan.axis_names = {"tp"};
  plan.module("embed", {.params = {{"weight", {{"tp", Shard(0)}}}}})
      .module("layers.*.wq", {.params = {{"weight", {{"tp", Shard(0)}}}}})
      .module("layers.*.wo", {.params = {{"weight", {{"tp", Shard(-1)}}}}})
      .module("layers.*.norm", {.params = {{"weight", {{"tp", Replicate()}}}}, .partial_gradient_axes = {"tp"}})
      .module("layers.1.experts", {.params = {{"w*", {{"ep", Shard(0)}}}, {"gate", {}}}, .ep_size = 2})
      .module("head", {.params = {{"weight", {{"tp", Replicate()}}}}})
      .tie("embed.weight", "head.weight");
  return plan;
}

std::vector<ParameterDescription> moe_parameters() {
  return {{"embed.weight", {11, 8}, 0},         {"layers.0.wq.weight", {8, 8}, 1},     {"layers.0.wo.weight", {8, 8}, 2},
          {"layers.0.norm.weight", {8}, 3},     {"layers.1.wq.weight", {8, 8}, 4},     {"layers.1.wo.weight", {8, 8}, 5},
          {"layers.1.norm.weight", {8}, 6},     {"layers.1.experts.w1", {3, 8, 4}, 7}, {"layers.1.experts.w2", {3, 4, 8}, 8},
          {"layers.1.experts.gate", {3, 8}, 9}, {"final_norm.weight", {8}, 10},        {"head.weight", {11, 8}, 0}};
}

/// Eight ranks: dense (fsdp_replicate, fsdp_shard, tp) and expert (edp_shard, ep) meshes over all of them.
template <class Body>
void with_meshes(Body&& body) {
  run_ranks(8, [&] {
    body(PlanMeshes{.dense = init_device_mesh("cpu", {2, 2, 2}, {"fsdp_replicate", "fsdp_shard", "tp"}),
                    .expert = init_device_mesh("cpu", {4, 2}, {"edp_shard", "ep"})});
  });
}

TEST(Plan, Patterns) {
  EXPECT_TRUE(matches_pattern("layers.*.wq", "layers.12.wq"));
  EXPECT_FALSE(matches_pattern("layers.*.wq", "layers.1.attention.wq"));
  EXPECT_TRUE(matches_pattern("layers.**.wq", "layers.1.attention.wq"));
  EXPECT_TRUE(matches_pattern("**", "a.b.c"));
  EXPECT_TRUE(matches_pattern("w?", "w1"));
  EXPECT_FALSE(matches_pattern("w?", "w"));
  EXPECT_FALSE(matches_pattern("w?x", "w.x"));
  EXPECT_TRUE(matches_pattern("", ""));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_TRUE(matches_pattern("a*", "a"));
}

TEST(Plan, OwnedAndSourceAxes) {
  for (const char* axis : {"dp", "dp_replicate", "dp_shard", "dp_cp", "cp", "pp", "fsdp_replicate", "fsdp_shard", "edp",
                           "edp_replicate", "edp_shard", "ep_shard"})
    EXPECT_TRUE(is_fsdp_axis(axis)) << axis;
  for (const char* axis : {"tp", "ep", "etp", ""}) EXPECT_FALSE(is_fsdp_axis(axis)) << axis;
  EXPECT_EQ(source_axes({}, {"cp", "tp"}), (std::vector<std::string>{"tp"}));
  EXPECT_FALSE(source_mesh({}).defined());
  with_meshes([](const PlanMeshes& meshes) {
    EXPECT_EQ(source_axes(meshes.dense), (std::vector<std::string>{"tp"}));
    EXPECT_EQ(source_mesh(meshes.dense), meshes.dense["tp"]);
    EXPECT_EQ(source_mesh(meshes.dense["tp"]), meshes.dense["tp"]);
    EXPECT_FALSE(source_mesh(meshes.dense["fsdp_shard"]).defined());
    EXPECT_EQ(default_source_shard_info(meshes.dense["fsdp_shard"]),
              (SourceShardMetaInfo{.mesh = meshes.dense["tp"], .placements = {Replicate()}}));
    // G27: the unit's own axes, not the dense ones.
    EXPECT_EQ(default_source_shard_info(meshes.expert["edp_shard"]),
              (SourceShardMetaInfo{.mesh = meshes.expert["ep"], .placements = {Replicate()}}));
    EXPECT_THAT(value_error([] { return default_source_shard_info(init_device_mesh("cpu", {8}, {"dp"})); }),
                HasSubstr("no axis of DeviceMesh(cpu, dp=8) is a source axis"));
    EXPECT_THAT(value_error([] { return default_source_shard_info({}); }), HasSubstr("the unit's mesh is undefined"));
  });
}

TEST(Plan, FileRoundTrip) {
  const ShardingPlan plan = moe_plan();
  EXPECT_EQ(ShardingPlan::from_toml(plan.to_toml()).to_toml(), plan.to_toml());
  const ShardingPlan read = ShardingPlan::from_toml(R"toml(
    axis_names = ["tp"]
    tied_pairs = [["embed.weight", "head.weight"]]
    expert_axis = "xp"
    [modules."layers.*.wq".params]
    weight = { tp = "Shard(0)" }
    bias = { tp = "Shard(dim=-1)", cp = "Replicate" }
    [modules."layers.*.experts"]
    ep_size = 4
    partial_gradient_axes = ["tp"]
    params = { w1 = { xp = "StridedShard(0, 2)" } }
  )toml");
  ShardingPlan want;
  want.axis_names = {"tp"};
  want.expert_axis = "xp";
  want.tie("embed.weight", "head.weight");
  want.module("layers.*.experts",
              {.params = {{"w1", {{"xp", StridedShard(0, 2)}}}}, .ep_size = 4, .partial_gradient_axes = {"tp"}});
  want.module("layers.*.wq", {.params = {{"weight", {{"tp", Shard(0)}}}, {"bias", {{"tp", Shard(-1)}, {"cp", Replicate()}}}}});
  EXPECT_EQ(read, want);
  EXPECT_EQ(ShardingPlan::from_toml(want.to_toml()), want);
}

TEST(Plan, FileErrorsAllAtOnce) {
  const std::string message = value_error([] {
    return ShardingPlan::from_toml(R"toml(axis_name = ["tp"]
tied_pairs = [["a"], 3]
axis_names = [1]
expert_axis = 2
[modules.a]
ep_size = -1
sizes = 2
[modules.b]
params = 3
[modules.c.params]
weight = { tp = "Shard" }
bias = { tp = "Shard(0" }
scale = "Shard(0)"
)toml",
                                   "my.toml");
  });
  EXPECT_THAT(message,
              AllOf(HasSubstr("[ShardingPlan] 11 problems:"), HasSubstr("unknown key axis_name, want"), HasSubstr("(my.toml:1)"),
                    HasSubstr("tied_pairs = 3, want a list of strings (my.toml:2)"), HasSubstr("want pairs of names"),
                    HasSubstr("axis_names = 1, want a string (my.toml:3)"), HasSubstr("expert_axis = 2, want a string")));
  EXPECT_THAT(message, AllOf(HasSubstr("modules.\"a\".ep_size = -1, want an integer >= 0 (my.toml:6)"),
                             HasSubstr("unknown key modules.\"a\".sizes"), HasSubstr("modules.\"b\".params = 3"),
                             HasSubstr("modules.\"c\".params.weight.tp = 'Shard', want \"Shard(dim)\""),
                             HasSubstr("params.bias.tp = 'Shard(0', want"), HasSubstr("params.scale = 'Shard(0)', want axes")));
  EXPECT_THAT(value_error([] { return ShardingPlan::from_toml("a = [", "x"); }),
              AllOf(HasSubstr("[ShardingPlan] syntax: "), HasSubstr("(x:1)")));
  EXPECT_THAT(value_error([] { return ShardingPlan::from_toml("modules = 3"); }), HasSubstr("modules = 3, want a table"));
  EXPECT_THAT(value_error([] { return ShardingPlan::from_toml("[modules]\na = 3"); }), HasSubstr("want a table with params"));
  EXPECT_THAT(value_error([] { return ShardingPlan::from_toml("tied_pairs = 3"); }), HasSubstr("want a list of pairs"));
  EXPECT_THAT(value_error([] { return ShardingPlan().module("a", {}).module("a", {}).to_toml(); }), HasSubstr("there twice"));
}

TEST(Plan, Expand) {
  const ShardingPlan plan = moe_plan().expand(moe_parameters());
  EXPECT_FALSE(plan.has_patterns());
  EXPECT_TRUE(moe_plan().has_patterns());
  std::map<std::string, ModuleShardingSpec> modules(plan.modules.begin(), plan.modules.end());
  EXPECT_EQ(modules.size(), 9U);
  EXPECT_EQ(modules.at("layers.1.wo").params.at("weight").at("tp"), Shard(1)) << "negative dimensions are settled";
  EXPECT_EQ(modules.at("layers.1.experts").params.size(), 3U);
  EXPECT_EQ(modules.at("layers.1.experts").ep_size, 2);
  // An exact name counts before a pattern.
  ShardingPlan both = moe_plan();
  both.module("layers.0", {.params = {{"wq.weight", {{"tp", Shard(1)}}}}});
  const ShardingPlan chosen = both.expand(moe_parameters());
  for (const auto& [name, spec] : chosen.modules) {
    if (name == "layers.0") {
      EXPECT_EQ(spec.params.at("wq.weight").at("tp"), Shard(1));
    }
    EXPECT_NE(name, "layers.0.wq");
  }
  ShardingPlan bad = moe_plan();
  bad.module("layers.?.wq", {.params = {{"weight", {{"tp", Shard(1)}}}}});
  bad.module("layer.*", {.params = {{"weight", {}}}});
  bad.module("final_norm", {.params = {{"weight", {{"tp", Shard(1)}}}}});
  EXPECT_THAT(value_error([&] { return bad.expand(moe_parameters()); }),
              AllOf(HasSubstr("[ShardingPlan] 4 problems:"), HasSubstr("\"layer.*.weight\" matches no parameter"),
                    HasSubstr("layers.0.wq.weight: \"layers.*.wq.weight\" and \"layers.?.wq.weight\" say different things"),
                    HasSubstr("final_norm.weight, axis tp: Shard(dim=1), want a dimension of a parameter with 1")));
}

TEST(Plan, SourceLayouts) {
  with_meshes([](const PlanMeshes& meshes) {
    const DeviceMesh tp = meshes.dense["tp"], ep = meshes.expert["ep"];
    const auto infos =
        build_source_shard_info(moe_plan().expand(moe_parameters()), meshes.dense, {.expert_source_mesh = meshes.expert});
    EXPECT_EQ(infos.size(), 11U);
    EXPECT_EQ(infos.at("embed.weight"), (SourceShardMetaInfo{.mesh = tp, .placements = {Shard(0)}}));
    EXPECT_EQ(infos.at("head.weight"), infos.at("embed.weight")) << "a tied pair is cut if one end is";
    EXPECT_EQ(infos.at("layers.0.wo.weight").placements, std::vector<Placement>{Shard(1)});
    EXPECT_EQ(infos.at("layers.0.norm.weight").copy_gradients, std::vector<CopyGradient>{CopyGradient::kPartial});
    EXPECT_EQ(infos.at("layers.1.experts.w1"), (SourceShardMetaInfo{.mesh = ep, .placements = {Shard(0)}}));
    EXPECT_EQ(infos.at("layers.1.experts.gate"), (SourceShardMetaInfo{.mesh = tp, .placements = {Replicate()}}))
        << "the router lies on the dense mesh";
    EXPECT_FALSE(infos.contains("final_norm.weight"));
    // Only the source axes of a whole mesh count; the source mesh itself gives the same.
    EXPECT_EQ(build_source_shard_info(moe_plan().expand(moe_parameters()), tp, {.expert_source_mesh = ep}), infos);
  });
}

TEST(Plan, SourceLayoutsWithoutMesh) {
  ShardingPlan plan;
  plan.axis_names = {"cp"};
  plan.module("a", {.params = {{"weight", {}}}});
  const SourceShardMetaInfo none = build_source_shard_info(plan, {}).at("a.weight");
  EXPECT_FALSE(none.mesh.defined());
  EXPECT_TRUE(none.placements.empty());
  plan.axis_names = {"cp", "tp"};
  plan.modules[0].second.params["weight"] = {{"tp", Shard(0)}};
  EXPECT_EQ(build_source_shard_info(plan, {}).at("a.weight").placements, std::vector<Placement>{Shard(0)});
}

TEST(Plan, SourceLayoutErrors) {
  with_meshes([](const PlanMeshes& meshes) {
    const auto error = [&](const std::function<void(ShardingPlan&)>& change, bool with_experts = true) {
      ShardingPlan plan = moe_plan().expand(moe_parameters());
      change(plan);
      SourceShardInfoOptions options;
      if (with_experts) options.expert_source_mesh = meshes.expert;
      return value_error([&] { return build_source_shard_info(plan, meshes.dense, options); });
    };
    const auto set = [](const char* axis, Placement placement) {
      return [axis, placement](ShardingPlan& plan) { plan.module("final_norm", {.params = {{"weight", {{axis, placement}}}}}); };
    };
    EXPECT_EQ(error([](auto&) {}), "no ValueError");
    EXPECT_THAT(
        error(set("cp", Shard(1))),
        HasSubstr("final_norm.weight, axis cp: Shard(dim=1), want Replicate(): FSDP or pipeline parallelism owns this axis"));
    EXPECT_THAT(error(set("ep_shard", Shard(0))), HasSubstr("owns this axis"));
    EXPECT_THAT(error(set("dp", Partial())), HasSubstr("owns this axis"));
    EXPECT_EQ(error(set("cp", Replicate())), "no ValueError");
    EXPECT_THAT(error(set("tp", Partial())), HasSubstr("axis tp: Partial(sum), want Shard or Replicate"));
    EXPECT_THAT(error(set("tpp", Shard(0))), HasSubstr("axis tpp: unknown axis, want one of tp"));
    EXPECT_THAT(error(set("tpp", Replicate())), HasSubstr("axis tpp: unknown axis"));
    EXPECT_THAT(error(set("ep", Shard(0))), HasSubstr("axis ep: Shard(dim=0) in a module whose ep_size is 0"));
    EXPECT_THAT(error([](auto&) {}, false),
                AllOf(HasSubstr("2 problems"), HasSubstr("layers.1.experts.w1: routed experts (ep_size 2) without expert mesh")));
    EXPECT_THAT(error([](auto& plan) {
                  for (auto& [name, spec] : plan.modules) spec.ep_size *= 2;
                }),
                HasSubstr("ep_size is 4, want the 2 ranks of axis ep"));
    EXPECT_THAT(error([](auto& plan) {
                  plan.module("x", {.params = {{"w", {{"ep", Shard(0)}, {"tp", Shard(1)}}}}, .ep_size = 2});
                }),
                HasSubstr("x.w, axis tp: Shard(dim=1), but the expert mesh has no such axis, want one of ep"));
    EXPECT_THAT(error([](auto& plan) {
                  plan.module("x", {.params = {{"w", {}}}, .partial_gradient_axes = {"sp"}});
                }),
                HasSubstr("x.w, axis sp: unknown axis in partial_gradient_axes"));
    EXPECT_THAT(error([](auto& plan) {
                  plan.module("embed", {.params = {{"weight", {{"tp", Shard(1)}}}}});
                }),
                HasSubstr("embed.weight: planned twice with different layouts"));
    // Ties: one way, two ways, other meshes, pairs that nobody plans, and pairs given instead.
    const auto head = [](Placement placement) {
      return [placement](ShardingPlan& plan) {
        for (auto& [name, spec] : plan.modules)
          if (name == "head") spec.params["weight"] = {{"tp", placement}};
      };
    };
    EXPECT_EQ(error(head(Shard(0))), "no ValueError");
    EXPECT_THAT(error(head(Shard(1))),
                HasSubstr("embed.weight and head.weight are tied, but cut differently: [Shard(dim=0)] and [Shard(dim=1)]"));
    EXPECT_THAT(error([](auto& plan) { plan.tie("embed.weight", "layers.1.experts.w1"); }), Not(HasSubstr("tied")));
    EXPECT_EQ(error([](auto& plan) { plan.tie("no", "body"); }), "no ValueError");
    ShardingPlan plan = moe_plan().expand(moe_parameters());
    const auto infos = build_source_shard_info(
        plan, meshes.dense,
        {.expert_source_mesh = meshes.expert, .tied_pairs = std::vector<std::pair<std::string, std::string>>{}});
    EXPECT_EQ(infos.at("head.weight").placements, std::vector<Placement>{Replicate()})
        << "pairs that are given override the plan's";
    EXPECT_THAT(value_error([&] { return build_source_shard_info(moe_plan(), meshes.dense); }),
                HasSubstr("the plan has patterns"));
  });
}

TEST(Plan, ValidateListsAllProblems) {
  with_meshes([](const PlanMeshes& meshes) {
    EXPECT_EQ(value_error([&] {
                moe_plan().validate(moe_parameters(), meshes);
                return 0;
              }),
              "no ValueError");
    ShardingPlan plan = moe_plan();
    plan.module("final_norm", {.params = {{"weight", {{"tpp", Shard(0)}, {"cp", Shard(0)}}}}});
    plan.module("nothing", {.params = {{"weight", {}}}});
    plan.tie("embed.weight", "final_norm.weight").tie("embed.weight", "gone");
    EXPECT_THAT(value_error([&] {
                  plan.validate(moe_parameters(), {.dense = meshes.dense});
                  return 0;
                }),
                AllOf(HasSubstr("[ShardingPlan] 7 problems:"), HasSubstr("\"nothing.weight\" matches no parameter"),
                      HasSubstr("axis tpp: unknown axis"), HasSubstr("axis cp: Shard(dim=0), want Replicate()"),
                      HasSubstr("layers.1.experts.w2: routed experts"), HasSubstr("two tensors in the model"),
                      HasSubstr("the model has no parameter gone")));
    // Two names of one tensor that no tie settles.
    ShardingPlan untied = moe_plan();
    untied.tied_pairs.clear();
    EXPECT_THAT(
        value_error([&] {
          untied.validate(moe_parameters(), meshes);
          return 0;
        }),
        HasSubstr("embed.weight and head.weight are one tensor with two layouts: [Shard(dim=0)] on DeviceMesh(cpu, tp=2)"));
    ShardingPlan strided = moe_plan();
    strided.module("final_norm", {.params = {{"weight", {{"tp", StridedShard(0, 3)}}}}});
    EXPECT_THAT(value_error([&] {
                  strided.validate(moe_parameters(), meshes);
                  return 0;
                }),
                HasSubstr("split factor"));
  });
}

TEST(Plan, ExplainIsATable) {
  with_meshes([](const PlanMeshes& meshes) {
    const std::string text = moe_plan().explain(moe_parameters(), meshes);
    EXPECT_EQ(text,
              "parameter              shape      tp                      ep     part of a rank  mesh\n"
              "embed.weight           [11, 8]    cut 0                   -      <= [6, 8]       dense\n"
              "layers.0.wq.weight     [8, 8]     cut 0                   -      [4, 8]          dense\n"
              "layers.0.wo.weight     [8, 8]     cut 1                   -      [8, 4]          dense\n"
              "layers.0.norm.weight   [8]        copy, partial gradient  -      [8]             dense\n"
              "layers.1.wq.weight     [8, 8]     cut 0                   -      [4, 8]          dense\n"
              "layers.1.wo.weight     [8, 8]     cut 1                   -      [8, 4]          dense\n"
              "layers.1.norm.weight   [8]        copy, partial gradient  -      [8]             dense\n"
              "layers.1.experts.w1    [3, 8, 4]  -                       cut 0  <= [2, 8, 4]    expert\n"
              "layers.1.experts.w2    [3, 4, 8]  -                       cut 0  <= [2, 4, 8]    expert\n"
              "layers.1.experts.gate  [3, 8]     copy                    -      [3, 8]          dense\n"
              "final_norm.weight      [8]        -                       -      [8]             not planned: copies\n"
              "head.weight            [11, 8]    cut 0                   -      <= [6, 8]       dense\n"
              "tied: embed.weight = head.weight\n");
    std::vector<ParameterDescription> alias = moe_parameters();
    alias.push_back({"again.weight", {8}, 10});
    EXPECT_THAT(moe_plan().explain(alias, meshes), HasSubstr("is final_norm.weight\n"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
