#pragma once
// The configuration of a run on a command line: a TOML file, and an option for every value of it.
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace CLI {
class App;
}

namespace hyper_parallel::apps {

/// Adds the positional argument `config` and options --section.key to `app`, which must outlive it, and parses.
class ConfigArguments {
 public:
  explicit ConfigArguments(CLI::App& app);
  ~ConfigArguments();
  /// False: help was asked for. ValueError: arguments that make no sense. Values are checked by train::load_config, so that a
  /// mistyped key is answered with the keys of its section.
  [[nodiscard]] bool parse(int argc, const char* const* argv);

  [[nodiscard]] std::filesystem::path file() const;  ///< empty: defaults only
  [[nodiscard]] const std::vector<train::Override>& overrides() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hyper_parallel::apps
