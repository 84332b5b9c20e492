#include "optim/norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/low_precision.h"

namespace hyper_parallel::optim {
namespace {

// As many running sums, so that the loops vectorise and the order is fixed.
constexpr std::int64_t kLanes = 16;

template <class T>
double value_of(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    return x;
  } else {
    return to_float(x);
  }
}

/// NaN wins.
double larger(double a, double b) { return a > b || std::isnan(a) ? a : b; }

template <class T, class Term, class Combine>
double over(const T* x, std::int64_t n, Term term, Combine combine) {
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t k = 0; k < kLanes; ++k) lanes[k] = combine(lanes[k], term(value_of(x[i + k])));
  }
  double result = 0;
  for (const double lane : lanes) result = combine(result, lane);
  for (; i < n; ++i) result = combine(result, term(value_of(x[i])));
  return result;
}

template <class T>
double with_power(const void* data, std::int64_t n, double p) {
  const T* x = static_cast<const T*>(data);
  const auto add = [](double a, double b) { return a + b; };
  if (p == 2)
    return over(
        x, n, [](double v) { return v * v; }, add);
  if (p == 1)
    return over(
        x, n, [](double v) { return std::abs(v); }, add);
  if (std::isinf(p))
    return over(
        x, n, [](double v) { return std::abs(v); }, larger);
  return over(
      x, n, [p](double v) { return std::pow(std::abs(v), p); }, add);
}

}  // namespace

double combine_powers(double a, double b, double p) { return std::isinf(p) ? larger(a, b) : a + b; }

double power_sum(const Values& values, std::int64_t numel, double p) {
  switch (values.dtype) {
    case c10::ScalarType::Float:
      return with_power<float>(values.data, numel, p);
    case c10::ScalarType::Half:
      return with_power<Half>(values.data, numel, p);
    case c10::ScalarType::BFloat16:
      return with_power<BFloat>(values.data, numel, p);
    default:
      return with_power<double>(values.data, numel, p);
  }
}

}  // namespace hyper_parallel::optim
