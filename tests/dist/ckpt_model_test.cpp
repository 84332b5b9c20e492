// Checkpoints of models and optimizers: any number of ranks, mesh, layout.
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using namespace hyper_parallel::testing;
using ::testing::HasSubstr;

struct Setting {
  std::vector<int64_t> mesh;
  ShardLayout layout;
};

const std::vector<Setting> kSettings = {{{1}, ShardLayout::kPerParameter}, {{2}, ShardLayout::kPerParameter},
                                        {{2}, ShardLayout::kRagged},       {{3}, ShardLayout::kRagged},
                                        {{4}, ShardLayout::kPerParameter}, {{2, 2}, ShardLayout::kRagged}};

/// A sharded net with an optimizer.
struct Training {
  explicit Training(const Setting& setting, uint64_t seed = 1, const NetOptions& net_options = {})
      : net(make_net(net_options, seed)),
        root(shard_net(net, on_mesh(setting.mesh, setting.layout))),
        optimizer(root, {.lr = 0.01}) {}

  /// One step on the part of a batch that this rank has; the same batch for any world.
  double step(int index) {
    const Batch batch = make_batch(12, static_cast<uint64_t>(100 + index)).part(get_rank(), get_world_size());
    root.zero_grad();
    const torch::Tensor loss = net_loss(net(batch.tokens), batch.targets);
    loss.backward();
    optimizer.step();
    const torch::Tensor sum = loss.detach().clone();
    current_world().comm().all_reduce(sum.view({1}), {.op = ReduceOp::kAvg}).wait();
    return sum.item<double>();
  }

  Net net;
  HSDPModule root;
  optim::AdamW optimizer;
};

void save_run(const std::filesystem::path& path, const Training& run) {
  StateDict state;
  state.add_model(run.root);
  state.add_optimizer(run.optimizer);
  save(path, state);
}

LoadResult load_run(const std::filesystem::path& path, Training& run, const LoadOptions& options = {}) {
  StateDict state;
  state.add_model(run.root);
  state.add_optimizer(run.optimizer, read_info(path));
  return load(path, state, options);
}

/// State of all parameters, whole.
Tensors full_state(const Training& run) {
  StateDict state;
  state.add_optimizer(run.optimizer);
  Tensors result = full_parameters(run.root);
  std::map<std::string, DTensor> parameters;
  for (const auto& [name, parameter] : run.root.named_dtensors()) parameters.emplace(name, parameter);
  for (const optim::FlatOptimizer::State& entry : run.optimizer.state()) {
    result[entry.name + ".step"] = torch::tensor(entry.step);
    const DTensor& parameter = parameters.at(entry.name);
    for (const auto& [slot, tensor] : entry.tensors)
      result[concat(entry.name, '.', slot)] =
          DTensor::from_local(tensor, parameter.device_mesh(), parameter.layout(), parameter.shape()).full_tensor();
  }
  return result;
}

bool same(const Tensors& a, const Tensors& b) {
  if (a.size() != b.size()) return false;
  return std::ranges::all_of(
      a, [&](const auto& entry) { return b.contains(entry.first) && torch::equal(entry.second, b.at(entry.first)); });
}

TEST(CkptModel, EverySettingToEverySetting) {
  const TempFolder folder;
  for (std::size_t from = 0; from < kSettings.size(); ++from) {
    const std::filesystem::path path = folder / std::to_string(from);
    Tensors saved;
    run_ranks(ranks_of(kSettings[from].mesh), [&](int rank) {
      Training run(kSettings[from]);
      run.step(0);
      run.step(1);
      const Tensors all = full_state(run);
      if (rank == 0) saved = all;
      save_run(path, run);
    });
    EXPECT_THAT(verify(path), ::testing::IsEmpty());
    for (std::size_t to = 0; to < kSettings.size(); ++to) {
      run_ranks(ranks_of(kSettings[to].mesh), [&] {
        Training fresh(kSettings[to], 77);
        const LoadResult result = load_run(path, fresh);
        EXPECT_TRUE(same(full_state(fresh), saved)) << from << " to " << to;
        EXPECT_EQ(result.bytes_read, result.bytes_owned);
        EXPECT_GT(result.bytes_checked, 0);
        Training used(kSettings[to], 78);
        used.step(5);
        load_run(path, used);
        EXPECT_TRUE(same(full_state(used), saved)) << from << " to " << to << ", over other state";
      });
    }
  }
}

TEST(CkptModel, GoesOnAsIfNothingHadHappened) {
  const TempFolder folder;
  for (const ShardLayout layout : kLayouts) {
    const Setting two{{2}, layout};
    Tensors uninterrupted;
    std::vector<double> losses;
    run_ranks(2, [&](int rank) {
      Training run(two);
      for (int i = 0; i < 3; ++i) run.step(i);
      save_run(folder / "three", run);
      std::vector<double> rest;
      for (int i = 3; i < 6; ++i) rest.push_back(run.step(i));
      const Tensors all = full_state(run);
      if (rank == 0) {
        uninterrupted = all;
        losses = rest;
      }
    });
    run_ranks(2, [&] {
      Training run(two, 9);
      load_run(folder / "three", run);
      for (int i = 3; i < 6; ++i) EXPECT_EQ(run.step(i), losses[static_cast<std::size_t>(i - 3)]);
      EXPECT_TRUE(same(full_state(run), uninterrupted)) << "bitwise at the same world size";
    });
    for (const int world : {1, 3, 4}) {
      run_ranks(world, [&] {
        Training run({{world}, layout}, 9);
        load_run(folder / "three", run);
        for (int i = 3; i < 6; ++i) EXPECT_NEAR(run.step(i), losses[static_cast<std::size_t>(i - 3)], 1e-5) << world;
      });
    }
    std::filesystem::remove_all(folder / "three");
  }
}

TEST(CkptModel, ParametersWithoutAStep) {
  const TempFolder folder;
  run_ranks(2, [&] {
    Training run(kSettings[1], 1, {.skip_last = true});  // u4 gets no gradient
    run.root.set_reduce_scatter_unused_params(false);
    run.step(0);
    save_run(folder / "c", run);
  });
  const CheckpointInfo info = read_info(folder / "c");
  EXPECT_TRUE(info.tensors.contains("optim.u1.a.weight.exp_avg"));
  EXPECT_TRUE(info.tensors.contains("optim.u4.a.weight.step"));
  const bool has_state = info.tensors.contains("optim.u4.a.weight.exp_avg");
  run_ranks(3, [&] {
    Training run(kSettings[3], 5);
    run.step(3);  // with state for all parameters
    load_run(folder / "c", run);
    for (const auto& state : run.optimizer.state()) {
      if (state.name != "u4.a.weight") continue;
      EXPECT_EQ(state.step, has_state ? 1 : 0);
    }
    run.step(4);
    StateDict state;
    state.add_optimizer(run.optimizer);
    EXPECT_TRUE(state.entries().contains("optim.u4.a.weight.exp_avg"));
  });
}

TEST(CkptModel, AModelThatBeganOnMeta) {
  const TempFolder folder;
  Tensors saved;
  run_ranks(2, [&](int rank) {
    Training run(kSettings[2]);
    run.step(0);
    save_run(folder / "c", run);
    const Tensors all = full_parameters(run.root);
    if (rank == 0) saved = all;
  });
  run_ranks(3, [&] {
    Net net = nullptr;
    {
      const MetaInit on_meta;
      net = Net(NetOptions{});
    }
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
    StateDict state;
    state.add_model(root);
    const LoadResult result = load(folder / "c", state, {.prefixes = {"model."}});
    EXPECT_EQ(result.bytes_read, result.bytes_owned);
    EXPECT_TRUE(same(full_parameters(root), saved));
    const Batch batch = make_batch(3, 1);
    net_loss(net(batch.tokens), batch.targets).backward();
  });
}

TEST(CkptModel, OtherOptimizers) {
  const TempFolder folder;
  run_ranks(2, [&] {
    Training run(kSettings[1]);
    run.step(0);
    save_run(folder / "adamw", run);
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    optim::SGD sgd(root, {.lr = 0.1, .momentum = 0.9});
    StateDict state;
    state.add_model(root);
    state.add_optimizer(sgd, read_info(folder / "adamw"));
    EXPECT_THAT(message_of<ValueError>([&] { load(folder / "adamw", state); }), HasSubstr("has a tensor exp_avg"));
    StateDict only_model;
    only_model.add_model(root);
    EXPECT_THAT(message_of<ValueError>([&] { load(folder / "adamw", only_model); }),
                HasSubstr("unexpected: optim.head.bias.exp_avg"));
    load(folder / "adamw", only_model, {.prefixes = {"model."}});
    EXPECT_TRUE(same(full_parameters(root), full_parameters(run.root)));
  });
}

TEST(CkptModel, InTheMiddleOfAStep) {
  const TempFolder folder;
  run_ranks(2, [&] {
    Training run(kSettings[1]);
    save_run(folder / "c", run);
    const Batch batch = make_batch(2, 1);
    const torch::Tensor loss = net_loss(run.net(batch.tokens), batch.targets);
    EXPECT_THAT(message_of<ValueError>([&] { load_run(folder / "c", run); }), HasSubstr("in the middle of a step"));
    loss.backward();
  });
}

}  // namespace
}  // namespace hyper_parallel::ckpt
