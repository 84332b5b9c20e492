// Runs that are stopped, moved to other ranks, and resumed.
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/ckpt/offline.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/trainer.h>

#include "dist/train_run.h"
#include "support/rank_threads.h"
#include "support/temp_folder.h"
#include "train/folder_lock.h"
#include "train/resume.h"
#include "train/stop_signal.h"

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;

class TrainResume : public TrainRun {
 protected:
  [[nodiscard]] Config config(const std::string& name, const std::vector<Override>& more = {}) const {
    std::vector<Override> all = {
        {"model.n_layers", "2"}, {"train.max_steps", "9"}, {"checkpoint.every", "3"}, {"checkpoint.keep_last", "0"}};
    all.insert(all.end(), more.begin(), more.end());
    return TrainRun::config(name, all);
  }
  static TrainResult train(const Config& config, int world, bool resume = false) {
    return TrainRun::train(config, world, {.resume = resume});
  }
  static std::string agreed_message(const Config& config, int world, bool resume) {
    return train::agreed_message(config, world, {.resume = resume});
  }

  /// As if the run had ended right after `step`.
  void forget_after(const std::string& name, std::int64_t step) const {
    for (const auto& entry : fs::directory_iterator(dir_ / "runs" / name / "checkpoints")) {
      if (entry.path().filename().string() > concat("step-0000000", step)) fs::remove_all(entry.path());
    }
  }

  static void expect_same_curve(const TrainResult& got, const TrainResult& want, double tolerance) {
    ASSERT_EQ(got.history.size(), want.history.size());
    for (std::size_t i = 0; i < got.history.size(); ++i) {
      EXPECT_EQ(got.history[i].step, static_cast<std::int64_t>(i) + 1);
      EXPECT_NEAR(got.history[i].loss, want.history[i].loss, tolerance) << "step " << i + 1;
      EXPECT_EQ(std::isfinite(got.history[i].grad_norm), std::isfinite(want.history[i].grad_norm)) << "step " << i + 1;
      if (std::isfinite(want.history[i].grad_norm)) {
        EXPECT_NEAR(got.history[i].grad_norm, want.history[i].grad_norm, 10 * tolerance) << "step " << i + 1;
      }
      EXPECT_EQ(got.history[i].lr, want.history[i].lr) << "step " << i + 1;
      EXPECT_EQ(got.history[i].loss_scale, want.history[i].loss_scale) << "step " << i + 1;
      EXPECT_EQ(got.history[i].epoch, want.history[i].epoch) << "every window once, step " << i + 1;
      EXPECT_EQ(got.history[i].tokens, want.history[i].tokens);
    }
    EXPECT_NEAR(got.val_loss_start, want.val_loss_start, tolerance);
    EXPECT_NEAR(got.val_loss_end, want.val_loss_end, tolerance);
  }
};

TEST_F(TrainResume, BitForBitOnAsManyRanks) {
  const std::vector<std::vector<Override>> ways = {
      {},
      {{"optim.optimizer", "muon"}, {"checkpoint.async", "false"}, {"optim.ema_decay", "0.9"}},
      {{"optim.optimizer", "sgd"}, {"parallel.layout", "per_parameter"}, {"train.micro_batch_size", "3"}},
      {{"precision.param_dtype", "float16"}, {"precision.loss_scale", "1e12"}, {"optim.ema_decay", "0.9"}},
      {{"precision.param_dtype", "bfloat16"}, {"optim.state_dtype", "bfloat16"}, {"model.tied", "true"}},
  };
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const std::string name = "w" + std::to_string(i);
    SCOPED_TRACE(name);
    const TrainResult whole = train(config(name, ways[i]), 2);
    EXPECT_EQ(whole.resumed, 0);
    EXPECT_EQ(whole.checkpoint.filename(), "step-00000009");
    forget_after(name, 3);
    const TrainResult again = train(config(name, ways[i]), 2, true);
    EXPECT_EQ(again.resumed, 3);
    EXPECT_EQ(again.steps, 9);
    expect_same_curve(again, whole, 0);
  }
}

/// B41, and exactly once: the same windows whatever the number of ranks was and is.
TEST_F(TrainResume, FromTwoRanksToFourToThree) {
  for (const char* optimizer : {"adamw", "muon"}) {
    const std::vector<Override> kind = {{"optim.optimizer", optimizer}, {"optim.ema_decay", "0.9"}};
    const TrainResult whole = train(config(optimizer, kind), 2);
    forget_after(optimizer, 3);
    std::vector<Override> replicated = kind;
    replicated.emplace_back("parallel.dp_replicate", "2");
    replicated.emplace_back("parallel.layout", "per_parameter");
    const TrainResult four = train(config(optimizer, replicated), 4, true);
    EXPECT_EQ(four.resumed, 3);
    expect_same_curve(four, whole, 2e-5);
    forget_after(optimizer, 6);
    const TrainResult three = train(config(optimizer, kind), 3, true);
    EXPECT_EQ(three.resumed, 6);
    expect_same_curve(three, whole, 2e-5);
  }
}

/// Tensor, context and expert parallelism come and go with the checkpoint.
TEST_F(TrainResume, BetweenWaysToShareTheModel) {
  using Overrides = std::vector<Override>;
  const Overrides experts = {
      {"model.n_experts", "4"}, {"model.top_k", "2"}, {"model.expert_ffn_dim", "24"}, {"model.aux_loss_weight", "0.01"}};
  const std::vector<std::tuple<std::string, Overrides, std::vector<std::pair<int, Overrides>>>> cases = {
      {"dense", {}, {{4, {{"parallel.tp", "2"}}}, {2, {{"parallel.cp", "2"}}}, {1, {}}}},
      {"experts", experts, {{4, {{"parallel.ep", "4"}}}, {2, {{"parallel.ep", "2"}}}, {2, {}}}},
  };
  for (const auto& [name, model, ways] : cases) {
    SCOPED_TRACE(name);
    const TrainResult whole = train(config(name + "-whole", model), 1);
    for (std::size_t i = 0; i < ways.size(); ++i) {
      Overrides all = model;
      all.insert(all.end(), ways[i].second.begin(), ways[i].second.end());
      const TrainResult result = train(config(name, all), ways[i].first, i > 0);
      EXPECT_EQ(result.resumed, static_cast<std::int64_t>(3 * i));
      expect_same_curve(result, whole, 1e-4);
      if (i + 1 < ways.size()) forget_after(name, static_cast<std::int64_t>(3 * (i + 1)));
    }
  }
}

TEST_F(TrainResume, KeepsTheLastFewAndResumesAnEndedRun) {
  const std::vector<Override> two = {{"checkpoint.keep_last", "2"}, {"checkpoint.dir", (dir_ / "saves").string()}};
  const TrainResult first = train(config("k", two), 2);
  const ckpt::Checkpointer saves(dir_ / "saves");
  EXPECT_EQ(saves.steps(), (std::vector<std::int64_t>{6, 9}));
  EXPECT_TRUE(ckpt::verify(saves.path_of(9)).empty());
  const TrainResult again = train(config("k", two), 2, true);
  EXPECT_EQ(again.resumed, 9);
  EXPECT_EQ(again.val_loss_end, first.val_loss_end);
  // Longer, elsewhere, on one rank.
  std::vector<Override> longer = two;
  longer.emplace_back("train.max_steps", "12");
  const TrainResult more = train(config("elsewhere", longer), 1, true);
  EXPECT_EQ(more.resumed, 9);
  EXPECT_EQ(more.steps, 12);
  ASSERT_EQ(more.history.size(), 3U) << "the new folder has no earlier steps";
  EXPECT_EQ(more.val_loss_start, first.val_loss_start);
}

TEST_F(TrainResume, WithoutACheckpointItBeginsAnew) {
  const TrainResult fresh = train(config("none", {{"checkpoint.every", "0"}}), 2, true);
  EXPECT_EQ(fresh.resumed, 0);
  EXPECT_EQ(fresh.steps, 9);
  EXPECT_TRUE(fresh.checkpoint.empty());
  EXPECT_FALSE(fs::exists(dir_ / "runs/none/checkpoints"));
}

TEST_F(TrainResume, ARunThatBeginsAnewLeavesEarlierCheckpointsAlone) {
  train(config("a"), 2);
  const TrainResult shorter = train(config("a", {{"train.max_steps", "3"}}), 2);
  EXPECT_EQ(shorter.checkpoint.filename(), "step-00000003");
  EXPECT_EQ(ckpt::Checkpointer(dir_ / "runs/a/checkpoints").steps(), (std::vector<std::int64_t>{3}));
  EXPECT_EQ(ckpt::Checkpointer(dir_ / "runs/a/checkpoints.1").steps(), (std::vector<std::int64_t>{3, 6, 9}));
  EXPECT_EQ(train(config("a"), 2, true).resumed, 3);
}

TEST_F(TrainResume, MetricsOfALaterStepAreDropped) {
  const TrainResult whole = train(config("m"), 2);
  forget_after("m", 6);
  std::ofstream(dir_ / "runs/m/metrics.jsonl", std::ios::app) << "{\"step\": 10, \"loss\": 1}\nno json\n{\"step\": 2";
  const TrainResult again = train(config("m"), 2, true);
  expect_same_curve(again, whole, 0);
  std::ifstream in(dir_ / "runs/m/metrics.jsonl");
  int steps = 0, validations = 0;
  for (std::string line; std::getline(in, line);) (line.find("val_loss") == std::string::npos ? steps : validations) += 1;
  EXPECT_EQ(steps, 9);
  EXPECT_EQ(validations, 4);  // at 0, 4, 8 and the end
}

TEST_F(TrainResume, AnotherConfigurationIsRefusedWithBothLines) {
  train(config("c"), 2);
  EXPECT_THAT(agreed_message(config("c", {{"optim.beta1", "0.8"}, {"model.tied", "true"}}), 2, true),
              AllOf(HasSubstr("[resume] "),
                    HasSubstr("step-00000009: model.tied = true (command line), want false as in the "
                              "checkpoint (default of that run)"),
                    HasSubstr("optim.beta1 = 0.8 (command line), want 0.9 as in the checkpoint (default of that run)")));
  // Each key by itself: no shape changes.
  const std::vector<Override> refused = {
      {"model.rope_theta", "500"}, {"model.norm_eps", "1e-6"},      {"model.max_seq_len", "20"},
      {"optim.optimizer", "muon"}, {"optim.beta2", "0.99"},         {"optim.eps", "1e-6"},
      {"optim.momentum", "0.5"},   {"optim.nesterov", "false"},     {"optim.state_dtype", "bfloat16"},
      {"optim.ema_decay", "0.9"},  {"precision.main_grad", "true"}, {"precision.param_dtype", "bfloat16"},
      {"train.seed", "2"},         {"data.seq_len", "8"},           {"data.validation_fraction", "0.1"}};
  for (const Override& other : refused)
    EXPECT_THAT(agreed_message(config("c", {other}), 2, true),
                AllOf(HasSubstr(other.first + " = "), HasSubstr("as in the checkpoint")))
        << other.first;
  EXPECT_THAT(agreed_message(config("c", {{"train.batch_size", "24"}}), 3, true), HasSubstr("train.batch_size = 24"));
  write_text(700);
  EXPECT_THAT(agreed_message(config("c"), 2, true), HasSubstr("the text has"));
  write_text(600);
  // The rate, how the ranks share the work, and what is shown, may change.
  const TrainResult other = train(config("c", {{"parallel.layout", "per_parameter"},
                                               {"train.micro_batch_size", "2"},
                                               {"train.max_steps", "10"},
                                               {"optim.lr", "0.004"},
                                               {"optim.schedule", "constant"},
                                               {"optim.weight_decay", "0"},
                                               {"optim.clip_norm", "0.5"}}),
                                  2, true);
  EXPECT_EQ(other.steps, 10);
  EXPECT_EQ(other.history.back().lr, 0.004);
}

TEST_F(TrainResume, AnotherTextOfTheSameLengthIsRefused) {
  train(config("t"), 2);
  std::string text = testing::file_text(dir_ / "text.txt");
  const std::string same = text;
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  testing::set_file_text(dir_ / "text.txt", text);
  for (const int world : {1, 2, 3})
    EXPECT_THAT(agreed_message(config("t"), world, true),
                ::testing::ContainsRegex("step-00000009: the text has checksum "
                                         "[0-9a-f]+ \\(data.path: command line\\), want [0-9a-f]+ as"));
  // Another place does not matter, nor into how many files it is cut.
  fs::create_directories(dir_ / "parts");
  testing::set_file_text(dir_ / "parts/1", same.substr(0, 1001));
  testing::set_file_text(dir_ / "parts/2", same.substr(1001));
  EXPECT_EQ(train(config("t", {{"data.path", (dir_ / "parts").string()}}), 3, true).resumed, 9);
  // An earlier release noted nothing but the size.
  const fs::path step = dir_ / "runs/t/checkpoints/step-00000009";
  const ckpt::Source saved(step);
  std::string extra = saved.info().extra;
  const std::size_t at = extra.find("\"text_crc32c\":");
  ASSERT_NE(at, std::string::npos);
  extra.replace(at, 12, "\"no_text_crc");
  fs::remove_all(dir_ / "old");
  ckpt::write_checkpoint_of(saved, dir_ / "old/step-00000009", {.ranks = 2, .extra = extra});
  EXPECT_EQ(train(config("t", {{"checkpoint.dir", (dir_ / "old").string()}}), 2, true).resumed, 9);
}

TEST_F(TrainResume, TheChecksumOfATextIsThatOfItsBytes) {
  fs::create_directories(dir_ / "parts");
  testing::set_file_text(dir_ / "parts/1", "12345");
  testing::set_file_text(dir_ / "parts/2", "");
  testing::set_file_text(dir_ / "parts/3", "6789");
  for (const int world : {1, 2, 3, 4, 8}) {
    run_ranks(world, [&] {
      const TextMark mark = identify(Corpus::open(dir_ / "parts", "here"), current_world().comm());
      EXPECT_EQ(mark.bytes, 9);
      EXPECT_EQ(mark.crc32c, 0xe3069283U);
    });
  }
}

/// A torn or foreign folder at a later step is passed over, and makes way for the save of that step.
TEST_F(TrainResume, FoldersThatAreNoCheckpointsAreKeptAside) {
  const fs::path saves = dir_ / "runs/f/checkpoints";
  for (const char* async : {"true", "false"}) {
    fs::remove_all(saves);
    const TrainResult whole = train(config("f", {{"checkpoint.async", async}}), 2);
    fs::remove(saves / "step-00000009/checkpoint.json");
    fs::remove_all(saves / "step-00000006");
    testing::set_file_text(saves / "step-00000006", "a file");
    const TrainResult again = train(config("f", {{"checkpoint.async", async}}), 2, true);
    EXPECT_EQ(again.resumed, 3);
    expect_same_curve(again, whole, 0);
    EXPECT_EQ(ckpt::Checkpointer(saves).steps(), (std::vector<std::int64_t>{3, 6, 9}));
    EXPECT_TRUE(fs::exists(saves / "step-00000009.aside/rank-00000.safetensors"));
    EXPECT_EQ(testing::file_text(saves / "step-00000006.aside"), "a file");
  }
  // Nothing that was put aside before is lost.
  fs::remove(saves / "step-00000009/checkpoint.json");
  EXPECT_EQ(train(config("f"), 2, true).resumed, 6);
  EXPECT_TRUE(fs::exists(saves / "step-00000009.aside.2/rank-00000.safetensors"));
}

/// A folder that was renamed: neither the last checkpoint, nor one of the last few.
TEST_F(TrainResume, ACheckpointUnderTheNameOfAnotherStepIsPassedOver) {
  const std::vector<Override> two = {{"checkpoint.keep_last", "2"}};
  const TrainResult whole = train(config("n"), 2);
  const fs::path saves = dir_ / "runs/n/checkpoints";
  fs::rename(saves / "step-00000009", saves / "step-00000500");
  fs::rename(saves / "step-00000003", saves / "step-00000005");
  const TrainResult again = train(config("n", two), 2, true);
  EXPECT_EQ(again.resumed, 6);
  expect_same_curve(again, whole, 0);
  EXPECT_EQ(ckpt::Checkpointer(saves).steps(), (std::vector<std::int64_t>{6, 9}));
  EXPECT_TRUE(ckpt::verify(saves / "step-00000500.aside").empty());
  EXPECT_TRUE(ckpt::verify(saves / "step-00000005.aside").empty());
  EXPECT_EQ(train(config("n", two), 2, true).resumed, 9);
}

TEST_F(TrainResume, RandomNumbersBeginWithTheSeed) {
  const auto random_of = [&](const std::string& name, const char* seed, std::uint64_t before) {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(before);
    train(config(name, {{"train.seed", seed}, {"train.max_steps", "1"}}), 1);
    return ckpt::read_info(dir_ / "runs" / name / "checkpoints/step-00000001").tensors.at("random").pieces.at(0).crc32c;
  };
  EXPECT_EQ(random_of("r1", "7", 1), random_of("r2", "7", 2));
  EXPECT_NE(random_of("r1", "7", 1), random_of("r3", "8", 1));
}

TEST_F(TrainResume, DamageIsRefused) {
  train(config("d"), 2);
  const fs::path folder = dir_ / "runs/d/checkpoints/step-00000009";
  for (const char* file : {"rank-00001.safetensors", "checkpoint.json"}) {
    const std::string whole = testing::file_text(folder / file);
    std::string bytes = whole;
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    testing::set_file_text(folder / file, bytes);
    EXPECT_THAT(agreed_message(config("d"), 3, true), HasSubstr(file));
    testing::set_file_text(folder / file, whole);
  }
  fs::remove(folder / "rank-00001.safetensors");
  EXPECT_THAT(agreed_message(config("d"), 3, true), HasSubstr("rank-00001.safetensors"));
}

TEST_F(TrainResume, AFolderThatTakesNoFilesIsFoundAtTheStart) {
  testing::set_file_text(dir_ / "file", "no folder");
  for (const char* place : {"file", "file/below"}) {
    const Config bad = config("b", {{"checkpoint.dir", (dir_ / place).string()}});
    EXPECT_THAT(agreed_message(bad, 2, false), AllOf(HasSubstr("[run] cannot create the folder " + (dir_ / place).string()),
                                                     HasSubstr(": Not a directory (checkpoint.dir: command line) (rank 0/2)")));
  }
  fs::create_directories(dir_ / "taken/.lock");
  EXPECT_THAT(agreed_message(config("b", {{"checkpoint.dir", (dir_ / "taken").string()}}), 2, false),
              HasSubstr("[run] cannot write " + (dir_ / "taken/.lock").string() + ": Is a directory (checkpoint.dir: "));
  EXPECT_FALSE(fs::exists(dir_ / "runs/b/metrics.jsonl")) << "nothing was trained";
  // Without saves the folder does not matter.
  EXPECT_EQ(train(config("b", {{"checkpoint.dir", (dir_ / "file").string()}, {"checkpoint.every", "0"}}), 2).steps, 9);
}

TEST_F(TrainResume, OneRunAtATimeInAFolder) {
  const std::vector<Override> saves = {{"checkpoint.dir", (dir_ / "saves").string()}, {"train.max_steps", "1"}};
  const RunOptions at_once = {.patience = std::chrono::milliseconds(1)};
  const std::string me = concat(" is in use by process ", ::getpid(), " on ");
  for (const char* folder : {"runs/l", "saves"}) {
    const FolderLock other(dir_ / folder, "test", at_once.patience);
    const std::string message = train::agreed_message(config("l", saves), 2, at_once);
    EXPECT_THAT(message, AllOf(HasSubstr("[run] " + (dir_ / folder).string() + me), HasSubstr("(rank 0/2)")));
    EXPECT_FALSE(fs::exists(dir_ / "runs/l/metrics.jsonl"));
  }
  // One that is about to end is waited for.
  auto other = std::make_unique<FolderLock>(dir_ / "saves", "test", at_once.patience);
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    other.reset();
  });
  EXPECT_EQ(train(config("l", saves), 2).steps, 1);
  ends.join();
  // Earlier checkpoints move, the lock stays where the new ones are.
  EXPECT_EQ(train(config("l", saves), 2).steps, 1);
  EXPECT_TRUE(fs::exists(dir_ / "saves/.lock"));
  EXPECT_FALSE(fs::exists(dir_ / "saves.1/.lock"));
  // The folder of the run may take the checkpoints, too.
  EXPECT_EQ(train(config("o", {{"checkpoint.dir", (dir_ / "runs/o").string()}}), 2).steps, 9);
  EXPECT_EQ(train(config("o", {{"checkpoint.dir", (dir_ / "runs/o").string()}}), 2, true).resumed, 9);
}

/// The error of a save in the background: at the next save, or at the end.
TEST_F(TrainResume, ErrorsOfSavesEndTheRun) {
  // Room for the name of the lock, none for those of checkpoints.
  constexpr std::size_t kLongest = 4095;
  std::string deep = (dir_ / "deep").string();
  while (deep.size() + 250 < kLongest) deep += '/' + std::string(200, 'd');
  deep += '/' + std::string(kLongest - 12 - deep.size(), 'd');
  for (const char* every : {"3", "100"}) {
    for (const char* async : {"true", "false"}) {
      const Config bad = config("e", {{"checkpoint.dir", deep}, {"checkpoint.every", every}, {"checkpoint.async", async}});
      EXPECT_THAT(agreed_message(bad, 2, false), HasSubstr("cannot create the folder")) << every << async;
    }
  }
}

TEST_F(TrainResume, SigtermSavesOnAllRanksAtTheSameStep) {
  const std::vector<Override> longer = {{"train.max_steps", "60"}, {"checkpoint.every", "0"}, {"train.eval_every", "0"}};
  const TrainResult whole = train(config("whole", longer), 2);
  std::vector<std::int64_t> steps(2);
  auto never_fatal = std::make_unique<StopSignal>();
  std::atomic<bool> done{false};
  std::thread killer([&] {
    const fs::path metrics = dir_ / "runs/stopped/metrics.jsonl";
    while (!done) {
      std::error_code ignored;
      if (fs::exists(metrics, ignored) && testing::file_text(metrics).find("\"step\":5,") != std::string::npos) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ::kill(::getpid(), SIGTERM);
  });
  run_ranks(2, [&](int rank) {
    const TrainResult mine = run_training(config("stopped", longer), current_world());
    done = true;
    EXPECT_TRUE(mine.stopped);
    EXPECT_EQ(mine.checkpoint.filename().string(), concat(mine.steps < 10 ? "step-0000000" : "step-000000", mine.steps));
    steps[static_cast<std::size_t>(rank)] = mine.steps;
  });
  killer.join();
  never_fatal.reset();
  EXPECT_EQ(steps[0], steps[1]);
  EXPECT_GE(steps[0], 5);
  EXPECT_LT(steps[0], 60);
  EXPECT_FALSE(fs::exists(dir_ / "runs/stopped/result.txt"));
  const TrainResult rest = train(config("stopped", longer), 2, true);
  EXPECT_EQ(rest.resumed, steps[0]);
  EXPECT_FALSE(rest.stopped);
  expect_same_curve(rest, whole, 0);
}

}  // namespace
}  // namespace hyper_parallel::train
