#pragma once
// Blocks with frozen parameters: low-rank adapters beside a frozen base, and blocks that are frozen as a whole.
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

enum class BlockKind { kAdapted, kFrozen, kTrained };

/// A frozen linear layer with a trained low-rank term: x W^T + b + (x A^T) B^T.
struct AdaptedLinearImpl : torch::nn::Module {
  AdaptedLinearImpl(int64_t in, int64_t out, BlockKind kind) {
    base = register_module("base", torch::nn::Linear(in, out));
    if (kind != BlockKind::kTrained) {
      for (auto& parameter : base->parameters()) parameter.set_requires_grad(false);
    }
    if (kind != BlockKind::kAdapted) return;
    a = register_parameter("a", torch::empty({2, in}));
    b = register_parameter("b", torch::empty({out, 2}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return a.defined() ? base(x) + torch::linear(torch::linear(x, a), b) : base(x);
  }
  torch::nn::Linear base = nullptr;
  torch::Tensor a, b;
};
TORCH_MODULE(AdaptedLinear);

struct AdaptedBlockImpl : torch::nn::Module {
  AdaptedBlockImpl(int64_t dim, BlockKind kind) {
    scale = register_parameter("scale", torch::ones({dim}), /*requires_grad=*/kind == BlockKind::kTrained);
    up = register_module("up", AdaptedLinear(dim, 2 * dim, kind));
    down = register_module("down", AdaptedLinear(2 * dim, dim, kind));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::silu(up(x * scale))); }
  torch::Tensor scale;
  AdaptedLinear up = nullptr, down = nullptr;
};
HP_MODULE(AdaptedBlock);

/// Embedding and head of the root are frozen.
struct AdaptedNetImpl : torch::nn::Module {
  static constexpr int64_t kVocab = NetImpl::kVocab;
  AdaptedNetImpl(const std::vector<BlockKind>& kinds, int64_t dim) {
    table = register_module("table", torch::nn::Embedding(kVocab, dim));
    head = register_module("head", torch::nn::Linear(dim, kVocab));
    for (auto& parameter : parameters()) parameter.set_requires_grad(false);
    for (std::size_t i = 0; i < kinds.size(); ++i)
      blocks.push_back(register_module("block" + std::to_string(i), AdaptedBlock(dim, kinds[i])));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor h = table(tokens);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (before_block) before_block(i, h);
      h = run_block ? run_block(blocks[i], h) : blocks[i](h);
    }
    return head(h);
  }
  std::function<void(std::size_t, const torch::Tensor&)> before_block;
  std::function<torch::Tensor(AdaptedBlock&, const torch::Tensor&)> run_block;
  torch::nn::Embedding table = nullptr;
  torch::nn::Linear head = nullptr;
  std::vector<AdaptedBlock> blocks;
};
HP_MODULE(AdaptedNet);

inline AdaptedNet make_adapted(const std::vector<BlockKind>& kinds, int64_t dim = 12) {
  AdaptedNet net(kinds, dim);
  seed_parameters(*net, 7);
  return net;
}

inline HSDPModule shard_adapted(const AdaptedNet& net, const FullyShardOptions& options) {
  for (const AdaptedBlock& block : net->blocks) fully_shard(block, options);
  return fully_shard(net, options);
}

}  // namespace hyper_parallel::testing
