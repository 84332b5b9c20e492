#pragma once
// Random numbers for ranks that must draw the same ones and for ranks that must not.
//
//   RandomStates random(seed, mesh);                                   // mesh (dp, tp)
//   { const auto scope = random.fork({"dp"});        x = dropout(x); }  // replicated over tp: the same mask there
//   { const auto scope = random.fork({"dp", "tp"});  h = dropout(h); }  // cut over tp: another mask on each rank
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel::parallel {

/// One stream of random numbers for each set of mesh axes. Ranks with equal coordinates along the axes of a stream draw the same
/// numbers from it, others different ones; what one stream has drawn does not change another. Nothing of the process's default
/// generator is used, so ranks may be threads. Thread safety: one thread at a time.
class HP_API RandomStates {
 public:
  /// Local. Pass the same seed on all ranks.
  RandomStates(std::uint64_t seed, DeviceMesh mesh);

  /// While one lives, operations of this thread that draw random numbers and name no generator draw from the stream.
  class HP_API Fork {
   public:
    explicit Fork(const at::Generator& generator);
    Fork(Fork&& other) noexcept;
    Fork& operator=(Fork&&) = delete;
    ~Fork();

   private:
    struct Scope;
    std::unique_ptr<Scope> scope_;
  };
  /// \param axes names of mesh axes, in any order; none: the same numbers on all ranks. Local. ValueError: an unknown or repeated
  /// name. Forks may be nested; the inner one counts.
  [[nodiscard]] Fork fork(const std::vector<std::string>& axes);
  /// The generator of a stream, for operations that take one. Local. ValueError as fork.
  [[nodiscard]] at::Generator generator(const std::vector<std::string>& axes);
  /// Of all streams used so far: for CheckpointOptions::generators, so that a recomputation draws the same numbers. Ask for
  /// each stream once, with `generator`, before the first checkpoint.
  [[nodiscard]] std::vector<at::Generator> generators() const;

  /// State of every stream used so far, by its axes joined with ','. Streams belong to this rank's coordinates. Local.
  [[nodiscard]] std::map<std::string, at::Tensor> state() const;
  /// Local. ValueError: axes that the mesh does not have.
  void set_state(const std::map<std::string, at::Tensor>& state);

 private:
  std::uint64_t seed_;
  DeviceMesh mesh_;
  std::map<std::string, at::Generator> streams_;
};

}  // namespace hyper_parallel::parallel
