#include "ckpt/elements.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <hyper_parallel/core/error.h>

#include "ckpt/dtypes.h"

namespace hyper_parallel::ckpt {

bool is_real(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16:
    case Dtype::kBF16:
    case Dtype::kF32:
    case Dtype::kF64:
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
      return true;
    default:
      return false;
  }
}

std::span<const std::byte> convert_elements(std::span<const std::byte> bytes, Dtype from, Dtype to,
                                            std::vector<std::byte>& memory, const std::string& name) {
  if (from == to) return bytes;
  check_value(is_real(from) && is_real(to), "safetensors", "tensor ", name, " is ", to_string(from), ", want a conversion to ",
              to_string(to), " between floating point types");
  const auto count = static_cast<std::int64_t>(bytes.size()) * 8 / bits_of(from);
  memory.resize(static_cast<std::size_t>(count * bits_of(to) / 8));
  if (count == 0) return memory;
  const at::Tensor source = at::from_blob(const_cast<std::byte*>(bytes.data()), {count}, at::dtype(scalar_type_of(from, name)));
  at::from_blob(memory.data(), {count}, at::dtype(scalar_type_of(to, name))).copy_(source);
  return memory;
}

}  // namespace hyper_parallel::ckpt
