#pragma once
// Whether the ranks of a group share a host, and the transport if they do: docs/design/009-same-host.md.
#include <memory>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/world_impl.h"

namespace hyper_parallel {

/// This rank's arena, made at the first call; null when it may not or cannot be had (then `reason` says why).
std::shared_ptr<Arena> find_or_make_arena(World::Impl& world, std::string* reason = nullptr);

/// A transport through shared memory among the global `ranks`, which meet in `world`'s store under `key`; null when they are not
/// on one host or one of them cannot or may not: all agree. TransportError when a rank does not come.
std::unique_ptr<Transport> make_same_host_transport(World::Impl& world, const std::string& key, int group_rank,
                                                    const std::vector<int>& ranks, const std::string& name);

}  // namespace hyper_parallel
