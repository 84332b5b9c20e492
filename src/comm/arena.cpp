#include "comm/arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <hyper_parallel/core/log.h>

namespace hyper_parallel {
namespace {

constexpr std::uint64_t kLine = 64;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kKeep = std::uint64_t{64} << 20;       // free bytes that keep their pages
constexpr std::uint64_t kLeast = std::uint64_t{1} << 26;       // of an arena, however many there are
constexpr std::uint64_t kWorthACall = std::uint64_t{1} << 20;  // smaller holes keep their pages too

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

struct Block {
  std::shared_ptr<Arena> arena;
  Arena::Range range;
};

void free_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  block->arena->give(block->range);
}

}  // namespace

std::shared_ptr<Arena> Arena::create(int neighbours, const Options& options) {
  const auto pages = static_cast<std::uint64_t>(std::max(::sysconf(_SC_PHYS_PAGES), 1L));
  const auto page = static_cast<std::uint64_t>(std::max(::sysconf(_SC_PAGESIZE), 1L));
  // Twice the machine's memory leaves room for fragments. Every rank maps all of its host: stay far below 47 bits of addresses.
  const auto most = (std::uint64_t{1} << 44) / static_cast<std::uint64_t>(std::max(neighbours, 1));
  const auto bytes = std::max(std::min(2 * pages * page, most), kLeast);
  return std::make_shared<Arena>(make_shared_file("hyper_parallel arena", round_up(bytes, std::max(page, kPage))), options);
}

Arena::Arena(SharedFile file, const Options& options)
    : file_(std::move(file)), first_touch_(options.first_touch), huge_pages_(options.huge_pages) {
  if (huge_pages_ && !ask_for_huge_pages(file_.mapping->data(), file_.mapping->size())) {
    log::warn("shared memory without huge pages: madvise: ", std::strerror(errno));
  }
  const auto bytes = file_.mapping->size();
  add_hole(kPage, {bytes - kPage, 0});  // the first page holds the file's id
}

c10::DataPtr Arena::allocate(std::size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) return {nullptr, cpu};
  if (::getpid() != file_.address.pid) return c10::GetCPUAllocator()->allocate(bytes);
  const auto range = take(bytes);
  if (!range) return c10::GetCPUAllocator()->allocate(bytes);
  auto block = std::make_unique<Block>(Block{shared_from_this(), *range});
  return {at(range->offset), block.release(), &free_block, cpu};
}

void Arena::copy_data(void* to, const void* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }

std::optional<Arena::Range> Arena::take(std::size_t bytes) {
  const auto unit = bytes >= kPage ? kPage : kLine;
  const auto range = find_room(round_up(std::max<std::uint64_t>(bytes, 1), unit), unit);
  if (range && first_touch_) {
    for (std::uint64_t i = 0; i < range->bytes; i += kPage) *static_cast<volatile char*>(at(range->offset + i)) = 0;
  }
  return range;
}

std::optional<Arena::Range> Arena::find_room(std::uint64_t size, std::uint64_t unit) {
  const std::lock_guard lock(mutex_);
  collect_late();
  // The smallest hole that fits; one that only alignment makes too small is passed over.
  for (auto it = sizes_.lower_bound({size, 0}); it != sizes_.end(); ++it) {
    const auto start = it->second;
    const auto aligned = round_up(start, unit);
    if (aligned - start + size > it->first) continue;
    const auto found = holes_.find(start);
    const auto hole = found->second;
    erase_hole(found);
    auto dirty = hole.dirty - std::min(hole.dirty, size);
    const auto front = aligned - start;
    const auto back = hole.bytes - front - size;
    if (front > 0) add_hole(start, {front, std::min(dirty, front)});
    dirty -= std::min(dirty, front);
    if (back > 0) add_hole(aligned + size, {back, std::min(dirty, back)});
    used_ += size;
    return Range{aligned, size};
  }
  return std::nullopt;
}

void Arena::give(const Range& range) noexcept {
  if (::getpid() != file_.address.pid) return;
  const std::lock_guard lock(mutex_);
  give_locked(range);
}

void Arena::give_later(const Range& range, Word* state, Word done, std::shared_ptr<Mapping> keep) {
  const std::lock_guard lock(mutex_);
  late_.push_back({range, state, done, std::move(keep)});
  collect_late();
}

std::optional<std::uint64_t> Arena::find(const void* data, std::size_t bytes) const noexcept {
  const auto base = reinterpret_cast<std::uintptr_t>(file_.mapping->data());
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (at < base || at - base > file_.mapping->size() || bytes > file_.mapping->size() - (at - base)) return std::nullopt;
  return at - base;
}

std::uint64_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

void Arena::add_hole(std::uint64_t offset, Hole hole) {
  holes_.emplace(offset, hole);
  sizes_.emplace(hole.bytes, offset);
  dirty_ += hole.dirty;
}

void Arena::erase_hole(Holes::iterator hole) {
  sizes_.erase({hole->second.bytes, hole->first});
  dirty_ -= hole->second.dirty;
  holes_.erase(hole);
}

void Arena::give_locked(const Range& range) {
  used_ -= range.bytes;
  auto offset = range.offset;
  Hole hole{range.bytes, range.bytes};
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && next->first == offset + range.bytes) {
    hole.bytes += next->second.bytes;
    hole.dirty += next->second.dirty;
    const auto joined = next++;
    erase_hole(joined);
  }
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == offset) {
      offset = before->first;
      hole.bytes += before->second.bytes;
      hole.dirty += before->second.dirty;
      erase_hole(before);
    }
  }
  if (hole.dirty >= kWorthACall && dirty_ + hole.dirty > kKeep) {
    const auto start = round_up(offset, kPage);
    const auto end = (offset + hole.bytes) / kPage * kPage;
    const bool gone = ::fallocate(file_.mapping->file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                                  static_cast<off_t>(end - start)) == 0;
    if (gone) hole.dirty = 0;
  }
  add_hole(offset, hole);
}

void Arena::collect_late() {
  std::erase_if(late_, [this](const Late& late) {
    if (word(*late.state).load(std::memory_order_acquire) != late.done) return false;
    give_locked(late.range);
    return true;
  });
}

}  // namespace hyper_parallel
