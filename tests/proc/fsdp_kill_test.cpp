// A rank dies in the middle of training: the others stop in time with the operation, the unit and the peer.
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/core/error.h>

#include "support/process.h"
#include "support/shared_files.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class KillTraining : public ::testing::TestWithParam<int> {};

TEST_P(KillTraining, SurvivorsStopWithNames) {
  const int world = GetParam(), victim = 1;
  auto ranks = start_ranks(world, HP_FSDP_PROGRAM, {"15000"}, {{"HP_SAMEHOST", "1"}});
  for (auto& rank : ranks) {
    ASSERT_TRUE(rank.wait_for_output("mapped\n", 60s)) << rank.output();
    ASSERT_THAT(rank.output(), Not(HasSubstr("training, 0 bytes mapped")));
  }
  const auto start = std::chrono::steady_clock::now();
  ranks[victim].kill(SIGKILL);
  EXPECT_EQ(ranks[victim].wait(10s), 128 + SIGKILL);
  for (int r = 0; r < world; ++r) {
    if (r == victim) continue;
    auto& rank = ranks[static_cast<std::size_t>(r)];
    EXPECT_EQ(rank.wait(30s), 3) << rank.output();
    EXPECT_THAT(rank.output(), AllOf(ContainsRegex("Error: \\[(all_gather_single|reduce_scatter_single|barrier)\\] peer rank"),
                                     HasSubstr("(global 1)"), HasSubstr("closed the connection")));
    EXPECT_THAT(rank.output(), ContainsRegex("(unit (first|middle|last|Wide)|gradients present)"));
    EXPECT_THAT(rank.output(), Not(HasSubstr("frame #")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 14s) << "noticed before the timeout";
}

INSTANTIATE_TEST_SUITE_P(Worlds, KillTraining, ::testing::Values(2, 3));

// Mapped shards are in no file system: whatever rank is killed at whatever moment, the others stop and the memory goes with the
// last of them.
TEST(KillTrainingAtRandom, LeavesNoProcessAndNoMemory) {
  const char* wish = std::getenv("HP_TEST_KILLS");
  const int kills = wish == nullptr ? 8 : std::atoi(wish);
  std::mt19937 random(11);
  for (int i = 0; i < kills; ++i) {
    const int world = 2 + i % 3;
    auto ranks = start_ranks(world, HP_FSDP_PROGRAM, {"15000"}, {{"HP_SAMEHOST", "1"}});
    std::set<std::string> files;
    for (auto& rank : ranks) {
      ASSERT_TRUE(rank.wait_for_output("mapped\n", 60s)) << rank.output();
      ASSERT_THAT(rank.output(), Not(HasSubstr("training, 0 bytes mapped")));
      files.merge(shared_files(rank.pid()));
    }
    ASSERT_EQ(holders_of(files).size(), ranks.size());
    const auto victim = random() % static_cast<unsigned>(world);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    ranks[victim].kill(SIGKILL);
    for (unsigned r = 0; r < ranks.size(); ++r) {
      EXPECT_EQ(ranks[r].wait(30s), r == victim ? 128 + SIGKILL : 3) << "kill " << i << ": " << ranks[r].output();
      if (r != victim) {
        EXPECT_THAT(ranks[r].output(), HasSubstr("closed the connection")) << "kill " << i;
      }
      EXPECT_EQ(::kill(ranks[r].pid(), 0), -1);
      EXPECT_EQ(errno, ESRCH) << "process " << ranks[r].pid() << " is still there";
    }
    EXPECT_TRUE(holders_of(files).empty()) << "kill " << i << ": somebody still has the memory of the ranks";
  }
}

TEST(WritingToGatheredParameters, EndsTheProcessAndSaysWhy) {
  for (const std::string mode : {"1", "copy"}) {
    auto ranks = start_ranks(2, HP_FSDP_PROGRAM, {"15000", "write"}, {{"HP_SAMEHOST", mode}});
    for (auto& rank : ranks) {
      EXPECT_EQ(rank.wait(60s), mode == "copy" ? 0 : 128 + SIGSEGV) << rank.output();
      EXPECT_THAT(rank.output(), HasSubstr(mode == "copy" ? "written" : "a write to gathered parameters"));
    }
  }
}

// Rank 0 also hosts the store: nobody may wait for its answers.
class FreezeTraining : public ::testing::TestWithParam<std::tuple<std::string, int>> {};
INSTANTIATE_TEST_SUITE_P(All, FreezeTraining, ::testing::Combine(::testing::Values("0", "1"), ::testing::Values(0, 1)));

TEST_P(FreezeTraining, TimesOutWithNames) {
  const auto& [mode, victim] = GetParam();
  auto ranks = start_ranks(2, HP_FSDP_PROGRAM, {"3000"}, {{"HP_SAMEHOST", mode}});
  for (auto& rank : ranks) {
    ASSERT_TRUE(rank.wait_for_output("mapped\n", 60s)) << rank.output();
    ASSERT_EQ(rank.output().find("training, 0 bytes mapped") == std::string::npos, mode == "1");
  }
  auto& frozen = ranks[static_cast<std::size_t>(victim)];
  auto& other = ranks[static_cast<std::size_t>(1 - victim)];
  frozen.kill(SIGSTOP);
  EXPECT_EQ(other.wait(40s), 3) << other.output();
  EXPECT_THAT(other.output(), AllOf(HasSubstr(concat("no answer from peer rank ", victim, " (global ", victim, ") within 3 s")),
                                    HasSubstr("unit ")));
  frozen.kill(SIGCONT);
  EXPECT_EQ(frozen.wait(40s), 3) << frozen.output();
}

}  // namespace
}  // namespace hyper_parallel::testing
