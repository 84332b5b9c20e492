// Worlds of processes: how they meet, and what they say when they cannot.
#include <csignal>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/process.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Environment = std::map<std::string, std::string>;

constexpr auto kPatience = 60s;

// Without what a launcher around the test may have set.
Environment without_launcher() {
  return {{"RANK", ""},        {"WORLD_SIZE", ""},  {"LOCAL_RANK", ""},
          {"MASTER_ADDR", ""}, {"MASTER_PORT", ""}, {"TORCHELASTIC_USE_AGENT_STORE", ""}};
}

Process start(const std::vector<std::string>& arguments, const Environment& changes) {
  auto environment = without_launcher();
  for (const auto& [name, value] : changes) environment[name] = value;
  return Process(HP_WORLD_PROGRAM, arguments, environment);
}

void expect_end(Process& process, int code, const ::testing::Matcher<std::string>& output) {
  EXPECT_EQ(process.wait(kPatience), code) << process.output();
  EXPECT_THAT(process.output(), output);
}

/// The one line of `world_program sum`: the sum, and how the ranks talk.
::testing::Matcher<std::string> sum_line(int sum) {
  return ::testing::MatchesRegex("sum " + std::to_string(sum) + ", (none|gloo|samehost|samehost, maps)\n");
}

TEST(World, ProcessesMeetAndEndCleanly) {
  for (const int world : {1, 2, 3}) {
    auto ranks = start_ranks(world, HP_WORLD_PROGRAM, {"sum"});
    for (auto& rank : ranks) expect_end(rank, 0, sum_line(world * (world + 1) / 2));
  }
}

TEST(World, EndsCleanlyEveryTime) {
  for (int i = 0; i < 8; ++i) {
    auto ranks = start_ranks(2, HP_WORLD_PROGRAM, {"sum"});
    for (auto& rank : ranks) expect_end(rank, 0, sum_line(3));
  }
}

/// Plays torchrun's agent, which hosts the store.
struct Agent {
  Agent() { EXPECT_TRUE(process.wait_for_output("hosting", kPatience)) << process.output(); }
  /// Rank `rank` of 2.
  [[nodiscard]] Process start_rank(int rank, const std::vector<std::string>& arguments, const Environment& more = {}) const {
    Environment environment{{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"},   {"LOCAL_RANK", std::to_string(rank)},
                            {"MASTER_ADDR", "127.0.0.1"},   {"MASTER_PORT", port}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
    environment.insert(more.begin(), more.end());
    return start(arguments, environment);
  }
  std::string port = std::to_string(free_port());
  Process process = start({"agent"}, {{"MASTER_PORT", port}});
};

TEST(World, JoinsTheAgentsStore) {
  Agent agent;
  for (const char* attempt : {"0", "1"}) {
    std::vector<Process> ranks;
    for (const int rank : {0, 1}) ranks.push_back(agent.start_rank(rank, {"sum"}, {{"TORCHELASTIC_RESTART_COUNT", attempt}}));
    for (auto& rank : ranks) expect_end(rank, 0, sum_line(3));
  }
  agent.process.kill(SIGKILL);
  EXPECT_EQ(agent.process.wait(kPatience), 128 + SIGKILL);
}

// Connections to a stopped process are accepted, and its answers never come.
TEST(World, AStoppedStoreIsATimeoutForThoseWhoJoin) {
  Agent agent;
  agent.process.kill(SIGSTOP);
  std::vector<Process> ranks;
  for (const int rank : {0, 1}) ranks.push_back(agent.start_rank(rank, {"init", "1500"}));
  for (auto& rank : ranks)
    expect_end(rank, 3, HasSubstr("TimeoutError: [init_process_group] cannot reach the store at 127.0.0.1:"));
}

class StoppedStore : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Paths, StoppedStore, ::testing::Values("0", "1"));

TEST_P(StoppedStore, IsATimeoutForThoseWhoMakeAGroup) {
  Agent agent;
  const auto go = std::filesystem::path(::testing::TempDir()) / ("go_" + agent.port);
  std::vector<Process> ranks;
  for (const int rank : {0, 1}) {
    ranks.push_back(agent.start_rank(rank, {"sum", "1500"}, {{"AWAIT", go.string()}, {"HP_SAMEHOST", GetParam()}}));
  }
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("joined", kPatience)) << rank.output();
  agent.process.kill(SIGSTOP);
  std::ofstream(go).put('1');
  for (auto& rank : ranks) {
    expect_end(rank, 3,
               AllOf(HasSubstr("TimeoutError: [get_group] cannot connect group dp of 2 ranks within 1.5 s"),
                     HasSubstr("the host of the store does not answer")));
  }
  std::filesystem::remove(go);
}

TEST(World, OfOneWithoutLauncher) {
  auto process = start({"init"}, {});
  expect_end(process, 0, std::string("rank 0 of 1, local 0\n"));
}

TEST(World, BadEnvironmentIsOneClearMessage) {
  const auto message = [](const Environment& environment) {
    auto process = start({"init", "2000"}, environment);
    EXPECT_EQ(process.wait(kPatience), 2) << process.output();
    return process.output();
  };
  EXPECT_EQ(message({{"RANK", "abc"}, {"WORLD_SIZE", "2"}}),
            "ValueError: [init_process_group] RANK=\"abc\", want an integer from 0 to 16777216\n");
  EXPECT_THAT(message({{"RANK", "1"}}), HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(message({{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE is set but RANK is not"));
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE=\"0\""));
  EXPECT_THAT(message({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=2, want 0 to 1 (WORLD_SIZE=2)"));
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR is not set, want it for WORLD_SIZE=2"));
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}), HasSubstr("MASTER_PORT is not set"));
  EXPECT_THAT(message({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "99999"}}),
              HasSubstr("MASTER_PORT=\"99999\", want an integer from 1 to 65535"));
}

TEST(World, DifferentWorldSizesAreNamedOnAllRanks) {
  const auto port = std::to_string(free_port());
  std::vector<Process> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.push_back(start({"init"}, {{"RANK", std::to_string(rank)},
                                     {"WORLD_SIZE", std::to_string(2 + rank)},
                                     {"MASTER_ADDR", "127.0.0.1"},
                                     {"MASTER_PORT", port}}));
  }
  for (auto& rank : ranks) {
    expect_end(rank, 2, std::string("ValueError: [init_process_group] world sizes differ: rank 0 has 2, rank 1 has 3\n"));
  }
}

TEST(World, TheSameRankTwiceIsAnError) {
  const auto port = std::to_string(free_port());
  const Environment one{{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
  auto zero = start({"init", "3000"}, {{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  auto first = start({"init", "3000"}, one);
  auto second = start({"init", "3000"}, one);
  const int codes = first.wait(kPatience) + second.wait(kPatience);
  EXPECT_EQ(codes, 2 + 3) << "one of them is refused, the other misses rank 2";
  EXPECT_THAT(first.output() + second.output(), HasSubstr("rank 1 joined twice"));
  expect_end(zero, 3, HasSubstr("rank 2 did not join within 3 s"));
}

TEST(World, AMissingRankIsNamed) {
  const auto port = std::to_string(free_port());
  std::vector<Process> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.push_back(
        start({"init", "2000"}, {{"RANK", rank}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}}));
  }
  for (auto& rank : ranks) {
    expect_end(rank, 3,
               AllOf(HasSubstr("TimeoutError: [init_process_group] rank 2 did not join within 2 s (world size 3)"),
                     Not(HasSubstr("frame #"))));
  }
}

TEST(World, AStoreThatIsNotThereIsNamed) {
  const auto port = std::to_string(free_port());
  auto process =
      start({"init", "2000"}, {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  expect_end(process, 3, HasSubstr("[init_process_group] cannot reach the store at 127.0.0.1:" + port));
}

}  // namespace
}  // namespace hyper_parallel::testing
