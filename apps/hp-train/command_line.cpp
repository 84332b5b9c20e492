#include "command_line.h"

#include <CLI/CLI.hpp>

#include "common/config_arguments.h"

namespace hyper_parallel::apps {
namespace {

constexpr const char* kDescription =
    "Trains a Llama-style decoder on text, dense or with a mixture of experts, sharded over all ranks.\n"
    "One rank:   hp-train config.toml\n"
    "Two ranks:  torchrun --standalone --no-python --nproc-per-node 2 hp-train config.toml --train.max_steps=500\n"
    "Four ranks, pairs of which cut the matrices:  torchrun ... --nproc-per-node 4 hp-train config.toml --parallel.tp=2\n"
    "What it will need:  hp-plan config.toml --ranks 4 --parallel.tp=2\n";

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  bool version = false;
  CLI::App app(kDescription, "hp-train");
  ConfigArguments arguments(app);
  app.add_flag("--print-config", line.print_config, "print the effective configuration as TOML and leave");
  app.add_flag("--resume", line.resume, "go on from the last checkpoint of the run, if there is one, on any number of ranks");
  app.add_flag("--version", version, "print the version and leave");
  if (!arguments.parse(argc, argv)) {
    line.text = app.help();
    return line;
  }
  if (version) line.text = concat("hp-train ", HP_VERSION, '\n');
  line.config_file = arguments.file();
  line.overrides = arguments.overrides();
  return line;
}

}  // namespace hyper_parallel::apps
