// Configuration of hp-train: reading, overrides, and one message with file and line for every mistake.
#include <hyper_parallel/train/config.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hyper_parallel::train {
namespace {

using ::testing::HasSubstr;

std::string message_of(const std::string& text, const std::vector<Override>& overrides = {}) {
  try {
    (void)parse_config(text, "a.toml", overrides);
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no error";
}

TEST(TrainConfig, ReadsEverySection) {
  const Config c = parse_config(
      "[model]\ndim = 64\nn_heads = 4\nn_kv_heads = 2\ntied = true\n[data]\npath = 'x.txt'\nseq_len = 32\n"
      "[optim]\nlr = 1\n[parallel]\nlayout = \"per_parameter\"\n[sample]\nprompts = [\"a\", 'b \"c\"']\n",
      "a.toml");
  EXPECT_EQ(c.model.dim, 64);
  EXPECT_EQ(c.model.n_kv_heads, 2);
  EXPECT_TRUE(c.model.tied);
  EXPECT_EQ(c.data.path, "x.txt");
  EXPECT_EQ(c.optim.lr, 1.0);
  EXPECT_EQ(c.parallel.layout, "per_parameter");
  EXPECT_EQ(c.sample.prompts, (std::vector<std::string>{"a", "b \"c\""}));
  EXPECT_EQ(c.where("model.n_kv_heads"), "a.toml:4");
  EXPECT_EQ(c.where("train.seed"), "default");
}

TEST(TrainConfig, OverridesWinAndAreNamedAsTheSource) {
  const Config c = parse_config("[model]\ndim = 64\n", "a.toml",
                                {{"model.dim", "256"},
                                 {"data.path", "some file.txt"},
                                 {"log.name", "\"quoted\""},
                                 {"sample.prompts", "['x', 'y']"},
                                 {"optim.lr", "3e-3"},
                                 {"model.tied", "true"}});
  EXPECT_EQ(c.model.dim, 256);
  EXPECT_EQ(c.data.path, "some file.txt");
  EXPECT_EQ(c.log.name, "quoted");
  EXPECT_EQ(c.sample.prompts.size(), 2U);
  EXPECT_EQ(c.optim.lr, 3e-3);
  EXPECT_TRUE(c.model.tied);
  EXPECT_EQ(c.where("model.dim"), "command line");
}

TEST(TrainConfig, WritesWhatItReads) {
  Config c = parse_config("[optim]\nlr = 0.00123\neps = 1e-9\n[sample]\nprompts = ['tab\\t \"q\"', \"line\\nfeed\"]\n", "a.toml",
                          {{"data.path", "C:\\x"}});
  const std::string text = to_toml(c);
  const Config again = parse_config(text, "b.toml");
  EXPECT_EQ(to_toml(again), text);
  EXPECT_EQ(again.optim.eps, 1e-9);
  EXPECT_EQ(again.sample.prompts, c.sample.prompts);
  EXPECT_EQ(again.data.path, "C:\\x");
  EXPECT_EQ(describe(c).size(), describe(Config{}).size());
}

TEST(TrainConfig, UnknownNamesAreErrorsWithTheirLine) {
  EXPECT_EQ(message_of("[train]\nseed = 3\n\nbatchsize = 4\n"),
            "[config] unknown key batchsize in [train], want one of seed, batch_size, micro_batch_size, max_steps, max_seconds, "
            "eval_every, "
            "eval_windows, activation_checkpoint, trace, trace_steps (a.toml:4)");
  EXPECT_THAT(message_of("\n[modle]\ndim = 3\n"),
              HasSubstr("unknown section [modle], want the sections model, data, train, optim"));
  EXPECT_THAT(message_of("\n[modle]\ndim = 3\n"), HasSubstr("(a.toml:2)"));
  EXPECT_THAT(message_of("dim = 3\n"), HasSubstr("unknown key dim outside any section"));
  EXPECT_THAT(message_of("model = 3\n"), HasSubstr("model = 3, want a section [model] (a.toml:1)"));
  EXPECT_THAT(message_of("", {{"model.size", "3"}}), HasSubstr("unknown key --model.size, want one of dim, n_layers"));
  EXPECT_THAT(message_of("", {{"size", "3"}}), HasSubstr("unknown key --size, want --section.key"));
}

TEST(TrainConfig, BadSyntaxNamesTheLine) {
  EXPECT_THAT(message_of("[model]\ndim = \n"), HasSubstr("[config] syntax: "));
  EXPECT_THAT(message_of("[model]\ndim = 1\ndim = 2\n"), HasSubstr("(a.toml:3)"));
  EXPECT_THAT(message_of("[model\n"), HasSubstr("(a.toml:1)"));
}

TEST(TrainConfig, BadValuesSayWhatIsWanted) {
  EXPECT_EQ(message_of("[model]\ndim = 0\n"), "[config] model.dim = 0, want an integer >= 1 (a.toml:2)");
  EXPECT_EQ(message_of("[model]\ndim = 1.5\n"), "[config] model.dim = 1.5, want an integer >= 1 (a.toml:2)");
  EXPECT_EQ(message_of("[model]\ntied = 1\n"), "[config] model.tied = 1, want true or false (a.toml:2)");
  EXPECT_EQ(message_of("[optim]\nlr = -1\n"), "[config] optim.lr = -1, want a number > 0 and <= 1000 (a.toml:2)");
  EXPECT_THAT(message_of("[optim]\nlr = nan\n"), HasSubstr("want a number"));
  EXPECT_THAT(message_of("[optim]\noptimizer = \"lion\"\n"), HasSubstr("want one of adamw, sgd, muon (a.toml:2)"));
  EXPECT_THAT(message_of("[optim]\nschedule = \"step\"\n"), HasSubstr("want one of cosine, linear, constant, wsd (a.toml:2)"));
  EXPECT_THAT(message_of("[optim]\ndecay_share = 0\n"), HasSubstr("want a number > 0 and <= 1"));
  EXPECT_THAT(message_of("[optim]\noptimizer = \"sgd\"\nmomentum = 0\n"),
              HasSubstr("optim.nesterov = true, want optim.momentum above 0 with it, or false (a.toml:3)"));
  EXPECT_THAT(message_of("[optim]\nweight_decay = inf\n"), HasSubstr("want a number"));
  EXPECT_EQ(message_of("[parallel]\nlayout = \"flat\"\n"),
            "[config] parallel.layout = \"flat\", want one of ragged, per_parameter (a.toml:2)");
  EXPECT_EQ(message_of("[data]\npath = [1]\n"), "[config] data.path = [ 1 ], want a text in quotes (a.toml:2)");
  EXPECT_THAT(message_of("[sample]\nprompts = ['a', 1]\n"), HasSubstr("want a list of texts in quotes (a.toml:2)"));
  EXPECT_EQ(message_of("", {{"model.dim", "many"}}), "[config] model.dim = many, want an integer >= 1 (command line)");
  EXPECT_THAT(message_of("", {{"model.dim", "1\nn_heads = 2"}}), HasSubstr("want an integer"));
  EXPECT_THAT(message_of("", {{"log.name", ""}}), HasSubstr("want a text that is not empty"));
  // The upper limit is named where it matters.
  EXPECT_EQ(message_of("[model]\ndim = 2000000000\n"),
            "[config] model.dim = 2000000000, want an integer >= 1 and <= 1073741824 (a.toml:2)");
  EXPECT_EQ(message_of("", {{"train.seed", "5000000000"}}),
            "[config] train.seed = 5000000000, want an integer >= 0 and <= 1073741824 (command line)");
  EXPECT_EQ(message_of("", {{"train.seed", "99999999999999999999"}}),
            "[config] train.seed = 99999999999999999999, want an integer >= 0 and <= 1073741824 (command line)");
}

TEST(TrainConfig, ValuesThatContradictEachOther) {
  EXPECT_EQ(message_of("[model]\ndim = 130\n"), "[config] model.dim = 130, want a multiple of model.n_heads = 4 (a.toml:2)");
  EXPECT_THAT(message_of("[model]\ndim = 12\n"), HasSubstr("model.dim / model.n_heads = 3, want an even number"));
  EXPECT_THAT(message_of("[model]\nn_kv_heads = 3\n"), HasSubstr("want a divisor of model.n_heads = 4 (a.toml:2)"));
  EXPECT_THAT(message_of("[model]\nvocab_size = 255\n"), HasSubstr("want at least the 256 tokens"));
  EXPECT_THAT(message_of("[data]\nseq_len = 1024\n"), HasSubstr("want at most model.max_seq_len = 256 (a.toml:2)"));
  EXPECT_THAT(message_of("[train]\nmax_steps = 0\n"), HasSubstr("both 0, want at least one limit (a.toml:2)"));
  EXPECT_THAT(message_of("[parallel]\ndp_shard = 0\n"), HasSubstr("want -1 or an integer >= 1 (a.toml:2)"));
  EXPECT_THAT(message_of("[parallel]\nzero_level = 1\nreshard_ranks = 2\n"),
              HasSubstr("parallel.reshard_ranks, memory_budget_mb and zero_level all say what stays after forward"));
  EXPECT_THAT(message_of("[parallel]\ncomm_fusion = false\n"), HasSubstr("want the layout \"per_parameter\" with it"));
  EXPECT_THAT(message_of("[parallel]\nlayout = \"per_parameter\"\ncomm_fusion = false\nbucket_mb = 1\n"),
              HasSubstr("parallel.bucket_mb limits what comm_fusion = false does not make"));
  EXPECT_THAT(message_of("[log]\nname = '../x'\n"), HasSubstr("want a plain folder name (a.toml:2)"));
}

/// Every pair of settings of which one would overrule the other.
TEST(TrainConfig, WaysOfShardingThatContradictEachOther) {
  const auto message = [](const std::vector<std::string>& lines) {
    std::string text = "[parallel]\n";
    for (const std::string& line : lines) text += line + "\n";
    return message_of(text);
  };
  const std::string ranks = "reshard_ranks = 2", budget = "memory_budget_mb = 1", keep = "reshard_after_forward = false";
  const auto zero = [](int level) { return "zero_level = " + std::to_string(level); };
  for (const auto& pair : {std::pair(ranks, budget), std::pair(ranks, zero(3)), std::pair(budget, zero(1))})
    EXPECT_THAT(message({pair.first, pair.second}), HasSubstr("all say what stays after forward, want one of them ("));
  EXPECT_EQ(
      message({keep, ranks}),
      "[config] parallel.reshard_after_forward = false with parallel.reshard_ranks, which says how much is freed, want one of "
      "them (a.toml:2, a.toml:3)");
  EXPECT_EQ(
      message({budget, keep}),
      "[config] parallel.reshard_after_forward = false with parallel.memory_budget_mb, which says how much is freed, want one "
      "of them (a.toml:3, a.toml:2)");
  const std::vector<std::string> accumulations = {"local", "partial", "each"};
  for (int level = 1; level <= 3; ++level) {
    const bool frees = level == 3;
    for (const bool said : {false, true}) {
      const std::string text = said ? "true" : "false", meant = frees ? "true" : "false";
      EXPECT_EQ(message({"reshard_after_forward = " + text, zero(level)}),
                said == frees ? "no error"
                              : "[config] parallel.reshard_after_forward = " + text + ", want " + meant +
                                    " or nothing with parallel.zero_level = " + std::to_string(level) + " (a.toml:2, a.toml:3)");
    }
    const std::string& meant = accumulations[static_cast<std::size_t>(level) - 1];
    for (const std::string& said : accumulations)
      EXPECT_EQ(message({zero(level), "accumulation = \"" + said + "\""}),
                said == meant
                    ? "no error"
                    : "[config] parallel.accumulation = \"" + said + "\", want \"" + meant +
                          "\" or nothing with parallel.zero_level = " + std::to_string(level) + " (a.toml:3, a.toml:2)");
  }
  EXPECT_EQ(message({"reshard_after_forward = true", ranks}), "no error");
  EXPECT_EQ(message({budget, "accumulation = \"each\"", "reshard_after_forward = true"}), "no error");
  EXPECT_EQ(message({"memory_budget_mb = 1e-7"}),
            "[config] parallel.memory_budget_mb = 1e-07, want 0 or at least 1e-06, one byte (a.toml:2)");
  EXPECT_THAT(message({"bucket_mb = 1e-9"}), HasSubstr("parallel.bucket_mb = 1e-09, want 0 or at least 1e-06"));
}

/// What a level stands for is written out, so that a saved configuration says it and can be read again.
TEST(TrainConfig, ZeroLevelsAreWrittenOut) {
  for (const int level : {1, 2, 3}) {
    const Config c = parse_config("", "a.toml", {{"parallel.zero_level", std::to_string(level)}});
    EXPECT_EQ(c.parallel.reshard_after_forward, level == 3);
    EXPECT_EQ(c.parallel.accumulation, level == 1 ? "local" : level == 2 ? "partial" : "each");
    EXPECT_EQ(accumulation_of(c.parallel), c.parallel.accumulation);
    EXPECT_EQ(to_toml(parse_config(to_toml(c), "b.toml")), to_toml(c));
  }
  EXPECT_EQ(accumulation_of({.accumulation = "partial"}), "partial");
}

TEST(TrainConfig, TracedSteps) {
  const auto steps = [](const std::string& text) {
    return traced_steps(parse_config("[train]\ntrace_steps = '" + text + "'\n", "a.toml"));
  };
  EXPECT_EQ(traced_steps(Config{}), std::pair(int64_t{3}, int64_t{5}));
  EXPECT_EQ(steps("7"), std::pair(int64_t{7}, int64_t{7}));
  EXPECT_EQ(steps("2-2"), std::pair(int64_t{2}, int64_t{2}));
  EXPECT_EQ(steps("10-200"), std::pair(int64_t{10}, int64_t{200}));
  EXPECT_EQ(steps("all"), std::pair(int64_t{1}, std::numeric_limits<int64_t>::max()));
  for (const char* bad : {"", "0", "5-3", "3-", "-3", "1-2-3", "3 - 5", "x", "99999999999999999999"})
    EXPECT_EQ(message_of(std::string("[train]\ntrace_steps = '") + bad + "'\n"),
              std::string("[config] train.trace_steps = \"") + bad + "\", want a step, a range like 3-5, or all (a.toml:2)");
}

TEST(TrainConfig, TheLossIsScaledForFloat16) {
  const auto scales = [](const std::string& text) { return scales_loss(parse_config("[precision]\n" + text, "a.toml")); };
  EXPECT_FALSE(scales(""));
  EXPECT_FALSE(scales("param_dtype = \"bfloat16\"\n"));
  EXPECT_TRUE(scales("param_dtype = \"float16\"\n"));
  EXPECT_TRUE(scales("reduce_dtype = \"float16\"\n"));
  EXPECT_TRUE(scales("loss_scale = 8.0\n"));
}

TEST(TrainConfig, ActivationCheckpoint) {
  EXPECT_EQ(checkpoint_every(parse_config("", "a.toml").train.activation_checkpoint), 0);
  EXPECT_EQ(checkpoint_every("block"), 1);
  EXPECT_EQ(
      checkpoint_every(parse_config("[train]\nactivation_checkpoint = \"block:4\"\n", "a.toml").train.activation_checkpoint), 4);
  for (const char* text :
       {"", "all", "Block", "block:", "block:0", "block:-1", "block:2x", "block: 2", "block:99999999999999999999"})
    EXPECT_EQ(message_of("", {{"train.activation_checkpoint", text}}),
              std::string("[config] train.activation_checkpoint = \"") + text +
                  "\", want none, block, or block:N with an integer N >= 1 (command line)");
  EXPECT_EQ(message_of("[train]\nactivation_checkpoint = \"block:5\"\n"),
            "[config] train.activation_checkpoint = \"block:5\", want at most model.n_layers = 4 blocks (a.toml:2)");
}

TEST(TrainConfig, DamagedDocumentsGiveAnErrorOrAConfiguration) {
  const std::string text = to_toml(parse_config("[sample]\nprompts = [\"a\", 'b']\n", "a.toml"));
  std::mt19937_64 random(5);
  const std::string bytes("[]{}=\"'.\n#\\0-e\xff\x00_,", 19);
  int errors = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string damaged = text;
    for (int i = 0; i < 3; ++i) {
      const std::size_t at = random() % damaged.size();
      if (random() % 2 == 0)
        damaged[at] = bytes[random() % bytes.size()];
      else
        damaged.erase(at, random() % 20);
    }
    try {
      (void)parse_config(damaged, "a.toml");
    } catch (const ValueError& error) {
      ++errors;
      EXPECT_THAT(error.what(), HasSubstr("[config] "));
    }
  }
  EXPECT_GT(errors, 100);
  EXPECT_THAT(message_of("[model]\nx = " + std::string(100000, '[')), HasSubstr("(a.toml:2)"));
}

TEST(TrainConfig, MissingFile) {
  try {
    (void)load_config("/no/such/file.toml");
    FAIL();
  } catch (const ValueError& error) {
    EXPECT_STREQ(error.what(), "[config] cannot read /no/such/file.toml, want a TOML file (command line)");
  }
  EXPECT_THROW((void)load_config("/"), ValueError);
}

TEST(TrainConfig, BatchesFollowTheWorld) {
  const Config c = parse_config("[train]\nbatch_size = 12\nmicro_batch_size = 2\n[parallel]\ndp_replicate = 2\n", "a.toml");
  const BatchPlan plan = plan_batches(c, 2);
  EXPECT_EQ(plan.dp_replicate, 2);
  EXPECT_EQ(plan.dp_shard, 1);
  EXPECT_EQ(plan.micro_batch, 2);
  EXPECT_EQ(plan.accumulation, 3);
  const Config automatic = parse_config("[train]\nbatch_size = 12\n", "a.toml");
  EXPECT_EQ(plan_batches(automatic, 4).micro_batch, 3);
  EXPECT_EQ(plan_batches(automatic, 4).accumulation, 1);
  EXPECT_EQ(plan_batches(automatic, 4).dp_shard, 4);
}

std::string plan_message(const std::string& text, int world) {
  const Config config = parse_config(text, "a.toml");
  try {
    (void)plan_batches(config, world);
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no error";
}

TEST(TrainConfig, WorldsThatDoNotFit) {
  EXPECT_EQ(plan_message("[parallel]\ndp_shard = 4\n", 2),
            "[parallel] dp_replicate * dp_shard = 1 * 4, want the world size 2 (a.toml:2)");
  EXPECT_EQ(plan_message("[parallel]\ndp_replicate = 3\n", 4),
            "[parallel] dp_replicate = 3, want a divisor of the world size 4 (a.toml:2)");
  EXPECT_EQ(plan_message("[train]\nbatch_size = 8\n[parallel]\nreshard_ranks = 2\ndp_replicate = 2\n", 4), "no error");
  EXPECT_EQ(plan_message("[train]\nbatch_size = 8\n[parallel]\nreshard_ranks = 4\ndp_replicate = 2\n", 4),
            "[parallel] reshard_ranks = 4, want a divisor of dp_shard = 2 (a.toml:4)");
  EXPECT_EQ(plan_message("[parallel]\nreshard_ranks = 3\n", 4),
            "[parallel] reshard_ranks = 3, want a divisor of dp_shard = 4 (a.toml:2)");
  EXPECT_EQ(plan_message("[train]\nbatch_size = 5\n", 2),
            "[train] batch_size = 5, want a multiple of the world size 2 (a.toml:2)");
  EXPECT_EQ(plan_message("[train]\nbatch_size = 8\nmicro_batch_size = 3\n", 2),
            "[train] micro_batch_size = 3, want a divisor of the 4 sequences of each rank (a.toml:3)");
}

TEST(TrainConfig, ArrangementsOfRanks) {
  const std::string base = "[train]\nbatch_size = 24\n[parallel]\n";
  const auto plan = [&](const std::string& parallel, int world) {
    return plan_batches(parse_config(base + parallel + "[model]\nn_experts = 8\ntop_k = 2\nexpert_ffn_dim = 8\n", "a.toml"),
                        world);
  };
  const BatchPlan all = plan("dp_replicate = 2\ncp = 3\ntp = 2\nep = 6\n", 24);
  EXPECT_EQ(all.dp_shard, 2);
  EXPECT_EQ(all.data_ranks(), 4);
  EXPECT_EQ(all.world(), 24);
  EXPECT_EQ(all.expert_shard(), 2);
  EXPECT_EQ(all.micro_batch, 6);
  EXPECT_EQ(plan("tp = 4\nep = 4\n", 4).data_ranks(), 1);
  EXPECT_EQ(plan_message(base + "tp = 3\n", 4),
            "[parallel] dp_replicate * cp * tp = 1 * 1 * 3, want a divisor of the world size 4 (a.toml:4)");
  EXPECT_EQ(plan_message(base + "cp = 3\n", 4),
            "[parallel] dp_replicate * cp = 1 * 3, want a divisor of the world size 4 (a.toml:4)");
  EXPECT_EQ(plan_message(base + "cp = 2\ndp_shard = 4\n", 4),
            "[parallel] dp_replicate * dp_shard * cp = 1 * 4 * 2, want the world size 4 (a.toml:5)");
  EXPECT_EQ(plan_message("[train]\nbatch_size = 3\n[parallel]\ntp = 2\n", 4),
            "[train] batch_size = 3, want a multiple of dp_replicate * dp_shard = 1 * 2 (a.toml:2)");
  const std::string experts = base + "ep = 3\n[model]\nn_experts = 8\ntop_k = 2\nexpert_ffn_dim = 8\n";
  EXPECT_EQ(plan_message(experts, 4),
            "[parallel] ep = 3, want a divisor of dp_shard * cp = 4 * 1, the ranks that share one copy (a.toml:4)");
  EXPECT_EQ(plan_message(base + "cp = 2\nreshard_ranks = 3\n", 4),
            "[parallel] reshard_ranks = 3, want a divisor of dp_shard * cp = 2 * 2 (a.toml:5)");
  EXPECT_EQ(plan_message(base + "reshard_ranks = 4\nep = 2\n[model]\nn_experts = 8\ntop_k = 2\nexpert_ffn_dim = 8\n", 4),
            "[parallel] reshard_ranks = 4, want a divisor of the 2 ranks that share the same experts, dp_shard * cp * tp / ep "
            "(a.toml:4, a.toml:5)");
}

TEST(TrainConfig, Experts) {
  const Config c = parse_config("[model]\nn_experts = 4\ntop_k = 1\nexpert_ffn_dim = 8\nmoe_every = 2\n", "a.toml");
  EXPECT_FALSE(has_experts(c.model, 0));
  EXPECT_TRUE(has_experts(c.model, 1));
  EXPECT_FALSE(has_experts(Config{}.model, 1));
  EXPECT_EQ(to_toml(parse_config(to_toml(c), "b.toml")), to_toml(c));
  const std::vector<std::pair<std::string, std::string>> settings = {
      {"top_k", "1"},         {"expert_ffn_dim", "8"},    {"shared_ffn_dim", "8"},
      {"moe_every", "2"},     {"router", "\"sigmoid\""},  {"norm_topk_prob", "false"},
      {"route_scale", "2.0"}, {"aux_loss_weight", "0.1"}, {"bias_update_speed", "0.1"}};
  for (const auto& [key, value] : settings) {
    EXPECT_EQ(message_of("[model]\n" + key + " = " + value + "\nn_experts = 0\n"),
              "[config] model." + key +
                  " is about experts and model.n_experts = 0, want experts with it, or its default (a.toml:2, a.toml:3)");
  }
  EXPECT_EQ(
      message_of("[parallel]\nep = 2\n"),
      "[config] parallel.ep is about experts and model.n_experts = 0, want experts with it, or its default (a.toml:2, default)");
  EXPECT_EQ(message_of("[model]\nn_experts = 4\nexpert_ffn_dim = 8\n"),
            "[config] model.top_k = 0, want at least 1 and at most model.n_experts = 4 (default, a.toml:2)");
  EXPECT_EQ(message_of("[model]\nn_experts = 4\nexpert_ffn_dim = 8\ntop_k = 5\n"),
            "[config] model.top_k = 5, want at least 1 and at most model.n_experts = 4 (a.toml:4, a.toml:2)");
  EXPECT_EQ(message_of("[model]\nn_experts = 4\ntop_k = 1\n"),
            "[config] model.expert_ffn_dim = 0 with model.n_experts = 4, want the width of an expert (default, a.toml:2)");
  const std::string experts = "[model]\nn_experts = 4\ntop_k = 1\nexpert_ffn_dim = 8\n";
  EXPECT_EQ(message_of(experts + "moe_every = 5\n"),
            "[config] model.moe_every = 5, want at most model.n_layers = 4: no block would have experts (a.toml:5, default)");
  EXPECT_EQ(message_of(experts + "[parallel]\nep = 5\n"),
            "[config] parallel.ep = 5, want at most model.n_experts = 4 (a.toml:6, a.toml:2)");
  EXPECT_EQ(
      message_of("[parallel]\nsequence_parallel = true\n"),
      "[config] parallel.sequence_parallel = true with parallel.tp = 1, which leaves nothing to cut, want tp above 1 or false "
      "(a.toml:2, default)");
  EXPECT_THAT(message_of("[model]\nrouter = \"top\"\n"), HasSubstr("want one of softmax, sigmoid (a.toml:2)"));
}

}  // namespace
}  // namespace hyper_parallel::train
