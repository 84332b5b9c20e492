// A rank dies or freezes while the others are in a collective: they stop in time, and say where and because of whom.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/process.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Kill : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(Kill, SurvivorsStopAndNameOperationUnitAndPeer) {
  const auto [world, victim] = GetParam();
  auto ranks = start_ranks(world, HP_WORLD_PROGRAM, {"loop", "15000"});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
  const auto start = std::chrono::steady_clock::now();
  auto& dead = ranks[static_cast<std::size_t>(victim)];
  dead.kill(SIGKILL);
  EXPECT_EQ(dead.wait(10s), 128 + SIGKILL);
  int named_by = 0;
  for (int r = 0; r < world; ++r) {
    if (r == victim) continue;
    auto& rank = ranks[static_cast<std::size_t>(r)];
    EXPECT_EQ(rank.wait(30s), 3) << "exit code of rank " << r << ": " << rank.output();
    EXPECT_THAT(rank.output(),
                AllOf(HasSubstr("Error: [reduce_scatter_single] peer rank"), HasSubstr("closed the connection"),
                      HasSubstr("unit layers.4, group dp, operation #"), HasSubstr(world == 2 ? "1.6 MB" : "2.4 MB")));
    const auto name = "peer rank " + std::to_string(victim) + " (global " + std::to_string(victim) + ")";
    const bool named = rank.output().find(name) != std::string::npos;
    if (named) ++named_by;
    // A survivor that stopped first may be blamed too: then its own message is quoted, unless the store died with rank 0.
    EXPECT_TRUE(named || victim == 0) << rank.output();
    EXPECT_THAT(rank.output(), Not(HasSubstr("frame #")));
  }
  EXPECT_GE(named_by, 1) << "no survivor names rank " << victim;
  EXPECT_LT(std::chrono::steady_clock::now() - start, 14s) << "a closed connection must be noticed before the timeout";
}

// Rank 0 also hosts the store.
INSTANTIATE_TEST_SUITE_P(Victims, Kill, ::testing::Values(std::pair{2, 1}, std::pair{2, 0}, std::pair{3, 1}, std::pair{3, 0}));

TEST(Freeze, ATimeoutNamesTheRankThatDoesNotAnswer) {
  auto ranks = start_ranks(2, HP_WORLD_PROGRAM, {"loop", "2000"});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
  ranks[1].kill(SIGSTOP);
  EXPECT_EQ(ranks[0].wait(30s), 3) << ranks[0].output();
  EXPECT_THAT(ranks[0].output(),
              HasSubstr("TimeoutError: [reduce_scatter_single] no answer from peer rank 1 (global 1) within 2 s; unit layers.4"));
  ranks[1].kill(SIGCONT);
  EXPECT_EQ(ranks[1].wait(30s), 3) << ranks[1].output();
}

}  // namespace
}  // namespace hyper_parallel::testing
