#pragma once
// Computation that takes a given time and no processor: for measuring and tracing what goes on beside it.
#include <chrono>
#include <string>
#include <thread>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hyper_parallel::testing {

/// x + mean(weight), after a sleep; its backward sleeps, too.
class Nap : public torch::autograd::Function<Nap> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x, const torch::Tensor& weight,
                               int64_t forward_us, int64_t backward_us) {
    ctx->saved_data["sizes"] = weight.sizes().vec();
    ctx->saved_data["backward_us"] = backward_us;
    std::this_thread::sleep_for(std::chrono::microseconds(forward_us));
    return x + weight.mean();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(std::chrono::microseconds(ctx->saved_data["backward_us"].toInt()));
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const double numel = static_cast<double>(c10::multiply_integers(sizes));
    return {gradients[0], (gradients[0].sum() / numel).expand(sizes), {}, {}};
  }
};

/// One weight and a nap.
struct NapLayerImpl : torch::nn::Module {
  explicit NapLayerImpl(int64_t numel) { weight = register_parameter("weight", torch::ones({numel})); }
  torch::Tensor forward(const torch::Tensor& x) { return Nap::apply(x, weight, forward_us, backward_us); }
  torch::Tensor weight;
  int64_t forward_us = 0, backward_us = 0;
};
HP_MODULE(NapLayer);

/// Layers one after the other. The root has no parameters of its own.
struct NapStackImpl : torch::nn::Module {
  NapStackImpl(int count, int64_t numel) {
    for (int i = 0; i < count; ++i) layers.push_back(register_module("layers" + std::to_string(i), NapLayer(numel)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  void set_naps(std::chrono::microseconds forward, std::chrono::microseconds backward) {
    for (auto& layer : layers) {
      layer->forward_us = forward.count();
      layer->backward_us = backward.count();
    }
  }
  std::vector<NapLayer> layers;
};
HP_MODULE(NapStack);

/// Shards every layer and the root.
inline HSDPModule shard_stack(const NapStack& stack, const FullyShardOptions& options) {
  for (const auto& layer : stack->layers) fully_shard(layer, options);
  return fully_shard(stack, options);
}

}  // namespace hyper_parallel::testing
