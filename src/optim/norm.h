#pragma once
#include <ATen/core/Tensor.h>

namespace hyper_parallel::optim {

/// Sum of |x|^p in fp64, or the largest |x| for p = infinity. Deterministic: the order of the sum depends on the size only.
[[nodiscard]] double power_sum(const at::Tensor& x, double p);

}  // namespace hyper_parallel::optim
