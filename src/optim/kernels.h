#pragma once
// What optimizers do to the elements of a flat shard. Every kernel works on each element alone, in fp32 (fp64 where the memory
// that it changes is fp64), so that the result does not depend on how a parameter is cut.
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace hyper_parallel::optim {

/// Elements in memory, fp32, fp64, bf16 or fp16; `data` is null for what is not there.
struct Values {
  void* data = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

/// `numel` elements of a contiguous CPU tensor from `offset` on.
[[nodiscard]] Values values_of(const at::Tensor& tensor, std::int64_t offset = 0);

/// Counts a write to the leaf that torch has not seen, so that units which keep gathered parameters know that these are old.
inline void count_write(const at::Tensor& leaf) { leaf.unsafeGetTensorImpl()->bump_version(); }

/// A parameter, and its fp32 master copy when it has one. The master is what is computed with; an element that somebody has
/// changed since (its rounded master is another number) is taken from the parameter.
struct Weights {
  Values parameter;
  Values master;
};

struct AdamWTask {
  Weights weights;
  Values gradient, exp_avg, exp_avg_sq;
  std::int64_t numel = 0;
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  std::int64_t step = 1;  ///< from 1
  bool maximize = false;
};
void adamw(const AdamWTask& task);

struct SgdTask {
  Weights weights;
  Values gradient, momentum_buffer;  ///< no buffer: no momentum
  std::int64_t numel = 0;
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  bool first = false;  ///< the buffer becomes the gradient
};
void sgd(const SgdTask& task);

/// buffer += (1 - momentum) * (gradient - buffer); update = buffer, or with `nesterov` gradient + momentum * (buffer - gradient).
struct MomentumTask {
  Values gradient, buffer, update;
  std::int64_t numel = 0;
  double momentum = 0;
  bool nesterov = false;
};
void momentum(const MomentumTask& task);

/// weights = weights * keep + update * factor.
struct ApplyTask {
  Weights weights;
  Values update;
  std::int64_t numel = 0;
  double keep = 1, factor = 0;
};
void apply_update(const ApplyTask& task);

/// average += weight * (values - average).
void average(const Values& average, const Values& values, std::int64_t numel, double weight);

/// Multiplies the elements; false when one of them was infinite or NaN.
bool scale(const Values& values, std::int64_t numel, double factor);

}  // namespace hyper_parallel::optim
