// A rank dies or freezes while the others are in a collective: they stop in time, and say where and because of whom.
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/process.h"
#include "support/shared_files.h"

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

// Names in the folders where shared memory usually leaves some.
std::set<std::string> shared_names() {
  std::set<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) out.insert(entry.path().filename());
  return out;
}

// 20 deaths of a random rank at a random moment. The memory that ranks share must never have a name, or it would stay.
TEST(RandomKills, LeaveNoProcessAndNoMemory) {
  std::mt19937 random(7);
  const auto names_before = shared_names();
  const char* wish = std::getenv("HP_TEST_KILLS");
  const int kills = wish == nullptr ? 20 : std::atoi(wish);
  for (int i = 0; i < kills; ++i) {
    const int world = 2 + i % 2;
    auto ranks = start_ranks(world, HP_WORLD_PROGRAM, {"loop", "15000"}, {{"HP_SAMEHOST", "1"}});
    for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
    std::set<std::string> files;
    for (const auto& rank : ranks) files.merge(shared_files(rank.pid()));
    EXPECT_EQ(files.size(), ranks.size() + 1) << "arenas and a mailbox";
    EXPECT_EQ(holders_of(files).size(), ranks.size());
    const auto victim = random() % static_cast<unsigned>(world);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 50'000));
    ranks[victim].kill(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    for (unsigned r = 0; r < ranks.size(); ++r) {
      EXPECT_EQ(ranks[r].wait(30s), r == victim ? 128 + SIGKILL : 3) << ranks[r].output();
      if (r == victim) continue;
      EXPECT_THAT(ranks[r].output(), HasSubstr("closed the connection"));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 14s) << "noticed before the timeout";
    for (const auto& rank : ranks) {
      EXPECT_EQ(::kill(rank.pid(), 0), -1);
      EXPECT_EQ(errno, ESRCH) << "process " << rank.pid() << " is still there";
    }
    EXPECT_TRUE(holders_of(files).empty()) << "kill " << i << ": somebody still has the memory of the ranks";
  }
  EXPECT_EQ(shared_names(), names_before);
}

// Rank 0 also hosts the store: nobody may wait for its answers.
class Freeze : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Victims, Freeze, ::testing::Values(std::pair{2, 1}, std::pair{2, 0}, std::pair{3, 0}));

TEST_P(Freeze, ATimeoutNamesTheRankThatDoesNotAnswer) {
  const auto [world, victim] = GetParam();
  auto ranks = start_ranks(world, HP_WORLD_PROGRAM, {"loop", "3000"});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
  auto& frozen = ranks[static_cast<std::size_t>(victim)];
  frozen.kill(SIGSTOP);
  const auto number = std::to_string(victim);
  int named_by = 0;
  for (auto& rank : ranks) {
    if (&rank == &frozen) continue;
    EXPECT_EQ(rank.wait(40s), 3) << rank.output();
    const bool named = rank.output().find("TimeoutError: [reduce_scatter_single] no answer from peer rank " + number +
                                          " (global " + number + ") within 3 s; unit layers.4") != std::string::npos;
    named_by += named ? 1 : 0;
    // One whose time is up a moment later may find the other gone.
    EXPECT_TRUE(named || world > 2) << rank.output();
  }
  EXPECT_GE(named_by, 1) << "no rank names rank " << victim;
  frozen.kill(SIGCONT);
  EXPECT_EQ(frozen.wait(40s), 3) << frozen.output();
}

}  // namespace
}  // namespace hyper_parallel::testing
