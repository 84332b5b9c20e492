#include <hyper_parallel/parallel/norm.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "parallel/layer.h"

namespace hyper_parallel::parallel {
namespace {

ParameterCut norm_cut(std::int64_t dim, const ParallelNormOptions& options) {
  return {{dim}, axis_cut(options.mesh, Replicate(), options.sequence_parallel)};
}

void fill(at::Tensor& parameter, double value) {
  const at::NoGradGuard no_grad;
  parameter.fill_(value);
}

}  // namespace

ParallelRMSNormImpl::ParallelRMSNormImpl(std::int64_t size, ParallelNormOptions norm_options)
    : dim(size), options(std::move(norm_options)) {
  (void)group_of("ParallelRMSNorm", options.mesh);
  weight = register_parameter("weight", at::empty({dim}));
  reset_parameters();
}

void ParallelRMSNormImpl::reset_parameters() { fill(weight, 1.0); }

ParameterCuts ParallelRMSNormImpl::own_cuts() const { return {{"weight", norm_cut(dim, options)}}; }

torch::Tensor ParallelRMSNormImpl::forward(torch::Tensor x) { return at::rms_norm(x, {dim}, weight, options.eps); }

ParallelLayerNormImpl::ParallelLayerNormImpl(std::int64_t size, ParallelNormOptions norm_options)
    : dim(size), options(std::move(norm_options)) {
  (void)group_of("ParallelLayerNorm", options.mesh);
  weight = register_parameter("weight", at::empty({dim}));
  if (options.bias) bias = register_parameter("bias", at::empty({dim}));
  reset_parameters();
}

void ParallelLayerNormImpl::reset_parameters() {
  fill(weight, 1.0);
  if (bias.defined()) fill(bias, 0.0);
}

ParameterCuts ParallelLayerNormImpl::own_cuts() const {
  ParameterCuts cuts{{"weight", norm_cut(dim, options)}};
  if (options.bias) cuts["bias"] = norm_cut(dim, options);
  return cuts;
}

torch::Tensor ParallelLayerNormImpl::forward(torch::Tensor x) { return at::layer_norm(x, {dim}, weight, bias, options.eps); }

}  // namespace hyper_parallel::parallel
