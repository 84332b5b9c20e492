// hp-train as a user starts it: exit codes, messages, files, one and two processes.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hyper_parallel/core/error.h>

#include "proc/hp_train_run.h"

namespace hyper_parallel {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Process;

struct Outcome {
  int code = 0;
  std::string output;  // of all ranks, one after the other
};

class HpTrain : public HpTrainRun {
 protected:
  HpTrain()
      : HpTrainRun(
            "[train]\nbatch_size = 8\nmax_steps = 6\neval_windows = 7\n[optim]\nlr = 1e-2\nwarmup_steps = 2\n"
            "[parallel]\ntimeout_seconds = 20\n[sample]\nprompts = ['verse ']\ntokens = 8\n[log]\nevery = 2\n") {}

  [[nodiscard]] static Outcome run_alone(const std::vector<std::string>& arguments) {
    Process process(HP_TRAIN, arguments, {{"OMP_NUM_THREADS", "1"}});
    const int code = process.wait(60s);
    return {code, process.output()};
  }
  [[nodiscard]] Outcome run(int world, const std::vector<std::string>& more = {}) const {
    if (world == 1) return run_alone(arguments(more));
    Outcome outcome;
    std::vector<Process> ranks = start(world, more);
    for (Process& rank : ranks) {
      const int code = rank.wait(60s);
      if (code != 0) outcome.code = code;
      outcome.output += rank.output();
    }
    return outcome;
  }
  // One line, on all ranks together, and exit code 1.
  static void expect_one_error(const Outcome& outcome, const std::string& message) {
    EXPECT_EQ(outcome.code, 1);
    EXPECT_THAT(outcome.output, HasSubstr("hp-train: error: "));
    EXPECT_THAT(outcome.output, HasSubstr(message));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }
};

TEST_F(HpTrain, OneAndTwoProcessesReachTheSameCurve) {
  const Outcome one = run(1, {"--log.name=one"}), two = run(2, {"--log.name=two"});
  ASSERT_EQ(one.code, 0) << one.output;
  ASSERT_EQ(two.code, 0) << two.output;
  for (const char* key : {"loss", "val_loss", "grad_norm"}) {
    const std::vector<double> a = losses("one", key), b = losses("two", key);
    ASSERT_EQ(a.size(), std::string(key) == "val_loss" ? 2U : 6U);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-4) << key << ' ' << i;
  }
  for (const char* name : {"config.toml", "metrics.jsonl", "loss.svg", "samples.txt"})
    EXPECT_TRUE(fs::exists(dir_ / "runs/two" / name));
  EXPECT_THAT(two.output, HasSubstr("Settings\n"));
  EXPECT_THAT(two.output, HasSubstr("Memory plan of one of 2 ranks"));
  EXPECT_THAT(two.output, HasSubstr("step      6/6  loss "));
  EXPECT_THAT(two.output, HasSubstr("--- sample 1 of 1 ---\nverse "));
  EXPECT_THAT(two.output, HasSubstr("\nRESULT world=2 val_loss_start="));
  EXPECT_THAT(two.output, Not(HasSubstr("\r")));
  std::size_t results = 0;
  for (std::size_t at = 0; (at = two.output.find("RESULT", at)) != std::string::npos; ++at) ++results;
  EXPECT_EQ(results, 1U);
}

/// Arrangements of up to six ranks and other settings, drawn from a seed. The same curve as one process has, dense and with
/// experts (balanced by bias, which unlike the balancing loss does not depend on how a step is cut into micro-batches).
TEST_F(HpTrain, DrawnArrangementsReachTheCurveOfOneProcess) {
  const std::vector<std::string> experts = {"--model.n_experts=5", "--model.top_k=2", "--model.expert_ffn_dim=12",
                                            "--model.shared_ffn_dim=9", "--model.bias_update_speed=0.01"};
  std::map<bool, std::string> reference = {{false, "dense"}, {true, "experts"}};
  ASSERT_EQ(run(1, {"--log.name=dense"}).code, 0);
  std::vector<std::string> alone = experts;
  alone.emplace_back("--log.name=experts");
  ASSERT_EQ(run(1, alone).code, 0);

  std::mt19937_64 random(11);
  const auto one_of = [&](const std::vector<std::string>& choices) { return choices[random() % choices.size()]; };
  const auto number = [&](const std::vector<int>& choices) { return choices[random() % choices.size()]; };
  for (int drawn = 0; drawn < 7;) {
    const bool moe = number({0, 1}) == 1;
    const int replicas = number({1, 1, 2}), shards = number({1, 2}), cp = number({1, 1, 2, 3}), tp = number({1, 2, 2, 3});
    const int world = replicas * shards * cp * tp, ep = moe ? number({1, 2, 3, 4}) : 1;
    if (world < 2 || world > 6 || shards * cp * tp % ep != 0) continue;
    const std::string name = concat("drawn", drawn++);
    std::vector<std::string> arguments = moe ? experts : std::vector<std::string>();
    const auto set = [&](const std::string& key, const auto& value) { arguments.push_back(concat("--", key, '=', value)); };
    set("log.name", name);
    set("parallel.dp_replicate", replicas);
    set("parallel.cp", cp);
    set("parallel.tp", tp);
    set("parallel.ep", ep);
    set("parallel.sequence_parallel", tp > 1 ? one_of({"true", "false"}) : "false");
    set("parallel.layout", one_of({"ragged", "per_parameter"}));
    set("parallel.accumulation", one_of({"local", "partial", "each"}));
    set("train.activation_checkpoint", one_of({"none", "block"}));
    set("train.micro_batch_size", one_of({"0", "1"}));
    std::string all;
    for (const std::string& argument : arguments) all += argument + ' ';
    SCOPED_TRACE(concat(world, " ranks: ", all));
    const Outcome outcome = run(world, arguments);
    ASSERT_EQ(outcome.code, 0) << outcome.output;
    for (const char* key : {"loss", "val_loss", "grad_norm", "tokens"}) {
      const std::vector<double> want = losses(reference[moe], key), got = losses(name, key);
      ASSERT_EQ(got.size(), want.size()) << key;
      for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 2e-4) << key << ' ' << i;
    }
  }
}

/// The line of rank 0 that says what moves the bytes of which group.
std::string transport_line(const std::string& output) {
  const auto at = output.find("Transport  ");
  return at == std::string::npos ? "none in: " + output : output.substr(at + 11, output.find('\n', at) - at - 11);
}

TEST_F(HpTrain, SaysWhatMovesTheBytesOfEveryGroup) {
  const auto line = [&](int world, std::vector<std::string> more) {
    more.insert(more.end(), {"--train.max_steps=1", "--train.eval_windows=1", "--parallel.layout=ragged"});
    const Outcome outcome = run(world, more);
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    return transport_line(outcome.output);
  };
  const std::vector<std::string> experts = {"--model.n_experts=4", "--model.top_k=2", "--model.expert_ffn_dim=12",
                                            "--parallel.ep=2"};
  EXPECT_EQ(line(1, {}), "none");
  EXPECT_EQ(line(4, {"--parallel.cp=2"}), "world: samehost, shards mapped; cp: samehost");
  EXPECT_EQ(line(4, {"--parallel.tp=2", "--parallel.dp_replicate=2"}), "dp_replicate: samehost; world: samehost; tp: samehost");
  EXPECT_EQ(line(4, {"--parallel.reshard_ranks=2"}), "world: samehost, shards mapped; world[0..1]: samehost");
  EXPECT_EQ(line(4, experts), "world: samehost, shards mapped; edp_shard: samehost, shards mapped; ep: samehost");
}

TEST_F(HpTrain, OnTwoHostsReplicasMeetOverTheNetwork) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make process spaces";
  auto ranks = testing::start_on_two_hosts(
      HP_TRAIN, arguments({"--parallel.layout=ragged", "--parallel.dp_replicate=2", "--train.max_steps=1"}),
      {{"OMP_NUM_THREADS", "1"}});
  for (Process& rank : ranks) EXPECT_EQ(rank.wait(60s), 0) << rank.output();
  EXPECT_EQ(transport_line(ranks[0].output()), "dp_shard: samehost, shards mapped; dp_replicate: gloo");
  for (const Process& rank : ranks) EXPECT_THAT(rank.output(), Not(HasSubstr("hyper_parallel warn")));
}

TEST_F(HpTrain, TheSavedConfigurationRepeatsTheRun) {
  ASSERT_EQ(run(1, {"--log.name=first", "--optim.lr", "0.003"}).code, 0);
  const Outcome again = run_alone({(dir_ / "runs/first/config.toml").string(), "--log.name=again"});
  ASSERT_EQ(again.code, 0) << again.output;
  EXPECT_EQ(losses("first", "loss"), losses("again", "loss"));
  EXPECT_EQ(losses("first", "lr")[1], 0.003);
}

TEST_F(HpTrain, WithoutValidationTheLastLineHasTheTrainingLoss) {
  const Outcome outcome = run(2, {"--log.name=none", "--data.validation_fraction=0"});
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, ::testing::ContainsRegex("\nRESULT world=2 loss_end=[0-9]\\.[0-9]+ tokens_per_s=[0-9]+\n"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("nan")));
  EXPECT_THAT(outcome.output, HasSubstr("no validation (data.validation_fraction = 0)"));
  EXPECT_THAT(testing::file_text(dir_ / "runs/none/result.txt"), ::testing::StartsWith("world=2 loss_end="));
}

TEST_F(HpTrain, HelpAndPrintConfig) {
  const Outcome help = run_alone({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.output, HasSubstr("--model.dim"));
  EXPECT_THAT(help.output, HasSubstr("--print-config"));
  const Outcome config = run(1, {"--print-config", "--model.dim=64", "--sample.prompts=['a', 'b']", "--parallel.dp_shard", "-1"});
  EXPECT_EQ(config.code, 0) << config.output;
  EXPECT_THAT(config.output, HasSubstr("\ndim = 64  #"));
  EXPECT_THAT(config.output, HasSubstr("\nprompts = [\"a\", \"b\"]  #"));
  EXPECT_THAT(config.output, HasSubstr("\ndp_shard = -1  #"));
  EXPECT_FALSE(fs::exists(dir_ / "runs"));
  EXPECT_THAT(run_alone({"--version"}).output, HasSubstr("hp-train "));
}

TEST_F(HpTrain, BadInputIsOneLineAndExitCodeOne) {
  const std::string toml = (dir_ / "config.toml").string();
  expect_one_error(run(1, {"--data.path=/no/such/file.txt"}), "[data] /no/such/file.txt: No such file or directory");
  std::ofstream(dir_ / "empty.txt").close();
  expect_one_error(run(1, {"--data.path=" + (dir_ / "empty.txt").string()}), "empty.txt: empty, want");
  expect_one_error(run_alone({}), "[data] data.path is not set, want a text file or folder (default)");
  expect_one_error(run_alone({toml, "--data.path"}), "--data.path: 1 required VALUE missing");
  expect_one_error(run(1, {"--train.batch_size=100000"}),
                   "want at least train.batch_size = 100000 for one batch (data.path: " + toml + ":8)");
  expect_one_error(run(1, {"--parallel.dp_shard=2"}),
                   "[parallel] dp_replicate * dp_shard = 1 * 2, want the world size 1 (command line)");
  expect_one_error(run(1, {"--model.dim=x"}), "[config] model.dim = x, want an integer >= 1 (command line)");
  expect_one_error(run(1, {"--model.width=3"}), "[config] unknown key --model.width, want one of dim, n_layers");
  expect_one_error(run(1, {"extra"}), "unexpected argument extra");
  expect_one_error(run_alone({"/no/such.toml"}), "[config] cannot read /no/such.toml");
  std::ofstream(toml, std::ios::app) << "\n[optim2]\n";
  expect_one_error(run(1), "[config] unknown section [optim2]");
  std::ofstream(toml) << "[model]\ndim = 32\nheads = 3\n";
  expect_one_error(run(1), "[config] unknown key heads in [model]");
  expect_one_error(run(1), "(" + toml + ":3)");
  std::ofstream(toml) << "[model]\n\ndim = -3\n";
  expect_one_error(run(1), "[config] model.dim = -3, want an integer >= 1 (" + toml + ":3)");
}

TEST_F(HpTrain, TwoRanksReportAMistakeOnce) {
  expect_one_error(run(2, {"--data.path=/no/such/file.txt"}), "[data] /no/such/file.txt: No such file or directory");
  expect_one_error(run(2, {"--train.batch_size=7"}),
                   "[train] batch_size = 7, want a multiple of the world size 2 (command line)");
  expect_one_error(run(2, {"--parallel.dp_shard=4"}), "want the world size 2 (command line)");
  expect_one_error(run(2, {"--model.width=3"}), "unknown key --model.width");
  expect_one_error(run(2, {"--log.dir=/dev/null/x"}), "[run] cannot create the folder /dev/null/x");
}

TEST_F(HpTrain, ARankThatDiesStopsTheOther) {
  std::vector<Process> ranks = start(2, {"--train.max_steps=1000000", "--train.eval_every=0"});
  ASSERT_TRUE(ranks[0].wait_for_output("step      2/", 60s)) << ranks[0].output();
  ranks[1].kill(SIGKILL);
  EXPECT_EQ(ranks[0].wait(40s), 1);
  // The operation, the peer, the unit or what else was under way, and who says it.
  EXPECT_THAT(ranks[0].output(), ::testing::ContainsRegex("hp-train: error: \\[[a-z_]+\\] peer rank 1 .*; .*\\(rank 0/2\\)"));
  EXPECT_EQ(ranks[1].wait(5s), 128 + SIGKILL);
}

}  // namespace
}  // namespace hyper_parallel
