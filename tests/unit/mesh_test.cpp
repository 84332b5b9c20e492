// Arithmetic of meshes, seen from each rank of a world without peers.
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/mesh/device_mesh.h>

#include "support/message_of.h"

namespace hyper_parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Names = std::vector<std::string>;
using Shape = std::vector<std::int64_t>;

// The calling thread is rank `rank` of `size` while it lives.
struct AsRank {
  AsRank(int rank, int size) { init_process_group({.backend = "fake", .rank = rank, .world_size = size}); }
  ~AsRank() { destroy_process_group(); }
  AsRank(const AsRank&) = delete;
  AsRank& operator=(const AsRank&) = delete;
};

TEST(Mesh, KnowsShapeNamesRanksAndCoordinate) {
  for (int rank = 0; rank < 12; ++rank) {
    const AsRank as(rank, 12);
    const auto mesh = init_device_mesh("cpu", {2, 3, 2}, {"dp", "cp", "tp"});
    EXPECT_TRUE(mesh.defined());
    EXPECT_EQ(mesh.device_type(), "cpu");
    EXPECT_EQ(mesh.ndim(), 3);
    EXPECT_EQ(mesh.shape(), (Shape{2, 3, 2}));
    EXPECT_EQ(mesh.mesh_dim_names(), (Names{"dp", "cp", "tp"}));
    EXPECT_EQ(mesh.size(), 12);
    EXPECT_EQ(mesh.size(1), 3);
    EXPECT_EQ(mesh.size(-3), 2);
    EXPECT_EQ(mesh.axis("cp"), 1);
    EXPECT_EQ(mesh.ranks()[11], 11);
    EXPECT_THAT(*mesh.get_coordinate(), ElementsAre(rank / 6, rank / 2 % 3, rank % 2));
    EXPECT_EQ(mesh.get_local_rank(-1), rank % 2);
    EXPECT_EQ(mesh.get_local_rank("cp"), rank / 2 % 3);
    EXPECT_EQ(mesh.to_string(), "DeviceMesh(cpu, dp=2, cp=3, tp=2)");
    EXPECT_EQ(mesh.world().rank(), rank);
  }
}

TEST(Mesh, OneAxisIsNamedDpByDefault) {
  const AsRank as(1, 4);
  const auto mesh = init_device_mesh("cpu", {4});
  EXPECT_EQ(mesh.mesh_dim_names(), (Names{"dp"}));
  EXPECT_EQ(mesh.get_local_rank(), 1);
  EXPECT_EQ(mesh.get_group().ranks(), (std::vector<int>{0, 1, 2, 3}));
}

TEST(Mesh, WithoutLauncherTheWorldHasOneRank) {
  ASSERT_FALSE(is_initialized());
  const auto mesh = init_device_mesh("cpu", {1, 1}, {"a", "b"});
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(get_rank(), 0);
  EXPECT_EQ(get_world_size(), 1);
  EXPECT_EQ(mesh.get_group("b").size(), 1);
  destroy_process_group();
}

TEST(Mesh, SlicesHoldTheRanksAroundTheCaller) {
  for (int rank = 0; rank < 12; ++rank) {
    const AsRank as(rank, 12);
    const auto mesh = init_device_mesh("cpu", {2, 3, 2}, {"dp", "cp", "tp"});
    const int dp = rank / 6;
    const int cp = rank / 2 % 3;
    const int tp = rank % 2;
    EXPECT_THAT(mesh["cp"].ranks(), ElementsAre(dp * 6 + tp, dp * 6 + 2 + tp, dp * 6 + 4 + tp));
    EXPECT_THAT(*mesh["cp"].get_coordinate(), ElementsAre(cp));
    const auto outer_inner = mesh[Names{"dp", "tp"}];
    EXPECT_THAT(outer_inner.ranks(), ElementsAre(cp * 2, cp * 2 + 1, 6 + cp * 2, 6 + cp * 2 + 1));
    EXPECT_EQ(outer_inner.shape(), (Shape{2, 2}));
    EXPECT_EQ(outer_inner["tp"], mesh["tp"]);
    EXPECT_EQ((mesh[Names{"dp", "cp", "tp"}]), mesh);
    EXPECT_EQ(mesh.get_group("tp").ranks(), mesh["tp"].ranks());
    EXPECT_EQ(mesh["tp"].get_group().ranks(), mesh["tp"].ranks());
    EXPECT_EQ(mesh.get_group("tp").rank(), tp);
  }
}

TEST(Mesh, FlattenJoinsAxesInOrder) {
  for (int rank = 0; rank < 12; ++rank) {
    const AsRank as(rank, 12);
    const auto mesh = init_device_mesh("cpu", {2, 3, 2}, {"dp", "cp", "tp"});
    const auto flat = mesh[Names{"dp", "cp"}].flatten();
    EXPECT_EQ(flat.mesh_dim_names(), (Names{"dp_cp"}));
    EXPECT_EQ(flat.shape(), (Shape{6}));
    const int tp = rank % 2;
    EXPECT_THAT(flat.ranks(), ElementsAre(tp, 2 + tp, 4 + tp, 6 + tp, 8 + tp, 10 + tp));
    EXPECT_EQ(flat.get_local_rank(), rank / 2);
    const auto group = mesh[Names{"dp", "cp"}].flatten("all").get_group();
    EXPECT_EQ(group.ranks(), flat.ranks());
    EXPECT_EQ(group.rank(), rank / 2);
    EXPECT_EQ(mesh["tp"].flatten(), mesh["tp"]);
    EXPECT_EQ(mesh["tp"].flatten("model").mesh_dim_names(), (Names{"model"}));
    // Dimensions that are not neighbours.
    EXPECT_EQ((mesh[Names{"dp", "tp"}].flatten().ranks()), (mesh[Names{"dp", "tp"}].ranks()));
  }
}

TEST(Mesh, ConcatenateJoinsSlicesOfOneRoot) {
  for (int rank = 0; rank < 8; ++rank) {
    const AsRank as(rank, 8);
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {"replicate", "shard", "tp"});
    EXPECT_EQ(DeviceMesh::concatenate({mesh[Names{"replicate", "shard"}], mesh["tp"]}), mesh);
    EXPECT_EQ((DeviceMesh::concatenate({mesh["replicate"], mesh["tp"]})), (mesh[Names{"replicate", "tp"}]));
    const auto mixed = DeviceMesh::concatenate({mesh[Names{"replicate", "shard"}].flatten("dp"), mesh["tp"]});
    EXPECT_EQ(mixed.shape(), (Shape{4, 2}));
    EXPECT_EQ(mixed.mesh_dim_names(), (Names{"dp", "tp"}));
    EXPECT_EQ(mixed.ranks(), mesh.ranks());
    EXPECT_THAT(*mixed.get_coordinate(), ElementsAre(rank / 2, rank % 2));
    EXPECT_EQ(DeviceMesh::concatenate({mesh}), mesh);
    // Roots are compared by value.
    EXPECT_EQ(DeviceMesh::concatenate({mesh["shard"], init_device_mesh("cpu", {2, 2, 2}, {"replicate", "shard", "tp"})["tp"]}),
              (mesh[Names{"shard", "tp"}]));
  }
}

TEST(Mesh, EqualityIsByValue) {
  const AsRank as(0, 4);
  const auto mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
  EXPECT_EQ(mesh, init_device_mesh("cpu", {2, 2}, {"a", "b"}));
  EXPECT_FALSE(mesh == init_device_mesh("cpu", {2, 2}, {"a", "c"}));
  EXPECT_FALSE(mesh == init_device_mesh("cpu", {4, 1}, {"a", "b"}));
  EXPECT_FALSE(mesh == init_device_mesh("cuda", {2, 2}, {"a", "b"}));
  EXPECT_FALSE(mesh == DeviceMesh());
  EXPECT_EQ(DeviceMesh(), DeviceMesh());
  EXPECT_EQ(DeviceMesh().to_string(), "DeviceMesh()");
}

TEST(Mesh, FromGroupWrapsGroups) {
  // Rank 0 of a 2 x 2 mesh.
  const std::vector<Comm> groups{Comm::fake(0, 2), Comm::fake(0, 2)};
  const auto mesh = DeviceMesh::from_group(groups, "cpu", {2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
  EXPECT_EQ(mesh.get_group("dp").shared_impl(), groups[0].shared_impl());
  EXPECT_EQ(mesh["tp"].get_group().shared_impl(), groups[1].shared_impl());
  EXPECT_EQ(mesh.flatten().get_group().size(), 4) << "a new group without peers";
  EXPECT_EQ(mesh.world().size(), 4);
  const AsRank as(3, 4);
  const auto own = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
  const auto again =
      DeviceMesh::from_group({own.get_group("dp"), own.get_group("tp")}, "cpu", {2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
  EXPECT_EQ(again, own);
  EXPECT_EQ(again.world().rank(), 3);
}

TEST(MeshErrors, Init) {
  const AsRank as(0, 4);
  const auto message = [](std::string_view type, const Shape& shape, const Names& names) {
    return message_of<ValueError>([&] { (void)init_device_mesh(type, shape, names); });
  };
  EXPECT_EQ(message("cpu", {3}, {"a"}), "[init_device_mesh] mesh has 3 ranks, want the world size 4 (rank 0/4)");
  EXPECT_THAT(message("cpu", {-4}, {"a"}), HasSubstr("mesh has 0 ranks"));
  EXPECT_THAT(message("npu", {4}, {"a"}), HasSubstr("device type \"npu\", want \"cpu\" or \"cuda\""));
  EXPECT_THAT(message("cpu", {}, {}), HasSubstr("mesh has 0 dims"));
  EXPECT_THAT(message("cpu", {2, 2}, {}), HasSubstr("0 axis names for 2 dims"));
  EXPECT_THAT(message("cpu", {2, 2}, {"a", "a"}), HasSubstr("axis name \"a\" is used twice"));
  EXPECT_THAT(message("cpu", {2, 2}, {"a", ""}), HasSubstr("empty axis name"));
}

TEST(MeshErrors, SlicesAndAxes) {
  const AsRank as(0, 8);
  const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {"dp", "cp", "tp"});
  EXPECT_EQ(message_of<ValueError>([&] { (void)mesh["pp"]; }),
            "[DeviceMesh::operator[]] axis \"pp\" is unknown, want one of {dp, cp, tp} (DeviceMesh(cpu, dp=2, cp=2, tp=2))");
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh[Names{"dp", "dp"}]; }), HasSubstr("axis \"dp\" is named twice"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh[Names{"tp", "dp"}]; }), HasSubstr("axes {tp, dp} are not in mesh order"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh[Names{}]; }), HasSubstr("no axis name given"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh.axis("x"); }), HasSubstr("axis \"x\" is unknown"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh.size(3); }), HasSubstr("axis 3 is out of range, want -3 to 2"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh.get_group(-4); }), HasSubstr("axis -4 is out of range"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)mesh.get_group("x"); }), HasSubstr("axis \"x\" is unknown"));
  EXPECT_THAT(message_of<ValueError>([&] {
                (void)mesh[Names{"dp", "cp"}].flatten("tp");
              }),
              HasSubstr("\"tp\" already names an axis"));
  EXPECT_THAT(message_of<ValueError>([] { (void)DeviceMesh().ranks(); }), HasSubstr("empty mesh handle"));
  EXPECT_THAT(message_of<ValueError>([] { (void)DeviceMesh().get_group(); }), HasSubstr("empty mesh handle"));
  const auto cuda = init_device_mesh("cuda", {8});
  EXPECT_FALSE(supports("cuda"));
  EXPECT_TRUE(supports("cpu"));
  EXPECT_THAT(message_of<ValueError>([&] { (void)cuda.get_group(); }), HasSubstr("no backend for device type \"cuda\""));
}

TEST(MeshErrors, Concatenate) {
  const AsRank as(0, 8);
  const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {"dp", "cp", "tp"});
  const auto other = init_device_mesh("cpu", {2, 4}, {"x", "y"});
  const auto message = [](const std::vector<DeviceMesh>& meshes) {
    return message_of<ValueError>([&] { (void)DeviceMesh::concatenate(meshes); });
  };
  EXPECT_THAT(message({}), HasSubstr("no mesh given"));
  EXPECT_THAT(message({mesh["dp"], other["y"]}), HasSubstr("come from different root meshes"));
  EXPECT_THAT(message({mesh["dp"], mesh["dp"]}), HasSubstr("axis name \"dp\" is used twice"));
  EXPECT_THAT(message({mesh["dp"], mesh["dp"].flatten("again")}),
              HasSubstr("axis \"again\" overlaps with another one on root axis \"dp\""));
  EXPECT_THAT(message({mesh["tp"], mesh["dp"]}),
              HasSubstr("axis \"dp\" is out of order, want the order of the root mesh {dp, cp, tp}"));
  EXPECT_THAT(message({mesh["dp"], DeviceMesh()}), HasSubstr("empty mesh handle"));
}

TEST(MeshErrors, FromGroup) {
  const auto make = [](const std::vector<Comm>& groups, const Shape& shape, const std::vector<int>& ranks, const Names& names) {
    return message_of<ValueError>([&] { (void)DeviceMesh::from_group(groups, "cpu", shape, ranks, names); });
  };
  EXPECT_THAT(make({Comm::fake(0, 2)}, {2, 1}, {0, 1}, {"a", "b"}), HasSubstr("1 groups for 2 dims"));
  EXPECT_THAT(make({Comm::fake(0, 2)}, {2}, {}, {"a"}), HasSubstr("no ranks given"));
  EXPECT_THAT(make({Comm()}, {1}, {0}, {"a"}), HasSubstr("empty Comm handle"));
  EXPECT_THAT(make({Comm::fake(0, 2)}, {2}, {0, 0}, {"a"}), HasSubstr("a rank is listed twice"));
  EXPECT_THAT(make({Comm::fake(0, 2)}, {3}, {0, 1, 2}, {"a"}), HasSubstr("does not hold the ranks along axis \"a\""));
  EXPECT_THAT(make({Comm::fake(0, 2)}, {2}, {0, 1, 2}, {"a"}), HasSubstr("3 ranks for a mesh of 2"));
  EXPECT_THAT(make({Comm::fake(0, 2)}, {2}, {4, 5}, {"a"}), HasSubstr("rank 0 is not part of"));
}

TEST(WorldErrors, Options) {
  const auto message = [](const InitOptions& options) {
    return message_of<ValueError>([&] { (void)init_process_group(options); });
  };
  EXPECT_THAT(message({.backend = "mpi"}), HasSubstr("backend \"mpi\" is not in this build"));
  EXPECT_THAT(message({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout 0 ms, want more than 0"));
  EXPECT_THAT(message({.rank = 1}), HasSubstr("rank 1 and world_size -1, want both or none"));
  EXPECT_THAT(message({.rank = 2, .world_size = 2}), HasSubstr("rank 2 of world_size 2"));
  EXPECT_FALSE(is_initialized());
  const AsRank as(0, 2);
  EXPECT_THAT(message({}), HasSubstr("already has a world"));
  EXPECT_THAT(message_of<ValueError>([] { (void)Comm::fake(2, 2); }), HasSubstr("[Comm::fake] rank 2 of 2"));
}

}  // namespace
}  // namespace hyper_parallel
