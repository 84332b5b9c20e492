#pragma once
// World: the ranks that were launched together, and the store through which they meet.
#include <chrono>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include <hyper_parallel/core/error.h>

namespace c10d {
class Store;
}

namespace hyper_parallel {

class Comm;

struct InitOptions {
  std::string backend;  ///< "gloo", "nccl"; empty: chosen by the device of a mesh
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  ///< of every collective unless it says otherwise
  /// Rank threads and tests give these; by default they come from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
  int rank = -1;
  int world_size = -1;
  int local_rank = -1;
  c10::intrusive_ptr<c10d::Store> store;
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
  [[nodiscard]] Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Joins the world that torchrun's environment describes (agent store or own TCP store), or makes a world of one without it.
/// Sets the calling thread's current world and returns it. Collective when the world has more than one rank.
HP_API World init_process_group(const InitOptions& options = {});
/// The calling thread's current world; makes a world of one when none was set and no launcher's environment is present,
/// otherwise ValueError says to call init_process_group first.
[[nodiscard]] HP_API World current_world();
[[nodiscard]] HP_API bool is_initialized();
/// Drops the calling thread's current world. Groups live on while meshes or units hold them.
HP_API void destroy_process_group();
[[nodiscard]] HP_API int get_rank();
[[nodiscard]] HP_API int get_world_size();

}  // namespace hyper_parallel
