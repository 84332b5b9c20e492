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

/// `shape` at an offset of a flat tensor, as a tensor whose storage begins and ends there and keeps the flat one alive: whoever
/// saves or copies storages gets this part only.
[[nodiscard]] inline at::Tensor part_of_flat(const at::Tensor& flat, std::int64_t offset, std::int64_t numel,
                                             at::IntArrayRef shape) {
  if (flat.is_meta()) return at::empty(shape, flat.options());
  void* data = numel == 0 ? nullptr : flat.narrow(0, offset, numel).mutable_data_ptr();
  auto* owner = new c10::Storage(flat.storage());
  at::DataPtr owned(
      data, owner, [](void* storage) { delete static_cast<c10::Storage*>(storage); }, flat.device());
  at::Tensor part = flat_over(std::move(owned), numel, flat.options());
  // No view: it would refer to another tensor of the storage, whose references tell whether anybody has kept it.
  part.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return part;
}

}  // namespace hyper_parallel::fsdp
