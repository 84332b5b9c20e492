#pragma once
// Tokens to rows in expert order and back.
//
//   token:            0      1      2          row:      0    1    2    3    4    5
//   its experts:    {0,2}  {1,2}  {0,2}        expert:   0    0    1    2    2    2
//                                              token:    0    2    1    0    1    2
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace hyper_parallel::parallel {

/// Where the rows of N tokens with k experts each are; M = N k.
struct RowOrder {
  at::Tensor token;                  ///< (M) whose row
  at::Tensor pair;                   ///< (M) which (token, choice), as token * k + choice
  at::Tensor position;               ///< (N, k) of each choice's row
  std::vector<std::int64_t> counts;  ///< rows of each expert
};

/// \param experts (N, k) int64, ascending in each row
RowOrder order_rows(const at::Tensor& experts, std::int64_t n_experts);

/// (N, dim) -> (M, dim). The gradient of a token is the sum over its rows, in expert order, in fp32.
at::Tensor spread(const at::Tensor& x, const RowOrder& order);
/// (M, dim) -> (N, dim): the sum over a token's rows times their weights (N, k), in expert order, in fp32; dtype of rows.
at::Tensor collect(const at::Tensor& rows, const at::Tensor& weights, const RowOrder& order);

/// y[i] = x[order[i]] for a permutation and its inverse.
at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse);

}  // namespace hyper_parallel::parallel
