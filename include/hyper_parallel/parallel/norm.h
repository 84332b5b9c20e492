#pragma once
// Norms for sequences that are cut over the ranks of a mesh axis.
#include <torch/nn/module.h>

#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/parallel/cut.h>

namespace hyper_parallel::parallel {

struct ParallelNormOptions {
  DeviceMesh mesh = {};  ///< one axis; undefined: a plain norm
  /// x is this rank's part of the sequence: the gradient of the weight, which all ranks have, is partial over the axis
  /// (AxisCut::partial_gradient): sum_partial_gradients, or the gradient rule of the unit, sums it. False: x is whole on all
  /// ranks, and so is the gradient.
  bool sequence_parallel = true;
  double eps = 1e-5;
  bool bias = true;  ///< LayerNorm only
};

/// Root mean square norm (Zhang and Sennrich 2019) over the last dimension. Parameter: weight, ones. Local.
class HP_API ParallelRMSNormImpl : public torch::nn::Module, public ParallelModule {
 public:
  explicit ParallelRMSNormImpl(std::int64_t dim, ParallelNormOptions options = {});
  torch::Tensor forward(torch::Tensor x);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;

  const std::int64_t dim;
  const ParallelNormOptions options;
  torch::Tensor weight;
};
HP_MODULE(ParallelRMSNorm);

/// Layer norm (Ba et al. 2016) over the last dimension. Parameters: weight, ones; bias, zeros. Local.
class HP_API ParallelLayerNormImpl : public torch::nn::Module, public ParallelModule {
 public:
  explicit ParallelLayerNormImpl(std::int64_t dim, ParallelNormOptions options = {});
  torch::Tensor forward(torch::Tensor x);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;

  const std::int64_t dim;
  const ParallelNormOptions options;
  torch::Tensor weight, bias;
};
HP_MODULE(ParallelLayerNorm);

}  // namespace hyper_parallel::parallel
