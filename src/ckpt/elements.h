#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <hyper_parallel/ckpt/safetensors.h>

namespace hyper_parallel::ckpt {

/// `bytes` as elements of another dtype, converted as torch does. The result lies in `memory` and stays until it is used again;
/// without a conversion it is `bytes`. ValueError, naming the tensor: torch has no such type; a conversion between kinds (real
/// and complex, floating point and not), which would lose what the values mean; a finite value that would become infinite or NaN.
[[nodiscard]] std::span<const std::byte> convert_elements(std::span<const std::byte> bytes, Dtype from, Dtype to,
                                                          std::vector<std::byte>& memory, const std::string& name);

/// Whether elements are floating point numbers that torch can convert: what a change of dtype applies to.
[[nodiscard]] bool is_real(Dtype dtype);

}  // namespace hyper_parallel::ckpt
