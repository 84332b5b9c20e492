#include "fsdp/unwritten.h"

#include <algorithm>
#include <mutex>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>

namespace hyper_parallel::fsdp {
namespace {

constexpr std::int64_t kPiece = 1 << 15;

/// Same bytes as integers, for floats and complex numbers.
at::Tensor as_bits(const at::Tensor& tensor) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  switch (real.element_size()) {
    case 2:
      return real.view(at::kShort);
    case 4:
      return real.view(at::kInt);
    case 8:
      return real.view(at::kLong);
    default:
      return real.view(at::kByte);
  }
}

/// Quiet NaNs with a payload.
std::int64_t pattern(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kHalf:
      return 0x7E5A;
    case at::kBFloat16:
      return 0x7FDA;
    case at::kFloat:
      return 0x7FC05A5A;
    case at::kDouble:
      return 0x7FF85A5A5A5A5A5ALL;
    default:
      return 0x7F;  // NaN, or the largest number, in the formats of one byte
  }
}

bool marked_by_bits(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

}  // namespace

Unwritten::Unwritten(const at::Tensor& tensor) {
  fill(tensor);
  version_ = static_cast<std::uint32_t>(tensor._version());
}

void Unwritten::fill(const at::Tensor& tensor) {
  if (tensor.is_meta() || !marked_by_bits(tensor)) return;
  at::NoGradGuard no_grad;
  as_bits(tensor.detach()).fill_(pattern(tensor.scalar_type()));
}

bool Unwritten::still(const at::Tensor& tensor) const {
  if (tensor.is_meta()) return true;
  if (tensor.numel() == 0) return false;
  if (!marked_by_bits(tensor)) return static_cast<std::uint32_t>(tensor._version()) == version_;
  at::NoGradGuard no_grad;
  // Piece by piece: a comparison of the whole would take memory beside it.
  const at::Tensor bits = as_bits(tensor.detach().contiguous()).view({-1});
  for (std::int64_t begin = 0; begin < bits.numel(); begin += kPiece) {
    const at::Tensor piece = bits.narrow(0, begin, std::min(kPiece, bits.numel() - begin));
    if (piece.eq(pattern(tensor.scalar_type())).any().item<bool>()) return true;
  }
  return false;
}

void become(const at::Tensor& handle, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(handle)) {
    // It remembers device and dtype of before; the next use makes a new one.
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  handle.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace hyper_parallel::fsdp
