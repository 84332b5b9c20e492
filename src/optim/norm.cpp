#include "optim/norm.h"

#include <cmath>
#include <cstdint>

#include <ATen/ops/abs.h>
#include <ATen/ops/max.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sum.h>

namespace hyper_parallel::optim {
namespace {

/// Sixteen running sums, so that the loop vectorises and the order is fixed.
double sum_of_squares(const float* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t k = 0; k < kLanes; ++k) {
      const double value = x[i + k];
      lanes[k] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

}  // namespace

double power_sum(const at::Tensor& x, double p) {
  if (x.numel() == 0) return 0;
  if (p == 2 && x.scalar_type() == at::kFloat && x.is_cpu() && x.is_contiguous())
    return sum_of_squares(x.const_data_ptr<float>(), x.numel());
  const at::Tensor magnitude = at::abs(x).to(at::kDouble);
  if (std::isinf(p)) return at::max(magnitude).item<double>();
  return at::sum(p == 1 ? magnitude : at::pow(magnitude, p)).item<double>();
}

}  // namespace hyper_parallel::optim
