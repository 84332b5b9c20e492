#pragma once
// The command line of hp-train.
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::apps {

struct CommandLine {
  std::filesystem::path config_file;  ///< empty: defaults only
  std::vector<train::Override> overrides;
  bool print_config = false;
  bool resume = false;              ///< go on from the last checkpoint
  std::optional<std::string> text;  ///< print this and leave: help or version
};

/// ValueError when the arguments make no sense.
[[nodiscard]] CommandLine parse_command_line(int argc, const char* const* argv);

}  // namespace hyper_parallel::apps
