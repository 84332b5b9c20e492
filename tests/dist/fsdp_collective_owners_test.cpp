// The count of collectives where somebody else gathers or reduces, where nothing is to be reduced, and where forwards run twice.
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/collective_count.h"

namespace hyper_parallel::testing {
namespace {

/// Options that change who gathers and reduces what.
std::vector<Case> owners() {
  std::vector<Case> all;
  all.push_back({.name = "Replicated", .choose = [](FullyShardOptions& options, const Net& net) {
                   options.replicate_params = {net->u1->a->weight, net->u2->q->bias, net->table->weight};
                 }});
  // Whole units: their gradients alone travel, though the mesh has no replicas.
  all.push_back({.name = "EverythingWhole", .options = {.threshold = 1 << 20}, .want = [](const std::string&) {
                   return PerGroup{.gathers = 0};
                 }});
  // The root's only gradient, that of the head's bias, is there before all others: at first it looks as if these did not come.
  Counts early_root;
  for (const char* unit : {"u1", "u2", "u2.inner", "u3", "u4"}) early_root[{kScatter, unit}] = early_root[{kReduce, unit}] = 1;
  all.push_back({.name = "LargeMatricesFrozen",
                 .before_wrapping =
                     [](const Net& net) {  // as with adapters of low rank
                       for (auto& parameter : net->named_parameters()) {
                         if (parameter.value().dim() == 2) parameter.value().set_requires_grad(false);
                       }
                     },
                 .more_at_first = early_root});
  early_root.clear();
  for (const char* unit : {"u2", "u2.inner", "u4"})
    early_root[{kGather, unit}] = early_root[{kScatter, unit}] = early_root[{kReduce, unit}] = 1;
  // Nothing in front of u1 wants a gradient, so backward does not come there; it does come through u3.
  all.push_back({.name = "FrozenUnits",
                 .before_wrapping =
                     [](const Net& net) {
                       net->table->weight.set_requires_grad(false);
                       for (auto& parameter : net->u1->parameters()) parameter.set_requires_grad(false);
                       for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
                     },
                 .want =
                     [](const std::string& unit) {
                       const bool frozen = unit == "u1" || unit == "u3";
                       return PerGroup{.gathers = unit == kRoot || unit == "u1" ? 1 : 2, .reductions = frozen ? 0 : 1};
                     },
                 .more_at_first = early_root});
  return all;
}

/// Ours must stay away: what travels over the shard axis has the user's label.
std::vector<Case> customs() {
  const auto gather = [](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
    comm.all_gather_single(output, input, {.label = kUser}).wait();
    return CommWait();
  };
  const auto scatter = [](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
    comm.reduce_scatter_single(output, input, {.label = kUser}).wait();
    return CommWait();
  };
  const auto set = [=](const HSDPModule& root) {
    for (const auto& module : root.module()->modules()) {
      const auto* hooked = dynamic_cast<const nn::HookedBase*>(module.get());
      if (hooked == nullptr || hooked->unit() == nullptr) continue;
      HSDPModule::of(module).set_custom_all_gather(gather);
      HSDPModule::of(module).set_custom_reduce_scatter(scatter);
    }
  };
  const auto all_reduce = [](const HSDPModule& root, bool last) { root.set_requires_all_reduce(last); };
  std::vector<Case> all;
  all.push_back({.name = "Custom",
                 .after_wrapping = set,
                 .want = [](const std::string& unit) { return PerGroup{.gathers = unit == kRoot ? 1 : 2, .by_the_user = true}; },
                 .presence_exchanges = 1});
  all.push_back({.name = "CustomAllReduceLast",
                 .after_wrapping = set,
                 .step = micro_batches({false, true}, all_reduce),
                 .want =
                     [](const std::string& unit) {
                       return PerGroup{.gathers = unit == kRoot ? 2 : 4, .reductions = 2, .all_reduces = 1, .by_the_user = true};
                     },
                 .presence_exchanges = 1});
  return all;
}

/// Once, before the first forward.
std::vector<Case> replica_inits() {
  Counts broadcast, compared{{{kGather, kCompared}, 12}, {{"all_gather_v", kCompared}, 12}};  // for each unit two texts
  for (const char* unit : {"Net", "u1", "u2", "u2.inner", "u3", "u4"}) broadcast[{kBroadcast, unit}] = 1;
  return {{.name = "ReplicasBroadcast", .options = {.replica_init = ReplicaInit::kBroadcast}, .more_at_first = broadcast},
          {.name = "ReplicasCompared", .options = {.replica_init = ReplicaInit::kCheck}, .more_at_first = compared}};
}

/// ZeRO levels over three micro-batches, as the table in fsdp/zero.h says.
std::vector<Case> zero_levels() {
  const auto level = [](ZeroLevel k) {
    return micro_batches({false, false, true}, [k](const HSDPModule& root, bool last) { set_zero_level(root, k, last); });
  };
  return {{.name = "Zero1", .step = level(ZeroLevel::k1), .want = [](const std::string&) { return PerGroup{.gathers = 1}; }},
          {.name = "Zero2",
           .step = level(ZeroLevel::k2),
           .want = [](const std::string&) { return PerGroup{.gathers = 1, .reductions = 3, .all_reduces = 1}; }},
          {.name = "Zero3", .step = level(ZeroLevel::k3), .want = [](const std::string& unit) {
             return PerGroup{.gathers = unit == kRoot ? 3 : 6, .reductions = 3};
           }}};
}

/// A forward of the root with `middle` in place of u1 and u3.
template <class Middle>
auto composed(Middle middle) {
  return [middle](const Net& given, const HSDPModule& root) {
    Net net = given;
    const Batch batch = make_batch(6, 5);
    const torch::Tensor logits = root.call(
        [&](const torch::Tensor& tokens) {
          const auto [u1, u3] = middle(net);
          return net->head->forward(net->u4(u3(net->u2(u1(net->table->forward(tokens))))));
        },
        batch.tokens);
    net_loss(logits, batch.targets).backward();
    root.zero_grad();
  };
}

std::vector<Case> checkpoints_and_scopes() {
  using Layer = std::function<torch::Tensor(const torch::Tensor&)>;
  const auto plain = [](Mlp& mlp) -> Layer { return [&mlp](const torch::Tensor& x) { return mlp(x); }; };
  const auto around = [](Mlp& mlp) -> Layer {
    return [&mlp](const torch::Tensor& x) { return checkpoint([&mlp](const torch::Tensor& y) { return mlp(y); }, x); };
  };
  const auto inside = [](Mlp& mlp) -> Layer {
    return [&mlp](const torch::Tensor& x) {
      const auto part = [&mlp](const torch::Tensor& y) { return mlp->b(torch::silu(mlp->a(y))); };
      return HSDPModule::of(mlp).call([&](const torch::Tensor& y) { return y + mlp->scale * checkpoint(part, y); }, x);
    };
  };
  std::vector<Case> all;
  all.push_back(
      {.name = "CheckpointAroundUnits", .step = composed([=](Net& net) { return std::pair(around(net->u1), around(net->u3)); })});
  all.push_back(
      {.name = "CheckpointInsideUnits", .step = composed([=](Net& net) { return std::pair(inside(net->u1), inside(net->u3)); })});
  // It runs again where its parameters still are: the second forward gathers nothing.
  all.push_back({.name = "CheckpointAroundKeptUnit",
                 .options = {.reshard_after_forward = false},
                 .step = composed([=](Net& net) { return std::pair(around(net->u1), plain(net->u3)); }),
                 .want = [](const std::string&) { return PerGroup{.gathers = 1}; }});
  // No forward in it gathers.
  const auto scope = [](const Net& net, const HSDPModule& root) {
    {
      const UnshardScope gathered(root);
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 2; ++i) (void)net(make_batch(6, 5).tokens);
    }
    default_step(net, root);
  };
  all.push_back({.name = "UnshardScope", .step = scope, .want = [](const std::string& unit) {
                   return PerGroup{.gathers = unit == kRoot ? 2 : 3};
                 }});
  all.push_back(
      {.name = "UnshardScopeKept", .options = {.reshard_after_forward = false}, .step = scope, .want = [](const std::string&) {
         return PerGroup{.gathers = 2};
       }});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Owners, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                              std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(owners())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Customs, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(customs())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(ReplicaInit, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2, 2}, std::vector<int64_t>{2, 1}),
                                            ::testing::ValuesIn(replica_inits())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(ZeroLevels, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                              std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(zero_levels())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Checkpoints, CollectiveCount,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(checkpoints_and_scopes())),
                         name_of);

}  // namespace
}  // namespace hyper_parallel::testing
