#pragma once
// Collectives that autograd can differentiate: the boundaries of tensor, sequence, expert and context parallelism.
//
// Each is named after what it does forward and what it does to the gradient. A tensor is replicated (every rank has the same
// values), cut (rank r has chunk r along a dimension), or partial (the value is the sum over ranks).
//
//   function                     input        output       gradient of the input
//   identity_all_reduce          replicated   replicated   sum over ranks
//   all_reduce_identity          partial      replicated   as it comes
//   all_gather_reduce_scatter    cut          replicated   sum over ranks, cut
//   reduce_scatter_all_gather    partial      cut          gathered
//   all_gather_split             cut          replicated   cut
//   split_all_gather             replicated   cut          gathered
//   all_to_all                   rows         rows         sent back
//
// "Replicated" outputs of the first and third go into computations that differ between ranks, so their gradients are summed; that
// of the fifth goes into a computation that every rank repeats.
//
// All are collective over the group, forward and backward: every rank calls them in the same order, and its loss depends on every
// result, so that the backward of each runs on all ranks or on none; whether the input needs a gradient is equal on all ranks.
// Ranks with nothing to compute go on with empty tensors. Sums are taken in rank order, in fp32 for half precision, and rounded
// once: the same bits in every run and on every rank. A group of one, or an undefined Comm, leaves the input as it is. Any dtype
// where nothing is summed. They can be differentiated twice, may be recomputed (hp::checkpoint) and keep no tensors for backward.
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::parallel {

/// Lengths of the chunks into which Shard cuts `n` elements: c = ceil(n / ranks) each until none are left, so the last ones may
/// be shorter or empty. Local. ValueError: n < 0, ranks < 1.
[[nodiscard]] HP_API std::vector<std::int64_t> ceil_chunks(std::int64_t n, int ranks);

/// Along which dimension, and in which lengths.
struct DimOptions {
  std::int64_t dim = 0;  ///< negative: from the end
  /// Length of each rank's chunk along `dim`, equal on all ranks, zeros allowed. Empty: where the input is cut, all ranks have as
  /// much as this one; where the output is cut, ceil_chunks.
  std::vector<std::int64_t> sizes = {};
  std::string label = {};  ///< shown in errors and in the flight recorder
};

/// x as it is; its gradient is summed over the ranks. Bytes sent, of x of n bytes: backward an all_reduce of n.
[[nodiscard]] HP_API at::Tensor identity_all_reduce(const at::Tensor& x, const Comm& comm, const std::string& label = {});
/// The sum of all ranks' x. Forward an all_reduce, backward nothing.
[[nodiscard]] HP_API at::Tensor all_reduce_identity(const at::Tensor& x, const Comm& comm, const std::string& label = {});
/// All ranks' x, joined along `dim`. Forward (W - 1) n bytes, backward the other ranks' chunks: n_whole - n.
/// ValueError: dim out of range, x has not the length that `sizes` gives this rank.
[[nodiscard]] HP_API at::Tensor all_gather_reduce_scatter(const at::Tensor& x, const Comm& comm, const DimOptions& options = {});
/// This rank's chunk of the sum of all ranks' x. Forward n - n_chunk bytes, backward (W - 1) n_chunk.
/// ValueError: dim out of range, the sum of `sizes` is not the length of x.
[[nodiscard]] HP_API at::Tensor reduce_scatter_all_gather(const at::Tensor& x, const Comm& comm, const DimOptions& options = {});
/// All ranks' x, joined along `dim`, for a computation that all ranks do alike. Forward (W - 1) n bytes, backward nothing.
[[nodiscard]] HP_API at::Tensor all_gather_split(const at::Tensor& x, const Comm& comm, const DimOptions& options = {});
/// This rank's chunk of an x that all ranks have. Forward nothing, backward (W - 1) n_chunk bytes.
[[nodiscard]] HP_API at::Tensor split_all_gather(const at::Tensor& x, const Comm& comm, const DimOptions& options = {});

/// How many rows go to and come from each rank; zeros allowed.
struct AllToAllOptions {
  std::vector<std::int64_t> output_rows;
  std::vector<std::int64_t> input_rows;
  std::string label = {};
};

/// Rows of x (dimension 0), which lie in the order of the ranks they are for, to those ranks; the result has the rows received in
/// the order of the ranks they came from. Bytes: the rows for others; backward those received from others.
/// ValueError: not one number for each rank, the sum of input_rows is not x.size(0).
[[nodiscard]] HP_API at::Tensor all_to_all(const at::Tensor& x, const Comm& comm, const AllToAllOptions& options);

}  // namespace hyper_parallel::parallel
