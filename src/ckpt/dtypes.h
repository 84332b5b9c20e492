#pragma once
#include <string>

#include <c10/core/ScalarType.h>

#include <hyper_parallel/ckpt/safetensors.h>

namespace hyper_parallel::ckpt {

/// ValueError, naming the tensor: safetensors files have no such type.
[[nodiscard]] Dtype dtype_of(c10::ScalarType type, const std::string& name);
/// ValueError, naming the tensor: torch has no such type.
[[nodiscard]] c10::ScalarType scalar_type_of(Dtype dtype, const std::string& name);

}  // namespace hyper_parallel::ckpt
