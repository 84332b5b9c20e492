#include <hyper_parallel/train/shard_llama.h>

#include <map>

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

namespace hyper_parallel::train {

HSDPModule fully_shard_llama(Llama& model, const FullyShardOptions& options) {
  if (!model->config.tied) {
    fully_shard(model->embed_tokens, options).set_unshard_in_backward(false);
    FullyShardOptions head = options;
    head.reshard_after_forward = false;
    fully_shard({model->norm.ptr(), model->lm_head.ptr()}, head);
  }
  for (LlamaBlock& layer : model->layers) fully_shard(layer, options);
  FullyShardOptions root = options;
  root.reshard_after_forward = false;
  return fully_shard(model, root);
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
}

}  // namespace hyper_parallel::train
