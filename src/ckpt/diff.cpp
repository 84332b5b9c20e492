// What differs between two checkpoints.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include <hyper_parallel/ckpt/offline.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "ckpt/dtypes.h"
#include "ckpt/elements.h"
#include "ckpt/runs.h"
#include "ckpt/sizes.h"
#include "ckpt/slabs.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "ckpt.diff";

/// What two runs of elements add to a difference.
class Compare {
 public:
  Compare(const DiffOptions& options, Difference& result) : options_(options), result_(result) {}

  void add(std::span<const std::byte> a, Dtype a_dtype, std::span<const std::byte> b, Dtype b_dtype) {
    if (a_dtype == b_dtype && std::memcmp(a.data(), b.data(), a.size()) == 0) return;
    if (a_dtype == b_dtype && add_integers(a, b, a_dtype)) return;
    if (!is_real(a_dtype) || !is_real(b_dtype)) {
      add_bytes(a, b, static_cast<std::size_t>(std::max<std::int64_t>(1, bits_of(a_dtype) / 8)));
      return;
    }
    const std::span<const std::byte> x = convert_elements(a, a_dtype, Dtype::kF64, first_, result_.name);
    const std::span<const std::byte> y = convert_elements(b, b_dtype, Dtype::kF64, second_, result_.name);
    for (std::size_t i = 0; i < x.size(); i += 8) {
      double left = 0, right = 0;
      std::memcpy(&left, x.data() + i, 8);
      std::memcpy(&right, y.data() + i, 8);
      if (left == right || (std::isnan(left) && std::isnan(right))) continue;
      double distance = std::abs(left - right);
      if (!std::isfinite(distance)) distance = std::numeric_limits<double>::infinity();
      if (distance <= options_.atol + options_.rtol * std::abs(right)) continue;
      ++result_.count;
      result_.max_abs = std::max(result_.max_abs, distance);
    }
  }

 private:
  /// False: the dtype is no integer.
  bool add_integers(std::span<const std::byte> a, std::span<const std::byte> b, Dtype dtype) {
    switch (dtype) {
      case Dtype::kI8:
        return add_integers_of<std::int8_t>(a, b);
      case Dtype::kI16:
        return add_integers_of<std::int16_t>(a, b);
      case Dtype::kI32:
        return add_integers_of<std::int32_t>(a, b);
      case Dtype::kI64:
        return add_integers_of<std::int64_t>(a, b);
      case Dtype::kU8:
        return add_integers_of<std::uint8_t>(a, b);
      case Dtype::kU16:
        return add_integers_of<std::uint16_t>(a, b);
      case Dtype::kU32:
        return add_integers_of<std::uint32_t>(a, b);
      case Dtype::kU64:
        return add_integers_of<std::uint64_t>(a, b);
      default:
        return false;
    }
  }

  /// Distances of 64 bits have no overflow as unsigned numbers, and lose digits as double.
  template <class T>
  bool add_integers_of(std::span<const std::byte> a, std::span<const std::byte> b) {
    constexpr double kTooFar = 18446744073709551616.0;  // 2^64
    for (std::size_t i = 0; i + sizeof(T) <= a.size(); i += sizeof(T)) {
      T left = 0, right = 0;
      std::memcpy(&left, a.data() + i, sizeof(T));
      std::memcpy(&right, b.data() + i, sizeof(T));
      if (left == right) continue;
      const auto x = static_cast<std::uint64_t>(left), y = static_cast<std::uint64_t>(right);
      const std::uint64_t distance = left < right ? y - x : x - y;
      const std::uint64_t size = std::cmp_less(right, 0) ? 0 - y : y;
      const double allowed = options_.atol + options_.rtol * static_cast<double>(size);
      if (allowed >= kTooFar || (allowed >= 0 && distance <= static_cast<std::uint64_t>(allowed))) continue;
      ++result_.count;
      result_.max_abs = std::max(result_.max_abs, static_cast<double>(distance));
    }
    return true;
  }

  /// Elements that are no numbers, or packed, are equal or not.
  void add_bytes(std::span<const std::byte> a, std::span<const std::byte> b, std::size_t size) {
    for (std::size_t i = 0; i + size <= a.size(); i += size) {
      if (std::memcmp(a.data() + i, b.data() + i, size) == 0) continue;
      ++result_.count;
      result_.max_abs = std::numeric_limits<double>::infinity();
    }
  }

  const DiffOptions& options_;
  Difference& result_;
  std::vector<std::byte> first_, second_;
};

Difference values_of(const std::string& name, const Source& first, const Source& second, const DiffOptions& options,
                     const std::function<void(std::uint64_t)>& advance) {
  const CheckpointInfo::Tensor &a = first.at(name), &b = second.at(name);
  Difference result{name, Difference::Kind::kValues, "", 0, 0};
  Compare compare(options, result);
  std::vector<std::byte> left, right;
  const auto one = [&](const Box& slab) {
    left.resize(static_cast<std::size_t>(slab.numel() * bits_of(a.dtype) / 8));
    right.resize(static_cast<std::size_t>(slab.numel() * bits_of(b.dtype) / 8));
    first.read(name, slab, left);
    second.read(name, slab, right);
    compare.add(left, a.dtype, right, b.dtype);
    advance(left.size() + right.size());
  };
  const Box whole = whole_box(a.shape);
  const std::int64_t bits = std::max(bits_of(a.dtype), bits_of(b.dtype));
  if (bits % 8 == 0) {
    for_each_slab(whole, std::max<std::int64_t>(1, static_cast<std::int64_t>(options.buffer_bytes) * 8 / bits), one);
  } else if (whole.numel() > 0) {
    one(whole);
  }
  if (result.count > 0) {
    result.text = concat(result.count, " of ", whole.numel(), " elements differ");
    if (std::isfinite(result.max_abs)) result.text += concat(", by at most ", result.max_abs);
  }
  return result;
}

}  // namespace

std::vector<Difference> diff(const Source& first, const Source& second, const DiffOptions& options) {
  check_value(options.atol >= 0 && options.rtol >= 0, kOp, "atol is ", options.atol, " and rtol ", options.rtol,
              ", want 0 or more");
  check_value(options.buffer_bytes > 0, kOp, "buffer_bytes is 0, want at least 1");
  std::vector<Difference> result;
  std::vector<std::string> common;
  std::uint64_t all = 0, done = 0;
  for (const auto& [name, a] : first.info().tensors) {
    const auto found = second.info().tensors.find(name);
    if (found == second.info().tensors.end()) {
      result.push_back({name, Difference::Kind::kOnlyFirst, "only in the first", 0, 0});
      continue;
    }
    const CheckpointInfo::Tensor& b = found->second;
    if (a.shape != b.shape) {
      result.push_back({name, Difference::Kind::kShape,
                        concat("shape ", whole_box(a.shape).to_string(), " and ", whole_box(b.shape).to_string()), 0, 0});
      continue;
    }
    if (a.dtype != b.dtype && (options.compare_dtypes || !is_real(a.dtype) || !is_real(b.dtype))) {
      result.push_back({name, Difference::Kind::kDtype, concat("dtype ", to_string(a.dtype), " and ", to_string(b.dtype)), 0, 0});
      continue;
    }
    common.push_back(name);
    all += *bytes_of({name, a.dtype, a.shape}) + *bytes_of({name, b.dtype, b.shape});
  }
  for (const auto& [name, tensor] : second.info().tensors) {
    if (!first.info().tensors.contains(name)) result.push_back({name, Difference::Kind::kOnlySecond, "only in the second", 0, 0});
  }
  for (const std::string& name : common) {
    Difference values = values_of(name, first, second, options, [&](std::uint64_t bytes) {
      done += bytes;
      if (options.progress) options.progress(done, all);
    });
    if (values.count > 0) result.push_back(std::move(values));
  }
  std::ranges::stable_sort(result, {}, &Difference::name);
  return result;
}

}  // namespace hyper_parallel::ckpt
