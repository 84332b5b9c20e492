#pragma once
// A network whose units are so large that their slices have whole pages, which ranks of one host map.
#include <functional>
#include <vector>

#include <torch/torch.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

/// Three blocks whose slices have whole pages with up to eight ranks, and a root of a few bytes.
struct WideImpl : torch::nn::Module {
  static constexpr int64_t kDim = 64;
  WideImpl() {
    for (const char* name : {"first", "middle", "last"}) blocks.push_back(register_module(name, Mlp(kDim, 200)));
    head = register_module("head", torch::nn::Linear(kDim, 5));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (before) before(i, x);
      x = blocks[i](x);
    }
    return head(x);
  }
  std::vector<Mlp> blocks;
  torch::nn::Linear head = nullptr;
  std::function<void(std::size_t block, torch::Tensor& x)> before;
};
HP_MODULE(Wide);

/// Shards every block and the root.
inline HSDPModule shard_wide(const Wide& model, const FullyShardOptions& options) {
  for (auto& block : model->blocks) fully_shard(block, options);
  return fully_shard(model, options);
}

}  // namespace hyper_parallel::testing
