// 200,000 damaged files, the same in every run: each is refused with CheckpointError, or valid.
#include <gtest/gtest.h>

#include "support/mutate_header.h"

namespace hyper_parallel::testing {
namespace {

TEST(SafetensorsFuzz, DamagedFilesAreRefusedOrValid) {
  const std::vector<std::string> files = files_to_mutate();
  for (const std::string& file : files) ASSERT_TRUE(parse_anything(file));
  std::mt19937 random(2026);
  int valid = 0;
  constexpr int kRounds = 200'000;
  for (int i = 0; i < kRounds; ++i) {
    const std::string file = mutate(files, random);
    try {
      valid += parse_anything(file) ? 1 : 0;
    } catch (const std::exception& error) {
      FAIL() << "round " << i << ": " << error.what() << "\n" << file;
    }
  }
  EXPECT_GT(valid, kRounds / 100);
  EXPECT_LT(valid, kRounds / 2);
}

}  // namespace
}  // namespace hyper_parallel::testing
