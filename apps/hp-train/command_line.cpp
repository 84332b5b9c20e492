#include "command_line.h"

#include <CLI/CLI.hpp>

namespace hyper_parallel::apps {
namespace {

constexpr const char* kDescription =
    "Trains a Llama-style decoder on text, dense or with a mixture of experts, sharded over all ranks.\n"
    "One rank:   hp-train config.toml\n"
    "Two ranks:  torchrun --standalone --no-python --nproc-per-node 2 hp-train config.toml --train.max_steps=500\n"
    "Four ranks, pairs of which cut the matrices:  torchrun ... --nproc-per-node 4 hp-train config.toml --parallel.tp=2\n";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  std::string file;
  bool version = false;
  CLI::App app(kDescription, "hp-train");
  app.add_option("config", file, "TOML file; every value of it can be overridden below");
  app.add_flag("--print-config", line.print_config, "print the effective configuration as TOML and leave");
  app.add_flag("--resume", line.resume, "go on from the last checkpoint of the run, if there is one, on any number of ranks");
  app.add_flag("--version", version, "print the version and leave");
  const std::vector<train::FieldInfo> fields = train::describe({});
  std::vector<std::string> values(fields.size());
  std::vector<CLI::Option*> options;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const train::FieldInfo& field = fields[i];
    CLI::Option* option =
        app.add_option(concat("--", field.section, '.', field.key), values[i], concat(field.help, " [", field.value, ']'));
    option->group(concat('[', field.section, ']'))->type_name("VALUE")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    options.push_back(option);
  }
  // What remains is checked here, so that a mistyped key is answered with the keys of its section.
  app.allow_extras();
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.text = app.help();
    return line;
  } catch (const CLI::Error& error) {
    throw ValueError(concat("[hp-train] ", error.what(), ", see hp-train --help"));
  }
  if (version) line.text = concat("hp-train ", HP_VERSION, '\n');
  line.config_file = file;
  for (std::size_t i = 0; i < fields.size(); ++i)
    if (options[i]->count() > 0) line.overrides.emplace_back(concat(fields[i].section, '.', fields[i].key), values[i]);
  const std::vector<std::string> extras = app.remaining();
  if (extras.empty()) return line;
  const std::string key = extras[0].substr(0, extras[0].find('='));
  if (key.starts_with("--") && key.find('.') != std::string::npos) {
    line.overrides.emplace_back(key.substr(2), "");
    return line;
  }
  throw ValueError(concat("[hp-train] unexpected argument ", joined(extras), ", see hp-train --help"));
}

}  // namespace hyper_parallel::apps
