// Who has what, who writes what.
#include "ckpt/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/dtensor/layout.h>

#include "ckpt/runs.h"
#include "support/message_of.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::value_error;
using ::testing::HasSubstr;
using Sizes = std::vector<std::int64_t>;

Holding holding(const std::string& name, const Sizes& shape, std::vector<Box> boxes, Dtype dtype = Dtype::kF32) {
  return {{name, dtype, shape}, std::move(boxes), "layout"};
}

TEST(CkptPlan, PackedAndUnpacked) {
  const Holdings holdings = {holding("a", {}, {Box{}}, Dtype::kI64), holding("b", {4, 6}, {{{0, 1}, {2, 3}}, {{2, 0}, {1, 6}}}),
                             holding("c", {0}, {})};
  const Holdings again = unpack(pack(holdings));
  ASSERT_EQ(again.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(again[i].spec.name, holdings[i].spec.name);
    EXPECT_EQ(again[i].spec.dtype, holdings[i].spec.dtype);
    EXPECT_EQ(again[i].spec.shape, holdings[i].spec.shape);
    EXPECT_EQ(again[i].boxes, holdings[i].boxes);
    EXPECT_EQ(again[i].layout, "layout");
  }
}

TEST(CkptPlan, OverlapsAndHoles) {
  const auto exact = [](std::vector<Holdings> of_rank) { return combine("op", of_rank).at(0).exact; };
  const auto rows = [](std::int64_t begin, std::int64_t end) {
    return Holdings{holding("a", {6, 2}, {{{begin, 0}, {end - begin, 2}}})};
  };
  EXPECT_TRUE(exact({rows(0, 3), rows(3, 6)}));
  EXPECT_TRUE(exact({rows(0, 3), rows(3, 6), rows(0, 3)})) << "a replica";
  EXPECT_FALSE(exact({rows(0, 3), rows(4, 6)})) << "a hole";
  EXPECT_FALSE(exact({rows(0, 4), rows(3, 6)})) << "an overlap";
  EXPECT_FALSE(exact({rows(0, 4), rows(3, 5)})) << "both, and the right number of elements";
  EXPECT_TRUE(exact({{holding("a", {0, 4}, {})}}));
  EXPECT_TRUE(exact({{holding("a", {}, {Box{}})}, {holding("a", {}, {})}}));
  EXPECT_THAT(value_error([&] {
                return deal_out("op", combine("op", {rows(0, 3), rows(4, 6)}), 2);
              }),
              HasSubstr("[op] the ranks' parts overlap or leave holes, want each element once or on replicas: a (layout)"));
  EXPECT_THAT(
      value_error([&] {
        return combine(
            "op", {{holding("a", {2}, {}), holding("b", {3}, {})}, {holding("a", {3}, {}), holding("b", {3}, {}, Dtype::kI8)}});
      }),
      HasSubstr("[op] ranks disagree: a is F32 [2] on rank 0, F32 [3] on rank 1; b is F32 [3] on rank 0, I8 [3] on rank 1"));
}

/// Random layouts: every element is written once, by a rank that has it, from one contiguous range; the work is even.
TEST(CkptPlan, EveryElementOnceByARankThatHasIt) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const Sizes mesh = round % 2 == 0 ? Sizes{2, 3} : Sizes{3, 2};
    const int world = 6;
    std::vector<Holdings> of_rank(world);
    std::map<std::string, Sizes> shapes;
    for (int t = 0; t < 4; ++t) {
      const Sizes shape = {1 + static_cast<std::int64_t>(random() % 200), static_cast<std::int64_t>(random() % 300)};
      std::vector<Placement> placements;
      for (int axis = 0; axis < 2; ++axis)
        placements.push_back(random() % 2 == 0 ? Replicate() : Shard(static_cast<std::int64_t>(random() % 2)));
      const Layout layout = Layout::from_placements(mesh, placements, 2);
      const std::string name = concat('t', t);
      shapes[name] = shape;
      for (int r = 0; r < world; ++r)
        of_rank[static_cast<std::size_t>(r)].push_back(
            holding(name, shape, layout.boxes(shape, Sizes{r / mesh[1], r % mesh[1]})));
    }
    const std::vector<GlobalTensor> tensors = combine("op", of_rank);
    std::vector<std::int64_t> work(world, 0);
    std::map<std::string, std::vector<int>> written;
    for (const auto& [name, shape] : shapes) written[name].assign(static_cast<std::size_t>(shape[0] * shape[1]), 0);
    std::map<std::pair<int, std::string>, int> keys;
    for (const PlannedPiece& piece : deal_out("op", tensors, world)) {
      const TensorSpec& spec = tensors[piece.tensor].spec;
      EXPECT_EQ(keys[std::pair(piece.rank, piece.key)]++, 0);
      const auto& holdings = of_rank[static_cast<std::size_t>(piece.rank)];
      const auto mine = std::ranges::find_if(holdings, [&](const Holding& h) { return h.spec.name == spec.name; });
      int runs = 0;
      for (const Box& box : mine->boxes) {
        if (intersect(box, piece.box) == piece.box) for_each_run(box, piece.box, piece.box, [&](auto, auto, auto) { ++runs; });
      }
      EXPECT_EQ(runs, 1) << piece.key;
      for_each_run(whole_box(spec.shape), piece.box, piece.box, [&](std::int64_t from, std::int64_t, std::int64_t count) {
        for (std::int64_t i = from; i < from + count; ++i) ++written[spec.name][static_cast<std::size_t>(i)];
      });
      work[static_cast<std::size_t>(piece.rank)] += piece.box.numel() * 4;
    }
    for (const auto& [name, counts] : written) EXPECT_TRUE(std::ranges::all_of(counts, [](int n) { return n == 1; })) << name;
    // Uneven shards are the layout's doing; what is on all ranks is shared to the row.
    if (std::ranges::all_of(tensors, [](const GlobalTensor& t) { return t.regions.size() == 1; })) {
      const auto [low, high] = std::ranges::minmax(work);
      EXPECT_LE(high - low, (64 << 10) + 4 * 300 * 4);
    }
  }
}

}  // namespace
}  // namespace hyper_parallel::ckpt
