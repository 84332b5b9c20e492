#include "ckpt/dtypes.h"

#include <utility>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::ckpt {
namespace {

using c10::ScalarType;

constexpr std::pair<Dtype, ScalarType> kPairs[] = {{Dtype::kBool, ScalarType::Bool},
                                                   {Dtype::kU8, ScalarType::Byte},
                                                   {Dtype::kI8, ScalarType::Char},
                                                   {Dtype::kF8E5M2, ScalarType::Float8_e5m2},
                                                   {Dtype::kF8E4M3, ScalarType::Float8_e4m3fn},
                                                   {Dtype::kF8E8M0, ScalarType::Float8_e8m0fnu},
                                                   {Dtype::kF8E4M3Fnuz, ScalarType::Float8_e4m3fnuz},
                                                   {Dtype::kF8E5M2Fnuz, ScalarType::Float8_e5m2fnuz},
                                                   {Dtype::kI16, ScalarType::Short},
                                                   {Dtype::kU16, ScalarType::UInt16},
                                                   {Dtype::kF16, ScalarType::Half},
                                                   {Dtype::kBF16, ScalarType::BFloat16},
                                                   {Dtype::kI32, ScalarType::Int},
                                                   {Dtype::kU32, ScalarType::UInt32},
                                                   {Dtype::kF32, ScalarType::Float},
                                                   {Dtype::kC64, ScalarType::ComplexFloat},
                                                   {Dtype::kF64, ScalarType::Double},
                                                   {Dtype::kI64, ScalarType::Long},
                                                   {Dtype::kU64, ScalarType::UInt64}};

}  // namespace

Dtype dtype_of(ScalarType type, const std::string& name) {
  for (const auto& [dtype, scalar] : kPairs) {
    if (scalar == type) return dtype;
  }
  throw ValueError(concat("[safetensors] tensor ", name, " is ", c10::toString(type), ", which safetensors files do not have"));
}

c10::ScalarType scalar_type_of(Dtype dtype, const std::string& name) {
  for (const auto& [known, scalar] : kPairs) {
    if (known == dtype) return scalar;
  }
  throw ValueError(concat("[safetensors] tensor ", name, " is ", to_string(dtype), ", which torch tensors do not have"));
}

}  // namespace hyper_parallel::ckpt
