#pragma once
// The local part of reductions: rows of equal length are combined in order.
#include <cstdint>
#include <span>
#include <string_view>

#include <c10/core/ScalarType.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel {

/// output[i] {=, +=} scale * (rows[0][i] op rows[1][i] op ...), in this order.
///
/// fp32 accumulates in fp32, half precision in fp32 (rounded once, at the end), fp64 and any input with an fp64 output in fp64;
/// integers are exact modulo 2^bits; bool: sum and max are "or", product and min are "and". NaN wins in min and max.
struct ReduceTask {
  void* output = nullptr;
  c10::ScalarType output_type = c10::ScalarType::Float;
  c10::ScalarType input_type = c10::ScalarType::Float;
  std::int64_t numel = 0;
  ReduceOp op = ReduceOp::kSum;  ///< kAvg: like kSum, the division is part of `scale`
  double scale = 1.0;            ///< floating types only
  bool accumulate = false;
};

/// `output` may be one of the rows, not overlap otherwise.
void reduce_rows(const ReduceTask& task, std::span<const void* const> rows);

/// ValueError of operation `op_name` unless reduce_rows can do it.
void check_reduction(std::string_view op_name, c10::ScalarType input, c10::ScalarType output, ReduceOp op, double scale);

}  // namespace hyper_parallel
