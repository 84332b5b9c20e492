#pragma once
// A module that is nothing but parameters.
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

/// Parameters p0, p1, … that add() registers. Forward: their sums, times x.
struct BagImpl : torch::nn::Module {
  torch::Tensor add(const torch::Tensor& value, bool trainable = true) {
    handles.push_back(register_parameter(concat('p', handles.size()), value, trainable));
    return handles.back();
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor sum = x;
    for (const torch::Tensor& handle : handles) sum = sum + handle.sum() * x;
    return sum;
  }
  std::vector<torch::Tensor> handles;
};
HP_MODULE(Bag);

}  // namespace hyper_parallel::testing
