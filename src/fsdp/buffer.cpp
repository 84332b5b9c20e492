#include "fsdp/buffer.h"

#include <algorithm>
#include <utility>

#include <hyper_parallel/core/error.h>

#include "fsdp/flat_tensor.h"

namespace hyper_parallel::fsdp {

namespace {

/// An embedding, and an output head of the same size with a norm, should be able to use the same block.
std::size_t with_room(std::size_t bytes) {
  constexpr std::size_t kLarge = 1 << 20;
  return bytes < kLarge ? bytes : bytes + bytes / 1024;
}

}  // namespace

MemoryPool::Block MemoryPool::take(std::size_t bytes, Use use) {
  const auto fit = place_of(bytes, use);
  if (fit != free_.end() && fit->use == use && fit->bytes <= bytes + bytes / 4) {
    Block block = std::move(*fit);
    free_.erase(fit);
    return block;
  }
  const std::size_t size = with_room(bytes);
  capacity_ += size;
  return Block{allocator_->allocate(size), size, use};
}

void MemoryPool::give(Block block) {
  const auto place = place_of(block.bytes, block.use);
  free_.insert(place, std::move(block));
}

std::vector<MemoryPool::Block>::iterator MemoryPool::place_of(std::size_t bytes, Use use) {
  return std::lower_bound(free_.begin(), free_.end(), std::pair(use, bytes),
                          [](const Block& block, const auto& want) { return std::pair(block.use, block.bytes) < want; });
}

void MemoryPool::clear() {
  for (const Block& block : free_) capacity_ -= block.bytes;
  free_.clear();
}

SwappedBuffer::SwappedBuffer(std::int64_t numel, const at::TensorOptions& options, std::string guard_message, MemoryPool::Use use)
    : message_(std::move(guard_message)), use_(use) {
  bytes_ = flat_bytes(numel, options);
  flat_ = flat_over(at::DataPtr(nullptr, options.device()), numel, options);
  guard();
}

void SwappedBuffer::acquire(MemoryPool& pool) {
  check_internal(!live_, "buffer", "acquired twice");
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  MemoryPool::Block block = pool.take(bytes_, use_);
  block_bytes_ = block.bytes;
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(std::move(block.data));
  live_ = true;
}

void SwappedBuffer::release(MemoryPool& pool) {
  if (!live_) return;
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  at::DataPtr data = storage->set_data_ptr(at::DataPtr(nullptr, flat_.device()));
  if (!std::exchange(lent_, false)) pool.give({std::move(data), block_bytes_, use_});
  guard();
  live_ = false;
}

void SwappedBuffer::lend(at::DataPtr data) {
  check_internal(!live_, "buffer", "acquired twice");
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  storage->clear_data_ptr_access_error_msg_();
  storage->set_data_ptr_noswap(std::move(data));
  live_ = lent_ = true;
}

void SwappedBuffer::set_guard_message(std::string message) {
  message_ = std::move(message);
  if (!live_) guard();
}

void SwappedBuffer::guard() {
  // A buffer of zero bytes has nothing to protect, and torch would refuse to look at its (empty) data.
  if (bytes_ > 0) flat_.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message_);
}

}  // namespace hyper_parallel::fsdp
