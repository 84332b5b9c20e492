#pragma once
// fp16 and bf16 in loops that the compiler must turn into vector code.
#include <algorithm>
#include <bit>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define HP_HAS_AVX2 1
#endif
#define HP_INLINE __attribute__((always_inline)) inline

namespace hyper_parallel {

struct Half {
  std::uint16_t bits;
};
struct BFloat {
  std::uint16_t bits;
};

// Conversions without branches, so that the compiler can vectorise the loops around them.
HP_INLINE float to_float(BFloat value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

HP_INLINE float to_float(Half value) {
  const std::uint32_t wide = static_cast<std::uint32_t>(value.bits) << 16;
  const std::uint32_t sign = wide & 0x80000000U;
  const std::uint32_t doubled = wide + wide;
  const float normal = std::bit_cast<float>((doubled >> 4) + (0xE0U << 23)) * 0x1.0p-112F;
  const float subnormal = std::bit_cast<float>((doubled >> 17) | (126U << 23)) - 0.5F;
  const std::uint32_t magnitude =
      doubled < (1U << 27) ? std::bit_cast<std::uint32_t>(subnormal) : std::bit_cast<std::uint32_t>(normal);
  return std::bit_cast<float>(sign | magnitude);
}

HP_INLINE BFloat to_bfloat(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<std::uint16_t>(value != value ? 0x7FC0U : rounded)};
}

HP_INLINE Half to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t doubled = bits + bits;
  const std::uint32_t sign = bits & 0x80000000U;
  const std::uint32_t exponent = std::max(doubled & 0xFF000000U, 0x71000000U);
  const float scaled = (std::bit_cast<float>(bits & 0x7FFFFFFFU) * 0x1.0p+112F) * 0x1.0p-110F;
  const auto sum = std::bit_cast<std::uint32_t>(std::bit_cast<float>((exponent >> 1) + 0x07800000U) + scaled);
  const std::uint32_t number = ((sum >> 13) & 0x00007C00U) + (sum & 0x00000FFFU);
  return {static_cast<std::uint16_t>((sign >> 16) | (doubled > 0xFF000000U ? 0x7E00U : number))};
}

}  // namespace hyper_parallel
