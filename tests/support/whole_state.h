#pragma once
#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hyper_parallel::testing {

/// The parameters of a module that is not sharded, to be saved or loaded as "model.<name>".
inline ckpt::StateDict whole_state(const torch::nn::Module& module) {
  ckpt::StateDict state;
  for (const auto& item : module.named_parameters()) state.add("model." + item.key(), item.value());
  return state;
}

}  // namespace hyper_parallel::testing
