#pragma once
// Which parts of the decoder are units of sharding.
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/train/llama.h>

namespace hyper_parallel::train {

/// Shards embedding, blocks and head (last norm and output projection) as units of their own, then the root. A tied weight is
/// used at both ends and so belongs to the root.
///
/// Local. The embedding is not gathered for its backward, which does not read it; the head stays gathered between its forward and
/// its backward, which follow each other. Returns the root's handle.
HSDPModule fully_shard_llama(Llama& model, const FullyShardOptions& options);

}  // namespace hyper_parallel::train
