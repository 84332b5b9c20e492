#pragma once
// The Net of small_net.h on the part of a batch that each rank has, and what the sum over the ranks must give.
#include <vector>

#include "support/small_net.h"

namespace hyper_parallel::testing {

/// Loss on rank's part of a batch of four rows for each rank.
inline torch::Tensor loss_of(Net& net, int rank, uint64_t seed = 3) {
  const Batch part = make_batch(int64_t{4} * get_world_size(), seed).part(rank, get_world_size());
  return net_loss(net(part.tokens), part.targets);
}

/// Gradients of the plain model: the mean over the ranks, summed over the batches of `seeds`.
inline Tensors mean_gradients(const std::vector<uint64_t>& seeds) {
  Net plain = make_net();
  for (const uint64_t seed : seeds) {
    for (int rank = 0; rank < get_world_size(); ++rank) (loss_of(plain, rank, seed) / get_world_size()).backward();
  }
  Tensors want = plain_gradients(*plain);
  want.erase("head.weight");  // tied: one owner in the sharded model
  return want;
}

}  // namespace hyper_parallel::testing
