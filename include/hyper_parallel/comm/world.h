#pragma once
// World: the ranks that were launched together, and the store through which they meet.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <c10/util/intrusive_ptr.h>

#include <hyper_parallel/core/error.h>

namespace c10 {
struct Allocator;
}

namespace hyper_parallel {

class Comm;

struct InitOptions {
  /// "gloo"; "fake" for a dry run without peers (Comm::fake); empty: chosen by the device of a mesh.
  std::string backend = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of every collective unless it says otherwise
  /// Rank threads and tests give these; by default they come from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
  int rank = -1;
  int world_size = -1;
  int local_rank = -1;
  /// A c10d::Store through which the ranks meet; used for one world only (wrap it in a PrefixStore for another).
  c10::intrusive_ptr<c10::intrusive_ptr_target> store = {};
  /// False: nobody waits here for ranks that have not joined; each group waits for its members when it is made.
  bool wait_for_ranks = true;
  /// Whether groups whose ranks all run on one host talk through memory that they share; false: always through the network.
  /// Default: what the environment variable HP_SAMEHOST says (0, 1 or copy), else true. One rank's false is enough.
  std::optional<bool> samehost = {};
  /// Whether such groups also map the shards of units in the ragged layout into each other instead of copying them; false: no.
  /// Default: not if HP_SAMEHOST is "copy". One rank's false is enough.
  std::optional<bool> map_shards = {};
  /// Ask for huge pages for that memory. The system must allow them for shared memory ("advise" or "always" in
  /// /sys/kernel/mm/transparent_hugepage/shmem_enabled), or nothing changes.
  bool huge_pages = false;
  /// Write to each page of a buffer when it is allocated and not when it is first used: then it lies on the NUMA node of the rank
  /// that owns it, whoever uses it first, and the steps meet no fresh pages. Buffers occupy all of their memory from the start.
  bool first_touch = false;
  /// Memory of the buffers that groups send from and receive into; default: memory that the ranks of the host share, or torch's
  /// CPU allocator where they do not. Must outlive the world. Messages from other memory are copied once more, and no shards are
  /// mapped.
  c10::Allocator* allocator = nullptr;
};

/// The ranks that were launched together; a cheap handle. A thread has at most one current world.
class HP_API World {
 public:
  World() = default;
  [[nodiscard]] bool defined() const noexcept { return impl_ != nullptr; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] int local_rank() const;
  [[nodiscard]] std::chrono::milliseconds timeout() const;
  /// The group of all ranks. Created on first use: collective then.
  [[nodiscard]] Comm comm(std::string_view device_type = "cpu") const;

  struct Impl;  // src/comm
  explicit World(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const std::shared_ptr<Impl>& shared_impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Joins the world that torchrun's environment describes (agent store or own TCP store), or makes a world of one without it.
/// Sets the calling thread's current world and returns it. Collective when the world has more than one rank.
/// Then the process ignores SIGPIPE from now on, unless it has a handler: a lost peer must be an error, not the end of the
/// process.
///
/// ValueError: bad options or environment, ranks that disagree about the world size, a rank given twice. CommError or
/// TimeoutError: the store cannot be reached, or a rank does not come (named).
HP_API World init_process_group(const InitOptions& options = {});
/// The same without setting the thread's current world: for callers that keep it themselves.
[[nodiscard]] HP_API World make_world(const InitOptions& options);
/// The calling thread's current world; makes a world of one when none was set and no launcher's environment is present,
/// otherwise ValueError says to call init_process_group first.
[[nodiscard]] HP_API World current_world();
[[nodiscard]] HP_API bool is_initialized();
/// Drops the calling thread's current world. Groups live on while meshes or units hold them.
HP_API void destroy_process_group();
[[nodiscard]] HP_API int get_rank();
[[nodiscard]] HP_API int get_world_size();
/// Whether this build has a backend for tensors on `device_type`. "cpu" has Gloo; "cuda" has none yet (its seam:
/// src/comm/backend.h).
[[nodiscard]] HP_API bool supports(std::string_view device_type);

}  // namespace hyper_parallel
