// Groups that are derived from a group.
#include <algorithm>
#include <functional>

#include "comm/comm_impl.h"
#include "comm/world_impl.h"

namespace hyper_parallel {
namespace {

/// A group without transport, with the counters of `size` ranks.
std::shared_ptr<Comm::Impl> without_peers(const Comm::Impl& parent, std::string name, std::vector<int> ranks, int rank) {
  auto impl = std::make_shared<Comm::Impl>();
  impl->rank = rank;
  impl->size = static_cast<int>(ranks.size());
  impl->name = std::move(name);
  impl->sent.resize(ranks.size());
  impl->received.resize(ranks.size());
  impl->ranks = std::move(ranks);
  impl->timeout = parent.timeout;
  impl->allocator = parent.allocator;
  impl->world = parent.world;
  impl->device_type = parent.device_type;
  return impl;
}

}  // namespace

Comm Comm::self() const {
  const auto& parent = require(impl_, "Comm::self");
  if (parent.size == 1) return *this;
  return Comm(without_peers(parent, "self", {parent.ranks[static_cast<std::size_t>(parent.rank)]}, 0));
}

Comm Comm::subgroup(std::span<const int> members) const {
  constexpr std::string_view kOp = "Comm::subgroup";
  const auto& parent = require(impl_, kOp);
  check_value(!members.empty() && std::ranges::adjacent_find(members, std::greater_equal<>()) == members.end(), kOp,
              members.size(), " members, want at least one, in ascending order (group ", parent.name, ')');
  check_value(members.front() >= 0 && members.back() < parent.size, kOp, "members ", members.front(), " to ", members.back(),
              ", want 0 to ", parent.size - 1, " (group ", parent.name, ')');
  const auto mine = std::ranges::find(members, parent.rank);
  check_value(mine != members.end(), kOp, "rank ", parent.rank, " is not one of the members (group ", parent.name, ')');
  if (static_cast<int>(members.size()) == parent.size) return *this;
  if (members.size() == 1) return self();
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(parent.ranks[static_cast<std::size_t>(member)]);
  const std::string name = concat(parent.name, '[', members.front(), "..", members.back(), ']');
  if (parent.fake) {
    auto impl = without_peers(parent, name, std::move(ranks), static_cast<int>(mine - members.begin()));
    impl->fake = true;
    return Comm(std::move(impl));
  }
  const auto world = parent.world.lock();
  check_value(world != nullptr, kOp, "the world of group ", parent.name, " is gone, want it alive");
  return Comm(find_or_make_group(world, parent.device_type, ranks, name));
}

Comm separate_group(const Comm& comm, const std::string& purpose) {
  const auto& impl = comm.impl();
  if (impl.size == 1 || impl.fake) return comm;
  const auto world = impl.world.lock();
  check_value(world != nullptr, "separate_group", "the world of group ", impl.name, " is gone, want it alive");
  return Comm(find_or_make_group(world, impl.device_type, impl.ranks, concat(impl.name, '/', purpose), purpose));
}

}  // namespace hyper_parallel
