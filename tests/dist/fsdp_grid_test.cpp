// The generated grid: mesh x buffers x dtypes x accumulation x offload x checkpointing, each against the unsharded run.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

enum class Buffers { kPerParameter, kFused, kZeroCopy, kRagged };
enum class Dtypes { kFloat, kBFloat16, kHalf };
enum class Mode { kPlain, kLocal, kPartial, kMainGrad };

struct Cell {
  Buffers buffers = Buffers::kFused;
  Dtypes dtypes = Dtypes::kFloat;
  Mode mode = Mode::kPlain;
  bool offload = false;
  bool checkpoint = false;

  [[nodiscard]] std::string name() const {
    return concat(std::array{"per-parameter", "fused", "zero-copy", "ragged"}[static_cast<std::size_t>(buffers)], '/',
                  std::array{"fp32", "bf16", "fp16"}[static_cast<std::size_t>(dtypes)], '/',
                  std::array{"plain", "local", "partial", "main"}[static_cast<std::size_t>(mode)], offload ? "/offload" : "",
                  checkpoint ? "/checkpoint" : "");
  }
};

std::vector<Cell> grid() {
  std::vector<Cell> cells;
  for (const auto buffers : {Buffers::kPerParameter, Buffers::kFused, Buffers::kZeroCopy, Buffers::kRagged}) {
    for (const auto dtypes : {Dtypes::kFloat, Dtypes::kBFloat16, Dtypes::kHalf}) {
      for (const auto mode : {Mode::kPlain, Mode::kLocal, Mode::kPartial, Mode::kMainGrad}) {
        for (const bool offload : {false, true}) {
          for (const bool checkpoint : {false, true}) cells.push_back({buffers, dtypes, mode, offload, checkpoint});
        }
      }
    }
  }
  return cells;
}

FullyShardOptions options_of(const Cell& cell, const std::vector<int64_t>& mesh) {
  FullyShardOptions options = on_mesh(mesh, cell.buffers == Buffers::kRagged ? ShardLayout::kRagged : ShardLayout::kPerParameter);
  options.comm_fusion = cell.buffers != Buffers::kPerParameter;
  if (cell.buffers == Buffers::kZeroCopy) options.comm_fusion_zero_copy = true;
  // bf16: low-precision compute, fp32 sums. fp16: low precision throughout.
  if (cell.dtypes == Dtypes::kBFloat16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (cell.dtypes == Dtypes::kHalf) options.mp_policy = {.param_dtype = torch::kHalf};
  options.mp_policy.apply_grad_on_fp32_main_grad = cell.mode == Mode::kMainGrad;
  if (cell.offload) options.offload_policy = CPUOffloadPolicy{};
  return options;
}

constexpr int kSteps = 2;
constexpr int kMicroBatches = 2;
constexpr double kLearningRate = 0.1;

struct Record {
  std::vector<Tensors> gradients;
  Tensors parameters;
};

torch::Tensor run_net(Net& net, const torch::Tensor& tokens, bool checkpoint) {
  if (!checkpoint) return net(tokens);
  return hyper_parallel::checkpoint([&](const torch::Tensor& x) { return net(x); }, tokens);
}

Record plain_run(int64_t rows) {
  Net net = make_net();
  Record run;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(rows, 7 + static_cast<uint64_t>(step));
    net_loss(net(batch.tokens), batch.targets).backward();
    run.gradients.push_back(plain_gradients(*net));
    run.gradients.back().erase("head.weight");  // tied: one owner in the sharded model
    torch::NoGradGuard no_grad;
    for (auto& entry : net->named_parameters()) {
      if (entry.key() != "head.weight") entry.value().sub_(entry.value().grad(), kLearningRate);
    }
    net->zero_grad();
  }
  for (auto& entry : net->named_parameters()) run.parameters[entry.key()] = entry.value().detach().clone();
  run.parameters.erase("head.weight");
  return run;
}

Record sharded_run(const Cell& cell, const std::vector<int64_t>& mesh, int64_t rows, int steps = kSteps, double factor = 1) {
  Net net = make_net();
  HSDPModule root = shard_net(net, options_of(cell, mesh));
  if (factor != 1) {
    for (const HSDPModule& unit : {HSDPModule::of(net->u1), HSDPModule::of(net->u2), HSDPModule::of(net->u2->inner),
                                   HSDPModule::of(net->u3), HSDPModule::of(net->u4), root})
      unit.set_gradient_scaling_factor(factor);
  }
  Record run;
  for (int step = 0; step < steps; ++step) {
    const Batch mine = make_batch(rows, 7 + static_cast<uint64_t>(step)).part(get_rank(), get_world_size());
    for (int64_t micro = 0; micro < kMicroBatches; ++micro) {
      const bool last = micro + 1 == kMicroBatches;
      root.set_requires_gradient_sync(cell.mode != Mode::kLocal || last);
      root.set_requires_all_reduce(cell.mode != Mode::kPartial || last);
      const Batch part = mine.part(micro, kMicroBatches);
      (net_loss(run_net(net, part.tokens, cell.checkpoint), part.targets) / kMicroBatches).backward();
      if (!last && (cell.mode == Mode::kLocal || cell.mode == Mode::kPartial)) {
        EXPECT_TRUE(step > 0 || root.named_grad_dtensors().empty()) << "gradients appear only when they are complete";
      }
    }
    run.gradients.push_back(full_gradients(root));
    torch::NoGradGuard no_grad;
    for (auto& group : root.groups()) {
      for (auto& parameter : group.parameters) {
        EXPECT_TRUE(parameter.grad.defined()) << parameter.name;
        EXPECT_EQ(parameter.sharded.grad().defined(), cell.mode != Mode::kMainGrad) << parameter.name;
        if (cell.mode == Mode::kMainGrad) {
          EXPECT_EQ(parameter.grad.scalar_type(), torch::kFloat);
        }
        parameter.sharded.data().add_(parameter.grad, -kLearningRate / factor);
      }
    }
    root.zero_grad();
  }
  run.parameters = full_parameters(root);
  return run;
}

double tolerance(Dtypes dtypes) { return std::array{1e-5, 4e-2, 6e-3}[static_cast<std::size_t>(dtypes)]; }

class Grid : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Grid, EqualsUnshardedRun) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  const Record want = plain_run(rows);
  run_ranks(ranks, {.watchdog = std::chrono::seconds(280)}, [&](int) {
    for (const Cell& cell : grid()) {
      const Record got = sharded_run(cell, mesh, rows);
      const double bound = tolerance(cell.dtypes);
      for (std::size_t step = 0; step < kSteps; ++step)
        EXPECT_LT(relative_difference(got.gradients[step], want.gradients[step]), bound * (1 + static_cast<double>(step)))
            << cell.name() << " step " << step;
      EXPECT_LT(relative_difference(got.parameters, want.parameters), bound) << cell.name();
    }
  });
}

/// A power of two, so that only numbers below the range of the dtype can be rounded differently.
TEST_P(Grid, ScalingFactorIsExact) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  run_ranks(ranks, {.watchdog = std::chrono::seconds(280)}, [&](int) {
    for (const Cell& cell : grid()) {
      if (cell.offload || cell.checkpoint || cell.buffers == Buffers::kZeroCopy) continue;  // the same reduction
      const Record once = sharded_run(cell, mesh, rows, 1, 1), scaled = sharded_run(cell, mesh, rows, 1, 4);
      const bool half = cell.dtypes == Dtypes::kHalf;  // small numbers have fewer bits there, and are rounded several times
      for (const auto& [name, gradient] : once.gradients.front())
        EXPECT_TRUE(torch::allclose(scaled.gradients.front().at(name), gradient * 4, half ? 2e-3 : 0, half ? 4e-6 : 0))
            << cell.name() << ' ' << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Grid,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 2},
                                           std::vector<int64_t>{2, 1}, std::vector<int64_t>{1}),
                         [](const auto& mesh) {
                           std::string name = "mesh";
                           for (const int64_t size : mesh.param) name += concat('_', size);
                           return name;
                         });

}  // namespace
}  // namespace hyper_parallel::testing
