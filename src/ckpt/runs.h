#pragma once
// Which elements of one box lie where in another, as runs that are contiguous in both. Torch-free.
#include <cstdint>
#include <utility>
#include <vector>

#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::ckpt {

/// The elements of `part`, which lies inside both `from` and `to`: f(offset in from, offset in to, numel) for each run, in
/// elements, both boxes row-major, offsets ascending. The runs are as long as they can be.
template <class F>
void for_each_run(const Box& from, const Box& to, const Box& part, F&& f) {
  const std::size_t dims = part.size.size();
  std::int64_t run = 1;
  std::size_t outer = dims;  // dimensions that are walked
  while (outer > 0) {
    const std::size_t d = outer - 1;
    run *= part.size[d];
    outer = d;
    if (part.size[d] != from.size[d] || part.size[d] != to.size[d]) break;
  }
  if (part.numel() == 0) return;
  const auto strides_of = [&](const Box& box) {
    std::vector<std::int64_t> strides(dims, 1);
    for (std::size_t d = dims; d-- > 1;) strides[d - 1] = strides[d] * box.size[d];
    return strides;
  };
  const std::vector<std::int64_t> from_strides = strides_of(from), to_strides = strides_of(to);
  std::int64_t from_offset = 0, to_offset = 0;
  for (std::size_t d = 0; d < dims; ++d) {
    from_offset += (part.offset[d] - from.offset[d]) * from_strides[d];
    to_offset += (part.offset[d] - to.offset[d]) * to_strides[d];
  }
  std::vector<std::int64_t> index(outer, 0);
  while (true) {
    f(from_offset, to_offset, run);
    std::size_t d = outer;
    for (; d > 0; --d) {
      from_offset += from_strides[d - 1];
      to_offset += to_strides[d - 1];
      if (++index[d - 1] < part.size[d - 1]) break;
      from_offset -= index[d - 1] * from_strides[d - 1];
      to_offset -= index[d - 1] * to_strides[d - 1];
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

/// Whether to copy runs of `run` bytes, `all` together, out of a mapping: a system call for each would cost more than the bytes.
[[nodiscard]] inline bool better_mapped(std::uint64_t run, std::uint64_t all) { return run < (16 << 10) && all > 16 * run; }

/// The box of a whole tensor.
[[nodiscard]] inline Box whole_box(std::vector<std::int64_t> shape) {
  Box box{std::vector<std::int64_t>(shape.size(), 0), std::move(shape)};
  return box;
}

}  // namespace hyper_parallel::ckpt
