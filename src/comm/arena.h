#pragma once
// Memory of one rank that the other ranks of its host can read.
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>

#include "comm/futex.h"
#include "comm/shared_memory.h"

namespace hyper_parallel {

/// A large sparse shared file and an allocator over it. Blocks are 64-byte aligned, those of a page or more page-aligned. Freed
/// memory is used again; beyond 64 MiB of it, pages go back to the system.
///
/// Blocks hold the arena: they may outlive the world and its groups. In a child after fork() it gives ordinary memory, and
/// freeing does nothing, because the parent goes on using the pages. Thread safety: any thread.
class Arena final : public c10::Allocator, public std::enable_shared_from_this<Arena> {
 public:
  struct Range {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };

  /// See InitOptions.
  struct Options {
    bool huge_pages = false;
    bool first_touch = false;
  };

  /// The arena of one rank of a host that has about `neighbours` of them. SharedMemoryError when the system refuses.
  static std::shared_ptr<Arena> create(int neighbours, const Options& options);
  Arena(SharedFile file, const Options& options);

  /// Torch's CPU memory when no room is left.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

  /// A block without owner; nothing when there is no room.
  [[nodiscard]] std::optional<Range> take(std::size_t bytes);
  void give(const Range& range) noexcept;
  /// Gives `range` back once `*state` is `done`: a peer may still read it. `keep` holds the word's memory.
  void give_later(const Range& range, Word* state, Word done, std::shared_ptr<Mapping> keep);

  /// Where `data` lies, if all of its `bytes` are in this arena.
  [[nodiscard]] std::optional<std::uint64_t> find(const void* data, std::size_t bytes) const noexcept;
  [[nodiscard]] char* at(std::uint64_t offset) const noexcept { return file_.mapping->data() + offset; }
  [[nodiscard]] const Mapping& mapping() const noexcept { return *file_.mapping; }
  [[nodiscard]] const SharedFileAddress& address() const noexcept { return file_.address; }
  [[nodiscard]] bool huge_pages() const noexcept { return huge_pages_; }
  /// Bytes in blocks now.
  [[nodiscard]] std::uint64_t used() const;

 private:
  struct Hole {
    std::uint64_t bytes = 0;
    std::uint64_t dirty = 0;  ///< about so many of them have pages
  };
  struct Late {
    Range range;
    Word* state;
    Word done;
    std::shared_ptr<Mapping> keep;
  };
  using Holes = std::map<std::uint64_t, Hole>;

  [[nodiscard]] std::optional<Range> find_room(std::uint64_t size, std::uint64_t unit);
  void add_hole(std::uint64_t offset, Hole hole);
  void erase_hole(Holes::iterator hole);
  void give_locked(const Range& range);
  void collect_late();

  SharedFile file_;
  bool first_touch_;
  bool huge_pages_;
  mutable std::mutex mutex_;
  Holes holes_;                                              ///< by offset; neighbours are always joined
  std::set<std::pair<std::uint64_t, std::uint64_t>> sizes_;  ///< (bytes, offset) of every hole
  std::uint64_t dirty_ = 0;                                  ///< sum over the holes
  std::uint64_t used_ = 0;
  std::vector<Late> late_;
};

}  // namespace hyper_parallel
