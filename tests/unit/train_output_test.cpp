// Schedule, memory plan, metrics, step lines and the loss plot.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/train/loss_plot.h>
#include <hyper_parallel/train/memory_plan.h>
#include <hyper_parallel/train/metrics.h>
#include <hyper_parallel/train/progress.h>
#include <hyper_parallel/train/schedule.h>

#include "support/message_of.h"

namespace hyper_parallel::train {
namespace {

using ::testing::HasSubstr;

TEST(ScheduleTest, WarmsUpThenFollowsTheCosine) {
  const Schedule s{.lr = 1.0, .min_ratio = 0.1, .warmup_steps = 4, .max_steps = 104};
  EXPECT_DOUBLE_EQ(s.at(0), 0.25);
  EXPECT_DOUBLE_EQ(s.at(3), 1.0);
  EXPECT_DOUBLE_EQ(s.at(4), 1.0);
  EXPECT_DOUBLE_EQ(s.at(54), 0.55);
  EXPECT_NEAR(s.at(104), 0.1, 1e-12);
  EXPECT_NEAR(s.at(1000), 0.1, 1e-12);
  EXPECT_DOUBLE_EQ(s.progress(26, 0), 0.25);
}

TEST(ScheduleTest, ATimeBudgetAnnealsToo) {
  const Schedule s{.lr = 2.0, .min_ratio = 0.0, .warmup_steps = 2, .max_steps = 0, .max_seconds = 30};
  EXPECT_DOUBLE_EQ(s.at(1, 9), 2.0);
  EXPECT_DOUBLE_EQ(s.at(5, 20, 10), 1.0);
  EXPECT_NEAR(s.at(6, 30, 10), 0.0, 1e-12);
  EXPECT_NEAR(s.at(7, 31, 10), 0.0, 1e-12);
  const Schedule both{.lr = 1.0, .min_ratio = 0.0, .warmup_steps = 0, .max_steps = 100, .max_seconds = 100};
  EXPECT_DOUBLE_EQ(both.at(10, 50, 0), 0.5);  // the budget that ends sooner rules
  EXPECT_DOUBLE_EQ(both.progress(10, 50), 0.5);
  EXPECT_DOUBLE_EQ(both.progress(70, 50), 0.7);
}

TEST(ScheduleTest, OtherShapesFollowStepsAndTime) {
  Schedule s{.lr = 2.0, .shape = optim::LrShape::kLinear, .min_ratio = 0.5, .max_steps = 100, .max_seconds = 10};
  EXPECT_DOUBLE_EQ(s.at(50, 1), 1.5);
  EXPECT_DOUBLE_EQ(s.at(50, 8), 1.2);
  s.shape = optim::LrShape::kConstant;
  EXPECT_DOUBLE_EQ(s.at(99, 9.9), 2.0);
  s.shape = optim::LrShape::kWsd;
  s.decay_share = 0.5;
  EXPECT_DOUBLE_EQ(s.at(49, 1), 2.0);
  EXPECT_DOUBLE_EQ(s.at(75, 1), 1.5);
}

TEST(MemoryPlanTest, CountsTheDecoder) {
  const ModelConfig m{.dim = 8, .n_layers = 3, .n_heads = 2, .n_kv_heads = 1, .ffn_dim = 12, .vocab_size = 256};
  // Norms 2 * 8; q and o 2 * 64; k and v 2 * 8 * 4; three matrices of 8 * 12.
  const std::int64_t block = 16 + 128 + 64 + 288;
  const auto units = llama_units(m);
  ASSERT_EQ(units.size(), 5U);
  EXPECT_EQ(units[0].numel, 2048);
  EXPECT_EQ(units[1].numel, block);
  EXPECT_EQ(units[4].numel, 2056);
  EXPECT_EQ(parameter_count(m), 3 * block + 2048 + 2056);
  ModelConfig tied = m;
  tied.tied = true;
  EXPECT_EQ(parameter_count(tied), 3 * block + 2056);
}

TEST(MemoryPlanTest, AddsUp) {
  Config c;
  const EngineBytes engine{.shards = 1000, .gradients = 1000, .pool = 300, .optimizer_state = 2000};
  const MemoryPlan plan = plan_memory(c, {.dp_shard = 2, .micro_batch = 8}, engine);
  EXPECT_GT(plan.activations, 8 * c.data.seq_len * c.model.vocab_size * 8);
  EXPECT_EQ(plan.total(), 1000 + 1000 + 300 + 2000 + plan.activations);
  c.precision.param_dtype = "bfloat16";
  EXPECT_LT(plan_memory(c, {.dp_shard = 2, .micro_batch = 8}, {}).activations, plan.activations);

  c.model = {.dim = 8, .n_layers = 3, .n_heads = 2, .n_kv_heads = 1, .ffn_dim = 12, .vocab_size = 256};
  const std::int64_t matrices = 3 * (128 + 64 + 288), count = parameter_count(c.model);
  EXPECT_EQ(optimizer_bytes(c), 8 * count);
  c.optim.optimizer = "sgd";
  EXPECT_EQ(optimizer_bytes(c), 4 * count);
  c.optim.momentum = 0;
  EXPECT_EQ(optimizer_bytes(c), 0);
  c.optim.optimizer = "muon";
  EXPECT_EQ(optimizer_bytes(c), 8 * (count - matrices) + 4 * matrices);
  c.optim.state_dtype = "bfloat16";
  EXPECT_EQ(optimizer_bytes(c), 4 * (count - matrices) + 2 * matrices);
  c.optim.ema_decay = 0.9;
  EXPECT_EQ(optimizer_bytes(c), 4 * (count - matrices) + 2 * matrices + 4 * count);
}

/// Blocks that are computed again keep their input, and one of them is back at a time.
TEST(MemoryPlanTest, ActivationCheckpoint) {
  Config c;
  c.model.n_layers = 5;
  const auto activations = [&](const char* checkpoint) {
    c.train.activation_checkpoint = checkpoint;
    return plan_memory(c, {.micro_batch = 8}, {}).activations;
  };
  const std::int64_t token = 8 * c.data.seq_len * 4, input = token * c.model.dim;
  const std::int64_t block = token * (12 * c.model.dim + 4 * c.model.ffn_dim), none = activations("none");
  EXPECT_EQ(activations("block"), none - 4 * block + 5 * input);
  EXPECT_EQ(activations("block:2"), none - 2 * block + 3 * input) << "blocks 0, 2 and 4";
  EXPECT_EQ(activations("block:5"), none + input) << "only the first one, which is needed whole at last";
}

TEST(MemoryPlanTest, ExpertsAndCutsOfTheModel) {
  Config c;
  c.model = {.dim = 8,
             .n_layers = 2,
             .n_heads = 2,
             .n_kv_heads = 1,
             .ffn_dim = 12,
             .n_experts = 3,
             .top_k = 2,
             .expert_ffn_dim = 5,
             .shared_ffn_dim = 4,
             .moe_every = 2};
  const auto units = llama_units(c.model);
  ASSERT_EQ(units.size(), 5U);
  EXPECT_EQ(units[1].numel, 2 * 8 + 128 + 64 + 3 * 8 * 12);
  EXPECT_EQ(units[2].numel, 2 * 8 + 128 + 64 + 3 * 8 * 4 + 3 * 8);
  EXPECT_EQ(units[3].name, "layers.1.mlp.experts");
  EXPECT_EQ(units[3].numel, 3 * 3 * 8 * 5);
  // Muon: neither routers nor experts.
  const std::int64_t matrices = 2 * (128 + 64) + 288 + 96, count = parameter_count(c.model);
  c.optim.optimizer = "muon";
  EXPECT_EQ(optimizer_bytes(c), 8 * (count - matrices) + 4 * matrices);
  const auto activations = [&](const BatchPlan& batches) { return plan_memory(c, batches, {}).activations; };
  const std::int64_t whole = activations({.micro_batch = 4}), tokens = 4 * c.data.seq_len;
  EXPECT_EQ(whole, tokens * (4 * (10 * 8 + 2 * 4 + 4 * 12) + 4 * (10 * 8 + 2 * 4 + 4 * 4 + 2 * (4 * 8 + 4 * 5) + 3) + 256 * 12));
  EXPECT_LT(activations({.tp = 2, .micro_batch = 4}), whole);
  const std::int64_t cut = activations({.tp = 2, .micro_batch = 4});
  c.parallel.sequence_parallel = true;
  EXPECT_LT(activations({.tp = 2, .micro_batch = 4}), cut);
  EXPECT_LT(activations({.cp = 2, .micro_batch = 4}), whole * 6 / 10);
}

TEST(Format, Numbers) {
  EXPECT_EQ(format_bytes(640), "640 B");
  EXPECT_EQ(format_bytes(1500), "1.5 kB");
  EXPECT_EQ(format_bytes(999'900'000), "1.0 GB");
  EXPECT_EQ(format_bytes(123'000'000), "123 MB");
  EXPECT_EQ(format_seconds(125.4), "2:05");
  EXPECT_EQ(format_seconds(3725), "1:02:05");
  EXPECT_EQ(format_seconds(-1), "0:00");
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(123), "123");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123456), "-123,456");
}

TEST(Format, TablesNameEverySettingAndItsSource) {
  const Config c = parse_config("[model]\ndim = 64\n", "a.toml", {{"optim.lr", "0.5"}});
  const std::string table = settings_table(c);
  for (const FieldInfo& info : describe(c)) EXPECT_THAT(table, HasSubstr(info.key));
  EXPECT_THAT(table, ::testing::ContainsRegex("dim +64 +a.toml:2\n"));
  EXPECT_THAT(table, ::testing::ContainsRegex("lr +0.5 +command line\n"));
  const std::string memory = memory_table(c, plan_batches(c, 2), {.shards = 1000, .gradients = 1000, .pool = 300});
  EXPECT_THAT(memory, HasSubstr("one of 2 ranks (2 shards x 1 replicas)"));
  const BatchPlan axes{.dp_replicate = 2, .dp_shard = 3, .cp = 2, .tp = 4, .ep = 8};
  EXPECT_THAT(memory_table(c, axes, {}), HasSubstr("one of 48 ranks (6 shards x 2 replicas, cp 2, tp 4, ep 8)"));
  EXPECT_THAT(memory, HasSubstr("optimizer state"));
  EXPECT_THAT(memory, ::testing::Not(HasSubstr("checkpoint buffer")));
  const EngineBytes staged{.shards = 1000, .gradients = 1000, .pool = 300, .staging = 100'000'000};
  EXPECT_THAT(memory_table(c, plan_batches(c, 2), staged),
              ::testing::ContainsRegex("checkpoint buffer \\(about\\) +100 MB\n  total, without torch itself +139 MB"));
}

StepMetrics example() {
  return {.step = 20,
          .tokens = 4096,
          .epoch = 0.5,
          .loss = 2.5,
          .grad_norm = 1.25,
          .lr = 3e-4,
          .tokens_per_s = 12345.6,
          .step_ms = 33.2,
          .memory = 250'000'000,
          .elapsed_s = 60,
          .eta_s = 65};
}

TEST(Format, StepLineHoldsEverything) {
  EXPECT_EQ(step_line(example(), 100),
            "step     20/100  loss 2.5000  grad_norm 1.250  lr 3.00e-04   12,346 tokens/s    33.2 ms  250 MB  ETA 1:05");
}

TEST(ProgressTest, PlainLinesEveryNthStepAndNothingOnOtherRanks) {
  auto lines_of = [](bool enabled) {
    std::FILE* file = std::tmpfile();
    {
      Progress progress(enabled, 10, 100, file);
      progress.print("hello");
      StepMetrics metrics = example();
      for (metrics.step = 1; metrics.step <= 25; ++metrics.step) progress.step(metrics, 0.25, metrics.step == 25);
    }
    std::rewind(file);
    std::string text;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
    std::fclose(file);
    return text;
  };
  const std::string text = lines_of(true);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);  // hello, 1, 10, 20, 25
  EXPECT_EQ(text.find('\r'), std::string::npos);
  EXPECT_THAT(text, HasSubstr("step     25/100"));
  EXPECT_EQ(lines_of(false), "");
}

TEST(MetricsTest, WritesOneObjectPerLine) {
  const std::filesystem::path file = std::filesystem::path(::testing::TempDir()) / "hp_metrics_test.jsonl";
  {
    MetricsFile metrics(file);
    StepMetrics m = example();
    metrics.write(m);
    m.loss = std::numeric_limits<double>::quiet_NaN();
    metrics.write(m);
    metrics.write_validation(20, 1.75, 0.5);
  }
  std::ifstream in(file);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(lines[0]["step"], 20);
  EXPECT_EQ(lines[0]["loss"], 2.5);
  EXPECT_EQ(lines[0]["memory"], 250'000'000);
  EXPECT_TRUE(lines[1]["loss"].is_null());
  EXPECT_EQ(lines[2]["val_loss"], 1.75);
  std::filesystem::remove(file);
  EXPECT_EQ(testing::message_of<Error>([] { return MetricsFile("/no/such/folder/metrics.jsonl"); }),
            "[log] cannot write /no/such/folder/metrics.jsonl: No such file or directory");
  EXPECT_EQ(testing::message_of<Error>([] { MetricsFile("/dev/full").write_validation(1, 2, 3); }),
            "[log] cannot write /dev/full: No space left on device");
  EXPECT_NO_THROW(MetricsFile().write(example()));
  EXPECT_GT(resident_bytes(), 1'000'000);
}

// Checks the tags of a document without declarations and comments: balanced, attributes quoted, no stray '<' or '&'.
bool well_formed(const std::string& xml, int* elements) {
  std::vector<std::string> open;
  std::size_t i = 0;
  while ((i = xml.find('<', i)) != std::string::npos) {
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return false;
    const std::string tag = xml.substr(i + 1, end - i - 1);
    if (tag.empty() || tag.find('<') != std::string::npos || std::count(tag.begin(), tag.end(), '"') % 2 != 0) return false;
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" /", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != name) return false;
      open.pop_back();
    } else {
      ++*elements;
      if (tag.back() != '/') open.push_back(name);
    }
    i = end;
  }
  for (i = 0; (i = xml.find('&', i)) != std::string::npos; ++i)
    if (xml.compare(i, 4, "&lt;") != 0 && xml.compare(i, 4, "&gt;") != 0 && xml.compare(i, 5, "&amp;") != 0) return false;
  return open.empty();
}

TEST(LossPlotTest, IsWellFormed) {
  LossPlot plot{.title = "a <b> & c"};
  for (int i = 1; i <= 5000; ++i) plot.train.push_back({static_cast<double>(i), 5.0 / std::sqrt(i)});
  plot.train[7].y = std::numeric_limits<double>::infinity();
  plot.validation = {{0, 5.5}, {2500, 1.0}, {5000, 0.5}};
  const std::string svg = to_svg(plot);
  int elements = 0;
  EXPECT_TRUE(well_formed(svg, &elements)) << svg;
  EXPECT_GT(elements, 20);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_LT(svg.size(), 100'000U);
  EXPECT_THAT(svg, HasSubstr("a &lt;b&gt; &amp; c"));
  EXPECT_THAT(svg, HasSubstr("validation"));
}

TEST(LossPlotTest, FewOrNoPointsDraw) {
  for (const LossPlot& plot :
       {LossPlot{}, LossPlot{.title = "one", .train = {{3, 2}}}, LossPlot{.validation = {{0, 0}, {1, 0}}}}) {
    const std::string svg = to_svg(plot);
    int elements = 0;
    EXPECT_TRUE(well_formed(svg, &elements));
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
  }
}

}  // namespace
}  // namespace hyper_parallel::train
