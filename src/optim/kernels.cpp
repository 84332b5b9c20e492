// Blocks of a few KiB go through the first-level cache: what has another dtype than the arithmetic is converted there, the rest
// is worked on in place.
#include "optim/kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/FunctionRef.h>

#include <hyper_parallel/core/error.h>

#include "core/low_precision.h"

namespace hyper_parallel::optim {
namespace {

constexpr std::int64_t kBlock = 1024;
constexpr std::int64_t kGrain = 32 * kBlock;  // elements from which a second thread pays

template <class A, class T>
HP_INLINE void widen(A* to, const void* from, std::int64_t start, std::int64_t n) {
  const T* source = static_cast<const T*>(from) + start;
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
      to[i] = static_cast<A>(to_float(source[i]));
    } else {
      to[i] = static_cast<A>(source[i]);
    }
  }
}

template <class A, class T>
HP_INLINE T rounded(A value) {
  if constexpr (std::is_same_v<T, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, BFloat>) {
    return to_bfloat(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <class A, class T>
HP_INLINE void narrow(void* to, const A* from, std::int64_t start, std::int64_t n) {
  T* target = static_cast<T*>(to) + start;
  for (std::int64_t i = 0; i < n; ++i) target[i] = rounded<A, T>(from[i]);
}

template <class A>
HP_INLINE bool direct(const Values& values) {
  return values.dtype == c10::CppTypeToScalarType<A>::value;
}

/// A block of `values` as numbers of type A: the memory itself, or a copy in `scratch`.
template <class A>
HP_INLINE A* open(const Values& values, std::int64_t start, std::int64_t n, A* scratch) {
  if (direct<A>(values)) return static_cast<A*>(values.data) + start;
  switch (values.dtype) {
    case c10::ScalarType::Half:
      widen<A, Half>(scratch, values.data, start, n);
      break;
    case c10::ScalarType::BFloat16:
      widen<A, BFloat>(scratch, values.data, start, n);
      break;
    case c10::ScalarType::Float:
      widen<A, float>(scratch, values.data, start, n);
      break;
    default:
      widen<A, double>(scratch, values.data, start, n);
      break;
  }
  return scratch;
}

/// Writes an opened block back.
template <class A>
HP_INLINE void close(const Values& values, std::int64_t start, std::int64_t n, const A* block) {
  if (direct<A>(values)) return;
  switch (values.dtype) {
    case c10::ScalarType::Half:
      return narrow<A, Half>(values.data, block, start, n);
    case c10::ScalarType::BFloat16:
      return narrow<A, BFloat>(values.data, block, start, n);
    case c10::ScalarType::Float:
      return narrow<A, float>(values.data, block, start, n);
    default:
      return narrow<A, double>(values.data, block, start, n);
  }
}

template <class A, class T>
HP_INLINE void take_changes(A* master, const void* parameter, std::int64_t start, std::int64_t n) {
  const T* p = static_cast<const T*>(parameter) + start;
  for (std::int64_t i = 0; i < n; ++i) {
    const float value = to_float(p[i]);
    master[i] = to_float(rounded<A, T>(master[i])) == value ? master[i] : static_cast<A>(value);
  }
}

template <class A>
HP_INLINE A* open(const Weights& weights, std::int64_t start, std::int64_t n, A* scratch) {
  if (weights.master.data == nullptr) return open(weights.parameter, start, n, scratch);
  A* master = open(weights.master, start, n, scratch);
  if (weights.parameter.dtype == c10::ScalarType::Half) take_changes<A, Half>(master, weights.parameter.data, start, n);
  if (weights.parameter.dtype == c10::ScalarType::BFloat16) take_changes<A, BFloat>(master, weights.parameter.data, start, n);
  return master;
}

template <class A>
HP_INLINE void close(const Weights& weights, std::int64_t start, std::int64_t n, const A* block) {
  if (weights.master.data != nullptr) close(weights.master, start, n, block);
  close(weights.parameter, start, n, block);
}

template <class A, class Task>
void run_plain(const Task& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t start = begin; start < end; start += kBlock) task.template block<A>(start, std::min(kBlock, end - start));
}

#ifdef HP_HAS_AVX2
template <class A, class Task>
__attribute__((target("avx2"))) void run_avx2(const Task& task, std::int64_t begin, std::int64_t end) {
  for (std::int64_t start = begin; start < end; start += kBlock) task.template block<A>(start, std::min(kBlock, end - start));
}
#endif

template <class A, class Task>
void run_range(const Task& task, std::int64_t begin, std::int64_t end) {
#ifdef HP_HAS_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return run_avx2<A>(task, begin, end);
#endif
  run_plain<A>(task, begin, end);
}

/// Calls range(begin, end) for parts of 0..numel on torch's threads. at::parallel_for would be serial here: it is a template, and
/// our sources are built without torch's OpenMP. An iterator over the memory has its threads inside of torch.
void on_threads(const Values& memory, std::int64_t numel, c10::function_ref<void(std::int64_t, std::int64_t)> range) {
  if (numel <= kGrain || at::get_num_threads() == 1) return range(0, numel);
  at::Tensor flat = at::from_blob(memory.data, {numel}, at::TensorOptions().dtype(memory.dtype));
  auto iterator = at::TensorIterator::nullary_op(flat);
  const auto size = static_cast<std::int64_t>(c10::elementSize(memory.dtype));
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t columns, std::int64_t rows) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t begin = (data[0] + row * strides[1] - static_cast<char*>(memory.data)) / size;
          range(begin, begin + columns);
        }
      },
      kGrain);
}

/// Runs `task` over all elements, in the precision of `changed`.
template <class Task>
void run(const Task& task, const Values& changed, std::int64_t numel) {
  if (numel == 0) return;
  on_threads(changed, numel, [&](std::int64_t begin, std::int64_t end) {
    changed.dtype == c10::ScalarType::Double ? run_range<double>(task, begin, end) : run_range<float>(task, begin, end);
  });
}

struct AdamW {
  const AdamWTask& t;
  double step_size, root_correction;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[4][kBlock];
    A* w = open(t.weights, start, n, space[0]);
    const A* g = open(t.gradient, start, n, space[1]);
    A* m = open(t.exp_avg, start, n, space[2]);
    A* v = open(t.exp_avg_sq, start, n, space[3]);
    const A sign = t.maximize ? A(-1) : A(1), keep = static_cast<A>(1 - t.lr * t.weight_decay);
    const A one_beta1 = static_cast<A>(1 - t.beta1), beta2 = static_cast<A>(t.beta2), one_beta2 = static_cast<A>(1 - t.beta2);
    const A size = static_cast<A>(step_size), correction = static_cast<A>(root_correction), eps = static_cast<A>(t.eps);
    for (std::int64_t i = 0; i < n; ++i) {
      const A gradient = sign * g[i];
      const A first = m[i] + one_beta1 * (gradient - m[i]);
      const A second = v[i] * beta2 + one_beta2 * gradient * gradient;
      m[i] = first;
      v[i] = second;
      w[i] = w[i] * keep - size * first / (std::sqrt(second) / correction + eps);
    }
    close(t.exp_avg, start, n, m);
    close(t.exp_avg_sq, start, n, v);
    close(t.weights, start, n, w);
  }
};

struct Sgd {
  const SgdTask& t;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[4][kBlock];
    A* w = open(t.weights, start, n, space[0]);
    const A* g = open(t.gradient, start, n, space[1]);
    const A sign = t.maximize ? A(-1) : A(1), decay = static_cast<A>(t.weight_decay), lr = static_cast<A>(t.lr);
    A* d = space[2];
    for (std::int64_t i = 0; i < n; ++i) d[i] = sign * g[i] + decay * w[i];
    if (t.momentum_buffer.data != nullptr) {
      A* buffer = open(t.momentum_buffer, start, n, space[3]);
      const A mu = t.first ? A(0) : static_cast<A>(t.momentum), take = t.first ? A(1) : static_cast<A>(1 - t.dampening);
      for (std::int64_t i = 0; i < n; ++i) buffer[i] = mu * buffer[i] + take * d[i];
      const A ahead = static_cast<A>(t.momentum);
      for (std::int64_t i = 0; i < n; ++i) d[i] = t.nesterov ? d[i] + ahead * buffer[i] : buffer[i];
      close(t.momentum_buffer, start, n, buffer);
    }
    for (std::int64_t i = 0; i < n; ++i) w[i] -= lr * d[i];
    close(t.weights, start, n, w);
  }
};

struct Momentum {
  const MomentumTask& t;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[3][kBlock];
    const A* g = open(t.gradient, start, n, space[0]);
    A* b = open(t.buffer, start, n, space[1]);
    // Nothing is read from the update, so that it must not be opened.
    A* u = direct<A>(t.update) ? static_cast<A*>(t.update.data) + start : space[2];
    const A mu = static_cast<A>(t.momentum), take = static_cast<A>(1 - t.momentum);
    for (std::int64_t i = 0; i < n; ++i) {
      b[i] += take * (g[i] - b[i]);
      u[i] = t.nesterov ? g[i] + mu * (b[i] - g[i]) : b[i];
    }
    close(t.buffer, start, n, b);
    close(t.update, start, n, u);
  }
};

struct Apply {
  const ApplyTask& t;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[2][kBlock];
    A* w = open(t.weights, start, n, space[0]);
    const A* u = open(t.update, start, n, space[1]);
    const A keep = static_cast<A>(t.keep), factor = static_cast<A>(t.factor);
    for (std::int64_t i = 0; i < n; ++i) w[i] = w[i] * keep + u[i] * factor;
    close(t.weights, start, n, w);
  }
};

struct Average {
  const Values &a, &v;
  double weight;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[2][kBlock];
    A* to = open(a, start, n, space[0]);
    const A* from = open(v, start, n, space[1]);
    const A share = static_cast<A>(weight);
    for (std::int64_t i = 0; i < n; ++i) to[i] += share * (from[i] - to[i]);
    close(a, start, n, to);
  }
};

struct Scale {
  const Values& v;
  double factor;
  std::atomic<bool>& finite;

  template <class A>
  HP_INLINE void block(std::int64_t start, std::int64_t n) const {
    alignas(64) A space[kBlock];
    A* x = open(v, start, n, space);
    const A f = static_cast<A>(factor);
    A bad = 0;  // 0 * x is 0 for a finite x and NaN otherwise
    for (std::int64_t i = 0; i < n; ++i) bad = std::max(bad, x[i] * A(0) == A(0) ? A(0) : A(1));
    for (std::int64_t i = 0; i < n; ++i) x[i] *= f;
    if (bad != A(0)) finite.store(false, std::memory_order_relaxed);
    close(v, start, n, x);
  }
};

}  // namespace

Values values_of(const at::Tensor& tensor, std::int64_t offset) {
  check_internal(tensor.is_cpu() && tensor.is_contiguous(), "optim", "want a contiguous tensor on the CPU");
  auto* bytes = static_cast<std::byte*>(tensor.data_ptr());
  return {bytes + offset * static_cast<std::int64_t>(tensor.element_size()), tensor.scalar_type()};
}

void adamw(const AdamWTask& task) {
  const auto step = static_cast<double>(task.step);
  run(AdamW{task, task.lr / (1 - std::pow(task.beta1, step)), std::sqrt(1 - std::pow(task.beta2, step))}, task.weights.parameter,
      task.numel);
}

void sgd(const SgdTask& task) { run(Sgd{task}, task.weights.parameter, task.numel); }

void momentum(const MomentumTask& task) { run(Momentum{task}, task.buffer, task.numel); }

void apply_update(const ApplyTask& task) { run(Apply{task}, task.weights.parameter, task.numel); }

void average(const Values& average, const Values& values, std::int64_t numel, double weight) {
  run(Average{average, values, weight}, average, numel);
}

bool scale(const Values& values, std::int64_t numel, double factor) {
  std::atomic<bool> finite = true;
  run(Scale{values, factor, finite}, values, numel);
  return finite;
}

}  // namespace hyper_parallel::optim
