#pragma once
// Collectives along any dimension, without autograd.
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel::parallel {

/// A group of one needs no communication; no group counts as one.
inline bool alone(const Comm& comm) { return !comm.defined() || comm.size() == 1; }
inline int rank_in(const Comm& comm) { return comm.defined() ? comm.rank() : 0; }
inline int size_of(const Comm& comm) { return comm.defined() ? comm.size() : 1; }

/// One dimension of a tensor and its chunks, checked.
struct DimCut {
  std::int64_t dim;  ///< not negative
  std::vector<std::int64_t> sizes;
};

/// The sum over ranks, in a new tensor.
at::Tensor summed(const at::Tensor& x, const Comm& comm, const std::string& label, ReduceOp op = ReduceOp::kSum);
at::Tensor gathered(const at::Tensor& x, const Comm& comm, const DimCut& cut, const std::string& label);
at::Tensor reduced(const at::Tensor& x, const Comm& comm, const DimCut& cut, const std::string& label);
at::Tensor own_chunk(const at::Tensor& x, const Comm& comm, const DimCut& cut);
at::Tensor exchanged(const at::Tensor& x, const Comm& comm, const std::vector<std::int64_t>& output_rows,
                     const std::vector<std::int64_t>& input_rows, const std::string& label);

}  // namespace hyper_parallel::parallel
