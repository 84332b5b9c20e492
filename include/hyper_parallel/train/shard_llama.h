#pragma once
// Which parts of the decoder are units of sharding.
#include <cstdint>

#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/train/llama.h>

namespace hyper_parallel::train {

/// Shards embedding, blocks and head (last norm and output projection) as units of their own, then the root. A tied weight is
/// used at both ends and so belongs to the root. The experts of a block are a unit of their own on `experts`, the mesh of the
/// ranks that have the same ones ([replicas,] shards; default: options.mesh), and everything else is one on options.mesh. What
/// the model's meshes have cut, and whose gradients are summands, becomes part of the units' layouts and reductions; gradients
/// are then those of the mean loss over all ranks that have different tokens, for experts too.
///
/// Local. The embedding is not gathered for its backward, which does not read it; the head stays gathered between its forward and
/// its backward, which follow each other. Returns the root's handle.
HSDPModule fully_shard_llama(Llama& model, const FullyShardOptions& options, const DeviceMesh& experts = {});

/// The weights of Llama(config, seed), bit for bit, for a model that fully_shard_llama has sharded: drawn one after the other on
/// every rank, which keeps its part. Memory: the shards and one parameter. Local.
void init_llama(Llama& model, const HSDPModule& root, std::uint64_t seed);

}  // namespace hyper_parallel::train
