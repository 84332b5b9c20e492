#pragma once
// Slices of memory, one in the arena of each rank of a host, and the range where a rank sees them side by side.
// Protocol: docs/design/009-same-host.md.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <c10/core/Allocator.h>

#include "comm/arena.h"

namespace hyper_parallel {

/// What a rank tells the others about its slice: in its own arena, written by it alone. Never freed.
struct SliceState {
  alignas(64) Word published = 0;  ///< times that the slice was complete
  Word finished = 0;               ///< times that this rank had done with reading those of the others
};

/// Where a slice is, for the others. `slice` zero: nowhere.
struct SliceAddress {
  std::uint64_t state = 0;
  std::uint64_t slice = 0;
};

/// Whether `word` has reached `count`; both wrap around.
[[nodiscard]] inline bool has_reached(Word& value, Word count) noexcept {
  return static_cast<std::int32_t>(word(value).load(std::memory_order_acquire) - count) >= 0;
}

/// Thread safety: one thread at a time.
class SharedSlices : public std::enable_shared_from_this<SharedSlices> {
 public:
  /// This rank's slice of `bytes` bytes. Without room in the arena it is ordinary memory and `address` says so.
  SharedSlices(std::shared_ptr<Arena> arena, int rank, int size, std::size_t bytes);
  SharedSlices(const SharedSlices&) = delete;
  SharedSlices& operator=(const SharedSlices&) = delete;
  ~SharedSlices();

  /// This rank's slice, to write.
  [[nodiscard]] c10::DataPtr own();
  [[nodiscard]] SliceAddress address() const;
  /// Maps the slices of all ranks, by rank; `arenas` are those of the peers. SharedMemoryError when one has none or the system
  /// refuses.
  void connect(std::span<const SliceAddress> addresses, std::span<const std::shared_ptr<Mapping>> arenas);
  [[nodiscard]] bool connected() const noexcept { return view_ != nullptr; }

  [[nodiscard]] SliceState& state(int rank) const noexcept { return *states_[static_cast<std::size_t>(rank)]; }
  /// Copies what lies on pages that belong to two slices, or to none in full. Afterwards the view is complete.
  void copy_edges() noexcept;
  /// All slices, one after the other. Only the copied pages can be written.
  [[nodiscard]] c10::DataPtr view();

  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Bytes of other ranks' slices that are mapped, and bytes of the view on pages of this rank's own.
  [[nodiscard]] std::size_t mapped_bytes() const noexcept;
  [[nodiscard]] static std::size_t private_bytes(std::size_t bytes, int size);

 private:
  /// A part of a slice that is copied.
  struct Edge {
    char* to;
    const char* from;
    std::size_t bytes;
  };
  [[nodiscard]] std::size_t start(int rank) const { return bytes_ * static_cast<std::size_t>(rank); }
  void map_slice(int rank, const Mapping& arena, std::uint64_t slice);
  void add_edge(int rank, std::size_t begin, std::size_t end);

  std::shared_ptr<Arena> arena_;
  int rank_;
  int size_;
  std::size_t bytes_;
  Arena::Range state_range_, range_;
  std::uint64_t slice_ = 0;  ///< in the arena
  c10::DataPtr elsewhere_;   ///< the slice, if the arena had no room
  std::vector<std::shared_ptr<Mapping>> peers_;
  std::vector<SliceState*> states_;
  std::vector<const char*> slices_;  ///< where each can be read outside of the view
  char* view_ = nullptr;
  std::size_t view_bytes_ = 0;
  std::vector<Edge> edges_;
};

}  // namespace hyper_parallel
