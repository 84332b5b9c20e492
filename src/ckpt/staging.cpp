#include "ckpt/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hyper_parallel::ckpt {

Staging::~Staging() { release(); }

void Staging::release() {
  if (memory_ != nullptr) ::munmap(memory_, capacity_);
  memory_ = nullptr;
  capacity_ = 0;
}

std::span<std::byte> Staging::take(std::uint64_t bytes) {
  if (bytes <= capacity_) return {memory_, bytes};
  release();
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  (void)::madvise(memory, bytes, MADV_HUGEPAGE);  // a hint
  memory_ = static_cast<std::byte*>(memory);
  capacity_ = bytes;
  return {memory_, bytes};
}

void copy_past_cache(std::byte* to, std::span<const std::byte> from) {
#if defined(__x86_64__)
  constexpr std::size_t kLine = 64;
  const std::size_t head = std::min<std::size_t>(from.size(), (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from.data(), head);
  std::size_t at = head;
  for (; at + kLine <= from.size(); at += kLine) {
    for (std::size_t part = 0; part < kLine; part += 16) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from.data() + at + part));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part), value);
    }
  }
  _mm_sfence();
  if (at < from.size()) std::memcpy(to + at, from.data() + at, from.size() - at);
#else
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
#endif
}

}  // namespace hyper_parallel::ckpt
