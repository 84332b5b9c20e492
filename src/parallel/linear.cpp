#include <hyper_parallel/parallel/linear.h>

#include <cmath>

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/nn/init.h>

#include "parallel/layer.h"

namespace hyper_parallel::parallel {
namespace {

std::vector<FeatureRange> ceil_ranges(std::int64_t features, int ranks) {
  std::vector<FeatureRange> ranges;
  for (int r = 0; r < ranks; ++r) ranges.push_back(chunk_of(features, ranks, r));
  return ranges;
}

/// One after the other, from the first feature to the last.
bool partition(const std::vector<FeatureRange>& ranges, std::int64_t features) {
  std::int64_t next = 0;
  for (const FeatureRange& range : ranges) {
    if (range.size() > 0 && range.begin != next) return false;
    next = std::max(next, range.end);
  }
  return next == features;
}

struct Ranges {
  std::vector<FeatureRange> of_ranks;
  bool weight_is_cut;
};

Ranges checked_ranges(const char* op, const ParallelLinearOptions& options, const Comm& comm, std::int64_t features) {
  const std::vector<FeatureRange> chunks = ceil_ranges(features, size_of(comm));
  const std::vector<FeatureRange>& given = options.ranges;
  if (given.empty() || given == chunks) return {chunks, true};
  check_value(given.size() == chunks.size(), op, given.size(), " ranges, want one for each of ", chunks.size(), " ranks");
  for (const FeatureRange& range : given)
    check_value(range.begin >= 0 && range.begin <= range.end && range.end <= features, op, "range [", range.begin, ", ",
                range.end, "), want it within ", features, " features");
  return {given, false};
}

void check_features(const char* op, std::int64_t in, std::int64_t out) {
  check_value(in >= 0 && out >= 0, op, in, " input and ", out, " output features, want 0 or more");
}

/// As torch::nn::Linear::reset_parameters: uniform in +-1 / sqrt(in).
void draw_bias(at::Tensor& whole, std::int64_t in_features) {
  const double bound = in_features > 0 ? 1.0 / std::sqrt(static_cast<double>(in_features)) : 0.0;
  torch::nn::init::uniform_(whole, -bound, bound);
}

void draw_weight(at::Tensor& whole) {
  if (whole.numel() > 0) torch::nn::init::kaiming_uniform_(whole, std::sqrt(5.0));
}

}  // namespace

std::vector<FeatureRange> balanced_ranges(std::int64_t units, std::int64_t unit_size, int ranks) {
  check_value(units >= 0 && unit_size >= 0 && ranks >= 1, "balanced_ranges", units, " units of ", unit_size, " over ", ranks,
              " ranks, want none or more over one or more");
  std::vector<FeatureRange> ranges;
  std::int64_t begin = 0;
  for (int r = 0; r < ranks; ++r) {
    const std::int64_t count = units / ranks + (r < units % ranks ? 1 : 0);
    ranges.push_back({begin * unit_size, (begin + count) * unit_size});
    begin += count;
  }
  return ranges;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in, std::int64_t out, ParallelLinearOptions linear_options)
    : in_features(in), out_features(out), options(std::move(linear_options)) {
  constexpr const char* kOp = "ColumnParallelLinear";
  check_features(kOp, in, out);
  comm_ = group_of(kOp, options.mesh);
  const Ranges ranges = checked_ranges(kOp, options, comm_, out);
  check_value(!options.gather_output || partition(ranges.of_ranks, out), kOp,
              "gather_output with ranges that overlap or leave gaps, want them one after the other");
  holds_whole_ = !ranges.weight_is_cut;
  range_ = ranges.of_ranks[static_cast<std::size_t>(rank_in(comm_))];
  const std::int64_t rows = holds_whole_ ? out : range_.size();
  weight = register_parameter("weight", at::empty({rows, in}));
  if (options.bias) bias = register_parameter("bias", at::empty({rows}));
  reset_parameters();
}

void ColumnParallelLinearImpl::reset_parameters() {
  const ParameterCuts cuts = own_cuts();
  reset_part(cuts.at("weight"), weight, draw_weight);
  if (bias.defined()) reset_part(cuts.at("bias"), bias, [this](at::Tensor& whole) { draw_bias(whole, in_features); });
}

ParameterCuts ColumnParallelLinearImpl::own_cuts() const {
  const auto axes = axis_cut(options.mesh, holds_whole_ ? Replicate() : Shard(0), holds_whole_);
  ParameterCuts cuts{{"weight", {{out_features, in_features}, axes}}};
  if (options.bias) cuts["bias"] = {{out_features}, axes};
  return cuts;
}

torch::Tensor ColumnParallelLinearImpl::forward(torch::Tensor x, std::int64_t sequence_length) {
  if (options.enter_region) x = enter(x, comm_, sequence_of(options), sequence_length, "ColumnParallelLinear");
  at::Tensor rows = weight, offset = bias;
  if (holds_whole_) {
    rows = weight.narrow(0, range_.begin, range_.size());
    if (bias.defined()) offset = bias.narrow(0, range_.begin, range_.size());
  }
  const at::Tensor y = at::linear(x, rows, offset);
  if (!options.gather_output || alone(comm_)) return y;
  std::vector<std::int64_t> sizes;
  for (const FeatureRange& range : options.ranges) sizes.push_back(range.size());
  if (sizes.empty()) sizes = ceil_chunks(out_features, comm_.size());
  return all_gather_split(y, comm_, {-1, std::move(sizes), "ColumnParallelLinear"});
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in, std::int64_t out, ParallelLinearOptions linear_options)
    : in_features(in), out_features(out), options(std::move(linear_options)) {
  constexpr const char* kOp = "RowParallelLinear";
  check_features(kOp, in, out);
  comm_ = group_of(kOp, options.mesh);
  const Ranges ranges = checked_ranges(kOp, options, comm_, in);
  check_value(partition(ranges.of_ranks, in), kOp, "ranges overlap or leave gaps, want them one after the other");
  holds_whole_ = !ranges.weight_is_cut;
  range_ = ranges.of_ranks[static_cast<std::size_t>(rank_in(comm_))];
  for (const FeatureRange& range : ranges.of_ranks) sizes_.push_back(range.size());
  weight = register_parameter("weight", at::empty({out, holds_whole_ ? in : range_.size()}));
  if (options.bias) bias = register_parameter("bias", at::empty({out}));
  reset_parameters();
}

void RowParallelLinearImpl::reset_parameters() {
  const ParameterCuts cuts = own_cuts();
  reset_part(cuts.at("weight"), weight, draw_weight);
  if (bias.defined()) reset_part(cuts.at("bias"), bias, [this](at::Tensor& whole) { draw_bias(whole, in_features); });
}

ParameterCuts RowParallelLinearImpl::own_cuts() const {
  ParameterCuts cuts{
      {"weight", {{out_features, in_features}, axis_cut(options.mesh, holds_whole_ ? Replicate() : Shard(1), holds_whole_)}}};
  if (options.bias) cuts["bias"] = {{out_features}, axis_cut(options.mesh, Replicate(), options.sequence_parallel)};
  return cuts;
}

torch::Tensor RowParallelLinearImpl::forward(torch::Tensor x) {
  if (!options.input_is_parallel) x = split_all_gather(x, comm_, {-1, sizes_, "RowParallelLinear"});
  const at::Tensor columns = holds_whole_ ? weight.narrow(1, range_.begin, range_.size()) : weight;
  const at::Tensor y = leave(at::linear(x, columns), comm_, sequence_of(options), "RowParallelLinear");
  return bias.defined() ? y + bias : y;
}

}  // namespace hyper_parallel::parallel
