#pragma once
// Options, inputs and the comparison of a sharded backward with plain ones on the losses of all ranks.
#include <vector>

#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

inline FullyShardOptions on_mesh(const std::vector<int64_t>& shape, ShardLayout layout = ShardLayout::kPerParameter,
                                 std::optional<bool> reshard = {}) {
  FullyShardOptions options;
  options.mesh =
      shape.size() == 1 ? init_device_mesh("cpu", shape, {"dp"}) : init_device_mesh("cpu", shape, {"dp_replicate", "dp_shard"});
  options.shard_layout = layout;
  options.reshard_after_forward = reshard;
  return options;
}

inline FullyShardOptions on_all(ShardLayout layout = ShardLayout::kPerParameter, std::optional<bool> reshard = {}) {
  return on_mesh({get_world_size()}, layout, reshard);
}

inline void seed_floating(torch::nn::Module& module, uint64_t seed) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& entry : module.named_parameters()) {
    if (entry.value().is_floating_point()) entry.value().normal_(0.0, 0.3, generator);
  }
}

inline torch::Tensor wave(at::IntArrayRef shape, int step) {
  const int64_t numel = c10::multiply_integers(shape);
  return torch::sin(torch::arange(numel, torch::kFloat) * 0.7 + step).view(shape);
}

/// The sharded model's backward on this rank's loss against the plain model's on the mean of all ranks' losses.
template <class Model, class Loss>
void expect_same_gradients(Model& sharded, const HSDPModule& root, Model& plain, Loss loss, const char* what = "") {
  const int world = get_world_size();
  for (int rank = 0; rank < world; ++rank) (loss(plain, rank) / world).backward();
  loss(sharded, get_rank()).backward();
  const Tensors got = full_gradients(root), want = plain_gradients(*plain);
  EXPECT_EQ(got.size(), want.size()) << what;
  for (const auto& [name, value] : got) {
    ASSERT_TRUE(want.contains(name)) << what << ' ' << name;
    const double tolerance = value.scalar_type() == torch::kBFloat16 ? 2e-2 : 1e-5;
    EXPECT_LT(relative_difference({{name, value}}, {{name, want.at(name)}}), tolerance) << what << ' ' << name;
  }
}

}  // namespace hyper_parallel::testing
