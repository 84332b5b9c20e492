// hp-train: reads the command line, joins the world, trains, and turns every failure into one line and exit code 1.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/train/agree.h>
#include <hyper_parallel/train/trainer.h>

#include "common/output.h"

#include "command_line.h"

namespace {

namespace hp = hyper_parallel;

int environment_rank() {
  const char* text = std::getenv("RANK");
  return text == nullptr ? 0 : std::atoi(text);
}

// torchrun has started the ranks again after one of them failed.
bool restarted() {
  const char* text = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return text != nullptr && std::atoi(text) > 0;
}

int fail(const std::exception& error, bool known_to_all) {
  const int rank = environment_rank();
  if (known_to_all && rank != 0) return EXIT_FAILURE;
  const std::string text = hp::apps::first_line(error);
  const bool says_who = known_to_all || text.find("(rank ") != std::string::npos;
  const std::string who = says_who ? "" : "rank " + std::to_string(rank) + ": ";
  std::fflush(stdout);
  std::fprintf(stderr, "hp-train: error: %s%s\n", who.c_str(), text.c_str());
  return EXIT_FAILURE;
}

void run(const hp::apps::CommandLine& line) {
  // A mistake in the configuration is kept until the ranks can agree on it, so that none waits for a rank that has left.
  std::optional<hp::train::Config> config;
  std::string mistake;
  try {
    config = hp::train::load_config(line.config_file, line.overrides);
  } catch (const hp::ValueError& error) {
    mistake = error.what();
  }
  hp::InitOptions options;
  if (config) options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * config->parallel.timeout_seconds));
  const hp::World world = hp::init_process_group(options);
  hp::train::agree_on(world.comm(), [&] {
    if (!config) throw hp::ValueError(mistake);
  });
  const hp::train::TrainResult result = hp::train::run_training(*config, world, {.resume = line.resume || restarted()});
  if (world.rank() == 0 && result.stopped) {
    std::printf("STOPPED step=%lld checkpoint=%s\n", static_cast<long long>(result.steps), result.checkpoint.c_str());
  } else if (world.rank() == 0) {
    std::printf("RESULT %s\n", to_string(result).c_str());
  }
  hp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  hp::apps::CommandLine line;
  try {
    line = hp::apps::parse_command_line(argc, argv);
    if (line.text || line.print_config) {
      const std::string text =
          line.text ? *line.text : hp::train::to_toml(hp::train::load_config(line.config_file, line.overrides));
      if (environment_rank() == 0) std::fputs(text.c_str(), stdout);
      hp::apps::finish_output("hp-train");
      return EXIT_SUCCESS;
    }
  } catch (const std::exception& error) {
    return fail(error, true);
  }
  try {
    run(line);
    return EXIT_SUCCESS;
  } catch (const hp::train::AgreedError& error) {
    return fail(error, true);
  } catch (const std::exception& error) {
    return fail(error, false);
  }
}
