// Checkpoints between every two ways of cutting one model: FSDP, HSDP, with and without tensor and expert parallelism, both group
// layouts; and folders that cannot be written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <unistd.h>

#include "dist/source_support.h"
#include "dist/tp_net.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using namespace hyper_parallel::testing;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// One way to cut the model over ranks.
struct Way {
  std::string name;
  std::vector<int64_t> mesh;       ///< dp axes, then those of the source
  std::vector<std::string> names;  ///< of the axes
  ShardLayout layout;
  [[nodiscard]] int ranks() const { return ranks_of(mesh); }
};

constexpr ShardLayout kRows = ShardLayout::kPerParameter, kRagged = ShardLayout::kRagged;

/// A model, its root, its optimizer and what to compare: whole tensors by name.
struct Sharded {
  std::shared_ptr<torch::nn::Module> module;
  HSDPModule root;
  std::shared_ptr<optim::AdamW> optimizer;
  void start() { optimizer = std::make_shared<optim::AdamW>(root, optim::AdamWOptions{.lr = 0.01}); }
  /// Gradients that depend on the place in the whole tensor alone, so that every way makes the same state.
  void step(int number) const {
    for (const auto& [name, parameter] : root.named_dtensors()) {
      const at::Tensor whole = wave(parameter.shape(), number + static_cast<int>(name.size()));
      const DTensor part = distribute_tensor(whole, parameter.device_mesh(), parameter.placements());
      for (const fsdp::ShardedGroup& group : root.groups()) {
        for (const fsdp::ShardedParameter& entry : group.parameters) {
          if (entry.name == name)
            const_cast<at::Tensor&>(entry.sharded).mutable_grad() = part.to_local().view(entry.sharded.sizes()).clone();
        }
      }
    }
    optimizer->step();
    optimizer->zero_grad();
  }
  [[nodiscard]] Tensors whole() const {
    Tensors result;
    for (const auto& [name, value] : get_model_state_dict(module, {.full_state_dict = true}))
      result[name] = std::get<at::Tensor>(value);
    for (const auto& [name, tensors] : get_optimizer_state_dict(module, *optimizer, {.full_state_dict = true}).state) {
      for (const auto& [slot, value] : tensors) result[concat(name, '.', slot)] = std::get<at::Tensor>(value);
    }
    return result;
  }
};

FullyShardOptions options_of(const Way& way, const DeviceMesh& mesh) {
  std::vector<std::string> dp;
  for (const std::string& name : way.names) {
    if (name.starts_with("dp")) dp.push_back(name);
  }
  FullyShardOptions options{.mesh = mesh[dp]};
  options.shard_layout = way.layout;
  return options;
}

/// The net of tp_net.h.
Sharded dense(const Way& way, uint64_t seed) {
  const DeviceMesh mesh = init_device_mesh("cpu", way.mesh, way.names);
  TpNet net(std::vector<int64_t>{8, 7});
  seed_parameters(*net, seed);
  const FullyShardOptions options = options_of(way, mesh);
  Sharded result;
  result.module = net.ptr();
  if (way.names.back() == "tp") {
    const SourceShardInfos infos = cut_net(net, mesh["tp"], Convention::kWhole);
    result.root = shard_tp_net(net, options, infos);
  } else {
    for (const TpBlock& block : net->blocks) fully_shard(block, options);
    result.root = fully_shard(net, options);
  }
  result.start();
  return result;
}

/// A stack of eight experts and a router.
Sharded experts(const Way& way, uint64_t seed) {
  const DeviceMesh mesh = init_device_mesh("cpu", way.mesh, way.names);
  Bag bag;
  bag->add(torch::zeros({8, 5, 3}));
  bag->add(torch::zeros({8, 3}));
  seed_parameters(*bag, seed);
  FullyShardOptions options = options_of(way, mesh);
  if (way.names.back() == "ep") {
    SourceShardInfos infos;
    for (std::size_t i = 0; i < bag->handles.size(); ++i) {
      torch::Tensor& parameter = bag->handles[i];
      const std::vector<Placement> placements = {i == 0 ? Shard(0) : Replicate()};
      const std::vector<int64_t> shape = parameter.sizes().vec();
      parameter.set_data(distribute_tensor(parameter.detach(), mesh["ep"], placements).to_local());
      infos.set(parameter, {.mesh = mesh["ep"], .placements = placements, .shape = shape}, concat('p', i));
    }
    options.source_shard_infos = infos;
  }
  Sharded result{bag.ptr(), fully_shard(bag, options), nullptr};
  result.start();
  return result;
}

template <class Make>
void expect_every_way_to_every_way(const std::vector<Way>& ways, const Make& make) {
  const TempFolder folder;
  Tensors want;
  for (const Way& from : ways) {
    run_ranks(from.ranks(), [&](int rank) {
      const Sharded run = make(from, 1);
      run.step(0);
      run.step(1);
      const Tensors whole = run.whole();
      if (rank == 0 && want.empty()) want = whole;
      EXPECT_EQ(relative_difference(whole, rank == 0 ? want : whole), 0.0) << from.name;
      StateDict state;
      state.add_model(run.root);
      state.add_optimizer(*run.optimizer);
      save(folder / from.name, state);
    });
    EXPECT_THAT(verify(folder / from.name), IsEmpty());
  }
  for (const Way& to : ways) {
    run_ranks(to.ranks(), [&] {
      for (const Way& from : ways) {
        const Sharded run = make(to, 7);
        StateDict state;
        state.add_model(run.root);
        state.add_optimizer(*run.optimizer, read_info(folder / from.name));
        const LoadResult result = load(folder / from.name, state);
        EXPECT_EQ(result.bytes_read, result.bytes_owned) << from.name << " to " << to.name;
        const Tensors got = run.whole();
        EXPECT_EQ(relative_difference(got, want), 0.0) << from.name << " to " << to.name;
      }
    });
  }
}

TEST(CkptParallel, TensorParallelOrNotEveryWayToEveryWay) {
  expect_every_way_to_every_way(std::vector<Way>{{"one", {1}, {"dp"}, kRows},
                                                 {"fsdp3-ragged", {3}, {"dp"}, kRagged},
                                                 {"fsdp4", {4}, {"dp"}, kRows},
                                                 {"hsdp2x2", {2, 2}, {"dp_replicate", "dp_shard"}, kRows},
                                                 {"hsdp2x2-ragged", {2, 2}, {"dp_replicate", "dp_shard"}, kRagged},
                                                 {"fsdp2-tp2", {2, 2}, {"dp_shard", "tp"}, kRows},
                                                 {"fsdp2-tp2-ragged", {2, 2}, {"dp_shard", "tp"}, kRagged},
                                                 {"tp3", {1, 3}, {"dp_shard", "tp"}, kRows},
                                                 {"hsdp2x1-tp2-ragged", {2, 1, 2}, {"dp_replicate", "dp_shard", "tp"}, kRagged}},
                                dense);
}

TEST(CkptParallel, ExpertsOverFourTwoAndOneRanks) {
  expect_every_way_to_every_way(std::vector<Way>{{"one", {1}, {"dp"}, kRagged},
                                                 {"fsdp4", {4}, {"dp"}, kRows},
                                                 {"ep4", {1, 4}, {"dp_shard", "ep"}, kRows},
                                                 {"fsdp2-ep2", {2, 2}, {"dp_shard", "ep"}, kRows},
                                                 {"fsdp2-ep2-ragged", {2, 2}, {"dp_shard", "ep"}, kRagged},
                                                 {"ep3", {1, 3}, {"dp_shard", "ep"}, kRagged}},
                                experts);
}

/// Wrong model: nothing of it is loaded, and every difference is named.
TEST(CkptParallel, AnotherModelIsRefused) {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const Sharded run = dense({"", {2}, {"dp"}, kRows}, 1);
    StateDict state;
    state.add_model(run.root);
    save(folder / "c", state);
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const Tensors before = full_parameters(root);
    StateDict other;
    other.add_model(root);
    const std::string message = message_of<ValueError>([&] { return load(folder / "c", other); });
    EXPECT_THAT(message, HasSubstr("missing: model.head.bias, "));
    EXPECT_THAT(message, HasSubstr("unexpected: model.block0.a, "));
    EXPECT_EQ(relative_difference(full_parameters(root), before), 0.0) << rank;
  });
}

/// What a user without rights on a folder sees. Root may write everywhere, so its threads act for somebody else.
class AsNobody {
 public:
  AsNobody() : before_(::geteuid() == 0 ? ::setfsuid(65534) : -1) {}
  ~AsNobody() {
    if (before_ >= 0) ::setfsuid(static_cast<uid_t>(before_));
  }
  AsNobody(const AsNobody&) = delete;
  AsNobody& operator=(const AsNobody&) = delete;

 private:
  int before_;
};

TEST(CkptParallel, AFolderWithoutRightsIsAnErrorOnAllRanks) {
  const TempFolder folder;
  namespace fs = std::filesystem;
  fs::create_directory(folder / "run");
  const auto allow = [&](fs::perms perms) { fs::permissions(folder / "run", perms); };
  fs::permissions(folder.path(), fs::perms::all);
  run_ranks(3, [&](int rank) {
    Checkpointer checkpointer(folder / "run");
    const torch::Tensor value = torch::full({5}, 3.0);
    StateDict state;
    state.add("value", value);
    checkpointer.save(1, state);
    checkpointer.save_async(2, state);  // its group is made here
    checkpointer.wait();
    current_world().comm().barrier();
    if (rank == 0) allow(fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
    current_world().comm().barrier();
    std::string at_once, later;
    {
      const AsNobody nobody;
      at_once = message_of<CheckpointError>([&] {
        checkpointer.save(3, state);
        return 0;
      });
      checkpointer.save_async(3, state);
      later = message_of<CheckpointError>([&] {
        checkpointer.wait();
        return 0;
      });
    }
    for (const std::string& message : {at_once, later}) {
      EXPECT_THAT(message, HasSubstr("cannot create the folder"));
      EXPECT_THAT(message, HasSubstr("Permission denied"));
      EXPECT_THAT(message, HasSubstr("(rank 0/3)"));
    }
    current_world().comm().barrier();
    if (rank == 0) allow(fs::perms::all);
    current_world().comm().barrier();
    value.zero_();
    load(checkpointer.path_of(2), state);
    EXPECT_EQ(value.sum().item<double>(), 15.0) << "what was there is there";
    EXPECT_EQ(checkpointer.steps(), (std::vector<std::int64_t>{1, 2}));
    checkpointer.save(3, state);
    EXPECT_EQ(checkpointer.latest(), 3);
  });
}

}  // namespace
}  // namespace hyper_parallel::ckpt
