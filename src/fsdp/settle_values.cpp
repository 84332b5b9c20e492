#include "fsdp/settle_values.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

constexpr std::size_t kShown = 12;

/// Parameters that began on meta and have elements without values here.
std::string unwritten_here(Unit& unit) {
  std::string lines;
  for (auto& group : unit.groups()) {
    for (const ManagedParameter& parameter : group->parameters()) {
      if (parameter.uninitialised && parameter.unwritten.still(parameter.sharded))
        lines += concat("parameter ", unit.qualified(parameter), '\n');
    }
  }
  return lines;
}

bool began_on_meta(Unit& unit) {
  return std::any_of(unit.groups().begin(), unit.groups().end(), [](const auto& group) {
    const auto& parameters = group->parameters();
    return std::any_of(parameters.begin(), parameters.end(), [](const auto& parameter) { return parameter.uninitialised; });
  });
}

void check_written(const std::vector<Unit*>& units) {
  std::vector<std::string> names;
  const auto add = [&](const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (Unit* unit : units) {
    if (began_on_meta(*unit)) {
      // A rank that owns nothing of a parameter cannot know.
      const Comm& comm = unit->unit_comm();
      for (const std::string& lines : comm.all_gather_string(unwritten_here(*unit), {.label = "parameters without values"})) {
        std::istringstream in(lines);
        for (std::string line; std::getline(in, line);) add(line);
      }
    }
    for (const auto& buffer : unit->buffers_without_values()) add(concat("buffer ", buffer.first));
  }
  if (!names.empty()) {
    std::string text;
    for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) text += concat(i == 0 ? "" : ", ", names[i]);
    if (names.size() > kShown) text += concat(" and ", names.size() - kShown, " more");
    throw ValueError(concat("[fully_shard] no values: ", text, ". They began on the meta device: before the first forward call ",
                            "reset_parameters, load_full or load_from_rank0 on the root's handle, or to_empty and write to all ",
                            "of them"));
  }
  for (Unit* unit : units) {
    for (auto& group : unit->groups()) {
      for (ManagedParameter& parameter : group->parameters()) parameter.uninitialised = false;
    }
  }
}

/// 64 bits of a row of bytes.
std::uint64_t hash_bytes(const at::Tensor& row) {
  const auto* bytes = static_cast<const unsigned char*>(row.const_data_ptr());
  const std::size_t size = row.nbytes();
  std::uint64_t hash = 0x9e3779b97f4a7c15ULL ^ size;
  for (std::size_t at = 0; at < size; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min<std::size_t>(8, size - at));
    hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

/// The first parameter that another replica of this rank's shard has with other bytes, as a message; empty: none.
std::string difference(const Unit& unit, const ParamGroup& group) {
  const Comm& replicate = group.options().replicate_comm;
  std::string mine;
  for (std::size_t i = 0; i < group.parameters().size(); ++i) {
    const at::Tensor row = group.home_row(i);
    const std::uint64_t hash = row.numel() > 0 ? hash_bytes(row) : 0;
    mine.append(reinterpret_cast<const char*>(&hash), sizeof hash);
  }
  const std::vector<std::string> all = replicate.all_gather_string(mine, {.label = "equal replicas"});
  for (std::size_t i = 0; i < group.parameters().size(); ++i) {
    for (std::size_t other = 1; other < all.size(); ++other) {
      if (all[other].compare(i * sizeof(std::uint64_t), sizeof(std::uint64_t), all[0], i * sizeof(std::uint64_t),
                             sizeof(std::uint64_t)) == 0)
        continue;
      return concat("replicas differ in parameter ", unit.qualified(group.parameters()[i]), ": rank ", replicate.ranks()[other],
                    " holds other values than rank ", replicate.ranks()[0],
                    ", want equal ones: seed or load all replicas alike, or set replica_init to kBroadcast (unit ", unit.name(),
                    ')');
    }
  }
  return {};
}

void settle_replicas(Unit& unit) {
  const ReplicaInit wish = unit.options().replica_init;
  if (wish == ReplicaInit::kNone || unit.unit_comm().size() == 1) return;
  std::string found;
  for (auto& group : unit.groups()) {
    const Comm& replicate = group->options().replicate_comm;
    if (!replicate.defined() || replicate.size() == 1) continue;
    if (wish == ReplicaInit::kBroadcast) {
      replicate.broadcast(group->shard(), 0, {.label = unit.name()}).wait();
    } else if (const std::string text = difference(unit, *group); found.empty()) {
      found = text;
    }
  }
  if (wish == ReplicaInit::kBroadcast) return;
  // Other shards may be equal on all replicas: the ranks that hold them must stop as well.
  for (const std::string& text : unit.unit_comm().all_gather_string(found, {.label = "equal replicas"}))
    check_value(text.empty(), "fully_shard", text);
}

}  // namespace

void settle_values(const std::vector<Unit*>& units) {
  check_written(units);
  for (Unit* unit : units) settle_replicas(*unit);
}

}  // namespace hyper_parallel::fsdp
