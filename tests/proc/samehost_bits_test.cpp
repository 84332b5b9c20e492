// Processes whose shards are mapped, copied or sent by Gloo end with the same bits, in memory and in checkpoints, on one host and
// on two.
#include <filesystem>
#include <map>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hyper_parallel/core/error.h>

#include "support/process.h"
#include "support/temp_folder.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// What a run prints and saves.
struct Outcome {
  std::map<std::string, std::string> bits;   ///< by case and rank
  std::map<std::string, std::string> ways;   ///< by case: how its shards travelled
  std::map<std::string, std::string> saved;  ///< by file
  std::vector<std::string> outputs;          ///< by rank
  [[nodiscard]] bool empty() const { return bits.empty() || saved.empty(); }
};

Outcome outcome_of(std::vector<Process> ranks, const TempFolder& folder) {
  Outcome out;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    EXPECT_EQ(ranks[r].wait(100s), 0) << ranks[r].output();
    out.outputs.push_back(ranks[r].output());
    std::istringstream lines(out.outputs.back());
    for (std::string line; std::getline(lines, line);) {
      const auto colon = line.find(": sum "), way = line.find(" [");
      if (colon == std::string::npos || way == std::string::npos) continue;
      const std::string name = line.substr(0, colon);
      out.bits[name] = line.substr(0, way);
      out.ways[name.substr(0, name.find(','))] = line.substr(way + 2, line.size() - way - 3);
    }
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (entry.is_regular_file()) {
      out.saved[std::filesystem::relative(entry.path(), folder.path()).string()] = file_text(entry.path());
    }
  }
  return out;
}

Outcome run(int world, const std::string& mode) {
  const TempFolder folder;
  return outcome_of(start_ranks(world, HP_FSDP_PROGRAM, {"60000", "bits", folder.path().string()}, {{"HP_SAMEHOST", mode}}),
                    folder);
}

void expect_same(const Outcome& got, const Outcome& want, const std::string& what) {
  EXPECT_FALSE(want.empty());
  EXPECT_EQ(got.bits, want.bits) << what;
  ASSERT_EQ(got.saved.size(), want.saved.size()) << what;
  for (const auto& [file, text] : want.saved) {
    ASSERT_TRUE(got.saved.contains(file)) << what << ": " << file;
    EXPECT_TRUE(got.saved.at(file) == text) << what << ": other bytes in " << file;
  }
}

class SameBits : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, SameBits, ::testing::Values(1, 2, 3, 4, 8));

std::string expected_way(const std::string& mode, int world, const std::string& name) {
  if (world == 1) return "none, not mapped";
  const std::string transport = mode == "0" ? "gloo" : "samehost";
  return concat(transport, name == "hybrid" ? '/' + transport : "", mode == "1" && name != "cut" ? ", mapped" : ", not mapped");
}

TEST_P(SameBits, MappedCopiedAndOverGloo) {
  const int world = GetParam();
  std::map<std::string, Outcome> outcomes;
  for (const std::string mode : {"0", "1", "copy"}) {
    if (world == 8 && mode == "copy") continue;  // 16 processes are enough
    const Outcome& outcome = outcomes[mode] = run(world, mode);
    EXPECT_EQ(outcome.ways.size(), world >= 4 ? 6U : 4U) << mode;
    for (const auto& [name, way] : outcome.ways) EXPECT_EQ(way, expected_way(mode, world, name)) << mode << ", " << name;
    expect_same(outcome, outcomes.at("0"), mode);
  }
}

TEST(TwoHosts, ShardsAreMappedInsideOfEachAndTheBitsStay) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make process spaces";
  const TempFolder folder;
  const Outcome apart =
      outcome_of(start_on_two_hosts(HP_FSDP_PROGRAM, {"60000", "bits", folder.path().string()}, {{"HP_LOG", "info"}}), folder);
  expect_same(apart, run(4, "0"), "two hosts");
  for (const auto& [name, way] : apart.ways) {
    EXPECT_EQ(way, name == "hybrid" ? "samehost/gloo, mapped" : "gloo, not mapped") << name;
  }
  // Nothing is amiss: no warning, and whoever asks hears of ranks by the numbers that the launcher gave them.
  EXPECT_THAT(apart.outputs[0],
              AllOf(HasSubstr("group dp_replicate uses Gloo, not shared memory: ranks 0 and 2 are on different"),
                    Not(HasSubstr("hyper_parallel warn"))));
  EXPECT_THAT(apart.outputs[1], HasSubstr("group dp_replicate uses Gloo, not shared memory: ranks 1 and 3 are on different"));
}

}  // namespace
}  // namespace hyper_parallel::testing
