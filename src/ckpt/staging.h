#pragma once
// Memory that values are copied to before they are written. Torch-free.
#include <cstddef>
#include <cstdint>
#include <span>

namespace hyper_parallel::ckpt {

/// Memory that keeps its size between saves, so that its pages are there. Huge ones, where the system has them. Thread safety:
/// one thread at a time.
class Staging {
 public:
  Staging() = default;
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Aligned to pages. std::bad_alloc.
  std::span<std::byte> take(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t capacity() const { return capacity_; }

 private:
  void release();
  std::byte* memory_ = nullptr;
  std::uint64_t capacity_ = 0;
};

/// Copies past the cache: what is copied is read much later, and a line that is written as a whole need not be read first.
void copy_past_cache(std::byte* to, std::span<const std::byte> from);

}  // namespace hyper_parallel::ckpt
