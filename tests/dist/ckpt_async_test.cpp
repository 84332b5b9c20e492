// Checkpointer: saves in the background, their errors, and how many are kept.
#include <hyper_parallel/ckpt/checkpoint.h>

#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/world.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::message_of;
using hyper_parallel::testing::run_ranks;
using hyper_parallel::testing::set_file_text;
using hyper_parallel::testing::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A matrix over all ranks and a vector that is whole.
struct Values {
  explicit Values(double value, std::int64_t rows = 64)
      : matrix(distribute_tensor(torch::full({rows, 16}, value), init_device_mesh("cpu", {get_world_size()}), {Shard(0)})),
        vector(torch::full({5}, value)) {
    state.add("matrix", matrix);
    state.add("vector", vector);
  }
  void fill(double value) const {
    matrix.to_local().fill_(value);
    vector.fill_(value);
  }
  [[nodiscard]] bool are(double value) const {
    return torch::equal(matrix.full_tensor(), torch::full_like(matrix.full_tensor(), value)) &&
           torch::equal(vector, torch::full({5}, value));
  }
  DTensor matrix;
  torch::Tensor vector;
  StateDict state;
};

TEST(CkptAsync, SavesWhatWasThereAtTheCall) {
  const TempFolder folder;
  run_ranks(3, [&] {
    Checkpointer checkpointer(folder / "run");
    EXPECT_EQ(checkpointer.latest(), std::nullopt);
    Values values(1);
    for (int step = 1; step <= 4; ++step) {
      checkpointer.save_async(step, values.state, std::to_string(10 * step));
      values.fill(step + 1);  // training goes on
    }
    checkpointer.wait();
    EXPECT_FALSE(checkpointer.busy());
    EXPECT_THAT(checkpointer.steps(), ElementsAre(1, 2, 3, 4));
    EXPECT_EQ(checkpointer.staging_bytes(), bytes_to_write(values.state)) << "the buffer is used again";
    for (int step = 1; step <= 4; ++step) {
      const LoadResult result = load(checkpointer.path_of(step), values.state);
      EXPECT_TRUE(values.are(step)) << step;
      EXPECT_EQ(result.extra, std::to_string(10 * step));
    }
  });
}

TEST(CkptAsync, TheDestructorWaits) {
  const TempFolder folder;
  run_ranks(2, [&] {
    { Checkpointer(folder / "run").save_async(3, Values(3).state); }
    current_world().comm().barrier();
    Checkpointer again(folder / "run");
    EXPECT_EQ(again.latest(), 3);
    Values values(0);
    load(again.path_of(3), values.state);
    EXPECT_TRUE(values.are(3));
  });
}

TEST(CkptAsync, KeepsTheLastFew) {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Checkpointer checkpointer(folder / "run", {.keep_last = 2});
    const Values values(1);
    for (const std::int64_t step : {5, 100, 7, 12}) {
      if (step == 7) checkpointer.wait();
      if (step == 12 && rank == 0) {
        std::filesystem::create_directories(folder / "run/.removed-step-00000001");
        std::filesystem::create_directories(folder / "run/step-00000900");  // no checkpoint
        std::filesystem::create_directories(folder / "run/notes");
      }
      if (step % 2 == 0) {
        checkpointer.save(step, values.state);
      } else {
        checkpointer.save_async(step, values.state);
      }
    }
    EXPECT_THAT(checkpointer.steps(), ElementsAre(12, 100));
    if (rank == 0) {
      EXPECT_FALSE(std::filesystem::exists(folder / "run/.removed-step-00000001"));
      EXPECT_TRUE(std::filesystem::exists(folder / "run/notes"));
    }
    current_world().comm().barrier();
  });
}

TEST(CkptAsync, ErrorsReachTheNextSaveOnAllRanks) {
  const TempFolder folder;
  set_file_text(folder / "run", "a file where the folder should be");
  run_ranks(3, [&](int rank) {
    Checkpointer checkpointer(folder / "run");
    const Values values(1);
    checkpointer.save_async(1, values.state);
    const std::string message = message_of<CheckpointError>([&] { checkpointer.save_async(2, values.state); });
    EXPECT_THAT(message, HasSubstr("cannot create the folder"));
    EXPECT_THAT(message, HasSubstr("(rank 0/3)"));
    checkpointer.wait();  // reported once, nothing was saved
    current_world().comm().barrier();
    if (rank == 0) std::filesystem::remove(folder / "run");
    current_world().comm().barrier();
    checkpointer.save_async(2, values.state);
    checkpointer.wait();
    EXPECT_EQ(checkpointer.latest(), 2);
    EXPECT_THAT(message_of<ValueError>([&] { checkpointer.save(-1, values.state); }), HasSubstr("step is -1"));
  });
  EXPECT_THAT(message_of<ValueError>([&] { Checkpointer(folder / "run", {.keep_last = -1}); }), HasSubstr("keep_last is -1"));
}

TEST(CkptAsync, AFullDiskLeavesTheLastGoodOne) {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    Checkpointer checkpointer(folder / "run");
    Values values(1, 4096);
    checkpointer.save_async(1, values.state);  // its group needs files in memory, which the limit would hit too
    checkpointer.wait();
    values.fill(2);
    rlimit old{}, small{};
    const auto set_limit = [&](const rlimit& limit) {
      current_world().comm().barrier();
      if (rank == 0) ::setrlimit(RLIMIT_FSIZE, &limit);
      current_world().comm().barrier();
    };
    ::getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 100 << 10;
    std::signal(SIGXFSZ, SIG_IGN);
    set_limit(small);
    const std::string at_once = message_of<CheckpointError>([&] { checkpointer.save(2, values.state); });
    checkpointer.save_async(2, values.state);
    const std::string later = message_of<CheckpointError>([&] { checkpointer.wait(); });
    set_limit(old);
    EXPECT_THAT(at_once, HasSubstr("rank-00000.safetensors: cannot set the size to "));
    EXPECT_THAT(later, HasSubstr("rank-00000.safetensors: cannot set the size to "));
    EXPECT_THAT(checkpointer.steps(), ElementsAre(1));
    load(checkpointer.path_of(1), values.state);
    EXPECT_TRUE(values.are(1));
    current_world().comm().barrier();
    EXPECT_FALSE(std::filesystem::exists(folder / "run/.step-00000002.partial"));
  });
}

TEST(CkptAsync, TwoOfThemWriteAtTheSameTime) {
  const TempFolder folder;
  run_ranks(2, [&] {
    Checkpointer first(folder / "a"), second(folder / "b");
    const Values one(1), two(2);
    for (int step = 0; step < 5; ++step) {
      first.save_async(step, one.state);
      second.save_async(step, two.state);
      current_world().comm().barrier();  // the main thread goes on communicating
    }
    first.wait();
    second.wait();
    Values values(0);
    load(second.path_of(4), values.state);
    EXPECT_TRUE(values.are(2));
    load(first.path_of(4), values.state);
    EXPECT_TRUE(values.are(1));
  });
}

}  // namespace
}  // namespace hyper_parallel::ckpt
