// hp-plan against what hp-train announces, and its errors.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proc/hp_train_run.h"

namespace hyper_parallel {
namespace {

using ::testing::HasSubstr;
using testing::Process;

struct Outcome {
  int code = 0;
  std::string output;
};

/// The lines from "Model" to "the same without sharding".
std::string table_of(const std::string& output) {
  const std::size_t begin = output.find("Model      "), last = output.find("the same without sharding");
  if (begin == std::string::npos || last == std::string::npos) return "no table in:\n" + output;
  return output.substr(begin, output.find('\n', last) - begin);
}

class HpPlan : public HpTrainRun {
 protected:
  HpPlan() : HpTrainRun("[train]\nmax_steps = 1\nbatch_size = 8\n[log]\n") {}

  [[nodiscard]] Outcome plan(const std::vector<std::string>& more) const {
    Process process(HP_PLAN, arguments(more), {{"OMP_NUM_THREADS", "1"}});
    Outcome outcome;
    outcome.code = process.wait(std::chrono::seconds(60));
    outcome.output = process.output();
    return outcome;
  }
  /// What rank 0 of hp-train prints.
  [[nodiscard]] std::string announced(int world, const std::vector<std::string>& more, const char* samehost) const {
    std::vector<Process> ranks =
        testing::start_ranks(world, HP_TRAIN, arguments(more), {{"OMP_NUM_THREADS", "1"}, {"HP_SAMEHOST", samehost}});
    for (Process& rank : ranks) EXPECT_EQ(rank.wait(std::chrono::seconds(60)), 0) << rank.output();
    return ranks[0].output();
  }
};

TEST_F(HpPlan, SaysWhatARunAnnounces) {
  struct Case {
    int world;
    std::vector<std::string> options;
  };
  const Case cases[] = {
      {1, {}},
      {2, {"--parallel.layout=ragged", "--optim.ema_decay=0.9"}},
      {2,
       {"--parallel.layout=per_parameter", "--precision.param_dtype=bfloat16", "--checkpoint.every=1", "--optim.ema_decay=0.9"}},
      {4, {"--parallel.dp_replicate=2", "--train.micro_batch_size=1", "--parallel.accumulation=partial"}},
      {4, {"--parallel.tp=2", "--model.n_experts=4", "--model.top_k=2", "--model.expert_ffn_dim=24", "--parallel.ep=2"}}};
  for (const Case& c : cases) {
    std::vector<std::string> options = c.options;
    options.insert(options.begin(), {"--ranks=" + std::to_string(c.world), "--rank=0"});
    const Outcome planned = plan(options);
    EXPECT_EQ(planned.code, 0) << planned.output;
    EXPECT_THAT(planned.output, HasSubstr("That is rank 0")) << "hp-train announces rank 0";
    EXPECT_EQ(table_of(planned.output), table_of(announced(c.world, c.options, "1"))) << ::testing::PrintToString(c.options);
    EXPECT_THAT(planned.output, HasSubstr("PLAN ranks=" + std::to_string(c.world) + " host_bytes="));
  }
}

/// A number behind a name of the line for scripts.
std::int64_t number_of(const std::string& output, const std::string& name) {
  const std::size_t at = output.find(name + '=', output.find("PLAN "));
  return at == std::string::npos ? -1 : std::stoll(output.substr(at + name.size() + 1));
}

TEST_F(HpPlan, AnyRankOrTheOneThatNeedsMost) {
  const Outcome most = plan({"--ranks=3", "--train.batch_size=9"});
  EXPECT_THAT(most.output, HasSubstr(", which needs most"));
  std::int64_t largest = 0, sum = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const Outcome one = plan({"--ranks=3", "--train.batch_size=9", "--rank=" + std::to_string(rank)});
    EXPECT_EQ(one.code, 0) << one.output;
    EXPECT_THAT(one.output, HasSubstr("That is rank " + std::to_string(rank)));
    const std::int64_t bytes = number_of(one.output, "rank_bytes");
    EXPECT_EQ(one.output.find(", which needs most") != std::string::npos, bytes == number_of(most.output, "rank_bytes"));
    EXPECT_EQ(number_of(one.output, "host_bytes"), number_of(most.output, "host_bytes"));
    largest = std::max(largest, bytes);
    sum += bytes;
  }
  EXPECT_EQ(number_of(most.output, "rank_bytes"), largest);
  EXPECT_EQ(number_of(most.output, "host_bytes"), sum);
}

TEST_F(HpPlan, WithoutSharedMemory) {
  const std::vector<std::string> wide = {"--model.dim=128", "--model.ffn_dim=256", "--parallel.layout=ragged"};
  std::vector<std::string> options = wide;
  options.insert(options.begin(), {"--ranks=2", "--network"});
  const Outcome planned = plan(options);
  EXPECT_EQ(planned.code, 0) << planned.output;
  EXPECT_EQ(table_of(planned.output), table_of(announced(2, wide, "0")));
  EXPECT_NE(table_of(planned.output), table_of(announced(2, wide, "1"))) << "mapped shards take less";
}

TEST_F(HpPlan, ManyRanksInOneProcess) {
  const Outcome planned = plan({"--ranks=1024", "--network", "--rank=1023", "--train.batch_size=1024"});
  EXPECT_EQ(planned.code, 0) << planned.output;
  EXPECT_THAT(planned.output, HasSubstr("one of 1024 ranks"));
  EXPECT_THAT(planned.output, HasSubstr("That is rank 1023\nPLAN ranks=1024 rank_bytes="));
}

TEST_F(HpPlan, RefusesWhatMakesNoSense) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--ranks=0"}, "--ranks is 0, want at least 1"},
      {{"--ranks=65"}, "--ranks is 65, want at most 64 on one host, or --network"},
      {{"--ranks=1000000000", "--network"}, "--ranks is 1000000000, want at most 1048576"},
      {{"--ranks=2", "--rank=2"}, "--rank is 2, want 0 to 1"},
      {{"--ranks=2", "--network", "--rank=2"}, "--rank is 2, want 0 to 1"},
      {{"--ranks=3"}, "batch_size = 8, want a multiple of the world size 3"},
      {{"--ranks=two"}, "--ranks"},
      {{"--model.dim=33"}, "model.dim"},
      {{"--model.width=33"}, "width"},
      {{"there"}, "unexpected argument there"}};
  for (const auto& [options, text] : cases) {
    const Outcome outcome = plan(options);
    EXPECT_EQ(outcome.code, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("hp-plan: error: [")) << ::testing::PrintToString(options);
    EXPECT_THAT(outcome.output, HasSubstr(text));
  }
}

/// Of hp-train, too: who redirects it wants all of it.
TEST_F(HpPlan, OutputThatCannotBeWritten) {
  const std::pair<const char*, const char*> commands[] = {{HP_PLAN, "--version"}, {HP_TRAIN, "--print-config"}};
  for (const auto& [program, option] : commands) {
    Process process("/bin/sh", {"-c", "exec \"$0\" \"$1\" > /dev/full", program, option}, {{"OMP_NUM_THREADS", "1"}});
    EXPECT_EQ(process.wait(std::chrono::seconds(60)), 1);
    EXPECT_THAT(process.output(), HasSubstr("] cannot write the output")) << program;
  }
}

}  // namespace
}  // namespace hyper_parallel
