#include "ckpt/elements.h"

#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <hyper_parallel/core/error.h>

#include "ckpt/dtypes.h"

namespace hyper_parallel::ckpt {
namespace {

template <class T>
std::int64_t first_not_finite_of(std::span<const std::byte> bytes, std::int64_t from, T exponent) {
  for (std::size_t i = static_cast<std::size_t>(from); (i + 1) * sizeof(T) <= bytes.size(); ++i) {
    T bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(T), sizeof(T));
    if ((bits & exponent) == exponent) return static_cast<std::int64_t>(i);
  }
  return -1;
}

/// The place of the first NaN or infinity, at or after `from`; -1: there is none.
std::int64_t first_not_finite(std::span<const std::byte> bytes, Dtype dtype, std::int64_t from = 0) {
  switch (dtype) {
    case Dtype::kF16:
      return first_not_finite_of<std::uint16_t>(bytes, from, 0x7c00);
    case Dtype::kBF16:
      return first_not_finite_of<std::uint16_t>(bytes, from, 0x7f80);
    case Dtype::kF32:
      return first_not_finite_of<std::uint32_t>(bytes, from, 0x7f800000);
    case Dtype::kF64:
      return first_not_finite_of<std::uint64_t>(bytes, from, 0x7ff0000000000000);
    case Dtype::kF8E4M3:  // without infinity
      return first_not_finite_of<std::uint8_t>(bytes, from, 0x7f);
    case Dtype::kF8E5M2:
      return first_not_finite_of<std::uint8_t>(bytes, from, 0x7c);
    default:
      return -1;
  }
}

/// ValueError where a finite number has become none.
void check_range(const at::Tensor& source, std::span<const std::byte> before, Dtype from, std::span<const std::byte> after,
                 Dtype to, const std::string& name) {
  const std::size_t size = before.size() / static_cast<std::size_t>(source.numel());
  for (std::int64_t i = first_not_finite(after, to); i >= 0; i = first_not_finite(after, to, i + 1)) {
    if (first_not_finite(before.subspan(static_cast<std::size_t>(i) * size, size), from) >= 0) continue;
    throw ValueError(concat("[safetensors] tensor ", name, " has ", source.select(0, i).item().toDouble(),
                            ", which is beyond the range of ", to_string(to), ", want a dtype that holds it"));
  }
}

}  // namespace

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
  check_range(source, bytes, from, memory, to, name);
  return memory;
}

}  // namespace hyper_parallel::ckpt
