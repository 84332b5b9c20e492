// FSDP and HSDP over tensor parallelism written by hand: losses, gradients, norms and weights of the plain run on one rank.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/tp_net.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

constexpr int kSteps = 3;
constexpr int64_t kRows = 8;
constexpr double kLr = 0.05;

struct Record {
  std::vector<double> losses, norms;
  std::vector<Tensors> gradients;
  Tensors parameters;
};

TpNet whole_net() {
  TpNet net(std::vector<int64_t>{8, 7});
  seed_parameters(*net, 3);
  return net;
}

torch::Tensor tp_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat).reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

Tensors without_head(Tensors tensors) {
  tensors.erase("head");
  return tensors;
}

const Record& plain_run() {
  static const Record run = [] {
    Record record;
    TpNet net = whole_net();
    std::vector<torch::Tensor> parameters;
    for (auto& entry : net->named_parameters()) {
      if (entry.key() != "head") parameters.push_back(entry.value());
    }
    torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(kLr).weight_decay(0.01));
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = make_batch(kRows, 50 + static_cast<uint64_t>(step));
      adamw.zero_grad();
      const auto loss = tp_loss(net(batch.tokens), batch.targets);
      loss.backward();
      record.losses.push_back(loss.item<double>());
      record.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, 0.5));
      record.gradients.push_back(without_head(plain_gradients(*net)));
      adamw.step();
    }
    for (auto& entry : net->named_parameters()) record.parameters[entry.key()] = entry.value().detach().clone();
    record.parameters = without_head(record.parameters);
    return record;
  }();
  return run;
}

struct Case {
  std::string name = {};
  std::vector<int64_t> mesh = {2, 2};  ///< ..., tp
  Convention convention = Convention::kWhole;
  ShardLayout layout = ShardLayout::kPerParameter;
  bool fusion = true;
  std::optional<int64_t> dim = {};
  int micro_batches = 1;
  enum class Accumulate { kEach, kNoSync, kNoAllReduce } accumulate = Accumulate::kEach;
  bool loss_parallel = false;
  bool low_precision = false;
  bool replicate_norms = false;
  bool main_grads = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

DeviceMesh mesh_of(const Case& c) {
  return c.mesh.size() == 2 ? init_device_mesh("cpu", c.mesh, {"dp_shard", "tp"})
                            : init_device_mesh("cpu", c.mesh, {"dp_replicate", "dp_shard", "tp"});
}

DeviceMesh fsdp_of(const DeviceMesh& mesh) {
  std::vector<std::string> names = mesh.mesh_dim_names();
  names.pop_back();
  return mesh[names];
}

FullyShardOptions options_of(const Case& c, const DeviceMesh& mesh, TpNet net) {
  FullyShardOptions options{.mesh = fsdp_of(mesh)};
  options.shard_layout = c.layout;
  options.comm_fusion = c.fusion;
  if (c.dim)
    options.shard_placement_fn = [dim = *c.dim](const std::string&, const at::Tensor& p) {
      return p.dim() > 1 ? std::optional(dim) : std::nullopt;
    };
  if (c.low_precision) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
  options.mp_policy.apply_grad_on_fp32_main_grad = c.main_grads;
  if (c.replicate_norms)
    for (const TpBlock& block : net->blocks) options.replicate_params.push_back(block->norm);
  return options;
}

/// The loss that a rank goes back from. In the convention of sums each rank of tp may take a part of the tokens.
torch::Tensor rank_loss(const Case& c, TpNet net, const Batch& batch) {
  const torch::Tensor logits = net(batch.tokens);
  if (!c.loss_parallel) return tp_loss(logits, batch.targets);
  const torch::Tensor mine = own_chunk(logits, 1, net->tp), targets = own_chunk(batch.targets, 1, net->tp);
  return tp_loss(mine, targets) * (static_cast<double>(mine.size(1)) / static_cast<double>(logits.size(1)));
}

Record sharded_run(const Case& c) {
  TpNet net = whole_net();
  const DeviceMesh mesh = mesh_of(c);
  const SourceShardInfos infos = cut_net(net, mesh["tp"], c.convention);
  const HSDPModule root = shard_tp_net(net, options_of(c, mesh, net), infos);
  if (c.convention == Convention::kSummed) {
    const double factor =
        1.0 / (static_cast<double>(fsdp_of(mesh).size()) * (c.loss_parallel ? 1.0 : static_cast<double>(c.mesh.back())));
    for (TpBlock& block : net->blocks) HSDPModule::of(block).set_gradient_scaling_factor(factor);
    root.set_gradient_scaling_factor(factor);
    root.set_reduce_op_type("sum");
  }
  optim::AdamW adamw(root, {.lr = kLr, .weight_decay = 0.01});
  const Comm data = root.data_parallel_comm();
  Record run;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(kRows, 50 + static_cast<uint64_t>(step));
    adamw.zero_grad();
    double loss = 0;
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      const bool last = micro + 1 == c.micro_batches;
      root.set_requires_gradient_sync(last || c.accumulate != Case::Accumulate::kNoSync);
      root.set_requires_all_reduce(last || c.accumulate != Case::Accumulate::kNoAllReduce);
      const Batch mine = batch.part(micro, c.micro_batches).part(data.rank(), data.size());
      const auto value = rank_loss(c, net, mine) / c.micro_batches;
      value.backward();
      loss += value.item<double>();
    }
    auto total = torch::tensor({loss}, torch::kDouble);
    root.unit_comm().all_reduce(total, {.op = c.loss_parallel ? ReduceOp::kSum : ReduceOp::kAvg}).wait();
    run.losses.push_back(total.item<double>() / (c.loss_parallel ? data.size() : 1));
    run.norms.push_back(clip_grad_norm_(root, 0.5));
    run.gradients.push_back(full_gradients(root));
    adamw.step();
  }
  run.parameters = full_parameters(root);
  return run;
}

class TensorParallel : public ::testing::TestWithParam<Case> {};

TEST_P(TensorParallel, EqualsPlainRun) {
  const Case& c = GetParam();
  const Record& want = plain_run();
  const double tolerance = c.low_precision ? 0.1 : 2e-5;
  run_ranks(ranks_of(c.mesh), [&](int rank) {
    const Record got = sharded_run(c);
    for (std::size_t s = 0; s < kSteps; ++s) {
      EXPECT_NEAR(got.losses[s], want.losses[s], (c.low_precision ? 2e-2 : 1e-5) * want.losses[s])
          << "step " << s << " rank " << rank;
      EXPECT_NEAR(got.norms[s], want.norms[s], (c.low_precision ? 3e-2 : 1e-5) * want.norms[s])
          << "step " << s << " rank " << rank;
      for (const auto& [name, gradient] : want.gradients[s]) {
        ASSERT_TRUE(got.gradients[s].contains(name)) << name;
        if (c.low_precision && s > 0) continue;  // Adam turns small differences into steps of full size
        EXPECT_LT(relative_difference({{name, got.gradients[s].at(name)}}, {{name, gradient}}), tolerance)
            << name << " step " << s;
      }
      EXPECT_EQ(got.gradients[s].size(), want.gradients[s].size());
    }
    if (!c.low_precision) {
      EXPECT_LT(relative_difference(got.parameters, want.parameters), 2e-4);
    }
  });
}

std::vector<Case> cases() {
  using Accumulate = Case::Accumulate;
  std::vector<Case> all;
  const std::vector<std::pair<std::string, std::vector<int64_t>>> meshes = {{"Fsdp2Tp2", {2, 2}},      {"Hsdp2x2Tp2", {2, 2, 2}},
                                                                            {"Fsdp1Tp3", {1, 3}},      {"Fsdp2Tp3", {2, 3}},
                                                                            {"Hsdp2x1Tp2", {2, 1, 2}}, {"Fsdp2Tp1", {2, 1}}};
  for (const auto& [mesh_name, mesh] : meshes) {
    for (const auto convention : {Convention::kWhole, Convention::kSummed}) {
      const std::string prefix = mesh_name + (convention == Convention::kWhole ? "Whole" : "Summed");
      const auto add = [&](const std::string& name, Case c) {
        c.name = prefix + name;
        c.mesh = mesh;
        c.convention = convention;
        all.push_back(c);
      };
      add("SameDim", {});
      add("OtherDim", {.dim = 1});
      add("Ragged", {.layout = ShardLayout::kRagged});
      add("Unfused", {.fusion = false});
      if (mesh_name != "Fsdp2Tp2" && mesh_name != "Hsdp2x2Tp2") continue;
      add("AccumulateEach", {.micro_batches = 2});
      add("NoSync", {.micro_batches = 2, .accumulate = Accumulate::kNoSync});
      add("NoAllReduce", {.micro_batches = 2, .accumulate = Accumulate::kNoAllReduce});
      add("RaggedNoSync", {.layout = ShardLayout::kRagged, .micro_batches = 2, .accumulate = Accumulate::kNoSync});
      add("ReplicateNorms", {.replicate_norms = true});
      add("MainGrads", {.main_grads = true});
      add("LowPrecision", {.low_precision = true});
      add("LowPrecisionRagged", {.layout = ShardLayout::kRagged, .low_precision = true});
      if (convention == Convention::kSummed) add("LossParallel", {.loss_parallel = true});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, TensorParallel, ::testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

/// Copies along tp are reduced with the replicas of HSDP: no collective for tp alone, and none more than without it.
TEST(TensorParallelTraffic, OneAllReduceForReplicasAndCopies) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 2}, {2, 2, 2}}) {
    run_ranks(ranks_of(shape), [&] {
      Case c{.name = "", .mesh = shape};
      TpNet net = whole_net();
      const DeviceMesh mesh = mesh_of(c);
      const SourceShardInfos infos = cut_net(net, mesh["tp"], c.convention);
      const HSDPModule root = shard_tp_net(net, options_of(c, mesh, net), infos);
      const bool hybrid = shape.size() == 3;
      const auto step = [&] { tp_loss(net(make_batch(2, 1).tokens), make_batch(2, 1).targets).backward(); };
      step();
      // Groups with copies along tp: norm, biases after the sum, scale; and the norm of the tokens, whose copies are summands.
      std::map<const void*, std::pair<Comm, int>> scatters, all_reduces;
      for (const auto& group : root.groups()) {
        const bool tp_copies = group.parts_comm.size() == group.shard_comm.size();
        ++scatters.try_emplace(&group.shard_comm.impl(), group.shard_comm, 0).first->second.second;
        if (!group.replicate_comm.defined() || group.replicate_comm.size() == 1) continue;
        EXPECT_EQ(group.replicate_comm.size(), (hybrid ? 2 : 1) * (tp_copies ? 2 : 1));
        ++all_reduces.try_emplace(&group.replicate_comm.impl(), group.replicate_comm, 0).first->second.second;
      }
      const Comm tp = mesh["tp"].get_group(std::int64_t{0});
      const auto reductions = [](const Comm& comm) {
        int64_t count = 0;
        for (const FlightRecord& record : comm.flight_record())
          count += record.label != "boundary" && record.operation == "all_reduce" ? 1 : 0;
        return count;
      };
      for (auto& [key, entry] : scatters) entry.first.reset_counters();
      std::map<const void*, int64_t> before;
      for (auto& [key, entry] : all_reduces)
        before[key] = entry.first.flight_record().empty() ? 0 : static_cast<int64_t>(entry.first.flight_record().back().sequence);
      root.zero_grad();
      step();
      // gathers: two for the groups of a block together, one for those of the root, which stay; one reduce-scatter for each group
      std::map<const void*, int64_t> want;
      const auto expect = [&](const HSDPModule& unit, int64_t gathers) {
        want[&unit.groups(false).front().shard_comm.impl()] += gathers;
        for (const auto& group : unit.groups(false)) want[&group.shard_comm.impl()] += 1;
      };
      for (TpBlock& block : net->blocks) expect(HSDPModule::of(block), 2);
      expect(root, 1);
      for (auto& [key, entry] : scatters) EXPECT_EQ(entry.first.counters().calls, want.at(key));
      for (auto& [key, entry] : all_reduces) {
        int64_t count = 0;
        for (const FlightRecord& record : entry.first.flight_record())
          count += static_cast<int64_t>(record.sequence) > before[key] && record.operation == "all_reduce" &&
                   record.label != "boundary";
        EXPECT_EQ(count, entry.second) << entry.first.name();
      }
      if (hybrid) {
        EXPECT_EQ(reductions(tp), 0) << "tp has its boundaries only";
      }
    });
  }
}

/// Muon needs whole matrices, wherever their parts lie.
TEST(TensorParallelOptimizers, MuonEqualsOneRank) {
  const auto run = [](const DeviceMesh& mesh, const SourceShardInfos* infos, TpNet net, ShardLayout layout) {
    Case c{.name = "", .layout = layout};
    FullyShardOptions options = options_of(c, mesh, net);
    HSDPModule root;
    if (infos != nullptr) {
      root = shard_tp_net(net, options, *infos);
    } else {
      for (TpBlock& block : net->blocks) fully_shard(block, options);
      root = fully_shard(net, options);
    }
    optim::Muon muon(root, {.lr = 0.02, .ns_dtype = c10::ScalarType::Float});
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = make_batch(kRows, 50 + static_cast<uint64_t>(step));
      const Comm data = root.data_parallel_comm();
      const Batch mine = batch.part(data.rank(), data.size());
      tp_loss(net(mine.tokens), mine.targets).backward();
      muon.step();
      muon.zero_grad();
    }
    return full_parameters(root);
  };
  Tensors want;
  run_ranks(1, [&] {
    want = run(init_device_mesh("cpu", {1, 1}, {"dp_shard", "tp"}), nullptr, whole_net(), ShardLayout::kRagged);
  });
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 2}, {1, 3}, {2, 2, 2}}) {
    for (const auto layout : kLayouts) {
      run_ranks(ranks_of(shape), [&] {
        TpNet net = whole_net();
        const DeviceMesh mesh = mesh_of({.name = "", .mesh = shape});
        const SourceShardInfos infos = cut_net(net, mesh["tp"], Convention::kWhole);
        EXPECT_LT(relative_difference(run(mesh, &infos, net, layout), want), 1e-3);
      });
    }
  }
}

/// One rank of tp finds a gradient that is not finite: all skip the step.
TEST(TensorParallelOptimizers, ScalerAgreesAcrossSourceAxes) {
  run_ranks(4, [](int rank) {
    TpNet net = whole_net();
    const DeviceMesh mesh = mesh_of({.name = ""});
    const SourceShardInfos infos = cut_net(net, mesh["tp"], Convention::kWhole);
    const HSDPModule root = shard_tp_net(net, {.mesh = mesh["dp_shard"]}, infos);
    optim::AdamW adamw(root, {.lr = kLr});
    optim::GradScaler scaler({.init_scale = 8});
    scaler.scale(tp_loss(net(make_batch(2, 1).tokens), make_batch(2, 1).targets)).backward();
    if (rank == 3) {
      for (auto& group : root.groups())
        for (auto& parameter : group.parameters)
          if (parameter.numel > 0) parameter.grad.view(-1)[0] = INFINITY;
    }
    scaler.unscale_(root);
    const Tensors before = full_parameters(root);
    scaler.step(adamw);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4.0);
    EXPECT_EQ(relative_difference(full_parameters(root), before), 0.0);
  });
}

/// What is planned for the pool is what is used, copies included.
TEST(TensorParallelMemory, PlanIsExact) {
  for (const auto layout : kLayouts) {
    run_ranks(8, [&] {
      const Case c{.name = "", .mesh = {2, 2, 2}, .layout = layout};
      TpNet net = whole_net();
      const DeviceMesh mesh = mesh_of(c);
      const SourceShardInfos infos = cut_net(net, mesh["tp"], c.convention);
      const HSDPModule root = shard_tp_net(net, options_of(c, mesh, net), infos);
      const fsdp::MemoryUse planned = root.plan_memory();
      for (int step = 0; step < 4; ++step) {
        tp_loss(net(make_batch(2, 1).tokens), make_batch(2, 1).targets).backward();
        root.zero_grad();
      }
      EXPECT_EQ(root.memory_use().pool, planned.pool);
      EXPECT_EQ(root.memory_use().shards, planned.shards);
      EXPECT_EQ(root.memory_use().gradients, planned.gradients);
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
