#pragma once
// What one rank cannot do fails on all ranks, with the same error.
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel::ckpt {

/// Runs `local` on every rank and returns what it gave on each, by rank. When it threw on any, all ranks throw: ValueError,
/// CheckpointError or Error, as the first rank that failed, with its text and, unless all failed alike, its number. Collective.
std::vector<std::string> agree(const Comm& comm, std::string_view op, const std::function<std::string()>& local,
                               const CommOptions& options = {});

/// The given group, or that of all ranks.
[[nodiscard]] Comm comm_or_world(const Comm& comm);

}  // namespace hyper_parallel::ckpt
