#include <hyper_parallel/dtensor/box.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace hyper_parallel {
namespace {

std::int64_t product(std::vector<std::int64_t>::const_iterator begin, std::vector<std::int64_t>::const_iterator end) {
  return std::accumulate(begin, end, std::int64_t{1}, std::multiplies<>());
}

// Splits [begin, end) of the flattened dimensions dim..dims-1 of `box`; `out` gets the parts in order.
void split_range(Box box, std::size_t dim, std::size_t dims, std::int64_t begin, std::int64_t end, std::vector<Box>& out) {
  if (begin >= end) return;
  const auto first = box.size.begin() + static_cast<std::ptrdiff_t>(dim);
  const std::int64_t inner = product(first + 1, box.size.begin() + static_cast<std::ptrdiff_t>(dims));
  const auto at_index = [&](std::int64_t index, std::int64_t count) {
    Box part = box;
    part.offset[dim] += index;
    part.size[dim] = count;
    return part;
  };
  const std::int64_t head_index = begin / inner;
  const std::int64_t tail_index = end / inner;
  if (begin % inner != 0 && head_index == tail_index) {
    split_range(at_index(head_index, 1), dim + 1, dims, begin % inner, end % inner, out);
    return;
  }
  std::int64_t index = head_index;
  if (begin % inner != 0) {
    split_range(at_index(index, 1), dim + 1, dims, begin % inner, inner, out);
    ++index;
  }
  if (index < tail_index) out.push_back(at_index(index, tail_index - index));
  if (end % inner != 0) split_range(at_index(tail_index, 1), dim + 1, dims, 0, end % inner, out);
}

}  // namespace

std::int64_t Box::numel() const { return product(size.begin(), size.end()); }

std::string Box::to_string() const {
  std::string text;
  for (std::size_t d = 0; d < size.size(); ++d) text += concat(d > 0 ? ", " : "", offset[d], ":", offset[d] + size[d]);
  return "[" + text + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box result = a;
  for (std::size_t d = 0; d < a.size.size(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    result.offset[d] = begin;
    result.size[d] = end - begin;
  }
  return result;
}

std::vector<Box> boxes_of_range(const Box& box, std::int64_t dims, std::int64_t begin, std::int64_t end) {
  const auto last = static_cast<std::ptrdiff_t>(dims);
  check_value(dims >= 0 && dims <= static_cast<std::int64_t>(box.size.size()), "boxes_of_range", "dims is ", dims, ", want 0 to ",
              box.size.size());
  const std::int64_t positions = product(box.size.begin(), box.size.begin() + last);
  check_value(begin >= 0 && begin <= end && end <= positions, "boxes_of_range", "range is ", begin, ":", end,
              ", want it within 0:", positions);
  if (begin == end || box.numel() == 0) return {};
  if (dims == 0) return {box};
  std::vector<Box> boxes;
  split_range(box, 0, static_cast<std::size_t>(dims), begin, end, boxes);
  return boxes;
}

}  // namespace hyper_parallel
