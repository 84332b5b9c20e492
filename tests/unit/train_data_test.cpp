// Tokenizer, corpus and sampler: every world size sees the same batches, and a position is enough to go on.
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/train/corpus.h>
#include <hyper_parallel/train/sampler.h>
#include <hyper_parallel/train/tokenizer.h>

#include "support/temp_folder.h"

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CorpusTest : public ::testing::Test {
 protected:
  fs::path write(const std::string& name, const std::string& text) {
    fs::create_directories((dir_ / name).parent_path());
    std::ofstream(dir_ / name, std::ios::binary) << text;
    return dir_ / name;
  }
  static std::string all_of(const Corpus& corpus) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(corpus.size()));
    corpus.read(0, tokens);
    return ByteTokenizer::decode(tokens);
  }
  static std::string message_of(const fs::path& path) {
    try {
      (void)Corpus::open(path, "a.toml:7");
    } catch (const ValueError& error) {
      return error.what();
    }
    return "no error";
  }
  testing::TempFolder folder_;
  fs::path dir_ = folder_.path();
};

TEST_F(CorpusTest, ReadsOneFile) {
  const Corpus corpus = Corpus::open(write("a.txt", "hello \xff"), "here");
  EXPECT_EQ(corpus.size(), 7);
  EXPECT_EQ(all_of(corpus), "hello \xff");
}

TEST_F(CorpusTest, ReadsAFolderInSortedOrderAndSkipsEmptyFiles) {
  write("b.txt", "second ");
  write("a/z.txt", "first ");
  write("c/empty.txt", "");
  write("d.txt", "third");
  const Corpus corpus = Corpus::open(dir_, "here");
  EXPECT_EQ(corpus.files(), 3);
  EXPECT_EQ(all_of(corpus), "first second third");
  std::vector<std::int64_t> across(10);
  corpus.read(4, across);
  EXPECT_EQ(ByteTokenizer::decode(across), "t second t");
  EXPECT_THROW(corpus.read(9, across), ValueError);
  EXPECT_THROW(corpus.read(-1, across), ValueError);
}

TEST_F(CorpusTest, MistakesNameThePathAndWhereItWasSet) {
  EXPECT_EQ(message_of(dir_ / "none.txt"),
            "[data] " + (dir_ / "none.txt").string() +
                ": No such file or directory, want a readable text file or folder (data.path: a.toml:7)");
  EXPECT_THAT(message_of(write("empty.txt", "")), HasSubstr("empty.txt: empty, want"));
  EXPECT_THAT(message_of(dir_), HasSubstr(": empty, want"));
  EXPECT_THAT(message_of("/dev/null"), HasSubstr("neither a file nor a folder"));
  EXPECT_EQ(message_of(""), "[data] data.path is not set, want a text file or folder (a.toml:7)");
}

TEST(Tokenizer, RoundTripsEveryByte) {
  std::string all(256, '\0');
  std::iota(all.begin(), all.end(), '\0');
  EXPECT_EQ(ByteTokenizer::decode(ByteTokenizer::encode(all)), all);
  EXPECT_EQ(ByteTokenizer::decode(std::vector<std::int64_t>{65, 256, -1}), "A??");
}

TEST(Tokenizer, PrintableKeepsTextAndDropsTerminalControl) {
  EXPECT_EQ(printable("a\tb\n"), "a\tb\n");
  EXPECT_EQ(printable("\x1b[2J\x7f"), "?[2J?");
  EXPECT_EQ(printable("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80"), "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("\xff\xc3"), "??");
  EXPECT_EQ(printable("\xc0\xaf\xed\xa0\x80\xc2\x9b"), "??????");
}

TEST(PermutationTest, IsABijectionForEverySize) {
  for (const std::uint64_t n : {1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4097}) {
    const Permutation permutation(n, 42 + n);
    std::set<std::uint64_t> seen;
    for (std::uint64_t i = 0; i < n; ++i) seen.insert(permutation(i));
    EXPECT_EQ(seen.size(), n);
    EXPECT_EQ(*seen.rbegin(), n - 1);
  }
}

TEST(PermutationTest, DependsOnTheSeedAndMixes) {
  const std::uint64_t n = 10000;
  const Permutation a(n, 1), b(n, 2);
  std::uint64_t same = 0, still = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    same += a(i) == b(i) ? 1 : 0;
    still += a(i) + 1 == a((i + 1) % n) ? 1 : 0;
  }
  EXPECT_LT(same, 10U);
  EXPECT_LT(still, 10U);
}

// The windows of each step, as a set: what the optimizer sees.
std::vector<std::vector<std::int64_t>> steps(int world, std::int64_t per_rank, std::int64_t batch, int count) {
  std::vector<std::vector<std::int64_t>> result(static_cast<std::size_t>(count));
  for (int rank = 0; rank < world; ++rank) {
    WindowSampler sampler(50, 7);
    for (auto& step : result)
      for (std::int64_t micro = 0; micro < batch / (per_rank * world); ++micro)
        for (const std::int64_t window : sampler.next(rank, world, per_rank)) step.push_back(window);
  }
  for (auto& step : result) std::sort(step.begin(), step.end());
  return result;
}

TEST(Sampler, EveryWorldSizeSeesTheSameBatches) {
  const auto one = steps(1, 12, 12, 10);
  EXPECT_EQ(steps(1, 3, 12, 10), one);
  EXPECT_EQ(steps(2, 6, 12, 10), one);
  EXPECT_EQ(steps(2, 1, 12, 10), one);
  EXPECT_EQ(steps(3, 2, 12, 10), one);
  EXPECT_EQ(steps(4, 3, 12, 10), one);
}

TEST(Sampler, EachEpochHoldsEveryWindowOnceInANewOrder) {
  WindowSampler sampler(30, 3);
  const auto first = sampler.next(0, 1, 30);
  EXPECT_EQ(sampler.epoch(), 1.0);
  const auto second = sampler.next(0, 1, 30);
  EXPECT_EQ(std::set<std::int64_t>(first.begin(), first.end()).size(), 30U);
  EXPECT_EQ(std::set<std::int64_t>(second.begin(), second.end()).size(), 30U);
  EXPECT_NE(first, second);
  EXPECT_NE(WindowSampler(30, 4).next(0, 1, 30), first);
}

TEST(Sampler, ResumesAtAnyPositionOnAnyWorldSize) {
  WindowSampler straight(37, 11);
  for (int i = 0; i < 9; ++i) (void)straight.next(0, 1, 8);  // into the second epoch
  WindowSampler resumed(37, 11);
  resumed.seek(straight.position());
  EXPECT_EQ(resumed.position(), 72);
  const auto expected = straight.next(0, 1, 8);
  WindowSampler rank0 = resumed, rank1 = resumed;
  auto got = rank0.next(0, 2, 4);
  for (const std::int64_t window : rank1.next(1, 2, 4)) got.push_back(window);
  EXPECT_EQ(got, expected);
  EXPECT_EQ(rank0.position(), straight.position());
  resumed.seek(0);
  EXPECT_EQ(resumed.next(0, 1, 5), WindowSampler(37, 11).next(0, 1, 5));
  EXPECT_THROW(resumed.seek(-1), ValueError);
  EXPECT_THROW(WindowSampler(0, 1), ValueError);
}

TEST(Sampler, SplitsTheTail) {
  const Splits splits = split_tokens(1000, 0.1);
  EXPECT_EQ(splits.train.begin, 0);
  EXPECT_EQ(splits.train.end, 900);
  EXPECT_EQ(splits.validation.begin, 900);
  EXPECT_EQ(splits.validation.end, 1000);
  EXPECT_EQ(splits.train.windows(100), 8);  // the last target of a ninth is missing
  EXPECT_EQ((Split{0, 901}.windows(100)), 9);
  EXPECT_EQ((Split{0, 100}.windows(100)), 0);
  EXPECT_EQ((Split{0, 101}.windows(100)), 1);
}

}  // namespace
}  // namespace hyper_parallel::train
