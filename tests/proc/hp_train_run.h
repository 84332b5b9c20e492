#pragma once
// The program hp-train on a small text, as a user starts it.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/process.h"
#include "support/temp_folder.h"

namespace hyper_parallel {

class HpTrainRun : public ::testing::Test {
 protected:
  /// \param sections of config.toml behind [model] and [data]; the last must be [log], whose dir is added
  explicit HpTrainRun(std::string sections) : sections_(std::move(sections)) {}

  void SetUp() override {
    write_text(0);
    std::ofstream(dir_ / "config.toml") << "[model]\ndim = 32\nn_layers = 2\nn_heads = 4\nffn_dim = 40\nmax_seq_len = 32\n"
                                           "[data]\npath = '"
                                        << (dir_ / "text.txt").string() << "'\nseq_len = 16\n"
                                        << sections_ << "dir = '" << (dir_ / "runs").string() << "'\n";
  }
  /// Texts of different `first` have the same length.
  void write_text(int first) const {
    std::ofstream text(dir_ / "text.txt");
    for (int i = 0; i < 400; ++i) text << "verse " << (first + i * 7919) % 400 << " of a short book\n";
  }

  [[nodiscard]] std::vector<std::string> arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {(dir_ / "config.toml").string()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  [[nodiscard]] std::vector<testing::Process> start(int world, const std::vector<std::string>& more) const {
    return testing::start_ranks(world, HP_TRAIN, arguments(more), {{"OMP_NUM_THREADS", "1"}});
  }
  /// From metrics.jsonl; the run may go on, so that the last line may be cut.
  [[nodiscard]] std::vector<double> losses(const std::string& name, const char* key = "loss") const {
    std::vector<double> values;
    std::ifstream in(dir_ / "runs" / name / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) {
      const auto json = nlohmann::json::parse(line, nullptr, false);
      if (json.is_object() && json.contains(key)) values.push_back(json[key]);
    }
    return values;
  }

  testing::TempFolder folder_;
  std::filesystem::path dir_ = folder_.path();

 private:
  std::string sections_;
};

}  // namespace hyper_parallel
