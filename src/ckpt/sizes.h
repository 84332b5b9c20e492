#pragma once
#include <cstdint>
#include <optional>

#include <hyper_parallel/ckpt/safetensors.h>

namespace hyper_parallel::ckpt {

/// Bytes of a tensor; nullopt when they overflow, when a size is negative or when packed elements do not fill bytes.
[[nodiscard]] std::optional<std::uint64_t> bytes_of(const TensorSpec& tensor);

}  // namespace hyper_parallel::ckpt
