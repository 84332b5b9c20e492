#include <hyper_parallel/dtensor/placement.h>

#include <sstream>
#include <unordered_set>

#include <gtest/gtest.h>

#include "support/message_of.h"

namespace hyper_parallel {
namespace {

using hyper_parallel::testing::value_error;

TEST(Placement, ComparesByValue) {
  EXPECT_EQ(Placement(), Replicate());
  EXPECT_EQ(Shard(1), Shard(1));
  EXPECT_NE(Shard(1), Shard(0));
  EXPECT_NE(Shard(0), StridedShard(0, 2));
  EXPECT_NE(StridedShard(0, 4), StridedShard(0, 2));
  EXPECT_NE(Partial(), Replicate());
  EXPECT_EQ(Partial(), Partial(ReduceOp::kSum));
  EXPECT_NE(Partial(), Partial(ReduceOp::kMax));
  EXPECT_EQ(RaggedShard(1, {1, 2}), RaggedShard(1, {1, 2}));
  EXPECT_NE(RaggedShard(1, {1, 2}), RaggedShard(1, {2, 1}));
  EXPECT_NE(RaggedShard(1, {1, 2}), RaggedShard(2, {1, 2}));
}

TEST(Placement, HashesWhatItCompares) {
  const std::unordered_set<Placement> set = {
      Replicate(),           Shard(0), Shard(0), Shard(1), StridedShard(0, 2), Partial(), RaggedShard(1, {1, 2}), Partial(),
      RaggedShard(1, {1, 2})};
  EXPECT_EQ(set.size(), 6U);
  EXPECT_EQ(Shard(3).hash(), Shard(3).hash());
}

TEST(Placement, PrintsAsInPyTorch) {
  const std::vector<Placement> placements = {Shard(0), Replicate()};
  EXPECT_EQ(to_string(placements), "[Shard(dim=0), Replicate()]");
  EXPECT_EQ(StridedShard(0, 2).to_string(), "_StridedShard(dim=0, sf=2)");
  EXPECT_EQ(Partial().to_string(), "Partial(sum)");
  EXPECT_EQ(Partial(ReduceOp::kAvg).to_string(), "Partial(avg)");
  EXPECT_EQ(Partial(ReduceOp::kProduct).to_string(), "Partial(product)");
  EXPECT_EQ(Partial(ReduceOp::kMin).to_string(), "Partial(min)");
  EXPECT_EQ(Partial(ReduceOp::kMax).to_string(), "Partial(max)");
  EXPECT_EQ(RaggedShard(1, {1, 2}).to_string(), "RaggedShard(dims=(0,), local_units=(1, 2))");
  EXPECT_EQ(RaggedShard(3, {4}).to_string(), "RaggedShard(dims=(0, 1, 2), local_units=(4,))");
  EXPECT_EQ(RaggedShard(0, {1, 0}).to_string(), "RaggedShard(dims=(), local_units=(1, 0))");
  std::ostringstream out;
  out << Shard(-1);
  EXPECT_EQ(out.str(), "Shard(dim=-1)");
}

TEST(Placement, AnswersOnlyWhatItsKindHas) {
  EXPECT_TRUE(Shard(2).is_shard(2));
  EXPECT_FALSE(Shard(2).is_shard(0));
  EXPECT_TRUE(StridedShard(2, 4).is_shard(2));
  EXPECT_EQ(StridedShard(2, 4).split_factor(), 4);
  EXPECT_EQ(Shard(2).split_factor(), 1);
  EXPECT_EQ(RaggedShard(2, {3, 1}).ragged_dims(), 2);
  EXPECT_EQ(RaggedShard(2, {3, 1}).local_units(), (std::vector<std::int64_t>{3, 1}));
  EXPECT_EQ(Partial(ReduceOp::kMin).reduce_op(), ReduceOp::kMin);
  EXPECT_EQ(value_error([] { return Replicate().dim(); }), "[Placement::dim] Replicate() cuts no single dimension");
  EXPECT_EQ(value_error([] { return Partial().split_factor(); }), "[Placement::split_factor] Partial(sum) has no split factor");
  EXPECT_EQ(value_error([] { return Shard(0).ragged_dims(); }), "[Placement::ragged_dims] Shard(dim=0) is not ragged");
  EXPECT_EQ(value_error([] { return Shard(0).local_units(); }), "[Placement::local_units] Shard(dim=0) is not ragged");
  EXPECT_EQ(value_error([] { return Shard(0).reduce_op(); }), "[Placement::reduce_op] Shard(dim=0) is not partial");
}

TEST(Placement, RejectsBadArguments) {
  EXPECT_EQ(value_error([] { return StridedShard(0, 0); }), "[StridedShard] split_factor is 0, want at least 1");
  EXPECT_EQ(value_error([] { return RaggedShard(-1, {1}); }), "[RaggedShard] dims is -1, want at least 0");
  EXPECT_EQ(value_error([] { return RaggedShard(1, {1, -2}); }), "[RaggedShard] local_units has -2, want at least 0");
  EXPECT_EQ(value_error([] { return RaggedShard(1, {0, 0}); }), "[RaggedShard] local_units sum to 0, want a positive sum");
}

}  // namespace
}  // namespace hyper_parallel
