#include <hyper_parallel/train/shard_llama.h>

#include <torch/torch.h>

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

}  // namespace hyper_parallel::train
