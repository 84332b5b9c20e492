#pragma once
// The training loop on rank threads.
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/trainer.h>

#include "support/rank_threads.h"
#include "support/temp_folder.h"

namespace hyper_parallel::train {

/// Runs of hp-train on rank threads, over a text of its own.
class TrainRun : public ::testing::Test {
 protected:
  void SetUp() override { write_text(600); }
  void write_text(int lines) const {
    std::ofstream out(dir_ / "text.txt");
    for (int i = 0; i < lines; ++i) out << "line " << i * 7919 % 600 << " of a text that repeats itself\n";
  }

  [[nodiscard]] Config config(const std::string& name, std::vector<Override> more = {}) const {
    std::vector<Override> overrides = {{"data.path", (dir_ / "text.txt").string()},
                                       {"log.dir", (dir_ / "runs").string()},
                                       {"log.name", name},
                                       {"log.every", "1000"}};
    overrides.insert(overrides.end(), more.begin(), more.end());
    return parse_config(
        "[model]\ndim = 32\nn_layers = 3\nn_heads = 4\nn_kv_heads = 2\nffn_dim = 40\nmax_seq_len = 16\n"
        "[data]\nseq_len = 16\n[train]\nbatch_size = 12\nmax_steps = 8\neval_every = 4\neval_windows = 14\n"
        "[optim]\nlr = 1e-2\nwarmup_steps = 3\n",
        "test.toml", overrides);
  }

  // The result of rank 0.
  static TrainResult train(const Config& config, int world, const RunOptions& options = {}) {
    TrainResult result;
    testing::run_ranks(world, [&](int rank) {
      TrainResult mine = run_training(config, current_world(), options);
      if (rank == 0) result = std::move(mine);
    });
    return result;
  }

  static void expect_same_curve(const TrainResult& got, const TrainResult& expected, double tolerance) {
    ASSERT_EQ(got.history.size(), expected.history.size());
    for (std::size_t i = 0; i < got.history.size(); ++i) {
      EXPECT_NEAR(got.history[i].loss, expected.history[i].loss, tolerance) << "step " << i + 1;
      EXPECT_NEAR(got.history[i].grad_norm, expected.history[i].grad_norm, 10 * tolerance) << "step " << i + 1;
    }
    EXPECT_NEAR(got.val_loss_start, expected.val_loss_start, tolerance);
    EXPECT_NEAR(got.val_loss_end, expected.val_loss_end, tolerance);
  }

  testing::TempFolder folder_;
  std::filesystem::path dir_ = folder_.path();
};

/// What all ranks of a run throw, which must be the same.
inline std::string agreed_message(const Config& config, int world, const RunOptions& options = {}) {
  std::string message;
  std::mutex mutex;
  int count = 0;
  testing::run_ranks(world, [&] {
    try {
      (void)run_training(config, current_world(), options);
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      message = error.what();
      ++count;
    }
  });
  EXPECT_EQ(count, world);
  return message;
}

}  // namespace hyper_parallel::train
