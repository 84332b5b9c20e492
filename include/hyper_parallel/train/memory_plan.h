#pragma once
// What a run will need, before it starts. Torch-free.
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Elements of each unit that is gathered as a whole.
struct UnitSize {
  std::string name;
  std::int64_t numel = 0;
};

/// Units of the decoder in forward order. Tied: the shared weight belongs to the root unit.
[[nodiscard]] std::vector<UnitSize> llama_units(const ModelConfig& model);
[[nodiscard]] std::int64_t parameter_count(const ModelConfig& model);

/// Bytes of one rank.
struct MemoryPlan {
  std::int64_t parameter_shards = 0;  ///< float32 master weights
  std::int64_t gradient_shards = 0;
  std::int64_t optimizer_state = 0;  ///< two moments
  std::int64_t gathered_units = 0;   ///< the pool that units are gathered into
  std::int64_t reduce_buffers = 0;   ///< gradients of the units in flight
  std::int64_t activations = 0;      ///< estimate: saved for backward by one micro-batch, and the logits
  [[nodiscard]] std::int64_t total() const;
};

/// Shards are counted without alignment padding. A group of one shard gathers nothing unless a cast asks for it.
[[nodiscard]] MemoryPlan plan_memory(const Config& config, const BatchPlan& batches);

}  // namespace hyper_parallel::train
