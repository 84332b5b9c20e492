#pragma once
// Memory that comes and goes under tensors that stay: a pool of blocks and storages whose block is swapped.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace hyper_parallel::fsdp {

/// Free blocks by size. Blocks are returned to the allocator by clear() and by the end of the pool only, so a loop that repeats
/// itself allocates nothing. Thread safety: one thread at a time.
class MemoryPool {
 public:
  /// Blocks serve one use only. kSpare is space that is normally not written to: kept apart, its pages stay untouched.
  enum class Use : std::uint8_t { kData, kSpare };
  struct Block {
    at::DataPtr data;
    std::size_t bytes = 0;  ///< capacity
    Use use = Use::kData;
  };

  explicit MemoryPool(c10::Allocator* allocator) : allocator_(allocator) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// The smallest free block of at least `bytes` and at most 1.25 times that, or a new one: of `bytes`, a little more if large.
  [[nodiscard]] Block take(std::size_t bytes, Use use);
  void give(Block block);
  /// Returns the free blocks to the allocator.
  void clear();
  /// Bytes taken from the allocator so far.
  [[nodiscard]] std::size_t capacity() const { return capacity_; }

 private:
  /// Where the first free block of that use and of at least that size stands.
  [[nodiscard]] std::vector<Block>::iterator place_of(std::size_t bytes, Use use);

  c10::Allocator* allocator_;
  std::vector<Block> free_;  // by use and size, ascending
  std::size_t capacity_ = 0;
};

/// A flat tensor whose storage object lives for ever and whose memory is taken from a pool and given back.
///
/// Views of `flat()` stay valid across swaps. While there is no memory, touching any of them throws `guard_message` (torch's own
/// check of the data pointer); shapes, views and detach stay allowed. nbytes is never changed, since torch checks saved views
/// against it.
class SwappedBuffer {
 public:
  SwappedBuffer() = default;
  SwappedBuffer(std::int64_t numel, const at::TensorOptions& options, std::string guard_message,
                MemoryPool::Use use = MemoryPool::Use::kData);
  SwappedBuffer(const SwappedBuffer&) = delete;
  SwappedBuffer& operator=(const SwappedBuffer&) = delete;
  SwappedBuffer(SwappedBuffer&&) = default;
  SwappedBuffer& operator=(SwappedBuffer&&) = default;

  [[nodiscard]] bool defined() const { return flat_.defined(); }
  [[nodiscard]] const at::Tensor& flat() const { return flat_; }
  void set_guard_message(std::string message);

  /// Contents are undefined afterwards.
  void acquire(MemoryPool& pool);
  void release(MemoryPool& pool);
  /// Memory from elsewhere, until release.
  void lend(at::DataPtr data);
  [[nodiscard]] bool lent() const { return live_ && lent_; }

 private:
  void guard();

  at::Tensor flat_;
  std::string message_;
  std::size_t bytes_ = 0;
  std::size_t block_bytes_ = 0;
  MemoryPool::Use use_ = MemoryPool::Use::kData;
  bool live_ = false;
  bool lent_ = false;
};

}  // namespace hyper_parallel::fsdp
