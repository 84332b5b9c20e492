#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace hyper_parallel::fsdp {

/// A 1-D tensor whose memory comes from `allocator`; contents undefined.
inline at::Tensor allocate_flat(std::int64_t numel, const at::TensorOptions& options, c10::Allocator* allocator) {
  const auto bytes = static_cast<std::size_t>(numel) * options.dtype().itemsize();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), nullptr, /*resizable=*/false);
  at::Tensor flat = at::empty({0}, options);
  flat.set_(storage, 0, {numel}, {1});
  return flat;
}

}  // namespace hyper_parallel::fsdp
