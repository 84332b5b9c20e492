#pragma once
#include "optim/kernels.h"

namespace hyper_parallel::optim {

/// Sum of |x|^p in fp64, or the largest |x| for p = infinity. Deterministic: the order of the sum depends on the size only.
[[nodiscard]] double power_sum(const Values& values, std::int64_t numel, double p);

/// What two parts have together: their sum, or the larger one for p = infinity, where NaN wins.
[[nodiscard]] double combine_powers(double a, double b, double p);

}  // namespace hyper_parallel::optim
