#pragma once
// The ranks of a run that is planned.
#include <vector>

#include <hyper_parallel/train/dry_run.h>

namespace hyper_parallel::apps {

/// Most ranks of one host: each is a thread with the groups of a real rank.
constexpr int kMostThreads = 64;
/// Most ranks of a plan: what it lists about them, the members of each group, takes time and memory by their number.
constexpr int kMostRanks = 1 << 20;

/// Every rank of a run on one host, by rank: they share memory as the processes of hp-train do. ValueError: the configuration
/// does not fit.
[[nodiscard]] std::vector<train::DryRun> plan_host(const train::Config& config, int ranks);
/// Rank `rank` of a run whose ranks all talk over the network. ValueError: the configuration does not fit.
[[nodiscard]] train::DryRun plan_network(const train::Config& config, int ranks, int rank);

}  // namespace hyper_parallel::apps
