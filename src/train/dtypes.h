#pragma once
#include <string>

#include <c10/core/ScalarType.h>

namespace hyper_parallel::train {

/// Of the names that the configuration accepts.
inline c10::ScalarType dtype_of(const std::string& name) {
  if (name == "bfloat16") return c10::kBFloat16;
  return name == "float16" ? c10::kHalf : c10::kFloat;
}

}  // namespace hyper_parallel::train
