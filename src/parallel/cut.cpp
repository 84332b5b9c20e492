#include <hyper_parallel/parallel/cut.h>

#include <numeric>
#include <tuple>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <hyper_parallel/parallel/functions.h>

#include "parallel/layer.h"
#include "parallel/transfer.h"

namespace hyper_parallel::parallel {
namespace {

using Shape = std::vector<std::int64_t>;

/// Where this rank's part lies along the dimension that an axis cuts.
FeatureRange range_of(const AxisCut& cut, const Shape& whole) {
  const auto dim = static_cast<std::size_t>(cut.placement.dim());
  return chunk_of(whole[dim], static_cast<int>(cut.mesh.size()), cut.mesh.get_local_rank());
}

const at::Tensor* find(const std::map<std::string, at::Tensor>& values, const std::string& name) {
  const auto entry = values.find(name);
  return entry == values.end() ? nullptr : &entry->second;
}

}  // namespace

ParallelModule::~ParallelModule() = default;

ParameterCuts parameter_cuts(const torch::nn::Module& root) {
  ParameterCuts all;
  for (const auto& item : root.named_modules(/*name_prefix=*/std::string(), /*include_self=*/true)) {
    const auto* layer = dynamic_cast<const ParallelModule*>(item.value().get());
    if (layer == nullptr) continue;
    for (auto& [name, cut] : layer->own_cuts()) all[item.key().empty() ? name : concat(item.key(), '.', name)] = std::move(cut);
  }
  return all;
}

Shape local_shape(const ParameterCut& cut) {
  Shape shape = cut.shape;
  for (const AxisCut& axis : cut.axes) {
    if (axis.placement.is_shard()) shape[static_cast<std::size_t>(axis.placement.dim())] = range_of(axis, cut.shape).size();
  }
  return shape;
}

at::Tensor local_part(const ParameterCut& cut, const at::Tensor& whole) {
  check_value(whole.defined() && whole.sizes() == at::IntArrayRef(cut.shape), "local_part", "shape ",
              whole.defined() ? whole.sizes() : at::IntArrayRef(), ", want ", at::IntArrayRef(cut.shape));
  at::Tensor part = whole;
  for (const AxisCut& axis : cut.axes) {
    if (!axis.placement.is_shard()) continue;
    const FeatureRange range = range_of(axis, cut.shape);
    part = part.narrow(axis.placement.dim(), range.begin, range.size());
  }
  return part;
}

at::Tensor full_tensor(const ParameterCut& cut, const at::Tensor& part) {
  check_value(part.defined() && part.sizes() == at::IntArrayRef(local_shape(cut)), "full_tensor", "shape ",
              part.defined() ? part.sizes() : at::IntArrayRef(), ", want this rank's part, ", at::IntArrayRef(local_shape(cut)));
  at::Tensor whole = part.detach();
  for (const AxisCut& axis : cut.axes) {
    const Comm comm = axis.mesh.get_group();
    if (!axis.placement.is_shard() || alone(comm)) continue;
    const std::int64_t dim = axis.placement.dim();
    whole = gathered(whole, comm, {dim, ceil_chunks(cut.shape[static_cast<std::size_t>(dim)], comm.size())}, "full_tensor");
  }
  return whole;
}

void sum_partial_gradients(torch::nn::Module& root) {
  const at::NoGradGuard no_grad;
  const ParameterCuts cuts = parameter_cuts(root);
  const auto parameters = root.named_parameters();
  // Axes in the order in which the names come, which is the same on all ranks.
  struct Bucket {
    DeviceMesh mesh;
    at::ScalarType dtype;
    std::vector<at::Tensor> parameters;
  };
  std::vector<Bucket> buckets;
  for (const auto& [name, cut] : cuts) {
    const at::Tensor* parameter = parameters.find(name);
    if (parameter == nullptr || !parameter->requires_grad()) continue;  // shared with an earlier name, or frozen
    for (const AxisCut& axis : cut.axes) {
      if (!axis.partial_gradient || axis.mesh.size() == 1) continue;
      auto bucket = std::find_if(buckets.begin(), buckets.end(),
                                 [&](const Bucket& b) { return b.mesh == axis.mesh && b.dtype == parameter->scalar_type(); });
      if (bucket == buckets.end()) bucket = buckets.insert(buckets.end(), {axis.mesh, parameter->scalar_type(), {}});
      bucket->parameters.push_back(*parameter);
    }
  }
  for (const Bucket& bucket : buckets) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& parameter : bucket.parameters)
      flat.push_back((parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter)).reshape({-1}));
    const at::Tensor sum = at::cat(flat);
    bucket.mesh.get_group().all_reduce(sum, {.label = "sum_partial_gradients"}).wait();
    std::int64_t begin = 0;
    for (const at::Tensor& parameter : bucket.parameters) {
      const at::Tensor part = sum.narrow(0, begin, parameter.numel()).view(parameter.sizes());
      if (parameter.grad().defined()) {
        parameter.mutable_grad().copy_(part);
      } else {
        parameter.mutable_grad() = part.clone();
      }
      begin += parameter.numel();
    }
  }
}

void load_whole(torch::nn::Module& root, const std::map<std::string, at::Tensor>& values) {
  constexpr const char* kOp = "load_whole";
  const ParameterCuts cuts = parameter_cuts(root);
  const at::NoGradGuard no_grad;
  const auto parameters = root.named_parameters();
  // A layer may know a tied parameter by another name.
  std::unordered_map<const void*, const ParameterCut*> cut_of;
  for (const auto& item : parameters) {
    if (const auto cut = cuts.find(item.key()); cut != cuts.end())
      cut_of.emplace(item.value().unsafeGetTensorImpl(), &cut->second);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& item : parameters) {
    const at::Tensor* value = find(values, item.key());
    check_value(value != nullptr && value->defined(), kOp, "no value for parameter ", item.key());
    const auto cut = cut_of.find(item.value().unsafeGetTensorImpl());
    const at::IntArrayRef want = cut == cut_of.end() ? item.value().sizes() : at::IntArrayRef(cut->second->shape);
    check_value(value->sizes() == want, kOp, "value for ", item.key(), " has shape ", value->sizes(), ", want ", want);
    copies.emplace_back(item.value(), cut == cut_of.end() ? *value : local_part(*cut->second, *value));
  }
  for (auto& [parameter, value] : copies) parameter.copy_(value);
}

void reset_part(const ParameterCut& cut, at::Tensor part, const std::function<void(at::Tensor& whole)>& draw) {
  const at::NoGradGuard no_grad;
  if (part.sizes() == at::IntArrayRef(cut.shape)) {
    draw(part);
    return;
  }
  at::Tensor whole = at::empty(cut.shape, part.options().requires_grad(false));
  draw(whole);
  part.copy_(local_part(cut, whole));
}

}  // namespace hyper_parallel::parallel
