#pragma once
// Box: a rectangle of a tensor. Torch-free.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

/// The elements [offset[d], offset[d] + size[d]) of every dimension d; of a scalar, the one element.
struct HP_API Box {
  std::vector<std::int64_t> offset;
  std::vector<std::int64_t> size;

  [[nodiscard]] std::int64_t numel() const;
  [[nodiscard]] std::string to_string() const;  ///< "[2:5, 0:3]"
  friend bool operator==(const Box&, const Box&) = default;
};

/// What two boxes of one tensor share; nullopt when that is nothing.
[[nodiscard]] HP_API std::optional<Box> intersect(const Box& a, const Box& b);

/// Boxes that make up the positions [begin, end) of `box` whose first `dims` dimensions are flattened, in that order: the
/// elements of the boxes, one box after the other and row-major in each, are that range. At most 2 * dims - 1 boxes, none of them
/// empty. Local.
///
///     box 4x5, dims 2, [3, 17):   . . . # #     head
///                                 # # # # #     body (whole rows)
///                                 # # # # #
///                                 # # . . .     tail
[[nodiscard]] HP_API std::vector<Box> boxes_of_range(const Box& box, std::int64_t dims, std::int64_t begin, std::int64_t end);

}  // namespace hyper_parallel
