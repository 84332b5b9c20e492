#pragma once
#include <torch/nn/module.h>

namespace hyper_parallel::nn {

/// Registered parameters are reached through the protected member.
struct Access : torch::nn::Module {
  static auto& parameters(torch::nn::Module& module) { return module.*(&Access::parameters_); }
};

}  // namespace hyper_parallel::nn
