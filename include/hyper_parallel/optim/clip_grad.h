#pragma once
// Norm and clipping of the gradients of a unit tree.
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

/// The norm of all gradients of all ranks together (never a local part): a plain number, equal on all ranks, and equal to that
/// of a single-process run up to rounding. Sums run in fp64 from gradients of any dtype.
///
/// Collective: one all-reduce of one number for each distinct group of ranks that hold different parts of parameters, in the
/// order of the tree. Units may lie on different meshes; replicas and padding count once or not at all. The groups of all units
/// must hold the same parameters cut their own way: ranks that hold other parameters altogether (pipeline stages) are not added.
/// ValueError: norm_type not positive. Error: see error_if_nonfinite.
[[nodiscard]] HP_API double get_total_norm(const fsdp::UnitHandle& root, const ClipGradOptions& options = {});

/// Scales all gradients of the tree in place so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does.
///
/// Collective as get_total_norm. \return the norm before clipping. A norm that is NaN makes all gradients NaN, on every rank
/// alike. ValueError: max_norm negative or NaN, norm_type not positive. Error: see error_if_nonfinite.
HP_API double clip_grad_norm_(const fsdp::UnitHandle& root, double max_norm, const ClipGradOptions& options = {});

/// The scaling of clip_grad_norm_ for a norm that is known. Local. ValueError: max_norm negative or NaN.
HP_API void clip_grads_with_norm_(const fsdp::UnitHandle& root, double max_norm, double total_norm,
                                  const ClipGradOptions& options = {});

/// Limits every element of every gradient to [-clip_value, clip_value]. Local; of the options only plain_parameters counts.
/// ValueError: clip_value negative or NaN.
HP_API void clip_grad_value_(const fsdp::UnitHandle& root, double clip_value, const ClipGradOptions& options = {});

}  // namespace hyper_parallel
