#pragma once
// The comparison of a sharded backward with plain ones on the losses of all ranks.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

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
