// Files pass the Python package safetensors both ways, byte for byte, and what it refuses we refuse.
#include <hyper_parallel/ckpt/safetensors.h>

#include <array>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/mutate_header.h"
#include "support/process.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::file_text;
using hyper_parallel::testing::Process;
using hyper_parallel::testing::set_file_text;
using hyper_parallel::testing::TempFolder;

int run_peer(const std::vector<std::string>& arguments, std::string* output = nullptr) {
  std::vector<std::string> all = {HP_SAFETENSORS_PEER};
  all.insert(all.end(), arguments.begin(), arguments.end());
  Process process(HP_PYTHON, all, {});
  const int code = process.wait(std::chrono::seconds(100));
  if (output != nullptr) *output = process.output();
  if (code != 0 && arguments[0] != "installed") ADD_FAILURE() << process.output();
  return code;
}

class SafetensorsPython : public ::testing::Test {
 protected:
  void SetUp() override {
    if (run_peer({"installed"}) != 0)
      GTEST_SKIP() << "the Python package safetensors is not installed next to torch: " HP_PYTHON " -m pip install safetensors";
  }
  TempFolder folder_;
};

TEST_F(SafetensorsPython, WhatItWritesWeWriteTheSameWay) {
  const std::filesystem::path theirs = folder_ / "theirs", ours = folder_ / "ours";
  ASSERT_EQ(run_peer({"write", theirs.string()}), 0);
  const SafetensorsFile file(theirs);
  std::vector<TensorSpec> specs;
  for (const TensorEntry& tensor : file.header().tensors) specs.push_back(tensor);
  EXPECT_EQ(specs.size(), 22U);
  EXPECT_EQ(file.at("scalar").shape.size(), 0U);
  EXPECT_EQ(file.at("quo\"te\\ \t\u00e9\U0001f600").shape, std::vector<std::int64_t>{5});
  SafetensorsWriter writer(ours, specs, {.metadata = file.header().metadata});
  for (const TensorSpec& spec : specs) writer.write(spec.name, file.bytes(file.at(spec.name)));
  writer.finish();
  EXPECT_TRUE(file_text(theirs) == file_text(ours));
}

TEST_F(SafetensorsPython, WhatWeWriteItReadsAndWritesTheSameWay) {
  const std::filesystem::path theirs = folder_ / "theirs", ours = folder_ / "ours";
  SafetensorsWriter writer(
      ours,
      {{"none", Dtype::kI32, {0, 4}}, {"flags", Dtype::kBool, {3}}, {"half", Dtype::kBF16, {}}, {"count", Dtype::kF32, {2, 3}}},
      {.metadata = {{"format", "pt"}}});
  const std::array<float, 6> count = {0, 1, 2, 3, 4, 5};
  const std::array<bool, 3> flags = {true, false, true};
  const std::uint16_t half = 0x3fc0;
  writer.write("count", std::as_bytes(std::span(count)));
  writer.write("flags", std::as_bytes(std::span(flags)));
  writer.write("half", std::as_bytes(std::span(&half, 1)));
  writer.finish();
  ASSERT_EQ(run_peer({"rewrite", ours.string(), theirs.string()}), 0);
  EXPECT_TRUE(file_text(theirs) == file_text(ours));
}

TEST_F(SafetensorsPython, WhatItRefusesWeRefuse) {
  std::mt19937 random(7);
  const std::vector<std::string> seeds = hyper_parallel::testing::files_to_mutate();
  std::vector<std::string> files = seeds;
  while (files.size() < 20'000) files.push_back(hyper_parallel::testing::mutate(seeds, random));
  const auto number = [](std::uint64_t value) {
    std::string text(8, '\0');
    std::memcpy(text.data(), &value, 8);
    return text;
  };
  std::string all = number(files.size());
  for (const std::string& file : files) all += number(file.size()) + file;
  set_file_text(folder_ / "inputs", all);
  std::string verdicts;
  ASSERT_EQ(run_peer({"judge", (folder_ / "inputs").string()}, &verdicts), 0);
  ASSERT_GE(verdicts.size(), files.size());
  int theirs = 0, ours = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const bool valid = hyper_parallel::testing::parse_anything(files[i]);
    theirs += verdicts[i] == '1' ? 1 : 0;
    ours += valid ? 1 : 0;
    ASSERT_TRUE(verdicts[i] == '1' || !valid) << "refused there, accepted here: " << files[i];
  }
  // We refuse more: unknown fields, names given twice.
  EXPECT_GT(ours, theirs / 2);
  RecordProperty("accepted_there", theirs);
  RecordProperty("accepted_here", ours);
}

}  // namespace
}  // namespace hyper_parallel::ckpt
