// Process groups of meshes over real peers.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/mesh/device_mesh.h>

#include "support/message_of.h"
#include "support/rank_threads.h"

namespace hyper_parallel {
namespace {

using Names = std::vector<std::string>;
using testing::message_of;
using testing::run_ranks;

float sum_over(const Comm& group, float value) {
  const auto tensor = torch::full({3}, value);
  group.all_reduce(tensor).wait();
  return tensor[2].item<float>();
}

TEST(MeshGroups, RunAlongTheirAxis) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const auto dp = mesh.get_group("dp");
    const auto tp = mesh.get_group("tp");
    EXPECT_EQ(dp.name(), "dp");
    EXPECT_EQ(sum_over(dp, static_cast<float>(rank)), static_cast<float>(2 * (rank % 2) + 2));
    EXPECT_EQ(sum_over(tp, static_cast<float>(rank)), static_cast<float>(4 * (rank / 2) + 1));
    EXPECT_EQ(sum_over(mesh.flatten().get_group(), 1.0F), 4.0F);
  });
}

TEST(MeshGroups, EqualRankListsShareOneGroup) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const auto first = mesh.get_group("dp");
    EXPECT_EQ(mesh.get_group(0).shared_impl(), first.shared_impl());
    EXPECT_EQ(mesh["dp"].get_group().shared_impl(), first.shared_impl());
    EXPECT_EQ(init_device_mesh("cpu", {2, 2}, {"a", "b"}).get_group("a").shared_impl(), first.shared_impl());
    const auto whole = current_world().comm();
    EXPECT_EQ(mesh.flatten("all").get_group().shared_impl(), whole.shared_impl());
    EXPECT_EQ(init_device_mesh("cpu", {4}).get_group().shared_impl(), whole.shared_impl());
    EXPECT_NE(mesh.get_group("tp").shared_impl(), first.shared_impl());
  });
}

// Ranks 2 and 3 never ask for their group: the other two must not wait for them.
TEST(MeshGroups, AreMadeByTheirMembersOnly) {
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    if (rank < 2) {
      EXPECT_EQ(sum_over(mesh.get_group("tp"), 1.0F), 2.0F);
    }
  });
}

// Two ranks of a world whose other ranks never come.
TEST(MeshGroups, OfSomeRanksOfAWorldThatNobodyWaitsFor) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](int rank) {
    const World world = make_world({.rank = rank + 1, .world_size = 4, .store = store, .wait_for_ranks = false});
    EXPECT_EQ(current_world().size(), 2);
    const auto mesh = DeviceMesh::from_ranks(world, "cpu", {2, 1}, {2, 1}, {"dp", "tp"});
    EXPECT_EQ(mesh.get_local_rank("dp"), 1 - rank);
    EXPECT_EQ(sum_over(mesh.get_group("dp"), 1.0F), 2.0F);
    EXPECT_FALSE(DeviceMesh::from_ranks(world, "cpu", {1}, {3}, {"dp"}).get_coordinate().has_value());
    EXPECT_EQ(message_of<ValueError>([&] { (void)DeviceMesh::from_ranks(world, "cpu", {1}, {4}, {"dp"}); }),
              "[DeviceMesh::from_ranks] rank 4, want 0 to 3");
    EXPECT_EQ(message_of<ValueError>([] { (void)DeviceMesh::from_ranks(World(), "cpu", {1}, {0}, {"dp"}); }),
              "[DeviceMesh::from_ranks] empty World handle, want one from make_world or init_process_group");
  });
}

TEST(MeshGroups, UnevenWorldsAndAxesOfOne) {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {3, 1}, {"dp", "tp"});
    EXPECT_EQ(mesh.get_group("tp").size(), 1);
    EXPECT_EQ(sum_over(mesh.get_group("tp"), static_cast<float>(rank)), static_cast<float>(rank));
    EXPECT_EQ(sum_over(mesh.get_group("dp"), 1.0F), 3.0F);
  });
}

TEST(MeshGroups, OutliveTheWorldThatMadeThem) {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh("cpu", {2});
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    EXPECT_EQ(sum_over(mesh.get_group(), 1.0F), 2.0F);
  });
}

TEST(MeshGroups, FromGroupUsesTheGivenOnes) {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    const auto made =
        DeviceMesh::from_group({mesh.get_group("dp"), mesh.get_group("tp")}, "cpu", {2, 2}, {0, 1, 2, 3}, {"x", "y"});
    EXPECT_EQ(made["y"].get_group().shared_impl(), mesh.get_group("tp").shared_impl());
    EXPECT_EQ(sum_over(made.flatten().get_group(), 1.0F), 4.0F);
    EXPECT_THROW(
        (void)DeviceMesh::from_group({mesh.get_group("tp"), mesh.get_group("dp")}, "cpu", {2, 2}, {0, 1, 2, 3}, {"x", "y"}),
        ValueError);
  });
}

TEST(Worlds, ManyAfterEachOther) {
  for (int i = 0; i < 20; ++i) {
    run_ranks(3, [](int) { EXPECT_EQ(sum_over(current_world().comm(), 1.0F), 3.0F); });
  }
}

TEST(Worlds, KnowTheirOptions) {
  run_ranks(2, [](int rank) {
    EXPECT_EQ(get_rank(), rank);
    EXPECT_EQ(get_world_size(), 2);
    EXPECT_EQ(current_world().local_rank(), rank);
    EXPECT_EQ(current_world().timeout(), std::chrono::seconds(30));
  });
}

}  // namespace
}  // namespace hyper_parallel
