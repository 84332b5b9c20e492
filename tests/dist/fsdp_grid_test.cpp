// The generated grid: mesh x buffers x dtypes x accumulation x offload x checkpointing, each against the unsharded run; and, so
// that every two values of all options meet on every mesh, a second one with the options of which parameters stay where.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/same_host_mode.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

enum class Buffers { kPerParameter, kFused, kZeroCopy, kRagged };
enum class Dtypes { kFloat, kBFloat16, kHalf };
enum class Sums { kPlain, kLocal, kPartial, kMainGrad };
enum class Reshard { kUnset, kKeep, kFree, kCut };
enum class Frozen { kNone, kParameters, kUnit };

template <class Enum>
const char* text_of(const auto& names, Enum value) {
  return names[static_cast<std::size_t>(value)];
}

struct Cell {
  Buffers buffers = Buffers::kFused;
  Dtypes dtypes = Dtypes::kFloat;
  Sums mode = Sums::kPlain;
  bool offload = false;
  bool checkpoint = false;
  // Of the second grid only.
  Reshard reshard = Reshard::kUnset;  ///< after forward
  Frozen frozen = Frozen::kNone;
  bool replicated = false;  ///< replicate_params
  bool threshold = false;
  bool buckets = false;
  bool stays = false;  ///< gathered after backward

  [[nodiscard]] std::string name() const {
    return concat(text_of(std::array{"per-parameter", "fused", "zero-copy", "ragged"}, buffers), '/',
                  text_of(std::array{"fp32", "bf16", "fp16"}, dtypes), '/',
                  text_of(std::array{"plain", "local", "partial", "main"}, mode), offload ? "/offload" : "",
                  checkpoint ? "/checkpoint" : "", text_of(std::array{"", "/keep", "/free", "/cut"}, reshard),
                  text_of(std::array{"", "/frozen parameters", "/frozen unit"}, frozen), replicated ? "/replicated" : "",
                  threshold ? "/threshold" : "", buckets ? "/buckets" : "", stays ? "/stays" : "");
  }
};

// ---- all pairs

/// A cell as one number for each option.
using Levels = std::array<int, 11>;
constexpr Levels kLevels = {4, 3, 4, 2, 2, 4, 3, 2, 2, 2, 2};

Cell cell_of(const Levels& at) {
  return {.buffers = static_cast<Buffers>(at[0]),
          .dtypes = static_cast<Dtypes>(at[1]),
          .mode = static_cast<Sums>(at[2]),
          .offload = at[3] == 1,
          .checkpoint = at[4] == 1,
          .reshard = static_cast<Reshard>(at[5]),
          .frozen = static_cast<Frozen>(at[6]),
          .replicated = at[7] == 1,
          .threshold = at[8] == 1,
          .buckets = at[9] == 1,
          .stays = at[10] == 1};
}

/// fully_shard refuses buckets of parameters that are not fused.
bool allowed(const Levels& at) { return !(at[0] == static_cast<int>(Buffers::kPerParameter) && at[9] == 1); }

/// Two options and their values.
using ValuePair = std::array<int, 4>;

std::vector<ValuePair> pairs_in(const Levels& at) {
  std::vector<ValuePair> pairs;
  for (int i = 0; i < static_cast<int>(at.size()); ++i) {
    for (int j = 0; j < i; ++j) pairs.push_back({i, at[static_cast<std::size_t>(i)], j, at[static_cast<std::size_t>(j)]});
  }
  return pairs;
}

std::vector<Levels> all_levels() {
  std::vector<Levels> all = {Levels{}};
  for (std::size_t option = 0; option < kLevels.size(); ++option) {
    const std::size_t count = all.size();
    for (int level = 1; level < kLevels[option]; ++level) {
      for (std::size_t i = 0; i < count; ++i) all.push_back(all[i]), all.back()[option] = level;
    }
  }
  std::erase_if(all, [](const Levels& at) { return !allowed(at); });
  return all;
}

/// Greedy: always the cell with the most pairs that no cell has yet.
std::vector<Levels> pairwise() {
  const std::vector<Levels> all = all_levels();
  std::set<ValuePair> open;
  for (const Levels& at : all) {
    for (const ValuePair& pair : pairs_in(at)) open.insert(pair);
  }
  std::vector<Levels> chosen;
  while (!open.empty()) {
    const Levels* best = nullptr;
    std::ptrdiff_t most = 0;
    // One cell in seven is enough to choose from, as long as it has something new.
    for (std::size_t i = chosen.size(); i<all.size(); i += most> 0 ? 7 : 1) {
      const std::vector<ValuePair> pairs = pairs_in(all[i]);
      const auto fresh = std::count_if(pairs.begin(), pairs.end(), [&](const ValuePair& pair) { return open.contains(pair); });
      if (fresh > most) most = fresh, best = &all[i];
    }
    for (const ValuePair& pair : pairs_in(*best)) open.erase(pair);
    chosen.push_back(*best);
  }
  return chosen;
}

TEST(Pairwise, EveryTwoValuesMeet) {
  std::map<ValuePair, int> met;
  for (const Levels& at : pairwise()) {
    EXPECT_TRUE(allowed(at));
    for (const ValuePair& pair : pairs_in(at)) ++met[pair];
  }
  std::size_t want = 0;
  for (std::size_t i = 0; i < kLevels.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) want += static_cast<std::size_t>(kLevels[i] * kLevels[j]);
  }
  EXPECT_EQ(met.size(), want - 1) << "all but buckets of single parameters";
  EXPECT_LT(pairwise().size(), 40U);
}

// ---- runs

std::vector<Cell> grid() {
  std::vector<Cell> cells;
  for (const auto buffers : {Buffers::kPerParameter, Buffers::kFused, Buffers::kZeroCopy, Buffers::kRagged}) {
    for (const auto dtypes : {Dtypes::kFloat, Dtypes::kBFloat16, Dtypes::kHalf}) {
      for (const auto mode : {Sums::kPlain, Sums::kLocal, Sums::kPartial, Sums::kMainGrad}) {
        for (const bool offload : {false, true}) {
          for (const bool checkpoint : {false, true}) cells.push_back({buffers, dtypes, mode, offload, checkpoint});
        }
      }
    }
  }
  return cells;
}

void freeze(const Net& net, Frozen frozen) {
  if (frozen == Frozen::kParameters) {
    net->u1->a->weight.set_requires_grad(false);
    net->u2->q->bias.set_requires_grad(false);
  }
  if (frozen == Frozen::kUnit) {
    for (auto& parameter : net->u3->parameters()) parameter.set_requires_grad(false);
  }
}

FullyShardOptions options_of(const Cell& cell, const std::vector<int64_t>& mesh, const Net& net) {
  FullyShardOptions options = on_mesh(mesh, cell.buffers == Buffers::kRagged ? ShardLayout::kRagged : ShardLayout::kPerParameter);
  options.comm_fusion = cell.buffers != Buffers::kPerParameter;
  if (cell.buffers == Buffers::kZeroCopy) options.comm_fusion_zero_copy = true;
  // bf16: low-precision compute, fp32 sums. fp16: low precision throughout.
  if (cell.dtypes == Dtypes::kBFloat16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (cell.dtypes == Dtypes::kHalf) options.mp_policy = {.param_dtype = torch::kHalf};
  options.mp_policy.apply_grad_on_fp32_main_grad = cell.mode == Sums::kMainGrad;
  if (cell.offload) options.offload_policy = CPUOffloadPolicy{};
  if (cell.reshard == Reshard::kKeep || cell.reshard == Reshard::kFree)
    options.reshard_after_forward = cell.reshard == Reshard::kFree;
  if (cell.reshard == Reshard::kCut) options.reshard_after_forward = mesh.back() % 2 == 0 ? 2 : 1;
  if (cell.replicated) options.replicate_params = {net->u1->a->weight, net->u2->q->bias, net->u3->b->weight, net->table->weight};
  if (cell.threshold) options.threshold = 200;
  if (cell.buckets) options.bucket_size = 600;
  return options;
}

constexpr int kSteps = 2;
constexpr int kMicroBatches = 2;
constexpr double kLearningRate = 0.1;

struct Record {
  std::vector<Tensors> gradients;
  Tensors parameters;
  int64_t mapped = 0;  ///< bytes of peers' shards that were read where they are
};

torch::Tensor run_net(Net& net, const torch::Tensor& tokens, bool checkpoint) {
  if (!checkpoint) return net(tokens);
  return hyper_parallel::checkpoint([&](const torch::Tensor& x) { return net(x); }, tokens);
}

Record plain_run(int64_t rows, Frozen frozen = Frozen::kNone) {
  Net net = make_net();
  freeze(net, frozen);
  Record run;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(rows, 7 + static_cast<uint64_t>(step));
    net_loss(net(batch.tokens), batch.targets).backward();
    run.gradients.push_back(plain_gradients(*net));
    run.gradients.back().erase("head.weight");  // tied: one owner in the sharded model
    torch::NoGradGuard no_grad;
    for (auto& entry : net->named_parameters()) {
      if (entry.key() != "head.weight" && entry.value().grad().defined()) entry.value().sub_(entry.value().grad(), kLearningRate);
    }
    net->zero_grad();
  }
  for (auto& entry : net->named_parameters()) run.parameters[entry.key()] = entry.value().detach().clone();
  run.parameters.erase("head.weight");
  return run;
}

Record sharded_run(const Cell& cell, const std::vector<int64_t>& mesh, int64_t rows, int steps = kSteps, double factor = 1,
                   const NetOptions& net_options = {}) {
  Net net = make_net(net_options);
  freeze(net, cell.frozen);
  HSDPModule root = shard_net(net, options_of(cell, mesh, net));
  if (cell.stays) root.set_reshard_after_backward(false);
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
      root.set_requires_gradient_sync(cell.mode != Sums::kLocal || last);
      root.set_requires_all_reduce(cell.mode != Sums::kPartial || last);
      const Batch part = mine.part(micro, kMicroBatches);
      (net_loss(run_net(net, part.tokens, cell.checkpoint), part.targets) / kMicroBatches).backward();
      if (!last && (cell.mode == Sums::kLocal || cell.mode == Sums::kPartial)) {
        EXPECT_TRUE(step > 0 || root.named_grad_dtensors().empty()) << "gradients appear only when they are complete";
      }
    }
    run.gradients.push_back(full_gradients(root));
    torch::NoGradGuard no_grad;
    for (auto& group : root.groups()) {
      for (auto& parameter : group.parameters) {
        EXPECT_EQ(parameter.grad.defined(), parameter.sharded.requires_grad()) << cell.name() << ' ' << parameter.name;
        if (!parameter.grad.defined()) continue;
        EXPECT_EQ(parameter.sharded.grad().defined(), cell.mode != Sums::kMainGrad) << parameter.name;
        if (cell.mode == Sums::kMainGrad) {
          EXPECT_EQ(parameter.grad.scalar_type(), torch::kFloat);
        }
        parameter.sharded.data().add_(parameter.grad, -kLearningRate / factor);
      }
    }
    root.zero_grad();
  }
  run.parameters = full_parameters(root);
  run.mapped = root.memory_use().mapped;
  return run;
}

double tolerance(Dtypes dtypes) { return std::array{1e-5, 4e-2, 6e-3}[static_cast<std::size_t>(dtypes)]; }

void expect_equal(const Tensors& got, const Tensors& want, double bound, const std::string& where) {
  EXPECT_EQ(got.size(), want.size()) << where;
  for (const auto& [name, value] : got) {
    ASSERT_TRUE(want.contains(name)) << where << ' ' << name;
    EXPECT_LT(relative_difference({{name, value}}, {{name, want.at(name)}}), bound) << where << ' ' << name;
  }
}

void expect_equal(const Cell& cell, const Record& got, const Record& want) {
  const double bound = tolerance(cell.dtypes);
  for (std::size_t step = 0; step < kSteps; ++step)
    expect_equal(got.gradients[step], want.gradients[step], bound * (1 + static_cast<double>(step)),
                 concat(cell.name(), " step ", step));
  expect_equal(got.parameters, want.parameters, bound, concat(cell.name(), " parameters"));
}

/// A power of two, so that only numbers below the range of the dtype can be rounded differently.
void expect_exact_scaling(const Cell& cell, const std::vector<int64_t>& mesh, int64_t rows) {
  const Record once = sharded_run(cell, mesh, rows, 1, 1), scaled = sharded_run(cell, mesh, rows, 1, 4);
  const bool half = cell.dtypes == Dtypes::kHalf;  // small numbers have fewer bits there, and are rounded several times
  for (const auto& [name, gradient] : once.gradients.front())
    EXPECT_TRUE(torch::allclose(scaled.gradients.front().at(name), gradient * 4, half ? 2e-3 : 0, half ? 4e-6 : 0))
        << cell.name() << ' ' << name;
}

class Grid : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(Grid, EqualsUnshardedRun) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  const Record want = plain_run(rows);
  run_ranks(ranks, {.watchdog = std::chrono::seconds(280)}, [&](int) {
    for (const Cell& cell : grid()) expect_equal(cell, sharded_run(cell, mesh, rows), want);
  });
}

TEST_P(Grid, ScalingFactorIsExact) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  run_ranks(ranks, {.watchdog = std::chrono::seconds(280)}, [&](int) {
    for (const Cell& cell : grid()) {
      expect_exact_scaling(cell, mesh, rows);
    }
  });
}

class PairGrid : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(PairGrid, EqualsUnshardedRunAndScalesExactly) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  const std::vector<Levels> cells = pairwise();
  std::map<Frozen, Record> want;
  for (const auto frozen : {Frozen::kNone, Frozen::kParameters, Frozen::kUnit}) want[frozen] = plain_run(rows, frozen);
  run_ranks(ranks, {.watchdog = std::chrono::seconds(280)}, [&](int) {
    for (const Levels& at : cells) {
      const Cell cell = cell_of(at);
      expect_equal(cell, sharded_run(cell, mesh, rows), want.at(cell.frozen));
      expect_exact_scaling(cell, mesh, rows);
    }
  });
}

bool same_bits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    const torch::Tensor left = x.second.contiguous(), right = y.second.contiguous();
    return x.first == y.first && left.sizes() == right.sizes() && left.scalar_type() == right.scalar_type() &&
           std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
  });
}

/// With units of whole pages, which the ranks of a host map.
class WideGrid : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(WideGrid, MappedCopiedAndOverGlooHaveTheSameBits) {
  const auto mesh = GetParam();
  const int ranks = ranks_of(mesh);
  const int64_t rows = int64_t{2} * kMicroBatches * ranks;
  std::vector<Cell> cells;
  for (const Levels& at : pairwise()) {
    if (cell_of(at).buffers == Buffers::kRagged) cells.push_back(cell_of(at));
  }
  const auto records = [&](const char* mode) {
    const Mode scoped(mode);
    std::vector<std::vector<Record>> all(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](int rank) {
      auto& mine = all[static_cast<std::size_t>(rank)];
      for (const Cell& cell : cells) mine.push_back(sharded_run(cell, mesh, rows, kSteps, 1, {.dim = 96}));
    });
    return all;
  };
  const auto want = records("0");
  for (const std::string mode : {"1", "processes", "copy"}) {
    const auto got = records(mode.c_str());
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const std::string where = concat(mode, ' ', cells[i].name());
      for (std::size_t r = 0; r < want.size(); ++r) {
        ASSERT_EQ(got[r][i].gradients.size(), want[r][i].gradients.size()) << where;
        for (std::size_t step = 0; step < want[r][i].gradients.size(); ++step)
          EXPECT_TRUE(same_bits(got[r][i].gradients[step], want[r][i].gradients[step]))
              << where << ", rank " << r << ", step " << step;
        EXPECT_TRUE(same_bits(got[r][i].parameters, want[r][i].parameters)) << where << ", rank " << r;
        const bool maps = mode != "copy" && !(cells[i].reshard == Reshard::kCut && mesh.back() > 2 && mesh.back() % 2 == 0);
        // Units that stay gathered after backward are copies.
        if (!cells[i].stays) {
          EXPECT_EQ(got[r][i].mapped > 0, maps) << where << ", rank " << r;
        }
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<std::vector<int64_t>>& mesh) {
  std::string name = "mesh";
  for (const int64_t size : mesh.param) name += concat('_', size);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Meshes, Grid,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 2},
                                           std::vector<int64_t>{2, 1}, std::vector<int64_t>{1}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Meshes, PairGrid,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{4}, std::vector<int64_t>{3},
                                           std::vector<int64_t>{2, 2}, std::vector<int64_t>{1, 2}, std::vector<int64_t>{2, 1},
                                           std::vector<int64_t>{1}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Meshes, WideGrid,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{3}, std::vector<int64_t>{2, 2},
                                           std::vector<int64_t>{8}),
                         name_of);

}  // namespace
}  // namespace hyper_parallel::testing
