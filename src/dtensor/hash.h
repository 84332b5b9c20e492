#pragma once
#include <cstddef>

namespace hyper_parallel {

/// Mixes `value` into `seed` (the golden-ratio mix of boost::hash_combine, 64-bit constant).
inline void hash_combine(std::size_t& seed, std::size_t value) noexcept {
  seed ^= value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2);
}

}  // namespace hyper_parallel
