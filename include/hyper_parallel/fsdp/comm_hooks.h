#pragma once
// Communication of the user's own in place of ours, and a look at reduced gradients.
#include <functional>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel {

/// Waits for a communication that was started; called once. Empty: it is done already.
using CommWait = std::function<void()>;

/// Starts output [W * n] = the inputs [n] of all W ranks of `group`, in rank order. Both have the compute dtype; `input` is this
/// rank's part of `output`. Both stay alive until the returned function has been called.
using CustomAllGather = std::function<CommWait(const Comm& group, const at::Tensor& output, const at::Tensor& input)>;

/// Starts output [n] = the sum over the ranks of `group` of their row for this rank; `input` [W * n] has one row for each rank.
/// Both have the reduce dtype. Averages and factors are applied afterwards.
using CustomReduceScatter = std::function<CommWait(const Comm& group, const at::Tensor& output, const at::Tensor& input)>;

/// Is given the reduced gradient (flat, this rank's part, reduce dtype, padding included) of each group of a unit, after the
/// reduction over shards and replicas and before it is added to `.grad`; may change it in place.
using AllReduceHook = std::function<void(const at::Tensor& reduced)>;

}  // namespace hyper_parallel
