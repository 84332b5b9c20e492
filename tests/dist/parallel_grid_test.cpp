// Composed parallelism equals one rank: loss, every gradient, its norm, and the weights after three steps, for meshes of every
// kind.
#include <gtest/gtest.h>

#include <map>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/parallel_net.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

using parallel::init_parallel_meshes;
using parallel::ParallelSizes;

constexpr std::size_t kSteps = 3;
constexpr int64_t kRows = 8;
constexpr double kMaxNorm = 0.5;

enum class Mode { kPlain, kAccumulate, kCheckpoint, kLowPrecision };

struct Case {
  std::string name;
  int world;
  ParallelSizes sizes;
  DecoderOptions net;
  bool idle_experts = false;  ///< all tokens go to the first experts: the other ranks' experts get none
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

struct Record {
  std::vector<double> losses, norms;
  std::vector<Tensors> gradients;
  Tensors parameters;
};

Tensors values_of(const Case& c) {
  DecoderOptions options = c.net;
  Tensors values = decoder_values(options);
  for (auto& [name, value] : values) {
    if (name.ends_with("router.weight")) value = c.idle_experts ? torch::zeros_like(value) : value * 4;
  }
  return values;
}

int64_t micro_batches(Mode mode) { return mode == Mode::kAccumulate ? 2 : 1; }

MixedPrecisionPolicy policy_of(Mode mode) {
  if (mode != Mode::kLowPrecision) return {};
  return {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
}

/// A large epsilon: Adam must not turn noise into steps of full size.
optim::AdamWOptions adamw_options() { return {.lr = 0.05, .eps = 1e-3}; }

/// Equal scores choose the first experts; the router must not learn otherwise.
void freeze_router(const Case& c, const Decoder& model) {
  if (!c.idle_experts) return;
  for (const DecoderBlock& layer : model->layers) layer->moe->router->weight.requires_grad_(false);
}

/// A tied one under its first name only.
Tensors distinct_parameters(const Decoder& model) {
  Tensors distinct;
  for (const auto& item : model->named_parameters()) {
    if (!model->options.tied || item.key() != "head.weight") distinct[item.key()] = item.value();
  }
  return distinct;
}

/// Without any unit.
Record plain_run(const Case& c, Mode mode) {
  Decoder model(c.net);
  parallel::load_whole(model, values_of(c));
  freeze_router(c, model);
  const Tensors distinct = distinct_parameters(model);
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, parameter] : distinct) parameters.push_back(parameter);
  torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(0.05).eps(1e-3).weight_decay(1e-2));
  Record run;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const Batch batch = decoder_batch(c.net, kRows, 50 + step);
    adamw.zero_grad();
    double total = 0;
    for (int64_t micro = 0; micro < micro_batches(mode); ++micro) {
      const Batch part = batch.part(micro, micro_batches(mode));
      const torch::Tensor loss = model(part.tokens, part.targets) / micro_batches(mode);
      loss.backward();
      total += loss.item<double>();
    }
    run.losses.push_back(total);
    run.norms.push_back(torch::nn::utils::clip_grad_norm_(parameters, kMaxNorm));
    run.gradients.emplace_back();
    for (const auto& [name, parameter] : distinct) {
      if (parameter.grad().defined()) run.gradients.back()[name] = parameter.grad().clone();
    }
    adamw.step();
  }
  for (const auto& [name, parameter] : distinct) run.parameters[name] = parameter.detach().clone();
  return run;
}

Record parallel_run(const Case& c, const Tensors& values, Mode mode, ShardLayout layout, const ParallelSizes& sizes) {
  const PlanMeshes meshes = init_parallel_meshes("cpu", sizes);
  DecoderOptions options = on_meshes(c.net, meshes);
  options.checkpoint = mode == Mode::kCheckpoint;
  Decoder model(options);
  parallel::load_whole(model, values);
  freeze_router(c, model);
  const ParallelModel made = parallelize(model, meshes, {.fully_shard = {.mp_policy = policy_of(mode), .shard_layout = layout}});
  const HSDPModule& root = made.root;
  optim::AdamW adamw(root, adamw_options());
  // Ranks of cp and tp have the same rows.
  const DeviceMesh replicas = sizes.dp_replicate > 1 ? meshes.dense["dp_replicate"] : DeviceMesh(),
                   shards = meshes.dense["dp_shard"];
  const int64_t rows = shards.size() * sizes.dp_replicate;
  const int64_t row = (replicas.defined() ? replicas.get_local_rank() : 0) * shards.size() + shards.get_local_rank();
  Record run;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const Batch batch = decoder_batch(c.net, kRows, 50 + step);
    adamw.zero_grad();
    double total = 0;
    for (int64_t micro = 0; micro < micro_batches(mode); ++micro) {
      root.set_requires_gradient_sync(micro + 1 == micro_batches(mode));
      const Batch mine = decoder_part(options, batch.part(micro, micro_batches(mode)), row, rows);
      const torch::Tensor loss = model(mine.tokens, mine.targets) / micro_batches(mode);
      loss.backward();
      total += loss.item<double>();
    }
    torch::Tensor mean = torch::tensor({total}, torch::kDouble);
    root.unit_comm().all_reduce(mean, {.op = ReduceOp::kAvg}).wait();
    run.losses.push_back(mean.item<double>());
    run.norms.push_back(clip_grad_norm_(root, kMaxNorm));
    run.gradients.push_back(full_gradients(root));
    adamw.step();
  }
  run.parameters = full_parameters(root);
  return run;
}

Record reference(const Case& c, const Tensors& values, Mode mode) {
  if (mode != Mode::kLowPrecision) return plain_run(c, mode);
  // Rounding is part of the run: the same dtypes on one rank.
  Record run;
  run_ranks(1, [&] { run = parallel_run(c, values, mode, ShardLayout::kPerParameter, {}); });
  return run;
}

void expect_same(const Record& got, const Record& want, Mode mode, const std::string& what) {
  const bool low = mode == Mode::kLowPrecision;
  for (std::size_t step = 0; step < kSteps; ++step) {
    const std::string where = concat(what, " step ", step);
    EXPECT_NEAR(got.losses[step], want.losses[step], (low ? 2e-2 : 1e-5) * want.losses[step]) << where;
    EXPECT_NEAR(got.norms[step], want.norms[step], (low ? 5e-2 : 2e-5) * want.norms[step]) << where;
    ASSERT_EQ(got.gradients[step].size(), want.gradients[step].size()) << where;
    if (low && step > 0) continue;  // small differences have grown
    for (const auto& [name, gradient] : want.gradients[step]) {
      ASSERT_TRUE(got.gradients[step].contains(name)) << where << ' ' << name;
      EXPECT_LT(relative_difference({{name, got.gradients[step].at(name)}}, {{name, gradient}}), low ? 0.15 : 5e-5)
          << where << ' ' << name;
    }
  }
  if (!low) {
    EXPECT_LT(relative_difference(got.parameters, want.parameters), 2e-4) << what;
  }
}

class ParallelGrid : public ::testing::TestWithParam<Case> {};

TEST_P(ParallelGrid, EqualsOneRank) {
  const Case& c = GetParam();
  const Tensors values = values_of(c);
  std::map<Mode, Record> want;
  const std::map<Mode, std::string> modes = {{Mode::kPlain, "plain"},
                                             {Mode::kAccumulate, "accumulate"},
                                             {Mode::kCheckpoint, "checkpoint"},
                                             {Mode::kLowPrecision, "bf16"}};
  for (const auto& [mode, name] : modes) want[mode] = reference(c, values, mode);
  run_ranks(c.world, [&](int rank) {
    for (const auto& [mode, name] : modes) {
      for (const auto layout : kLayouts) {
        const std::string what = concat(name, layout == ShardLayout::kRagged ? " ragged" : " per parameter", " rank ", rank, ':');
        expect_same(parallel_run(c, values, mode, layout, c.sizes), want.at(mode), mode, what);
      }
    }
  });
}

std::vector<Case> cases() {
  const DecoderOptions dense = {}, sequence = {.sequence = true}, loss = {.loss_parallel = true};
  const DecoderOptions both = {.loss_parallel = true, .sequence = true};
  const DecoderOptions uneven = {.vocab = 13, .hidden = 7, .heads = 3, .loss_parallel = true, .sequence = true};
  const DecoderOptions tied = {.tied = true}, tied_both = {.tied = true, .loss_parallel = true, .sequence = true};
  const DecoderOptions moe = {.layers = 1, .experts = 5, .aux_loss = 0.1};
  DecoderOptions moe_both = moe;
  moe_both.loss_parallel = moe_both.sequence = true;
  DecoderOptions context = dense, moe_context = moe;
  context.length = moe_context.length = 8;
  DecoderOptions context_both = both;
  context_both.length = 8;
  return {{"Fsdp2Tp2", 4, {.tp = 2}, dense},
          {"Fsdp2Tp2Sequence", 4, {.tp = 2}, sequence},
          {"Fsdp2Tp2LossParallel", 4, {.tp = 2}, loss},
          {"Fsdp2Tp2Both", 4, {.tp = 2}, both},
          {"Fsdp2Tp2Uneven", 4, {.tp = 2}, uneven},
          {"Tp3Uneven", 3, {.tp = 3}, uneven},
          {"Tp4MoreRanksThanHeads", 4, {.tp = 4}, both},
          {"Hsdp2x2Tp2", 8, {.dp_replicate = 2, .tp = 2}, both},
          {"Fsdp2Tp2Tied", 4, {.tp = 2}, tied},
          {"Fsdp2Tp2TiedBoth", 4, {.tp = 2}, tied_both},
          {"Ep2", 2, {.ep = 2}, moe},
          {"Ep4", 4, {.ep = 4}, moe},
          {"Fsdp2Ep2", 4, {.ep = 2}, moe},
          {"Hsdp2x2Ep2", 4, {.dp_replicate = 2, .ep = 2}, moe},
          {"Fsdp2Ep2Idle", 4, {.ep = 2}, moe, true},
          {"Fsdp4Ep2Tp2", 8, {.tp = 2, .ep = 2}, moe_both},
          {"Fsdp2Ep2Tp2", 4, {.tp = 2, .ep = 2}, moe},
          {"Fsdp2Cp2", 4, {.cp = 2}, context},
          {"Cp2Tp2", 4, {.cp = 2, .tp = 2}, context_both},
          {"Cp2Ep2", 2, {.cp = 2, .ep = 2}, moe_context}};
}

INSTANTIATE_TEST_SUITE_P(All, ParallelGrid, ::testing::ValuesIn(cases()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
}  // namespace hyper_parallel::testing
