#include <hyper_parallel/train/shard_llama.h>

#include <map>

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <hyper_parallel/parallel/cut.h>

namespace hyper_parallel::train {
namespace {

using parallel::ParameterCut;

/// What is cut, by the parameter it is: names change when units are made.
using CutsByParameter = std::map<const c10::TensorImpl*, ParameterCut>;

CutsByParameter cuts_of(const Llama& model) {
  CutsByParameter cuts;
  const parallel::ParameterCuts by_name = parallel::parameter_cuts(model);
  for (const auto& item : model->named_parameters()) cuts.emplace(item.value().unsafeGetTensorImpl(), by_name.at(item.key()));
  return cuts;
}

/// The source layout of a parameter along the one axis of `source`.
SourceShardMetaInfo source_of(const ParameterCut& cut, const DeviceMesh& source) {
  SourceShardMetaInfo info{
      .mesh = source, .placements = {Replicate()}, .shape = cut.shape, .copy_gradients = {CopyGradient::kWhole}};
  for (const parallel::AxisCut& axis : cut.axes) {
    if (axis.mesh.mesh_dim_names() != source.mesh_dim_names()) continue;
    info.placements = {axis.placement};
    if (axis.partial_gradient) info.copy_gradients = {CopyGradient::kPartial};
  }
  return info;
}

/// Options of the unit of `modules`, whose weights the axis of `source` has cut before.
FullyShardOptions with_source(FullyShardOptions options, const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                              const CutsByParameter& cuts, const DeviceMesh& source) {
  if (!source.defined()) return options;
  options.source_shard_infos.emplace();
  for (const auto& [name, parameter] : managed_parameters(modules, options))
    options.source_shard_infos->set(parameter, source_of(cuts.at(parameter.unsafeGetTensorImpl()), source), name);
  return options;
}

}  // namespace

HSDPModule fully_shard_llama(Llama& model, const FullyShardOptions& options, const DeviceMesh& experts) {
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
  const CutsByParameter cuts = cuts_of(model);
  const DeviceMesh &tp = model->meshes.tp, &ep = model->meshes.ep;
  const auto shard = [&](const Modules& modules, const FullyShardOptions& of_unit) {
    return fully_shard(modules, with_source(of_unit, modules, cuts, tp)).front();
  };
  FullyShardOptions kept = options;
  kept.reshard_after_forward = false;
  if (!model->config.tied) {
    shard({model->embed_tokens.ptr()}, options).set_unshard_in_backward(false);
    shard({model->norm.ptr(), model->lm_head.ptr()}, kept);
  }
  FullyShardOptions of_experts = options;
  if (experts.defined()) of_experts.mesh = experts;
  for (LlamaBlock& layer : model->layers) {
    if (!layer->moe.is_empty()) {
      const Modules modules = {layer->moe->experts.ptr()};
      const HSDPModule unit = fully_shard(modules, with_source(of_experts, modules, cuts, ep)).front();
      // Ranks of ep have sent each other their tokens, and those of tp have shared out theirs: the mean over the ranks that have
      // the same experts is to be one over those that have different sequences.
      const double copies = tp.defined() ? static_cast<double>(tp.size()) : 1.0;
      const double senders = ep.defined() ? static_cast<double>(ep.size()) : 1.0;
      if (copies != senders) unit.set_gradient_scaling_factor(copies / senders);
    }
    shard({layer.ptr()}, options);
  }
  return shard({model.ptr()}, kept);
}

void init_llama(Llama& model, const HSDPModule& root, std::uint64_t seed) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const auto& group : root.groups()) {
    for (const auto& parameter : group.parameters) shapes[parameter.name] = parameter.full_shape;
  }
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(seed);
  for (const std::string& name : model->named_parameters().keys()) {
    torch::Tensor whole = torch::empty(shapes.at(name));
    model->init_parameter(name, whole, generator);
    root.load_full({{name, whole}}, /*strict=*/false);
  }
  for (const auto& item : model->named_buffers()) {
    const torch::Tensor zeros = torch::zeros(item.value().sizes(), item.value().scalar_type());
    root.load_full({{item.key(), zeros}}, /*strict=*/false);
  }
}

}  // namespace hyper_parallel::train
