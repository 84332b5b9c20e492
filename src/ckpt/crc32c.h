#pragma once
// CRC-32C (Castagnoli), as a whole and put together from parts in any order. Torch-free.
#include <cstddef>
#include <cstdint>
#include <span>

#include <hyper_parallel/core/export.h>

namespace hyper_parallel::ckpt {

/// The CRC-32C of `bytes`: 0xe3069283 for "123456789".
[[nodiscard]] HP_API std::uint32_t crc32c(std::span<const std::byte> bytes);

/// What parts of a message contribute to its checksum. A CRC without its initial and final inversion is linear: that of the whole
/// is the XOR of those of its parts, each moved to its place. So ranks that read different parts of a message can check it
/// together.
class HP_API PartialCrc32c {
 public:
  /// Bytes [offset, offset + bytes.size()) of the message; offsets of later calls must not be smaller than the end of earlier
  /// ones.
  void add(std::uint64_t offset, std::span<const std::byte> bytes);
  /// The contribution to a message of `size` bytes.
  [[nodiscard]] std::uint32_t contribution(std::uint64_t size) const;
  /// The CRC-32C of a message of `size` bytes, from the XOR of the contributions of all its bytes.
  [[nodiscard]] static std::uint32_t finish(std::uint32_t contributions, std::uint64_t size);

 private:
  std::uint32_t value_ = 0;
  std::uint64_t end_ = 0;
  std::uint64_t step_ = 0;  // of the last move, which strided parts repeat
  std::uint32_t factor_ = 0;
};

}  // namespace hyper_parallel::ckpt
