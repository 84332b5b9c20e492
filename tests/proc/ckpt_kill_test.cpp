// Killed at 50 random moments of a save: what was saved before is there and whole.
#include <chrono>
#include <random>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>
#include <signal.h>

#include <hyper_parallel/ckpt/checkpoint.h>

#include "support/process.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::Process;
using hyper_parallel::testing::TempFolder;

std::int64_t last_saved(const std::string& output) {
  std::istringstream lines(output);
  std::string word;
  std::int64_t step = 0, last = 0;
  while (lines >> word >> step) last = step;
  return last;
}

TEST(CkptKill, ACrashLosesNothingButTheSaveInProgress) {
  const TempFolder folder;
  const std::filesystem::path run = folder / "run";
  std::mt19937 random(11);
  int broken_off = 0;
  for (int round = 0; round < 50; ++round) {
    Process program(HP_CKPT_PROGRAM, {run.string(), round % 2 == 0 ? "save" : "save_async"}, {{"OMP_NUM_THREADS", "1"}});
    ASSERT_TRUE(program.wait_for_output("saved ", std::chrono::seconds(60))) << program.output();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    program.kill(SIGKILL);
    program.wait(std::chrono::seconds(10));
    for (const auto& entry : std::filesystem::directory_iterator(run))
      broken_off += entry.path().filename().string()[0] == '.' ? 1 : 0;

    const Checkpointer checkpointer(run);
    const std::vector<std::int64_t> steps = checkpointer.steps();
    ASSERT_FALSE(steps.empty());
    ASSERT_GE(steps.back(), last_saved(program.output())) << "what was reported is there";
    for (const std::int64_t step : steps) {
      const std::filesystem::path path = checkpointer.path_of(step);
      ASSERT_EQ(verify(path), std::vector<std::string>()) << round;
      const CheckpointInfo info = read_info(path);
      for (const auto& [name, tensor] : info.tensors) {
        for (const CheckpointInfo::Piece& piece : tensor.pieces) {
          const SafetensorsFile file(path / info.files[piece.file].name);
          std::vector<float> values(static_cast<std::size_t>(piece.box.numel()));
          file.read(file.at(piece.key), 0, std::as_writable_bytes(std::span(values)));
          for (const float value : values) ASSERT_EQ(value, static_cast<float>(step)) << name;
        }
      }
    }
  }
  EXPECT_GT(broken_off, 0) << "at least one kill came in the middle of a save";
}

}  // namespace
}  // namespace hyper_parallel::ckpt
