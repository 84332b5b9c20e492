#pragma once
// ZeRO levels as shorthands for the switches of a tree.
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel {

/// What is sharded, and so what one optimizer step over n micro-batches keeps and sends. P: bytes of all parameters in the
/// compute dtype, G: of all gradients in the dtype in which they accumulate, on W ranks; shards and optimizer state are 1/W at
/// every level.
///
/// | level | sharded            | gathered parameters | gradients between micro-batches | all-gather | reduce-scatter |
/// |-------|--------------------|---------------------|---------------------------------|------------|----------------|
/// | k1    | optimizer state    | P, always           | G                               | 1          | 1              |
/// | k2    | and gradients      | P, always           | G / W                           | 1          | n              |
/// | k3    | and parameters     | the unit at work    | G / W                           | 2 n        | n              |
///
/// The last two columns count the volume P (W - 1) / W, or G (W - 1) / W, that each rank sends. With replicas (HSDP), k1 and k2
/// reduce over them once for each step, k3 in every micro-batch.
enum class ZeroLevel { k1 = 1, k2, k3 };

/// Sets the switches of the whole tree for the next micro-batch: set_reshard_after_forward, set_reshard_after_backward,
/// set_requires_gradient_sync and set_requires_all_reduce. Call it before every micro-batch, alike on all ranks. Local.
/// \param last_micro_batch its backward completes the gradients
HP_API void set_zero_level(const fsdp::UnitHandle& root, ZeroLevel level, bool last_micro_batch = true);

}  // namespace hyper_parallel
