// Blocks of rows are summed in a small accumulator that stays in the first-level cache: each input is read once, the output
// written once.
#include "comm/reduce.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/low_precision.h"

namespace hyper_parallel {
namespace {

constexpr std::int64_t kBlock = 2048;

struct Bool {
  std::uint8_t bits;
};

// Reading and writing elements of memory type T as accumulator type A.
template <class A, class T>
HP_INLINE A load(T value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
    return static_cast<A>(to_float(value));
  } else if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<A>(value.bits != 0);
  } else {
    return static_cast<A>(value);
  }
}

template <class T, class A>
HP_INLINE T store(A value) {
  if constexpr (std::is_same_v<T, Half>) {
    return to_half(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, BFloat>) {
    return to_bfloat(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, Bool>) {
    return {static_cast<std::uint8_t>(value != 0)};
  } else {
    return static_cast<T>(value);
  }
}

struct Add {
  template <class A>
  static HP_INLINE A apply(A a, A b) {
    return static_cast<A>(a + b);
  }
};
struct Multiply {
  template <class A>
  static HP_INLINE A apply(A a, A b) {
    return static_cast<A>(a * b);
  }
};
struct Or {
  template <class A>
  static HP_INLINE A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct Lower {
  template <class A>
  static HP_INLINE A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Upper {
  template <class A>
  static HP_INLINE A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};

template <class A, class In, class Out, class Operation>
HP_INLINE void run_blocks(const ReduceTask& task, std::span<const void* const> rows) {
  alignas(64) A sum[kBlock];
  const auto scale = static_cast<A>(task.scale);
  for (std::int64_t start = 0; start < task.numel; start += kBlock) {
    const std::int64_t n = std::min(kBlock, task.numel - start);
    const In* first = static_cast<const In*>(rows.front()) + start;
    for (std::int64_t i = 0; i < n; ++i) sum[i] = load<A>(first[i]);
    for (const auto* row : rows.subspan(1)) {
      const In* next = static_cast<const In*>(row) + start;
      for (std::int64_t i = 0; i < n; ++i) sum[i] = Operation::apply(sum[i], load<A>(next[i]));
    }
    Out* out = static_cast<Out*>(task.output) + start;
    if constexpr (std::is_floating_point_v<A>) {
      if (scale != A(1)) {
        for (std::int64_t i = 0; i < n; ++i) sum[i] *= scale;
      }
    }
    if (task.accumulate) {
      for (std::int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<Out, Bool>) {
          out[i] = store<Out>(static_cast<A>(load<A>(out[i]) | sum[i]));
        } else {
          out[i] = store<Out>(static_cast<A>(load<A>(out[i]) + sum[i]));
        }
      }
    } else {
      for (std::int64_t i = 0; i < n; ++i) out[i] = store<Out>(sum[i]);
    }
  }
}

template <class A, class In, class Out, class Operation>
void run_plain(const ReduceTask& task, std::span<const void* const> rows) {
  run_blocks<A, In, Out, Operation>(task, rows);
}

#ifdef HP_HAS_AVX2
template <class A, class In, class Out, class Operation>
__attribute__((target("avx2"))) void run_avx2(const ReduceTask& task, std::span<const void* const> rows) {
  run_blocks<A, In, Out, Operation>(task, rows);
}
#endif

template <class A, class In, class Out, class Operation>
void run(const ReduceTask& task, std::span<const void* const> rows) {
#ifdef HP_HAS_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return run_avx2<A, In, Out, Operation>(task, rows);
#endif
  run_plain<A, In, Out, Operation>(task, rows);
}

template <class A, class In, class Out>
void with_operation(const ReduceTask& task, std::span<const void* const> rows) {
  constexpr bool kIsBool = std::is_same_v<In, Bool>;
  switch (task.op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      if constexpr (kIsBool) {
        return run<A, In, Out, Or>(task, rows);
      } else {
        return run<A, In, Out, Add>(task, rows);
      }
    case ReduceOp::kProduct:
      return run<A, In, Out, Multiply>(task, rows);
    case ReduceOp::kMin:
      return run<A, In, Out, Lower>(task, rows);
    case ReduceOp::kMax:
      return run<A, In, Out, Upper>(task, rows);
  }
}

/// Sums run in fp32, or in fp64 when input or output are; a narrower output is rounded once, at the end.
template <class In>
void with_float_output(const ReduceTask& task, std::span<const void* const> rows) {
  using Sum = std::conditional_t<std::is_same_v<In, double>, double, float>;
  switch (task.output_type) {
    case c10::ScalarType::Double:
      return with_operation<double, In, double>(task, rows);
    case c10::ScalarType::Float:
      return with_operation<Sum, In, float>(task, rows);
    case c10::ScalarType::Half:
      return with_operation<Sum, In, Half>(task, rows);
    default:
      return with_operation<Sum, In, BFloat>(task, rows);
  }
}

// Integers: sums and products run in an unsigned type, where wrapping is defined; order needs the real one.
template <class Signed, class Unsigned>
void with_integer(const ReduceTask& task, std::span<const void* const> rows) {
  if (task.op == ReduceOp::kMin || task.op == ReduceOp::kMax) return with_operation<Signed, Signed, Signed>(task, rows);
  with_operation<Unsigned, Unsigned, Unsigned>(task, rows);
}

bool is_float(c10::ScalarType type) {
  return type == c10::ScalarType::Float || type == c10::ScalarType::Double || type == c10::ScalarType::Half ||
         type == c10::ScalarType::BFloat16;
}

bool is_integer(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Bool:
      return true;
    default:
      return false;
  }
}

}  // namespace

void reduce_rows(const ReduceTask& task, std::span<const void* const> rows) {
  if (task.numel == 0) return;
  switch (task.input_type) {
    case c10::ScalarType::Float:
      return with_float_output<float>(task, rows);
    case c10::ScalarType::Double:
      return with_float_output<double>(task, rows);
    case c10::ScalarType::Half:
      return with_float_output<Half>(task, rows);
    case c10::ScalarType::BFloat16:
      return with_float_output<BFloat>(task, rows);
    case c10::ScalarType::Byte:
      return with_integer<std::uint8_t, std::uint8_t>(task, rows);
    case c10::ScalarType::Char:
      return with_integer<std::int8_t, std::uint8_t>(task, rows);
    case c10::ScalarType::Short:
      return with_integer<std::int16_t, std::uint16_t>(task, rows);
    case c10::ScalarType::Int:
      return with_integer<std::int32_t, std::uint32_t>(task, rows);
    case c10::ScalarType::Long:
      return with_integer<std::int64_t, std::uint64_t>(task, rows);
    case c10::ScalarType::UInt16:
      return with_integer<std::uint16_t, std::uint16_t>(task, rows);
    case c10::ScalarType::UInt32:
      return with_integer<std::uint32_t, std::uint32_t>(task, rows);
    case c10::ScalarType::UInt64:
      return with_integer<std::uint64_t, std::uint64_t>(task, rows);
    case c10::ScalarType::Bool:
      return with_operation<std::uint8_t, Bool, Bool>(task, rows);
    default:
      throw InternalError("[reduce_rows] internal: unchecked dtype");
  }
}

void check_reduction(std::string_view op_name, c10::ScalarType input, c10::ScalarType output, ReduceOp op, double scale) {
  const bool floating = is_float(input);
  check_value(floating || is_integer(input), op_name, "cannot reduce ", c10::toString(input), ", want a real or integer dtype");
  check_value(output == input || (floating && is_float(output)), op_name, "output is ", c10::toString(output), " for ",
              c10::toString(input), " input, want the same dtype, or floating dtypes for both");
  check_value(floating || op != ReduceOp::kAvg, op_name, "cannot average ", c10::toString(input), ", want a floating dtype");
  check_value(floating || scale == 1.0, op_name, "scale ", scale, " for ", c10::toString(input),
              ", want 1 unless the dtype is floating");
}

}  // namespace hyper_parallel
