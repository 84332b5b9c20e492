#pragma once
// The command line of hp-ckpt.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace hyper_parallel::apps {

/// What can be asked for; one struct for all commands, each of which looks at its own.
struct CkptCommand {
  std::string name;                      ///< "inspect", "verify", "convert", "diff", "reshard"
  std::filesystem::path source, target;  ///< of diff: the two that are compared
  std::string to = "checkpoint";         ///< convert: "checkpoint", "hf", "dcp"
  std::string config, tokenizer, dtype;
  std::optional<std::string> prefix;
  int ranks = 1;
  std::int64_t file_mb = 5000, buffer_mb = 16;
  bool overwrite = false, quiet = false;
  double atol = 0, rtol = 0;
  bool any_dtype = false;
  int depth = 0;                    ///< inspect: levels of the tree; 0: all
  std::int64_t most = 20;           ///< diff: lines
  std::optional<std::string> text;  ///< print this and leave: help or version
};

/// ValueError when the arguments make no sense.
[[nodiscard]] CkptCommand parse_ckpt_command(int argc, const char* const* argv);

}  // namespace hyper_parallel::apps
