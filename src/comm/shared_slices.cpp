#include "comm/shared_slices.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <hyper_parallel/core/error.h>

#include "comm/view_guard.h"

namespace hyper_parallel {
namespace {

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(std::max(::sysconf(_SC_PAGESIZE), 4096L));
  return size;
}

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// The whole pages inside of [begin, end), empty if there are none.
struct Pages {
  std::size_t begin = 0, end = 0;
};
Pages whole_pages(std::size_t begin, std::size_t end) {
  const auto page = page_size();
  Pages pages{round_up(begin, page), end / page * page};
  pages.end = std::max(pages.begin, pages.end);
  return pages;
}

[[noreturn]] void refuse(const char* what) { throw SharedMemoryError(concat(what, ": ", std::strerror(errno))); }

void drop(void* context) { delete static_cast<std::shared_ptr<SharedSlices>*>(context); }

}  // namespace

// The slice starts in its page where it starts in the view's page, so that whole pages of it can be mapped there.
SharedSlices::SharedSlices(std::shared_ptr<Arena> arena, int rank, int size, std::size_t bytes)
    : arena_(std::move(arena)), rank_(rank), size_(size), bytes_(bytes) {
  const auto lead = start(rank) % page_size();
  const auto state = arena_->take(sizeof(SliceState));
  // The arena aligns to 4096 bytes, whatever the page size.
  const auto room = state ? arena_->take(round_up(lead + bytes, page_size()) + page_size() - 4096) : std::nullopt;
  if (state) state_range_ = *state;
  if (!room) {
    elsewhere_ = c10::GetCPUAllocator()->allocate(bytes);
    return;
  }
  range_ = *room;
  slice_ = round_up(range_.offset, page_size()) + lead;
  new (arena_->at(state_range_.offset)) SliceState();
}

SharedSlices::~SharedSlices() {
  if (view_ != nullptr) {
    unguard_view(view_);
    ::munmap(view_, view_bytes_);
  }
  // The state stays for ever, a line of the arena: a peer that has yet to leave the last phase still looks at it.
  if (range_.bytes > 0) arena_->give(range_);
}

c10::DataPtr SharedSlices::own() {
  void* data = slice_ != 0 ? arena_->at(slice_) : elsewhere_.get();
  return {data, new std::shared_ptr<SharedSlices>(shared_from_this()), &drop, c10::Device(c10::DeviceType::CPU)};
}

SliceAddress SharedSlices::address() const { return {state_range_.offset, slice_}; }

void SharedSlices::connect(std::span<const SliceAddress> addresses, std::span<const std::shared_ptr<Mapping>> arenas) {
  for (int r = 0; r < size_; ++r) {
    const auto& address = addresses[static_cast<std::size_t>(r)];
    if (address.slice == 0) throw SharedMemoryError(concat("rank ", r, " has no room for a slice of ", bytes_, " bytes"));
    const auto* arena = r == rank_ ? &arena_->mapping() : arenas[static_cast<std::size_t>(r)].get();
    const bool fits = address.slice <= arena->size() && bytes_ <= arena->size() - address.slice &&
                      address.state <= arena->size() - sizeof(SliceState) && address.state % alignof(SliceState) == 0 &&
                      address.slice % page_size() == start(r) % page_size();
    if (!fits) throw SharedMemoryError(concat("rank ", r, " names no place for a slice of ", bytes_, " bytes"));
    states_.push_back(reinterpret_cast<SliceState*>(arena->data() + address.state));
    slices_.push_back(arena->data() + address.slice);
  }
  peers_.assign(arenas.begin(), arenas.end());
  const auto total = round_up(start(size_), page_size());
  void* place = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) refuse("cannot reserve addresses for gathered parameters");
  view_ = static_cast<char*>(place);
  view_bytes_ = total;
  for (int r = 0; r < size_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    map_slice(r, r == rank_ ? arena_->mapping() : *arenas[i], addresses[i].slice);
  }
  ::madvise(view_, view_bytes_, MADV_DONTDUMP);
  if (arena_->huge_pages()) ask_for_huge_pages(view_, view_bytes_);
  guard_view(view_, view_bytes_);
}

void SharedSlices::map_slice(int rank, const Mapping& arena, std::uint64_t slice) {
  const auto begin = start(rank), end = begin + bytes_;
  const auto pages = whole_pages(begin, end);
  if (pages.begin == pages.end) return add_edge(rank, begin, end);
  const auto offset = static_cast<off_t>(slice + (pages.begin - begin));
  void* mapped = ::mmap(view_ + pages.begin, pages.end - pages.begin, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                        arena.file(), offset);
  if (mapped == MAP_FAILED) refuse("cannot map a slice of gathered parameters");
  add_edge(rank, begin, pages.begin);
  add_edge(rank, pages.end, end);
}

void SharedSlices::add_edge(int rank, std::size_t begin, std::size_t end) {
  if (begin == end) return;
  edges_.push_back({view_ + begin, slices_[static_cast<std::size_t>(rank)] + (begin - start(rank)), end - begin});
}

void SharedSlices::copy_edges() noexcept {
  for (const auto& edge : edges_) std::memcpy(edge.to, edge.from, edge.bytes);
}

c10::DataPtr SharedSlices::view() {
  return {view_, new std::shared_ptr<SharedSlices>(shared_from_this()), &drop, c10::Device(c10::DeviceType::CPU)};
}

std::size_t SharedSlices::mapped_bytes() const noexcept {
  std::size_t sum = 0;
  for (int r = 0; r < size_; ++r) {
    const auto pages = whole_pages(start(r), start(r) + bytes_);
    if (r != rank_) sum += pages.end - pages.begin;
  }
  return sum;
}

std::size_t SharedSlices::private_bytes(std::size_t bytes, int size) {
  auto sum = round_up(bytes * static_cast<std::size_t>(size), page_size());
  for (std::size_t r = 0; r < static_cast<std::size_t>(size); ++r) {
    const auto pages = whole_pages(r * bytes, (r + 1) * bytes);
    sum -= pages.end - pages.begin;
  }
  return sum;
}

}  // namespace hyper_parallel
