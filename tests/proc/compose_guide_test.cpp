// The programs of docs/guide/compose_parallelisms.md on four ranks: they end cleanly and print the tables that the page shows.
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/process.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;

TEST(ComposeGuide, ProgramsPrintWhatThePageShows) {
  std::ifstream file(HP_GUIDE);
  std::ostringstream page;
  page << file.rdbuf();
  for (const char* program : {HP_GUIDE_MODEL, HP_GUIDE_PLAN}) {
    auto ranks = start_ranks(4, program, {}, {{"OMP_NUM_THREADS", "1"}});
    for (auto& rank : ranks) EXPECT_EQ(rank.wait(60s), 0) << rank.output();
    EXPECT_THAT(page.str(), ::testing::HasSubstr("```\n" + ranks.front().output() + "```\n"));
    for (std::size_t rank = 1; rank < ranks.size(); ++rank) EXPECT_EQ(ranks[rank].output(), "");
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
