#pragma once
#include <hyper_parallel/ckpt/checkpoint.h>

#include "ckpt/plan.h"

namespace hyper_parallel::ckpt {

/// What this rank has. \param saved gives the dtypes of what a load has still to make; null for a save
/// \param prefix only names that begin with it
[[nodiscard]] Holdings holdings_of(const StateDict& state, const CheckpointInfo* saved, std::string_view prefix = {});

}  // namespace hyper_parallel::ckpt
