#include <hyper_parallel/comm/world.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <thread>

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <hyper_parallel/core/log.h>
#include <hyper_parallel/core/trace.h>

#include "comm/arena.h"
#include "comm/bounded_store.h"
#include "comm/comm_impl.h"
#include "comm/same_host.h"
#include "comm/torch_compat.h"
#include "comm/world_impl.h"

namespace hyper_parallel {
namespace {

constexpr std::string_view kInit = "init_process_group";

thread_local World this_world;
// Worlds that this thread joined through the environment: each gets keys of its own in the launcher's store.
thread_local int joined_worlds = 0;

const char* environment(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

std::optional<int> integer_from_environment(const char* name, int least, int most) {
  const char* text = environment(name);
  if (text == nullptr) return std::nullopt;
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  const bool number = error == std::errc() && end == view.data() + view.size();
  check_value(number && value >= least && value <= most, kInit, name, "=\"", view, "\", want an integer from ", least, " to ",
              most);
  return value;
}

bool launched() { return environment("RANK") != nullptr || environment("WORLD_SIZE") != nullptr; }

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

std::string seconds(std::chrono::milliseconds time) { return concat(static_cast<double>(time.count()) / 1000.0, " s"); }

[[noreturn]] void fail_to_join(const World::Impl& world, bool timeout, const std::string& what) {
  const auto message = concat('[', kInit, "] ", what, " (rank ", world.rank, '/', world.size, ')');
  CommFailure failure{std::string(kInit), {}, "world", 0, 0, -1};
  if (timeout) throw TimeoutError(message, std::move(failure));
  throw CommError(message, std::move(failure));
}

void read_environment(World::Impl& world) {
  constexpr int kMost = 1 << 24;
  const auto rank = integer_from_environment("RANK", 0, kMost);
  const auto size = integer_from_environment("WORLD_SIZE", 1, kMost);
  check_value(rank.has_value() == size.has_value(), kInit, rank ? "RANK" : "WORLD_SIZE", " is set but ",
              rank ? "WORLD_SIZE" : "RANK", " is not, want both (torchrun sets them) or none");
  if (!rank) return;
  check_value(*rank < *size, kInit, "RANK=", *rank, ", want 0 to ", *size - 1, " (WORLD_SIZE=", *size, ')');
  world.rank = *rank;
  world.size = *size;
  world.local_rank = integer_from_environment("LOCAL_RANK", 0, kMost).value_or(*rank);
}

// The launcher's store (torchrun's agent), or one that rank 0 hosts.
c10::intrusive_ptr<c10d::Store> store_from_environment(const World::Impl& world) {
  const char* address = environment("MASTER_ADDR");
  const auto port = integer_from_environment("MASTER_PORT", 1, 65535);
  check_value(address != nullptr && port.has_value(), kInit, address == nullptr ? "MASTER_ADDR" : "MASTER_PORT",
              " is not set, want it for WORLD_SIZE=", world.size);
  const char* agent = environment("TORCHELASTIC_USE_AGENT_STORE");
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(*port);
  options.isServer = world.rank == 0 && !(agent != nullptr && std::string_view(agent) == "True");
  options.numWorkers = static_cast<std::size_t>(world.size);
  options.waitWorkers = false;
  options.multiTenant = true;
  options.timeout = world.timeout;
  const char* attempt = environment("TORCHELASTIC_RESTART_COUNT");
  const auto prefix = concat("hyper_parallel/", attempt == nullptr ? "0" : attempt, '/', joined_worlds);
  try {
    auto store = try_within(world.timeout + kStoreAnswer, [address = std::string(address), options] {
      const QuietTorchLog quiet;
      return c10::make_intrusive<c10d::TCPStore>(address, options);
    });
    TORCH_CHECK_WITH(DistStoreError, store.valid(), kNoStoreAnswer);
    return c10::make_intrusive<c10d::PrefixStore>(prefix, store.get());
  } catch (const std::exception& error) {
    const auto text = first_line(error);
    const bool timeout = text.find("timed out") != std::string::npos || text.find("timeout") != std::string::npos;
    fail_to_join(
        world, timeout,
        concat(options.isServer ? "cannot host the store at " : "cannot reach the store at ", address, ':', *port, ": ", text));
  }
}

// Rank 0 hears from all ranks, then tells all whether the world stands.
void meet(c10::intrusive_ptr<c10d::Store> base, const World::Impl& world) {
  BoundedStore store(std::move(base), world.timeout);
  const auto mine = std::to_string(world.rank);
  std::string verdict = "ok";
  bool timeout = false;
  try {
    const bool first = store.add("joined/" + mine, 1) == 1;
    if (first) store.set("size/" + mine, std::to_string(world.size));
    if (!first) {
      verdict = concat("V[", kInit, "] rank ", world.rank,
                       " joined twice: two processes have the same rank, or the store already served a world");
    } else if (world.rank == 0) {
      for (int r = 1; r < world.size && verdict == "ok"; ++r) {
        try {
          const auto theirs = store.get_to_str(concat("size/", r));
          if (theirs != std::to_string(world.size)) {
            verdict = concat("V[", kInit, "] world sizes differ: rank 0 has ", world.size, ", rank ", r, " has ", theirs);
          }
        } catch (const std::exception& error) {
          log::debug(kInit, ": waiting for rank ", r, ": ", first_line(error));
          verdict = concat("T[", kInit, "] rank ", r, " did not join within ", seconds(world.timeout), " (world size ",
                           world.size, ')');
        }
      }
      store.set("verdict", verdict);
      if (verdict != "ok") std::this_thread::sleep_for(std::chrono::seconds(1));  // the others still have to read it
    } else {
      // Longer than rank 0 waits, so that its verdict says who is missing.
      store.wait({"verdict"}, world.timeout + std::chrono::seconds(5));
      verdict = store.get_to_str("verdict");
    }
  } catch (const std::exception& error) {
    log::debug(kInit, ": ", first_line(error));
    timeout = true;
  }
  if (timeout) fail_to_join(world, true, concat("no answer from rank 0 within ", seconds(world.timeout)));
  if (verdict == "ok") return;
  const auto text = verdict.substr(1);
  if (verdict.front() == 'V') throw ValueError(text);
  throw TimeoutError(text, CommFailure{std::string(kInit), {}, "world", 0, 0, -1});
}

// How many ranks share this host, if the launcher says so: only a hint.
void find_neighbours(World::Impl& world) {
  const char* local = environment("LOCAL_WORLD_SIZE");
  const bool threads = dynamic_cast<c10d::HashStore*>(world.store.get()) != nullptr;
  world.neighbours = threads ? world.size : local == nullptr ? 0 : std::clamp(std::atoi(local), 0, world.size);
  world.one_host = world.neighbours == world.size;
}

void choose_same_host(World::Impl& world, const InitOptions& options) {
  const char* text = environment("HP_SAMEHOST");
  const std::string_view value = text == nullptr ? "1" : text;
  check_value(value == "0" || value == "1" || value == "copy" || value == "processes", kInit, "HP_SAMEHOST=\"", value,
              "\", want 0, 1, copy or processes");
  world.same_host = value == "0" ? SameHost::kOff : value == "processes" ? SameHost::kProcesses : SameHost::kOn;
  if (options.samehost) world.same_host = *options.samehost ? SameHost::kOn : SameHost::kOff;
  world.huge_pages = options.huge_pages;
  world.first_touch = options.first_touch;
  world.map = options.map_shards.value_or(value != "copy");
}

void apply_options(World::Impl& world, const InitOptions& options) {
  check_value(options.timeout.count() > 0, kInit, "timeout ", options.timeout.count(), " ms, want more than 0");
  check_value(options.backend.empty() || options.backend == "gloo" || options.backend == "fake", kInit, "backend \"",
              options.backend, "\" is not in this build, want \"gloo\", \"fake\" or none");
  check_value((options.rank >= 0) == (options.world_size >= 0), kInit, "rank ", options.rank, " and world_size ",
              options.world_size, ", want both or none");
  check_value(options.store == nullptr || options.rank >= 0, kInit, "a store without rank and world_size, want all three");
  if (options.rank >= 0) {
    check_value(options.world_size >= 1 && options.rank < options.world_size, kInit, "rank ", options.rank, " of world_size ",
                options.world_size, ", want 0 <= rank < world_size");
    world.rank = options.rank;
    world.size = options.world_size;
    world.local_rank = options.local_rank >= 0 ? options.local_rank : options.rank;
  } else {
    read_environment(world);
    if (options.local_rank >= 0) world.local_rank = options.local_rank;
  }
  world.timeout = options.timeout;
  world.fake = options.backend == "fake";
  world.allocator = options.allocator;
  choose_same_host(world, options);
}

const World::Impl& require(const std::shared_ptr<World::Impl>& impl, std::string_view op) {
  check_value(impl != nullptr, op, "empty World handle, want one from init_process_group");
  return *impl;
}

// Short and equal on all members: runs of equal steps, e.g. "0+2x4" for 0, 2, 4, 6.
std::string rank_key(const std::vector<int>& ranks) {
  std::string out;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t count = 1;
    const int step = i + 1 < ranks.size() ? ranks[i + 1] - ranks[i] : 1;
    while (i + count < ranks.size() && ranks[i + count] - ranks[i + count - 1] == step) ++count;
    if (!out.empty()) out += ',';
    out += concat(ranks[i], '+', step, 'x', count);
    i += count;
  }
  return out;
}

// Buffers of a group that may be a part of a larger one on this host are where the others can read them.
void choose_allocator(World::Impl& world, Comm::Impl& group) {
  group.allocator = world.allocator;
  if (group.allocator != nullptr) return;
  const bool shared = group.transport != nullptr ? group.transport->name() == std::string_view("samehost")
                                                 : world.size > 1 && !world.fake && world.store != nullptr;
  const auto arena = shared ? find_or_make_arena(world) : nullptr;
  group.allocator = arena != nullptr ? arena.get() : c10::GetCPUAllocator();
  group.allocator_owner = arena;
}

}  // namespace

std::shared_ptr<Comm::Impl> find_or_make_group(const std::shared_ptr<World::Impl>& world, std::string_view device_type,
                                               const std::vector<int>& ranks, const std::string& name, std::string_view purpose) {
  constexpr std::string_view kOp = "get_group";
  check_value(supports(device_type), kOp, "no backend for device type \"", device_type, "\" in this build, want \"cpu\"");
  const auto mine = std::find(ranks.begin(), ranks.end(), world->rank);
  check_value(mine != ranks.end(), kOp, "rank ", world->rank, " is not a member of group ", name);
  const auto key = concat(device_type, ':', rank_key(ranks), purpose.empty() ? "" : "/", purpose);
  const std::lock_guard lock(world->mutex);
  if (const auto found = world->groups.find(key); found != world->groups.end()) return found->second;
  auto group = std::make_shared<Comm::Impl>();
  group->rank = static_cast<int>(mine - ranks.begin());
  group->size = static_cast<int>(ranks.size());
  group->name = name;
  group->device_type = device_type;
  group->ranks = ranks;
  group->timeout = world->timeout;
  group->world = world;
  group->sent.resize(ranks.size());
  group->received.resize(ranks.size());
  group->fake = world->fake;
  if (group->size > 1 && !group->fake) {
    try {
      group->transport = make_same_host_transport(*world, "group/" + key, group->rank, ranks, name);
      if (group->transport == nullptr) {
        group->transport = make_gloo_transport(*world, "group/" + key, group->rank, group->size);
      }
    } catch (const TransportError& error) {
      CommFailure failure{std::string(kOp), {}, name, 0, 0, -1};
      const auto message = concat('[', kOp, "] cannot connect group ", name, " of ", group->size, " ranks within ",
                                  seconds(world->timeout), ": ", error.what(), " (rank ", group->rank, '/', group->size, ')');
      if (error.kind() == TransportError::Kind::kTimeout) throw TimeoutError(message, std::move(failure));
      throw CommError(message, std::move(failure));
    }
  }
  choose_allocator(*world, *group);
  world->groups.emplace(key, group);
  return group;
}

bool supports(std::string_view device_type) { return device_type == "cpu"; }

int World::rank() const { return require(impl_, "World::rank").rank; }
int World::size() const { return require(impl_, "World::size").size; }
int World::local_rank() const { return require(impl_, "World::local_rank").local_rank; }
std::chrono::milliseconds World::timeout() const { return require(impl_, "World::timeout").timeout; }

Comm World::comm(std::string_view device_type) const {
  const auto& world = require(impl_, "World::comm");
  std::vector<int> ranks(static_cast<std::size_t>(world.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return Comm(find_or_make_group(impl_, device_type, ranks, "world"));
}

World make_world(const InitOptions& options) {
  auto world = std::make_shared<World::Impl>();
  apply_options(*world, options);
  if (world->size > 1 && !world->fake) {
    const QuietTorchLog quiet;
    ignore_broken_pipes();
    if (options.store != nullptr) {
      auto* store = dynamic_cast<c10d::Store*>(options.store.get());
      check_value(store != nullptr, kInit, "`store` is not a c10d::Store");
      world->store = options.store;
      if (options.wait_for_ranks) meet(c10::intrusive_ptr<c10d::Store>::reclaim_copy(store), *world);
    } else {
      auto store = store_from_environment(*world);
      ++joined_worlds;
      world->store = store;
      if (options.wait_for_ranks) meet(store, *world);
    }
    find_neighbours(*world);
  }
  return World(std::move(world));
}

World init_process_group(const InitOptions& options) {
  check_value(!this_world.defined(), kInit, "this thread already has a world, call destroy_process_group first");
  World world = make_world(options);
  trace::set_rank(world.rank(), world.size());
  log::set_rank(world.rank());
  this_world = std::move(world);
  return this_world;
}

World current_world() {
  if (!this_world.defined()) {
    check_value(!launched(), "current_world",
                "no world yet, call init_process_group first (a launcher's environment is present)");
    this_world = make_world({});
  }
  return this_world;
}

bool is_initialized() { return this_world.defined(); }

void destroy_process_group() {
  this_world = World();
  log::set_rank(-1);
  trace::set_rank(-1, 0);
}

int get_rank() { return current_world().rank(); }
int get_world_size() { return current_world().size(); }

}  // namespace hyper_parallel
