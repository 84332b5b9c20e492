#pragma once
// What parallel layers do to their parameters: plain local tensors, each a part of a whole one that no rank may ever hold.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/dtensor/placement.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel::parallel {

/// What one mesh axis does to one parameter.
struct AxisCut {
  DeviceMesh mesh;      ///< of this one axis: its name is mesh.mesh_dim_names()[0]
  Placement placement;  ///< Shard(dim) in ceil chunks, or Replicate()
  /// With Replicate(): the gradient that a rank computes is one summand, to be summed over the axis before it is used. False:
  /// every rank computes the whole gradient.
  bool partial_gradient = false;
};

/// A parameter of a parallel layer. Axes that are not listed replicate it, and every rank along them computes the whole gradient
/// of its own data.
struct ParameterCut {
  std::vector<std::int64_t> shape;  ///< of the whole parameter
  std::vector<AxisCut> axes;        ///< each cuts another dimension
};

using ParameterCuts = std::map<std::string, ParameterCut>;

/// Base of all parallel layers. Thread safety: as torch::nn::Module.
class HP_API ParallelModule {
 public:
  virtual ~ParallelModule();
  /// The cuts of the parameters that this module itself registers, by their names in it. Local.
  [[nodiscard]] virtual ParameterCuts own_cuts() const = 0;
};

/// The cuts of all parallel layers below `root`, by full name of the parameter. Local.
[[nodiscard]] HP_API ParameterCuts parameter_cuts(const torch::nn::Module& root);
template <class Contained>
[[nodiscard]] ParameterCuts parameter_cuts(const torch::nn::ModuleHolder<Contained>& holder) {
  return parameter_cuts(*holder);
}

/// Shape of this rank's part. Local.
[[nodiscard]] HP_API std::vector<std::int64_t> local_shape(const ParameterCut& cut);
/// This rank's part of `whole`: a view. Local. ValueError: another shape.
[[nodiscard]] HP_API at::Tensor local_part(const ParameterCut& cut, const at::Tensor& whole);
/// The whole tensor of which every rank passes its part. Collective over the axes. ValueError: not the shape of the part.
[[nodiscard]] HP_API at::Tensor full_tensor(const ParameterCut& cut, const at::Tensor& part);

/// Sums the gradients that are declared partial over their axes, bucketed by axis and dtype, in the order of names; a gradient
/// that is absent on this rank counts as zero. For models that no unit reduces. Once per step, after the last backward.
/// Collective over the axes.
HP_API void sum_partial_gradients(torch::nn::Module& root);
template <class Contained>
void sum_partial_gradients(const torch::nn::ModuleHolder<Contained>& holder) {
  sum_partial_gradients(*holder.ptr());
}

/// Fills the parameters of `root` from whole tensors that every rank has, by full name; parameters that no parallel layer owns
/// are copied in full. Local. ValueError, nothing is changed then: a parameter without value, a wrong shape.
HP_API void load_whole(torch::nn::Module& root, const std::map<std::string, at::Tensor>& values);
template <class Contained>
void load_whole(const torch::nn::ModuleHolder<Contained>& holder, const std::map<std::string, at::Tensor>& values) {
  load_whole(*holder.ptr(), values);
}

/// Draws `whole`, of the shape of the cut, as the layer that is not cut would, and keeps this rank's part in `part`: random
/// numbers are used up alike whatever the number of ranks is. Memory: one whole parameter. Local.
HP_API void reset_part(const ParameterCut& cut, at::Tensor part, const std::function<void(at::Tensor& whole)>& draw);

}  // namespace hyper_parallel::parallel
