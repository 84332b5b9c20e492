#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel {

struct ClipGradOptions {
  double norm_type = 2.0;           ///< p of the p-norm; infinity for the largest magnitude
  bool error_if_nonfinite = false;  ///< throw Error when the norm is infinite or NaN, before anything is scaled
  /// Parameters outside of the unit tree (ignored_params), equal on all ranks: counted once and scaled alike.
  std::vector<at::Tensor> plain_parameters = {};
};

/// Scales all gradients of the tree in place so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does.
///
/// Collective: one all-reduce of one number for each distinct shard group. \return the norm before clipping, of all gradients of
/// all ranks together (never a local part), equal on all ranks and to a single-process run up to rounding. Sums run in fp64.
/// ValueError: max_norm negative or NaN, norm_type not positive. Error: see error_if_nonfinite.
HP_API double clip_grad_norm_(const fsdp::UnitHandle& root, double max_norm, const ClipGradOptions& options = {});

}  // namespace hyper_parallel
