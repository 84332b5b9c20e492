// hp-train --resume as a user meets it: exit codes, SIGTERM, and torchrun that starts the ranks again.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "proc/hp_train_run.h"

namespace hyper_parallel {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Process;

class HpResume : public HpTrainRun {
 protected:
  HpResume()
      : HpTrainRun(
            "[train]\nbatch_size = 12\nmax_steps = 300\neval_every = 0\neval_windows = 4\n[optim]\nlr = 3e-3\nwarmup_steps = 2\n"
            "[parallel]\ntimeout_seconds = 30\n[checkpoint]\nevery = 40\nkeep_last = 0\n[log]\nevery = 100\n") {}
  /// All ranks' exit codes must be `code`; their output.
  static std::string finish(std::vector<Process> ranks, int code = 0) {
    std::string output;
    for (Process& rank : ranks) {
      EXPECT_EQ(rank.wait(60s), code) << rank.output();
      output += rank.output();
    }
    return output;
  }
  void wait_for(const fs::path& path) const {
    for (int i = 0; i < 6000 && !fs::exists(path); ++i) std::this_thread::sleep_for(10ms);
    ASSERT_TRUE(fs::exists(path)) << path;
  }
  static void expect_near(const std::vector<double>& got, const std::vector<double>& want, double tolerance) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << "step " << i + 1;
  }
};

TEST_F(HpResume, SigtermSavesAndExitsWithZeroAndOthersGoOn) {
  finish(start(2, {"--log.name=whole"}));
  const std::vector<double> whole = losses("whole");
  ASSERT_EQ(whole.size(), 300U);
  // Two ranks are stopped, then four, and three go on to the end. One rank gets the signal, all of them stop.
  const fs::path saves = dir_ / "runs/moved/checkpoints";
  std::vector<Process> two = start(2, {"--log.name=moved", "--resume"});
  wait_for(saves / "step-00000040/checkpoint.json");
  two[1].kill(SIGTERM);
  const std::string first = finish(std::move(two));
  EXPECT_THAT(first, HasSubstr("Resume     no checkpoint yet, from the beginning"));
  EXPECT_THAT(first, HasSubstr("STOPPED step="));
  EXPECT_THAT(first, Not(HasSubstr("RESULT")));
  EXPECT_FALSE(fs::exists(dir_ / "runs/moved/result.txt"));
  const std::size_t reached = losses("moved").size();
  ASSERT_LT(reached, 200U);
  std::vector<Process> four = start(4, {"--log.name=moved", "--resume"});
  ASSERT_TRUE(four[0].wait_for_output("Transport", 60s)) << four[0].output();
  four[0].kill(SIGTERM);
  const std::string second = finish(std::move(four));
  EXPECT_THAT(second, HasSubstr("saved by 2 rank(s)"));
  EXPECT_THAT(second, HasSubstr("STOPPED step="));
  ASSERT_LT(losses("moved").size(), 300U);
  const std::string third = finish(start(3, {"--log.name=moved", "--resume"}));
  EXPECT_THAT(third, HasSubstr("saved by 4 rank(s)"));
  EXPECT_THAT(third, HasSubstr("RESULT world=3"));
  expect_near(losses("moved"), whole, 0.05);
}

TEST_F(HpResume, MistakesAreOneLine) {
  finish(start(2, {"--log.name=m", "--train.max_steps=5"}));
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"--model.rope_theta=500", "model.rope_theta = 500 (command line), want 10000 as in the checkpoint (default of that run)"},
      {"--optim.optimizer=sgd", "optim.optimizer = \"sgd\" (command line), want \"adamw\" as in the checkpoint (default"},
      {"--train.batch_size=24",
       "train.batch_size = 24 (command line), want 12 as in the checkpoint (" + (dir_ / "config.toml").string() + ":11 of"}};
  for (const auto& [argument, message] : refused) {
    const std::string output = finish(start(2, {"--log.name=m", "--resume", argument}), 1);
    EXPECT_THAT(output, AllOf(HasSubstr("hp-train: error: [resume] "), HasSubstr(message)));
    EXPECT_EQ(std::count(output.begin(), output.end(), '\n'), 1) << output;
  }
  write_text(1);
  const std::string other = finish(start(2, {"--log.name=m", "--resume"}), 1);
  EXPECT_THAT(other, AllOf(HasSubstr("step-00000005: the text has checksum "), HasSubstr("text of the run that was saved")));
  EXPECT_EQ(std::count(other.begin(), other.end(), '\n'), 1) << other;
  write_text(0);
  testing::set_file_text(dir_ / "file", "");
  EXPECT_THAT(finish(start(2, {"--log.name=f", "--checkpoint.dir=" + (dir_ / "file").string(), "--train.max_steps=7"}), 1),
              HasSubstr("hp-train: error: [run] cannot create the folder "));
}

TEST_F(HpResume, ChangesAndFoldersThatAreNoCheckpointsAreTold) {
  finish(start(2, {"--log.name=c", "--train.max_steps=10", "--checkpoint.every=5"}));
  const fs::path saves = dir_ / "runs/c/checkpoints";
  fs::remove(saves / "step-00000010/checkpoint.json");
  testing::set_file_text(saves / "step-00000010/notes.txt", "mine");
  const std::string output = finish(start(2, {"--log.name=c", "--resume", "--train.max_steps=12", "--checkpoint.every=5",
                                              "--optim.lr=0.001", "--optim.schedule=wsd", "--parallel.layout=per_parameter"}));
  EXPECT_THAT(output,
              AllOf(HasSubstr("Resume     step 5 of "), HasSubstr("step-00000010 is passed over: it has no checkpoint.json\n"),
                    HasSubstr("           changed: train.max_steps 10 -> 12\n"), HasSubstr("changed: optim.lr 0.003 -> 0.001\n"),
                    HasSubstr("changed: optim.schedule \"cosine\" -> \"wsd\"\n"),
                    HasSubstr("changed: parallel.layout \"ragged\" -> \"per_parameter\"\n"),
                    HasSubstr("step-00000010.aside now\n"), Not(HasSubstr("changed: model"))));
  EXPECT_EQ(testing::file_text(saves / "step-00000010.aside/notes.txt"), "mine");
  EXPECT_TRUE(fs::exists(saves / "step-00000010/checkpoint.json"));
  EXPECT_EQ(losses("c").size(), 12U);
  fs::rename(saves / "step-00000010", saves / "step-00000500");
  EXPECT_THAT(finish(start(2, {"--log.name=c", "--resume", "--train.max_steps=11", "--checkpoint.every=5"})),
              AllOf(HasSubstr("Resume     step 12 of "),
                    HasSubstr("step-00000500 is passed over: it is the checkpoint of step 10, want 500 as its name says\n"),
                    HasSubstr("           nothing is left to train: the checkpoint has 12 step(s) and "),
                    HasSubstr(", train.max_steps = 11, "), HasSubstr("RESULT world=2")));
}

TEST_F(HpResume, ASecondRunInAFolderIsRefusedUntilTheFirstHasGone) {
  const std::vector<std::string> options = {"--log.name=l", "--train.max_steps=1000000", "--checkpoint.keep_last=1"};
  std::vector<Process> first = start(2, options);
  wait_for(dir_ / "runs/l/metrics.jsonl");
  const std::string refused = finish(start(2, options), 1);
  EXPECT_THAT(refused, HasSubstr("hp-train: error: [run] " + (dir_ / "runs/l").string() + " is in use by process " +
                                 std::to_string(first[0].pid()) + " on "));
  EXPECT_EQ(std::count(refused.begin(), refused.end(), '\n'), 1) << refused;
  for (Process& rank : first) rank.kill(SIGKILL);
  EXPECT_THAT(finish(start(2, {"--log.name=l", "--resume", "--train.max_steps=1"})), HasSubstr("RESULT world=2"));
}

/// Children of a process, from /proc.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> children;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    std::ifstream stat(entry.path() / "stat");
    std::string text;
    if (!std::getline(stat, text)) continue;
    const auto behind = text.rfind(')');  // the name may have spaces
    if (behind == std::string::npos) continue;
    std::istringstream rest(text.substr(behind + 1));
    char state = 0;
    pid_t its_parent = 0;
    if (rest >> state >> its_parent && its_parent == parent) children.push_back(static_cast<pid_t>(std::stol(text)));
  }
  return children;
}

TEST_F(HpResume, TorchrunStartsAgainAfterACrash) {
  finish(start(2, {"--log.name=whole", "--train.max_steps=400"}));
  const std::vector<double> whole = losses("whole");
  std::vector<std::string> command = {"--standalone", "--no-python", "--nproc-per-node", "2", "--max-restarts", "1", HP_TRAIN};
  for (const std::string& word : arguments({"--log.name=crashed", "--train.max_steps=400"})) command.push_back(word);
  Process agent(HP_TORCHRUN, command, {{"OMP_NUM_THREADS", "1"}});
  wait_for(dir_ / "runs/crashed/checkpoints/step-00000080/checkpoint.json");
  std::vector<pid_t> ranks;
  for (const pid_t child : children_of(agent.pid())) {
    std::ifstream name("/proc/" + std::to_string(child) + "/comm");
    std::string text;
    if (std::getline(name, text) && text == "hp-train") ranks.push_back(child);
  }
  ASSERT_EQ(ranks.size(), 2U);
  ASSERT_LT(losses("crashed").size(), 400U) << "the run was over before the crash";
  ::kill(ranks[1], SIGKILL);
  EXPECT_EQ(agent.wait(120s), 0) << agent.output();
  EXPECT_THAT(agent.output(), HasSubstr("Resume     step "));
  EXPECT_THAT(agent.output(), HasSubstr("RESULT world=2"));
  expect_near(losses("crashed"), whole, 0);
}

}  // namespace
}  // namespace hyper_parallel
