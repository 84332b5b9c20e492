// hp-ckpt as a user starts it: exit codes, messages, what it writes, and its memory.
#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/hf/model.h>
#include <hyper_parallel/hf/tokenizer.h>
#include <hyper_parallel/train/hf_config.h>
#include <hyper_parallel/train/shard_llama.h>

#include "support/process.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"
#include "support/whole_state.h"
#include "unit/hf_peer.h"

namespace hyper_parallel::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int code = 0;
  std::string output;
};

Outcome run_ckpt(const std::vector<std::string>& arguments) {
  Process process(HP_CKPT, arguments, {{"OMP_NUM_THREADS", "1"}});
  Outcome outcome;
  outcome.code = process.wait(std::chrono::seconds(100));
  outcome.output = process.output();
  return outcome;
}

/// \param script may use $0, hp-ckpt, and $1, the argument
Outcome run_in_shell(const std::string& script, const std::string& argument) {
  Process process("/bin/sh", {"-c", script, HP_CKPT, argument}, {{"OMP_NUM_THREADS", "1"}});
  Outcome outcome;
  outcome.code = process.wait(std::chrono::seconds(100));
  outcome.output = process.output();
  return outcome;
}

const train::ModelConfig kModel{.dim = 16, .n_layers = 2, .n_heads = 2, .ffn_dim = 24, .vocab_size = 256, .max_seq_len = 32};

class HpCkpt : public ::testing::Test {
 protected:
  void SetUp() override {
    run_ranks(2, [&] {
      train::Llama model(kModel, 3);
      const HSDPModule root = train::fully_shard_llama(model, on_mesh({2}, ShardLayout::kRagged));
      const optim::AdamW optimizer(root, {.lr = 0.1});
      ckpt::StateDict state;
      state.add_model(root);
      state.add_optimizer(optimizer);
      state.add("position", torch::tensor(int64_t{5}));
      ckpt::save(path("step"), state, {.extra = "{\"note\": 1}"});
    });
    train::Config config;
    config.model = kModel;
    config.data.seq_len = 16;
    set_file_text(path("config.toml"), train::to_toml(config));
  }
  [[nodiscard]] std::string path(const std::string& name) const { return folder_.file(name); }
  void expect_error(const Outcome& outcome, const std::string& message) const {
    EXPECT_EQ(outcome.code, 2) << outcome.output;
    EXPECT_THAT(outcome.output, AllOf(HasSubstr("hp-ckpt: error: "), HasSubstr(message)));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }

  TempFolder folder_;
};

TEST_F(HpCkpt, Inspect) {
  const Outcome all = run_ckpt({"inspect", path("step")});
  EXPECT_EQ(all.code, 0);
  EXPECT_THAT(all.output, AllOf(HasSubstr("checkpoint, "), HasSubstr("format version 1, written by 2 ranks"),
                                HasSubstr("extra: {\"note\":1}"), HasSubstr("rank-00001.safetensors"), HasSubstr("    q_proj"),
                                HasSubstr("F32"), HasSubstr("(24, 16)"), HasSubstr("RaggedShard")));
  const Outcome top = run_ckpt({"inspect", "--depth", "1", path("step")});
  EXPECT_THAT(top.output, AllOf(HasSubstr("\nmodel "), HasSubstr("tensors"), Not(HasSubstr("q_proj"))));
  ckpt::SafetensorsWriter writer(path("odd.safetensors"), {{"a\nb\x1b", ckpt::Dtype::kU8, {1}}});
  writer.write("a\nb\x1b", std::vector<std::byte>(1));
  writer.finish();
  EXPECT_THAT(run_ckpt({"inspect", path("odd.safetensors")}).output, HasSubstr("\na\\x0ab\\x1b "));
}

TEST_F(HpCkpt, VerifyFindsDamage) {
  EXPECT_EQ(run_ckpt({"verify", path("step")}).code, 0);
  std::string text = file_text(path("step/rank-00000.safetensors"));
  text[text.size() - 9] = static_cast<char>(text[text.size() - 9] ^ 1);
  set_file_text(path("step/rank-00000.safetensors"), text);
  const Outcome damaged = run_ckpt({"verify", path("step")});
  EXPECT_EQ(damaged.code, 1);
  EXPECT_THAT(damaged.output, AllOf(HasSubstr("has checksum"), HasSubstr("DAMAGED"), HasSubstr(": 1 problem\n")));
  // Nothing is written from it, with checksums that would agree.
  expect_error(run_ckpt({"convert", path("step"), path("new")}), "has checksum");
  expect_error(run_ckpt({"reshard", path("step"), path("new"), "--ranks", "2"}), "has checksum");
  EXPECT_FALSE(fs::exists(path("new")));
  expect_error(run_ckpt({"verify", path("nothing")}), "does not exist");
  expect_error(run_ckpt({"verify", path("config.toml")}), "config.toml: is no safetensors file");
  fs::create_directory(path("empty"));
  expect_error(run_ckpt({"verify", path("empty")}), "holds neither checkpoint.json nor safetensors files");
  set_file_text(path("old.pt"), "\x80\x02");
  expect_error(run_ckpt({"verify", path("old.pt")}), "is pickled");
}

/// Of the source, and of what others have put into the target, nothing is lost.
TEST_F(HpCkpt, TargetsThatAreRefused) {
  set_file_text(path("step/notes.txt"), "mine");
  fs::create_directory_symlink(path("step"), path("link"));
  fs::create_directories(path("outer"));
  fs::copy(path("step"), path("outer/inner"));
  for (const char* target : {"step", "link", "outer/../step/."})
    expect_error(run_ckpt({"reshard", path("step"), path(target), "--ranks", "2", "--overwrite"}), "is the source");
  expect_error(run_ckpt({"convert", path("link"), path("step"), "--overwrite"}), "is the source");
  for (const char* target : {"step/sub", "link/sub/deeper"})
    expect_error(run_ckpt({"convert", path("step"), path(target)}), "lies in the source");
  expect_error(run_ckpt({"convert", path("outer/inner"), path("outer"), "--to", "hf", "--overwrite"}), "lies in the target");
  EXPECT_EQ(file_text(path("step/notes.txt")), "mine");
  EXPECT_FALSE(fs::exists(path("step/sub")));
  ASSERT_EQ(run_ckpt({"reshard", path("step"), path("new"), "--ranks", "2"}).code, 0);
  set_file_text(path("new/notes.txt"), "mine");
  expect_error(run_ckpt({"reshard", path("step"), path("new"), "--ranks", "3", "--overwrite"}), "/new holds notes.txt besides");
  EXPECT_EQ(ckpt::read_info(path("new")).world_size, 2);
  const std::vector<std::string> to_hf = {"convert", path("step"), path("hf"),          "--to",
                                          "hf",      "--config",   path("config.toml"), "--overwrite"};
  ASSERT_EQ(run_ckpt(to_hf).code, 0);
  ASSERT_EQ(run_ckpt(to_hf).code, 0) << "files that it writes may be there";
  set_file_text(path("hf/README.md"), "mine");
  expect_error(run_ckpt(to_hf), "/hf holds README.md besides what would be written, which is not overwritten");
  EXPECT_EQ(file_text(path("hf/README.md")), "mine");
  fs::remove(path("hf/README.md"));
  set_file_text(path("hf/generation_config.json"), "mine");
  expect_error(run_ckpt(to_hf), "/hf holds generation_config.json besides what would be written, which is not overwritten");
  EXPECT_EQ(file_text(path("hf/generation_config.json")), "mine");
  // The folder that one is in would be gone.
  ASSERT_TRUE(fs::remove(path("new/notes.txt")));
  for (const char* target : {".", "../new"})
    expect_error(
        run_in_shell("cd \"$1\" && exec \"$0\" reshard ../step " + std::string(target) + " --ranks 3 --overwrite", path("new")),
        "the current folder " + fs::canonical(path("new")).string() + " lies in the target ");
  EXPECT_EQ(ckpt::read_info(path("new")).world_size, 2);
  expect_error(run_ckpt({"convert", path("step"), ""}), "[hp-ckpt] target: is \"\", want a path");
  expect_error(run_ckpt({"inspect", ""}), "[hp-ckpt] path: is \"\", want a path");
}

TEST_F(HpCkpt, WhatTheCheckpointSaysComesBeforeTheFileBesideIt) {
  train::Config config;
  config.model = kModel;
  config.model.rope_theta = 500.0;
  config.data.seq_len = 16;
  fs::create_directories(path("run/checkpoints"));
  fs::copy(path("config.toml"), path("run/config.toml"));
  run_ranks(2, [&] {
    train::Llama model(config.model, 3);
    ckpt::StateDict state;
    state.add_model(train::fully_shard_llama(model, on_mesh({2}, ShardLayout::kRagged)));
    ckpt::save(path("run/checkpoints/step-1"), state, {.extra = nlohmann::json({{"config", train::to_toml(config)}}).dump()});
  });
  ASSERT_EQ(run_ckpt({"convert", path("run/checkpoints/step-1"), path("hf"), "--to", "hf"}).code, 0);
  EXPECT_EQ(hf::read_config(path("hf")).rope_theta, 500.0);
  // A file that contradicts it makes another function of the same weights.
  const auto with = [&](const std::string& file) {
    return run_ckpt({"convert", path("run/checkpoints/step-1"), path("hf2"), "--to", "hf", "--config", file});
  };
  expect_error(with(path("config.toml")), "config.toml is not the model of " + path("run/checkpoints/step-1") +
                                              ": rope_theta is 10000.0, want 500.0 as it was saved");
  config.model.norm_eps = 1e-6;
  set_file_text(path("eps.toml"), train::to_toml(config));
  expect_error(with(path("eps.toml")), "rms_norm_eps is 1e-06, want 1e-05 as it was saved");
  EXPECT_FALSE(fs::exists(path("hf2")));
  config.model.norm_eps = 1e-5;
  config.optim.lr = 1.0;
  set_file_text(path("same.toml"), train::to_toml(config));
  EXPECT_EQ(with(path("same.toml")).code, 0);
}

TEST_F(HpCkpt, ThereAndBackAgain) {
  // The model that lies beside the checkpoint is found by itself.
  fs::create_directories(path("run/checkpoints"));
  fs::rename(path("step"), path("run/checkpoints/step-1"));
  fs::copy(path("config.toml"), path("run/config.toml"));
  const Outcome exported = run_ckpt({"convert", path("run/checkpoints/step-1"), path("hf"), "--to", "hf"});
  ASSERT_EQ(exported.code, 0) << exported.output;
  EXPECT_THAT(exported.output, HasSubstr("WROTE "));
  EXPECT_EQ(hf::Tokenizer::load(path("hf")).vocab_size(), 256);
  const Outcome same = run_ckpt({"diff", path("hf"), path("run/checkpoints/step-1"), "--prefix", "model."});
  EXPECT_EQ(same.code, 0) << same.output;
  ASSERT_EQ(run_ckpt({"convert", path("hf"), path("back"), "--ranks", "3"}).code, 0);
  EXPECT_EQ(run_ckpt({"verify", path("back")}).code, 0);
  EXPECT_EQ(run_ckpt({"diff", path("back"), path("run/checkpoints/step-1"), "--prefix", "model."}).code, 0);
  // The checkpoint remembers the model.
  ASSERT_EQ(run_ckpt({"convert", path("back"), path("hf2"), "--to", "hf", "--tokenizer", "bytes"}).code, 0);
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json"})
    EXPECT_TRUE(file_text(folder_ / "hf" / name) == file_text(folder_ / "hf2" / name)) << name;
  std::string output;
  EXPECT_EQ(run_hf_peer({"open", path("hf"), "verse"}, &output), 0);
  EXPECT_THAT(output, HasSubstr("tokens [118, 101, 114, 115, 101]"));
  // A config that contradicts the weights is noticed on the way to a checkpoint, too.
  std::string config = file_text(path("hf2/config.json"));
  const std::string size = "\"intermediate_size\": ";
  config.replace(config.find(size + "24"), size.size() + 2, size + "32");
  set_file_text(path("hf2/config.json"), config);
  expect_error(run_ckpt({"convert", path("hf2"), path("wrong")}), "does not fit its config: ");
  EXPECT_FALSE(fs::exists(path("wrong")));
  const Outcome different = run_ckpt({"diff", path("run/checkpoints/step-1"), path("back")});
  EXPECT_EQ(different.code, 1);
  EXPECT_THAT(different.output, AllOf(HasSubstr("only in the first"), HasSubstr("DIFFERENT")));
}

TEST_F(HpCkpt, ExpertsAndHalfPrecision) {
  train::ModelConfig config = kModel;
  config.qk_norm = true;
  config.n_experts = 3;
  config.top_k = 2;
  config.expert_ffn_dim = 10;
  run_ranks(1, [&] {
    train::Llama model(config);
    hf::save_model(path("moe"), whole_state(*model), train::hf_config_of(config));
  });
  ASSERT_EQ(run_ckpt({"convert", path("moe"), path("step-moe"), "--ranks", "2"}).code, 0);
  const ckpt::CheckpointInfo info = ckpt::read_info(path("step-moe"));
  EXPECT_EQ(info.tensors.at("model.layers.0.mlp.experts.up_proj").shape, (std::vector<int64_t>{3, 10, 16}));
  ASSERT_EQ(run_ckpt({"convert", path("step-moe"), path("moe2"), "--to", "hf", "--file-mb", "1"}).code, 0);
  EXPECT_EQ(run_ckpt({"diff", path("moe"), path("moe2")}).code, 0);
  ASSERT_EQ(run_ckpt({"convert", path("step-moe"), path("half"), "--to", "hf", "--dtype", "bfloat16"}).code, 0);
  EXPECT_EQ(hf::read_config(path("half")).dtype, "bfloat16");
  EXPECT_EQ(run_ckpt({"diff", path("moe"), path("half")}).code, 1);
  EXPECT_EQ(run_ckpt({"diff", path("moe"), path("half"), "--any-dtype", "--rtol", "0.01"}).code, 0);
}

TEST_F(HpCkpt, DcpFolders) {
  ASSERT_EQ(run_ckpt({"convert", path("step"), path("dcp"), "--to", "dcp", "--ranks", "2"}).code, 0);
  EXPECT_EQ(run_ckpt({"diff", path("step"), path("dcp")}).code, 0);
  ASSERT_EQ(run_ckpt({"convert", path("dcp"), path("hf"), "--to", "hf", "--config", path("config.toml")}).code, 0);
  ASSERT_EQ(run_ckpt({"convert", path("step"), path("one"), "--to", "dcp", "--prefix", "model.layers."}).code, 0);
  // Its reader and we see the same, and so it is with what its writer has written on two ranks.
  EXPECT_EQ(run_hf_peer({"dcp-read", path("one"), path("one/shard-00001-model-00001-of-00001.safetensors")}), 0);
  ASSERT_EQ(run_ckpt({"convert", path("dcp"), path("whole"), "--to", "dcp"}).code, 0);
  EXPECT_EQ(run_hf_peer({"dcp-read", path("dcp"), path("whole/shard-00001-model-00001-of-00001.safetensors")}), 0);
  fs::create_directory(path("theirs"));
  std::vector<Process> ranks = start_ranks(2, HP_PYTHON, {HP_HF_PEER, "dcp-write", path("theirs")}, {{"OMP_NUM_THREADS", "1"}});
  for (Process& rank : ranks) ASSERT_EQ(rank.wait(std::chrono::seconds(100)), 0) << rank.output();
  const Outcome same = run_ckpt({"diff", path("theirs/dcp"), path("theirs/expected.safetensors")});
  EXPECT_EQ(same.code, 0) << same.output;
  ASSERT_EQ(run_ckpt({"convert", path("theirs/dcp"), path("ours")}).code, 0);
  EXPECT_EQ(run_ckpt({"diff", path("ours"), path("theirs/expected.safetensors")}).code, 0);
}

TEST_F(HpCkpt, Reshard) {
  const Outcome done = run_ckpt({"reshard", path("step"), path("four"), "--ranks", "4"});
  EXPECT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(ckpt::read_info(path("four")).world_size, 4);
  EXPECT_EQ(ckpt::read_info(path("four")).extra, "{\"note\":1}");
  EXPECT_EQ(run_ckpt({"diff", path("step"), path("four")}).code, 0);
  expect_error(run_ckpt({"reshard", path("step"), path("four"), "--ranks", "2"}), "is there already");
  EXPECT_EQ(run_ckpt({"reshard", path("step"), path("four"), "--ranks", "2", "--overwrite"}).code, 0);
  EXPECT_EQ(ckpt::read_info(path("four")).world_size, 2);
}

/// Runs hp-ckpt and watches its private memory: the largest number of kB that was seen.
long watched_kb(const std::vector<std::string>& arguments) {
  Process process(HP_CKPT, arguments, {{"OMP_NUM_THREADS", "1"}});
  long most = 0;
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(process.pid()), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0) {
    std::ifstream status(concat("/proc/", process.pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) most = std::max(most, std::stol(line.substr(8)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(process.wait(std::chrono::seconds(10)), 0) << process.output();
  return most;
}

TEST_F(HpCkpt, MemoryIsBounded) {
  // One tensor of 320 MB through buffers of 1 MB.
  ckpt::SafetensorsWriter writer(path("large.safetensors"), {{"large", ckpt::Dtype::kF32, {80'000, 1000}}});
  const std::vector<float> rows(1'000'000, 0.5F);
  for (int i = 0; i < 80; ++i) writer.write("large", std::as_bytes(std::span(rows)), static_cast<std::uint64_t>(i) * 4'000'000);
  writer.finish();
  const long nothing = watched_kb({"inspect", path("large.safetensors")});
  const std::vector<std::vector<std::string>> commands = {
      {"convert", path("large.safetensors"), path("large"), "--ranks", "2", "--buffer-mb", "1"},
      {"reshard", path("large"), path("half"), "--ranks", "3", "--buffer-mb", "1", "--dtype", "float16"},
      {"diff", path("large"), path("large.safetensors")}};
  for (const std::vector<std::string>& arguments : commands) {
    const long most = watched_kb(arguments);
    EXPECT_GT(most, 1000) << arguments[0];
    EXPECT_LT(most, nothing + 110'000) << arguments[0];
  }
}

TEST_F(HpCkpt, HelpAndMistakes) {
  for (const char* command : {"inspect", "verify", "convert", "diff", "reshard"}) {
    const Outcome help = run_ckpt({command, "--help"});
    EXPECT_EQ(help.code, 0);
    EXPECT_THAT(help.output, HasSubstr("PATH")) << command;
  }
  EXPECT_THAT(run_ckpt({"--version"}).output, HasSubstr("hp-ckpt 0."));
  EXPECT_THAT(run_ckpt({}).output, HasSubstr("Exit code: 0 done"));
  expect_error(run_in_shell("exec \"$0\" inspect \"$1\" > /dev/full", path("step")),
               "cannot write the output: No space left on device");
  expect_error(run_ckpt({"explode"}), "see hp-ckpt --help");
  expect_error(run_ckpt({"inspect"}), "path is required");
  expect_error(run_ckpt({"inspect", path("nothing")}), "does not exist");
  expect_error(run_ckpt({"diff", path("step"), path("nothing")}), "/nothing: does not exist");
  expect_error(run_ckpt({"diff", path("nothing"), path("step")}), "/nothing: does not exist");
  expect_error(run_ckpt({"diff", path("step"), path("step"), "--prefix=nope."}), "has a tensor whose name begins with \"nope.\"");
  expect_error(run_ckpt({"inspect", path("config.toml")}), "config.toml: is no safetensors file");
  for (const auto& [option, value] : std::map<std::string, std::string>{{"--atol", "-1"}, {"--rtol", "nan"}}) {
    expect_error(run_ckpt({"diff", path("step"), path("step"), concat(option, '=', value)}),
                 concat("[hp-ckpt] ", option, ": is ", value, ", want a finite number >= 0, see hp-ckpt --help"));
  }
  fs::create_directories(path("run/checkpoints"));
  fs::copy(path("step"), path("run/checkpoints/step-00000007"));
  for (const char* place : {"run", "run/checkpoints"})
    expect_error(run_ckpt({"inspect", path(place)}), "its last checkpoint is " + path("run/checkpoints/step-00000007"));
  set_file_text(path("pytorch_model.bin"), "PK\3\4");
  expect_error(run_ckpt({"inspect", path("pytorch_model.bin")}), "is pickled, which is not opened");
  fs::create_directories(path("far/from/everything"));
  fs::copy(path("step"), path("far/from/everything/step"));
  expect_error(run_ckpt({"convert", path("far/from/everything/step"), path("hf"), "--to", "hf"}),
               "does not say which model it is, want --config FILE");
  expect_error(run_ckpt({"convert", path("step"), path("x"), "--config", path("config.toml")}),
               "--config and --tokenizer are for --to hf");
  expect_error(run_ckpt({"convert", path("step"), path("x"), "--to", "hf", "--ranks", "2"}),
               "--ranks is for --to checkpoint and dcp");
  expect_error(run_ckpt({"convert", path("step"), path("x"), "--dtype", "int8"}), "int8");
  EXPECT_FALSE(fs::exists(path("hf")));
}

}  // namespace
}  // namespace hyper_parallel::testing
