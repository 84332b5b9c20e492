// The training loop on rank threads: every way to share the model gives the loss curve of one rank.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <ATen/ops/equal.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/schedule.h>
#include <hyper_parallel/train/shard_llama.h>
#include <hyper_parallel/train/trainer.h>

#include "dist/train_run.h"
#include "support/rank_threads.h"
#include "support/read_trace.h"

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::run_ranks;

class TrainLoop : public TrainRun {};

TEST_F(TrainLoop, LearnsAndWritesItsFiles) {
  const TrainResult result =
      train(config("one", {{"train.max_steps", "40"}, {"sample.prompts", "['line ']"}, {"sample.tokens", "5"}}), 1);
  EXPECT_EQ(result.steps, 40);
  EXPECT_EQ(result.tokens, 40 * 12 * 16);
  EXPECT_NEAR(result.val_loss_start, std::log(256.0), 0.2);
  EXPECT_LT(result.val_loss_end, 2.5);
  for (const char* name : {"config.toml", "metrics.jsonl", "loss.svg", "samples.txt"})
    EXPECT_GT(fs::file_size(dir_ / "runs/one" / name), 10U) << name;
  EXPECT_EQ(to_toml(load_config(dir_ / "runs/one/config.toml")),
            to_toml(config("one", {{"train.max_steps", "40"}, {"sample.prompts", "['line ']"}, {"sample.tokens", "5"}})));
}

TEST_F(TrainLoop, EveryWorldSizeAndLayoutGivesTheSameCurve) {
  const TrainResult one = train(config("w1"), 1);
  expect_same_curve(train(config("w2"), 2), one, 1e-5);
  expect_same_curve(train(config("w3"), 3), one, 1e-5);
  expect_same_curve(train(config("w4"), 4), one, 1e-5);
  expect_same_curve(train(config("w2p", {{"parallel.layout", "per_parameter"}}), 2), one, 1e-5);
  expect_same_curve(train(config("w2k", {{"parallel.reshard_after_forward", "false"}}), 2), one, 1e-5);
  expect_same_curve(train(config("w4h", {{"parallel.dp_replicate", "2"}}), 4), one, 1e-5);
  expect_same_curve(train(config("w1a", {{"train.micro_batch_size", "4"}}), 1), one, 1e-5);
  expect_same_curve(train(config("w2a", {{"train.micro_batch_size", "2"}}), 2), one, 1e-5);
}

/// What the settings of [parallel] and [precision] change is where things lie and when they travel, not the result.
TEST_F(TrainLoop, EveryWayOfShardingGivesTheSameCurve) {
  const TrainResult one = train(config("p1", {{"train.micro_batch_size", "3"}}), 1);
  const std::vector<std::vector<Override>> ways = {
      {{"parallel.reshard_ranks", "2"}},
      {{"parallel.memory_budget_mb", "0.2"}},
      {{"parallel.zero_level", "1"}},
      {{"parallel.zero_level", "2"}},
      {{"parallel.zero_level", "3"}},
      {{"parallel.accumulation", "partial"}, {"parallel.dp_replicate", "2"}},
      {{"parallel.accumulation", "each"}},
      {{"parallel.replicate_below", "200"}, {"parallel.bucket_mb", "0.01"}},
      {{"parallel.offload", "true"}, {"precision.main_grad", "true"}},
      {{"parallel.layout", "per_parameter"}, {"parallel.comm_fusion", "false"}},
      {{"parallel.late_waits", "true"}, {"parallel.accumulation", "each"}},
      {{"parallel.replica_init", "check"}, {"parallel.dp_replicate", "2"}},
      {{"parallel.replica_init", "broadcast"}, {"parallel.dp_replicate", "4"}},
      {{"precision.loss_scale", "1024"}},
  };
  for (std::size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE(ways[i].front().first + " = " + ways[i].front().second);
    std::vector<Override> overrides = ways[i];
    overrides.emplace_back("train.micro_batch_size", "1");
    expect_same_curve(train(config("p4-" + std::to_string(i), overrides), 4), one, 1e-5);
  }
}

TEST(InitLlama, GivesTheWeightsOfAModelBuiltInOnePiece) {
  for (const bool tied : {false, true}) {
    for (const int world : {1, 2, 3}) {
      run_ranks(world, [&] {
        const ModelConfig shape{
            .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 40, .max_seq_len = 16, .tied = tied};
        Llama whole(shape, 7), model{nullptr};
        {
          const MetaInit no_memory;
          model = Llama(shape);
        }
        FullyShardOptions options;
        options.shard_layout = ShardLayout::kRagged;
        const HSDPModule root = fully_shard_llama(model, options);
        init_llama(model, root, 7);
        for (const auto& [name, parameter] : root.named_dtensors())
          EXPECT_TRUE(at::equal(parameter.full_tensor(), whole->named_parameters()[name])) << name;
        EXPECT_TRUE(at::equal(model->cos, whole->cos));
      });
    }
  }
}

TEST_F(TrainLoop, TiedHeadAndBfloat16) {
  const TrainResult tied = train(config("t1", {{"model.tied", "true"}}), 1);
  expect_same_curve(train(config("t2", {{"model.tied", "true"}}), 2), tied, 1e-5);
  const std::vector<Override> half = {{"precision.param_dtype", "bfloat16"}};
  const TrainResult bf16 = train(config("h1", half), 1);
  expect_same_curve(train(config("h2", half), 2), bf16, 2e-2);
  EXPECT_NEAR(bf16.val_loss_end, train(config("f1"), 1).val_loss_end, 5e-2);
}

TEST_F(TrainLoop, EveryOptimizerAndScheduleLearnsAlikeOnAllWorlds) {
  struct Case {
    const char *optimizer, *schedule, *lr;
  };
  for (const Case& c : {Case{"sgd", "linear", "0.1"}, Case{"muon", "wsd", "1e-2"}, Case{"adamw", "constant", "1e-2"}}) {
    const std::vector<Override> more = {
        {"optim.optimizer", c.optimizer}, {"optim.schedule", c.schedule}, {"optim.lr", c.lr}, {"optim.min_lr_ratio", "0"}};
    const TrainResult one = train(config("o1", more), 1);
    EXPECT_LT(one.val_loss_end, one.val_loss_start - 0.3) << c.optimizer;
    const double last = std::string(c.schedule) == "constant" ? 1 : std::string(c.schedule) == "wsd" ? 1 : 0.2;
    EXPECT_NEAR(one.history.back().lr, last * std::stod(c.lr), 1e-12) << c.schedule;
    expect_same_curve(train(config("o2", more), 2), one, 2e-5);
    std::vector<Override> replicated = more;
    replicated.emplace_back("parallel.dp_replicate", "2");
    expect_same_curve(train(config("o4", replicated), 4), one, 2e-5);
  }
}

// Nothing is below 2^-24 in fp16: without the scale most gradients of this model would be lost.
TEST_F(TrainLoop, Float16LearnsAndLeavesOutStepsThatOverflow) {
  const TrainResult one = train(config("h1", {}), 1);
  for (const char* reduce : {"float32", "float16"}) {
    const TrainResult half = train(config(std::string("h2-") + reduce, {{"precision.param_dtype", "float16"},
                                                                        {"precision.reduce_dtype", reduce},
                                                                        {"precision.loss_scale", "1024"},
                                                                        {"train.micro_batch_size", "3"}}),
                                   2);
    for (const StepMetrics& step : half.history) EXPECT_EQ(step.loss_scale, 1024);
    expect_same_curve(half, one, 0.02);
  }
  const TrainResult large =
      train(config("h3", {{"precision.param_dtype", "float16"}, {"precision.loss_scale", "1e12"}, {"train.max_steps", "60"}}), 2);
  ASSERT_EQ(large.history.size(), 60U);
  EXPECT_FALSE(std::isfinite(large.history.front().grad_norm));
  EXPECT_EQ(large.history[1].loss_scale, 0.5e12);
  EXPECT_TRUE(std::isfinite(large.history.back().grad_norm));
  EXPECT_LT(large.val_loss_end, large.val_loss_start - 0.5);
}

// The averages of a run are those of its weights: with a decay of 0 they are the weights, near 1 they stay behind.
TEST_F(TrainLoop, ValidatesWithAverages) {
  const std::vector<Override> kept = {{"parallel.zero_level", "1"}, {"sample.prompts", "['line ']"}, {"sample.tokens", "3"}};
  const auto with = [&](const std::string& name, const char* decay) {
    std::vector<Override> overrides = kept;
    overrides.emplace_back("optim.ema_decay", decay);
    return train(config(name, overrides), 2);
  };
  const TrainResult plain = with("e0", "0"), tiny = with("e1", "1e-300"), slow = with("e2", "0.999");
  EXPECT_EQ(tiny.val_loss_end, plain.val_loss_end);
  EXPECT_GT(slow.val_loss_end, plain.val_loss_end + 1e-3);
  ASSERT_EQ(slow.history.size(), plain.history.size());
  for (std::size_t i = 0; i < plain.history.size(); ++i) EXPECT_EQ(slow.history[i].loss, plain.history[i].loss) << i;
}

TEST_F(TrainLoop, Bfloat16OptimizerState) {
  for (const char* optimizer : {"adamw", "sgd", "muon"}) {
    SCOPED_TRACE(optimizer);
    const TrainResult wide = train(config("s4", {{"optim.optimizer", optimizer}}), 1);
    const TrainResult narrow = train(config("s2", {{"optim.optimizer", optimizer}, {"optim.state_dtype", "bfloat16"}}), 2);
    expect_same_curve(narrow, wide, 0.05);
    EXPECT_NE(narrow.val_loss_end, wide.val_loss_end);
  }
}

TEST_F(TrainLoop, RepeatsBitForBit) {
  const TrainResult a = train(config("a"), 2), b = train(config("b"), 2);
  expect_same_curve(a, b, 0.0);
}

/// Computing blocks again changes no bit, whatever the ranks share.
TEST_F(TrainLoop, ActivationCheckpointing) {
  const std::vector<std::vector<Override>> settings = {
      {}, {{"parallel.layout", "per_parameter"}, {"train.micro_batch_size", "2"}}, {{"precision.param_dtype", "bfloat16"}}};
  for (std::size_t i = 0; i < settings.size(); ++i) {
    const TrainResult plain = train(config("plain", settings[i]), 2);
    for (const char* choice : {"block", "block:2"}) {
      std::vector<Override> again = settings[i];
      again.emplace_back("train.activation_checkpoint", choice);
      expect_same_curve(train(config("again", again), 2), plain, 0.0);
    }
  }
}

TEST_F(TrainLoop, ATimeBudgetEndsTheRunOnAllRanks) {
  const TrainResult result =
      train(config("time", {{"train.max_steps", "0"}, {"train.max_seconds", "0.3"}, {"optim.warmup_steps", "2"}}), 2);
  EXPECT_GE(result.seconds, 0.3);
  ASSERT_GT(result.steps, 2);
  // The rate follows the time that the ranks agreed on, which metrics carry.
  const Schedule schedule{.lr = 1e-2, .min_ratio = 0.1, .warmup_steps = 2, .max_steps = 0, .max_seconds = 0.3};
  const auto& history = result.history;
  for (std::size_t i = 3; i < history.size(); ++i)
    EXPECT_DOUBLE_EQ(history[i].lr, schedule.at(static_cast<std::int64_t>(i), history[i - 1].elapsed_s, history[1].elapsed_s));
  EXPECT_LT(history[history.size() - 2].elapsed_s, 0.3);
}

TEST_F(TrainLoop, WithoutValidationSplit) {
  const TrainResult result = train(config("noval", {{"data.validation_fraction", "0"}}), 2);
  EXPECT_EQ(result.steps, 8);
  EXPECT_TRUE(std::isnan(result.val_loss_end));
  EXPECT_THAT(to_string(result), ::testing::MatchesRegex("world=2 loss_end=[0-9.]+ tokens_per_s=[0-9]+"));
}

TEST_F(TrainLoop, TracesTheStepsThatItIsAskedFor) {
  const auto steps = [&](const std::string& name, int rank) {
    std::vector<std::string> labels;
    for (const auto& span : testing::select(
             testing::spans_of(testing::read_json(dir_ / "runs" / name / ("t-" + std::to_string(rank) + ".json"))), "step"))
      labels.push_back(span.label);
    return labels;
  };
  train(config("range", {{"train.trace", "t-%r.json"}, {"train.trace_steps", "2-4"}}), 2);
  for (int rank : {0, 1}) EXPECT_EQ(steps("range", rank), (std::vector<std::string>{"2", "3", "4"}));
  const auto spans = testing::spans_of(testing::read_json(dir_ / "runs/range/t-1.json"));
  for (const char* kind : {"data", "forward", "backward", "unshard", "reshard", "reduce", "clip", "optim", "metrics"})
    EXPECT_GE(testing::select(spans, kind).size(), 3U) << kind;
  // Beyond the end of the run: what there is.
  train(config("long", {{"train.trace", "t-%r.json"}, {"train.trace_steps", "7-100"}}), 2);
  EXPECT_EQ(steps("long", 1), (std::vector<std::string>{"7", "8"}));
  // A run that fails leaves the trace of what it did.
  EXPECT_THAT(agreed_message(config("fails", {{"optim.lr", "1000"},
                                              {"optim.clip_norm", "0"},
                                              {"optim.beta1", "0"},
                                              {"train.max_steps", "300"},
                                              {"train.trace", "t-%r.json"},
                                              {"train.trace_steps", "all"}}),
                             2),
              HasSubstr("[train] loss"));
  EXPECT_FALSE(steps("fails", 0).empty());
  train(config("never", {{"train.trace", "t-%r.json"}, {"train.trace_steps", "50"}}), 2);
  EXPECT_FALSE(fs::exists(dir_ / "runs/never/t-0.json"));
  EXPECT_EQ(agreed_message(config("same", {{"train.trace", "t.json"}}), 2),
            "[config] train.trace = \"t.json\" has no %r, want it: all 2 ranks would write the same file (command line)");
}

TEST_F(TrainLoop, MistakesAreAgreedOn) {
  EXPECT_THAT(agreed_message(config("x", {{"data.path", "/no/such.txt"}}), 2), HasSubstr("[data] /no/such.txt: No such file"));
  EXPECT_THAT(agreed_message(config("x", {{"train.batch_size", "100000"}}), 2),
              HasSubstr("want at least train.batch_size = 100000 for one batch"));
  EXPECT_THAT(agreed_message(config("x", {{"data.validation_fraction", "0.0003"}}), 2),
              HasSubstr("validation tokens, want at least 17"));
  EXPECT_THAT(agreed_message(config("x", {{"parallel.dp_shard", "3"}}), 2), HasSubstr("want the world size 2 (command line)"));
  EXPECT_THAT(agreed_message(config("x", {{"log.dir", (dir_ / "text.txt").string()}}), 2),
              HasSubstr("[run] cannot create the folder"));
  EXPECT_THAT(
      agreed_message(
          config("x", {{"optim.lr", "1000"}, {"optim.clip_norm", "0"}, {"optim.beta1", "0"}, {"train.max_steps", "300"}}), 2),
      HasSubstr("[train] loss"));
}

TEST_F(TrainLoop, RanksWithDifferentConfigurationsStop) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run_ranks(2, [&](int rank) {
    try {
      (void)run_training(config("x", {{"optim.lr", rank == 0 ? "0.1" : "0.2"}}), current_world());
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  });
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[0], messages[1]);
  EXPECT_THAT(messages[0], HasSubstr("lr = 0.2"));
}

TEST(AgreeOn, OneRankIsEnoughAndIsNamed) {
  std::mutex mutex;
  std::vector<std::string> messages;
  run_ranks(3, [&](int rank) {
    const Comm comm = current_world().comm();
    EXPECT_NO_THROW(agree_on(comm, [] {}));
    try {
      agree_on(comm, [&] { check_value(rank != 1, "test", "bad"); });
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      messages.emplace_back(error.what());
    }
  });
  EXPECT_EQ(messages, std::vector<std::string>(3, "[test] bad (rank 1/3)"));
}

}  // namespace
}  // namespace hyper_parallel::train
