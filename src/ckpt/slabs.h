#pragma once
// A large box as small ones. Torch-free.
#include <algorithm>
#include <cstdint>

#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::ckpt {

/// f(box) for boxes of at most `max_numel` elements that make up `box`, each contiguous in it, in the order of its elements.
/// Nothing for an empty box.
template <class F>
void for_each_slab(const Box& box, std::int64_t max_numel, F&& f) {
  const std::int64_t numel = box.numel();
  if (numel == 0) return;
  std::size_t d = 0;
  while (d < box.size.size() && box.size[d] == 1) ++d;
  if (numel <= max_numel || d == box.size.size()) {
    f(box);
    return;
  }
  const std::int64_t rows = std::max<std::int64_t>(1, max_numel / (numel / box.size[d]));
  for (std::int64_t at = 0; at < box.size[d]; at += rows) {
    Box part = box;
    part.offset[d] += at;
    part.size[d] = std::min(rows, box.size[d] - at);
    for_each_slab(part, max_numel, f);
  }
}

}  // namespace hyper_parallel::ckpt
