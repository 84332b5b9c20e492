#pragma once
// Collectives for the engine that Comm's public functions do not have: rows that are read where they are, and notes that travel
// along with a reduction.
#include <functional>
#include <span>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel {

/// Gets the row of rank `rank`. It may lie in that rank's memory and is gone when the call returns.
using ReadRow = std::function<void(int rank, const void* row)>;

/// One tensor of gather_rows. Rows that are received go through `space`, `size() * input.numel()` elements of input's dtype;
/// those that can be read in their owner's memory leave it untouched. `input` may be this rank's row of `space`.
struct RowGather {
  at::Tensor space, input;
  ReadRow read;  ///< must not throw
};

/// An all-gather whose result need not lie in one piece: `wait` calls the `read` of each part once for each rank, this one
/// included, in any order. Several parts, as many on all ranks, are one operation: one number, one wait, one error. Each `input`
/// must stay as it is until `wait`. `advance` leaves once all rows have been handed out, while peers may still read this rank's.
/// Collective; errors and counters are those of Comm::all_gather_single, which other ranks may call instead for a single part.
HP_API Work gather_rows(const Comm& comm, std::span<const RowGather> parts, const CommOptions& options = {});

/// Comm::reduce_scatter_single and Comm::all_reduce with some bytes of each rank, which cost no operation of their own: `notes`
/// has one row for each rank (Byte, contiguous, on the CPU; the same size on all ranks). This rank's row is sent, the others are
/// there after `wait`, or after `advance` of an all_reduce. An undefined tensor: without notes.
HP_API Work reduce_scatter_with_notes(const Comm& comm, const at::Tensor& output, const at::Tensor& input,
                                      const at::Tensor& notes, const ReduceScatterOptions& options = {});
HP_API Work all_reduce_with_notes(const Comm& comm, const at::Tensor& tensor, const at::Tensor& notes,
                                  const AllReduceOptions& options = {});

}  // namespace hyper_parallel
