#pragma once
// Linear layers whose weight is cut over the ranks of a mesh axis (Shoeybi et al. 2019, "Megatron-LM"; sequence parallelism:
// Korthikanti et al. 2022).
//
//   column-parallel: each rank has rows of the weight          row-parallel: each rank has columns of the weight
//
//   x ──► W0 ──► y0                                             x0 ──► W0 ──┐
//   x ──► W1 ──► y1   each rank a part of the features          x1 ──► W1 ──┴─ sum ──► y
//
// One after the other, with anything element by element in between, they need one sum over the ranks forward and one backward.
// With sequence parallelism what lies outside of such a pair is cut along the sequence: the sums become reduce-scatters, and
// x is gathered on the way in.
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/common.h>

#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/nn/module.h>
#include <hyper_parallel/parallel/cut.h>

namespace hyper_parallel::parallel {

/// Features [begin, end) of one rank.
struct FeatureRange {
  std::int64_t begin = 0, end = 0;
  [[nodiscard]] std::int64_t size() const { return end - begin; }
  friend bool operator==(const FeatureRange&, const FeatureRange&) = default;
};

/// Splits `units` units of `unit_size` features, such as heads, over ranks: the first (units % ranks) ranks get one more. Local.
/// ValueError: units or unit_size < 0, ranks < 1.
[[nodiscard]] HP_API std::vector<FeatureRange> balanced_ranges(std::int64_t units, std::int64_t unit_size, int ranks);

/// Options of ColumnParallelLinear and RowParallelLinear.
struct ParallelLinearOptions {
  DeviceMesh mesh = {};  ///< one axis; undefined: the layer is not cut, and communicates with nobody
  bool bias = true;
  /// Column-parallel: the output is gathered, for ranks that all go on alike. False: each rank keeps its own features.
  bool gather_output = false;
  /// Row-parallel: the input is this rank's features. False: it is whole on all ranks, and cut here.
  bool input_is_parallel = true;
  /// Column-parallel: the input is this rank's part of the sequence. Row-parallel: the output is.
  bool sequence_parallel = false;
  std::int64_t sequence_dim = 1;
  /// Column-parallel: false where the caller has already brought x into the region, once for several layers that read it, with
  /// identity_all_reduce or all_gather_reduce_scatter.
  bool enter_region = true;
  /// Features of each rank, where the default will not do: output features (column), input features (row). Default: ceil chunks,
  /// with which each rank holds its part of the weight. Other ranges may be uneven in any way, column-parallel ones may overlap;
  /// then every rank holds the whole weight, computes its range of it, and the gradient is partial (AxisCut::partial_gradient).
  std::vector<FeatureRange> ranges = {};
};

/// y = x W^T + b with W (out, in) cut along dim 0. Initialised like torch::nn::Linear from the same random numbers, whatever the
/// number of ranks. Parameters: weight, bias (cut like the rows).
class HP_API ColumnParallelLinearImpl : public torch::nn::Module, public ParallelModule {
 public:
  /// Collective over the axis where its group is used for the first time. ValueError: sizes < 0, a mesh of several axes, ranges
  /// that do not fit, gather_output with ranges that overlap or leave gaps.
  ColumnParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, ParallelLinearOptions options = {});
  /// x (..., in) -> (..., own features), or (..., out) with gather_output. Collective, forward and backward.
  /// \param sequence_length with sequence_parallel: length of the whole sequence, in ceil chunks; 0: all ranks have as much
  torch::Tensor forward(torch::Tensor x, std::int64_t sequence_length = 0);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;
  [[nodiscard]] FeatureRange range() const { return range_; }  ///< of this rank

  const std::int64_t in_features, out_features;
  const ParallelLinearOptions options;
  torch::Tensor weight, bias;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(std::int64_t{0})})

 private:
  Comm comm_;
  FeatureRange range_;
  bool holds_whole_ = false;
};
HP_MODULE(ColumnParallelLinear);

/// y = sum over ranks of x W^T, plus b, with W (out, in) cut along dim 1. Initialised like torch::nn::Linear from the same random
/// numbers. Parameters: weight, bias (on all ranks; with sequence_parallel its gradient is partial).
class HP_API RowParallelLinearImpl : public torch::nn::Module, public ParallelModule {
 public:
  /// As ColumnParallelLinear; `ranges` must not overlap.
  RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features, ParallelLinearOptions options = {});
  /// x (..., own features), or (..., in) without input_is_parallel -> (..., out); with sequence_parallel this rank's ceil chunk
  /// of it along sequence_dim. Collective, forward and backward.
  torch::Tensor forward(torch::Tensor x);
  void reset_parameters();
  [[nodiscard]] ParameterCuts own_cuts() const override;
  [[nodiscard]] FeatureRange range() const { return range_; }

  const std::int64_t in_features, out_features;
  const ParallelLinearOptions options;
  torch::Tensor weight, bias;

 private:
  Comm comm_;
  FeatureRange range_;
  std::vector<std::int64_t> sizes_;  ///< of all ranks' ranges
  bool holds_whole_ = false;
};
HP_MODULE(RowParallelLinear);

}  // namespace hyper_parallel::parallel
