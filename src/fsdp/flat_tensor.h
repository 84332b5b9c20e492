#pragma once
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace hyper_parallel::fsdp {

[[nodiscard]] inline std::size_t flat_bytes(std::int64_t numel, const at::TensorOptions& options) {
  return static_cast<std::size_t>(numel) * options.dtype().itemsize();
}

/// A 1-D tensor over `data`, which may be null: then only the shape can be used.
[[nodiscard]] inline at::Tensor flat_over(at::DataPtr data, std::int64_t numel, const at::TensorOptions& options) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), flat_bytes(numel, options), std::move(data), nullptr,
                             /*resizable=*/false);
  at::Tensor flat = at::empty({0}, options);
  flat.set_(storage, 0, {numel}, {1});
  return flat;
}

/// A 1-D tensor whose memory comes from `allocator`; contents undefined.
[[nodiscard]] inline at::Tensor allocate_flat(std::int64_t numel, const at::TensorOptions& options, c10::Allocator* allocator) {
  return flat_over(allocator->allocate(flat_bytes(numel, options)), numel, options);
}

}  // namespace hyper_parallel::fsdp
