#pragma once
#include <memory>
#include <vector>

#include <hyper_parallel/nn/fully_shard.h>

namespace hyper_parallel::nn {

/// fully_shard, which also takes those of the parameters in `shared` that only modules of inner units register: tied parameters
/// that inner units have left out (ignored_params) because others use them, too.
[[nodiscard]] std::vector<HSDPModule> fully_shard_with(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                                       const FullyShardOptions& options, const std::vector<at::Tensor>& shared);

}  // namespace hyper_parallel::nn
