// hp-plan: what a run of hp-train will need, before it starts. The model is sharded as there, but gets no values.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include <hyper_parallel/train/progress.h>

#include "common/config_arguments.h"
#include "common/output.h"
#include "ranks.h"

namespace {

namespace hp = hyper_parallel;
namespace train = hyper_parallel::train;

constexpr const char* kDescription =
    "Says how much memory a run of hp-train will need: for each rank, and for all of a host.\n"
    "Ranks of one host:   hp-plan config.toml --ranks 8 --parallel.tp=2\n"
    "Ranks of many:       hp-plan config.toml --ranks 1024 --network\n";

std::int64_t total(const train::Config& config, const train::DryRun& run) {
  return train::plan_memory(config, run.batches, run.engine).total();
}

void print(const train::Config& config, const train::DryRun& run) {
  std::fputs(train::memory_table(config, run.batches, run.engine).c_str(), stdout);
}

/// One rank, by default the one that needs most, and all of them together.
void show_host(const train::Config& config, int ranks, std::optional<int> rank) {
  const std::vector<train::DryRun> runs = hp::apps::plan_host(config, ranks);
  const auto less = [&](const train::DryRun& a, const train::DryRun& b) { return total(config, a) < total(config, b); };
  const auto most = std::max_element(runs.begin(), runs.end(), less);
  const train::DryRun& shown = rank ? runs[static_cast<std::size_t>(*rank)] : *most;
  print(config, shown);
  std::int64_t all = 0;
  for (const train::DryRun& run : runs) all += total(config, run);
  std::printf("That is rank %td%s%s\n", &shown - runs.data(),
              total(config, shown) == total(config, *most) ? ", which needs most" : "",
              shown.engine.maps ? "; it sees the shards of the others in place" : "");
  std::printf("PLAN ranks=%d host_bytes=%lld rank_bytes=%lld\n", ranks, static_cast<long long>(all),
              static_cast<long long>(total(config, shown)));
}

void show_network(const train::Config& config, int ranks, int rank) {
  const train::DryRun run = hp::apps::plan_network(config, ranks, rank);
  print(config, run);
  std::printf("That is rank %d\nPLAN ranks=%d rank_bytes=%lld\n", rank, ranks, static_cast<long long>(total(config, run)));
}

int run(int argc, const char* const* argv) {
  int ranks = 1, rank = 0;
  bool network = false, version = false;
  CLI::App app(kDescription, "hp-plan");
  hp::apps::ConfigArguments arguments(app);
  app.add_option("--ranks", ranks, "ranks of the run [1]")->type_name("N");
  app.add_flag("--network", network, "no two ranks share memory, as if each were on a host of its own");
  CLI::Option* which =
      app.add_option("--rank", rank, "which rank [0 with --network, otherwise the one that needs most]")->type_name("R");
  app.add_flag("--version", version, "print the version and leave");
  if (!arguments.parse(argc, argv)) {
    std::fputs(app.help().c_str(), stdout);
    return EXIT_SUCCESS;
  }
  if (version) {
    std::printf("hp-plan %s\n", HP_VERSION);
    return EXIT_SUCCESS;
  }
  hp::check_value(ranks >= 1, "hp-plan", "--ranks is ", ranks, ", want at least 1");
  hp::check_value(ranks <= hp::apps::kMostRanks, "hp-plan", "--ranks is ", ranks, ", want at most ", hp::apps::kMostRanks);
  hp::check_value(rank >= 0 && rank < ranks, "hp-plan", "--rank is ", rank, ", want 0 to ", ranks - 1);
  hp::check_value(network || ranks <= hp::apps::kMostThreads, "hp-plan", "--ranks is ", ranks, ", want at most ",
                  hp::apps::kMostThreads, " on one host, or --network");
  const train::Config config = train::load_config(arguments.file(), arguments.overrides());
  if (network)
    show_network(config, ranks, rank);
  else
    show_host(config, ranks, which->count() > 0 ? std::optional(rank) : std::nullopt);
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    hp::apps::finish_output("hp-plan");
    return code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hp-plan: error: %s\n", hp::apps::first_line(error).c_str());
    return EXIT_FAILURE;
  }
}
