#pragma once
// Tensors that have memory but no values yet, and handles that change what they refer to.
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace hyper_parallel::fsdp {

/// A tensor whose values nobody has written yet. Floating tensors carry a NaN of one bit pattern that no arithmetic produces, so
/// that any write is seen, whoever does it; in others a changed version counter says the same.
class Unwritten {
 public:
  Unwritten() = default;
  /// Fills `tensor`, unless it is on the meta device, which needs no mark.
  explicit Unwritten(const at::Tensor& tensor);
  /// Fills `tensor` with the mark. Local; nothing on the meta device.
  static void fill(const at::Tensor& tensor);
  /// True while some element of `tensor`, the one that was filled or a view of its memory, has no value.
  [[nodiscard]] bool still(const at::Tensor& tensor) const;

 private:
  std::uint32_t version_ = 0;
};

/// Makes `handle` refer to `data`, whatever device and dtype either has. The handle stays the same object: optimizers, hooks,
/// .grad and the version counter keep.
void become(const at::Tensor& handle, const at::Tensor& data);

}  // namespace hyper_parallel::fsdp
