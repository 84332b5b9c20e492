#pragma once
// The shared file of a group of ranks on one host: how messages are announced. Protocol: docs/design/009-same-host.md.
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/futex.h"
#include "comm/shared_memory.h"

namespace hyper_parallel {

/// Messages from one rank to another that are under way at once. More wait at the sender.
constexpr Word kEntries = 256;
/// Up to here a message travels inside its announcement.
constexpr std::size_t kInlineBytes = 216;

/// Life of an entry: free -> posted -> (claimed ->) done -> free, or posted -> revoked when the sender gives up. The sender makes
/// the steps from and to free and to revoked, the receiver the others.
enum EntryState : Word { kEntryFree = 0, kEntryPosted, kEntryClaimed, kEntryDone, kEntryRevoked };

/// Where the bytes are.
enum class Place : Word {
  kInline,   ///< in the entry
  kStaged,   ///< at `where` in the sender's arena, in a copy made for this message
  kArena,    ///< at `where` in the sender's arena, in the tensor itself
  kAddress,  ///< at address `where` of the process that both ranks are threads of
};

struct Entry {
  Word state = kEntryFree;
  Word place = 0;
  std::int32_t tag = 0;
  Word wanted = 0;  ///< the sender waits: copy now rather than later
  std::uint64_t bytes = 0;
  std::uint64_t where = 0;
  Word spare[2] = {};
  std::array<unsigned char, kInlineBytes> payload = {};
};
static_assert(sizeof(Entry) == 256);

/// Messages from one rank to another. An entry is announced by its number in `order`, in the order of posting.
struct Lane {
  alignas(64) Word tail = 0;     ///< announcements so far, modulo 2^32
  alignas(64) Word backlog = 0;  ///< the sender has messages that found no free entry: tell it when one is done
  alignas(64) std::array<Word, kEntries> order = {};
  std::array<Entry, kEntries> entries = {};
};

/// What a rank is woken by.
struct Seat {
  alignas(64) Bell bell;    ///< something changed for the rank
  alignas(64) Bell helper;  ///< somebody waits for something that the rank's helper thread can do
  alignas(64) Word closed = 0;
};

/// Gives the parts of the file their places. All zero is its valid start.
class Mailbox {
 public:
  Mailbox(std::shared_ptr<Mapping> mapping, int size) : mapping_(std::move(mapping)), size_(static_cast<std::size_t>(size)) {}
  static std::size_t file_bytes(int size) noexcept {
    const auto n = static_cast<std::size_t>(size);
    return (kSharedFileHeader + n * sizeof(Seat) + n * n * sizeof(Lane) + 65535) / 65536 * 65536;
  }
  [[nodiscard]] Seat& seat(int rank) const noexcept { return seats()[rank]; }
  [[nodiscard]] Lane& lane(int from, int to) const noexcept {
    auto* lanes = reinterpret_cast<Lane*>(seats() + size_);
    return lanes[static_cast<std::size_t>(from) * size_ + static_cast<std::size_t>(to)];
  }
  [[nodiscard]] const std::shared_ptr<Mapping>& mapping() const noexcept { return mapping_; }

 private:
  [[nodiscard]] Seat* seats() const noexcept { return reinterpret_cast<Seat*>(mapping_->data() + kSharedFileHeader); }

  std::shared_ptr<Mapping> mapping_;
  std::size_t size_;
};

}  // namespace hyper_parallel
