// A parameter has a gradient when some rank had one for it. The reductions tell: no rank decides alone, and no message of its own
// says so.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

/// All three run; the result is c's, and on request a's, too. b's is never used.
struct PickImpl : torch::nn::Module {
  PickImpl() {
    for (auto* layer : {&a, &b, &c}) *layer = nn::Linear(3, 5);
    register_module("a", a), register_module("b", b), register_module("c", c);
  }
  torch::Tensor forward(const torch::Tensor& x, bool with_a) {
    (void)b(x);
    const auto y = a(x);
    return with_a ? c(x) + y : c(x);
  }
  nn::Linear a = nullptr, b = nullptr, c = nullptr;
};
HP_MODULE(Pick);

/// How the step in which one rank uses `a` goes on to a reduction that reaches all ranks.
enum class Way { kAtOnce, kLocalSum, kParked, kLateWait, kCustom, kCustomParked };

struct Case {
  std::string name;
  std::vector<std::int64_t> mesh;
  Way way = Way::kAtOnce;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

void set_switches(const HSDPModule& root, Way way, bool last) {
  if (way == Way::kLocalSum) root.set_requires_gradient_sync(last);
  if (way == Way::kParked || way == Way::kCustomParked) root.set_requires_all_reduce(last);
  if (way == Way::kLateWait) root.set_is_last_backward(last);
}

HSDPModule shard(const Pick& model, const FullyShardOptions& options, bool one_unit, Way way) {
  std::vector<HSDPModule> units;
  if (!one_unit) {
    for (auto* layer : {&model->a, &model->b, &model->c}) units.push_back(fully_shard(*layer, options));
  }
  units.push_back(fully_shard(model, options));
  for (const HSDPModule& unit : units) {
    if (way != Way::kCustom && way != Way::kCustomParked) break;
    unit.set_custom_reduce_scatter([](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
      comm.reduce_scatter_single(output, input).wait();
      return CommWait();
    });
  }
  return units.back();
}

class Presence : public ::testing::TestWithParam<Case> {};

TEST_P(Presence, IsTheUnionOverAllRanks) {
  const Case& c = GetParam();
  const int world = ranks_of(c.mesh);
  run_ranks(world, [&](int rank) {
    for (const auto layout : kLayouts) {
      for (const bool one_unit : {true, false}) {
        for (const bool fused : {true, false}) {
          FullyShardOptions options = on_mesh(c.mesh, layout);
          options.comm_fusion = fused;
          Pick model;
          seed_parameters(*model, 3);
          const HSDPModule root = shard(model, options, one_unit, c.way);
          const auto has = [&](const char* name) { return model->named_parameters()[name].grad().defined(); };
          // One rank after the other, then none: what one step has told is gone in the next.
          for (int user = 0; user <= world; ++user) {
            const std::string where = concat("rank ", user, " uses it, one unit ", one_unit, ", fused ", fused);
            if (c.way != Way::kAtOnce && c.way != Way::kCustom) {
              set_switches(root, c.way, false);
              model(wave({2, 3}, user), rank == user).sum().backward();
              set_switches(root, c.way, true);
              model(wave({2, 3}, user), false).sum().backward();
            } else {
              model(wave({2, 3}, user), rank == user).sum().backward();
            }
            for (const char* name : {"a.weight", "a.bias"}) EXPECT_EQ(has(name), user < world) << name << ": " << where;
            for (const char* name : {"b.weight", "b.bias"}) EXPECT_FALSE(has(name)) << name << ": " << where;
            for (const char* name : {"c.weight", "c.bias"}) EXPECT_TRUE(has(name)) << name << ": " << where;
            root.zero_grad();
          }
        }
      }
    }
  });
}

std::vector<Case> cases() {
  const std::vector<std::pair<std::string, std::vector<std::int64_t>>> meshes = {
      {"One", {1}}, {"Two", {2}}, {"Three", {3}}, {"Hybrid", {2, 2}}, {"Copies", {2, 1}}};
  const std::vector<std::pair<std::string, Way>> ways = {{"AtOnce", Way::kAtOnce}, {"LocalSum", Way::kLocalSum},
                                                         {"Parked", Way::kParked}, {"LateWait", Way::kLateWait},
                                                         {"Custom", Way::kCustom}, {"CustomParked", Way::kCustomParked}};
  std::vector<Case> all;
  for (const auto& [mesh_name, mesh] : meshes) {
    for (const auto& [way_name, way] : ways) all.push_back({way_name + "On" + mesh_name, mesh, way});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Presence, ::testing::ValuesIn(cases()), [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace hyper_parallel::testing
