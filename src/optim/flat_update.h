#pragma once
#include <hyper_parallel/optim/flat_optimizer.h>

#include "optim/kernels.h"

namespace hyper_parallel::optim {

/// One parameter of one step, as memory.
struct FlatOptimizer::Update {
  Weights weights;
  Values gradient;
  Values slots[2];
  std::int64_t numel = 0;
  std::int64_t step = 0;
  GroupSettings settings;  ///< weight_decay is 0 for a parameter that does not decay
};

}  // namespace hyper_parallel::optim
