#pragma once
// What a World points to, and how groups are made.
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>

namespace hyper_parallel {

class Arena;
class Mapping;
class Transport;

/// Whether groups may talk through shared memory.
enum class SameHost {
  kOff,
  kOn,
  kProcesses,  ///< on, and threads of one process treat each other like processes: for tests
};

struct World::Impl {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::chrono::milliseconds timeout{};

  c10::intrusive_ptr<c10::intrusive_ptr_target> store;  ///< c10d::Store; null in a world of one
  c10::Allocator* allocator = nullptr;                  ///< the user's, or null
  bool fake = false;                                    ///< dry run: groups have no peers
  bool one_host = false;                                ///< all ranks run on this host: connect through loopback
  int neighbours = 0;                                   ///< ranks on this host, 0 if unknown

  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Comm::Impl>> groups;  ///< by device type and rank list
  std::shared_ptr<void> device;                               ///< Gloo's network device, shared by the groups
  SameHost same_host = SameHost::kOff;
  bool map = true;  ///< gathered parameters may be mapped instead of copied
  bool huge_pages = false, first_touch = false;
  std::shared_ptr<Arena> arena;                               ///< this rank's memory that peers can read, once it is needed
  std::map<std::string, std::weak_ptr<Mapping>> peer_arenas;  ///< that groups have mapped, by id
};

/// The group of `ranks` (global, in group order) in `world`: found in the cache or made. Collective among `ranks` when made.
/// Groups of another `purpose` have connections of their own.
/// ValueError when this rank is not listed or the device has no backend; CommError when a member does not come.
std::shared_ptr<Comm::Impl> find_or_make_group(const std::shared_ptr<World::Impl>& world, std::string_view device_type,
                                               const std::vector<int>& ranks, const std::string& name,
                                               std::string_view purpose = {});

/// A group of the same ranks with connections of its own, so that another thread can use it. Collective among them.
[[nodiscard]] Comm separate_group(const Comm& comm, const std::string& purpose);

/// Gloo's pairs among `ranks`, which meet in `world`'s store under `key`.
std::unique_ptr<Transport> make_gloo_transport(World::Impl& world, const std::string& key, int group_rank, int group_size);

}  // namespace hyper_parallel
