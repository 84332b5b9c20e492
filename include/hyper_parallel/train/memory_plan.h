#pragma once
// What a run will need, before it starts. Torch-free.
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Elements of a unit of the whole model.
struct UnitSize {
  std::string name;
  std::int64_t numel = 0;
};

/// Units of the decoder in forward order, before tp and ep cut them. Tied: the shared weight belongs to the root unit.
[[nodiscard]] std::vector<UnitSize> llama_units(const ModelConfig& model);
[[nodiscard]] std::int64_t parameter_count(const ModelConfig& model);

/// What engine and optimizer say that they will hold: fsdp::UnitHandle::plan_memory and optim::FlatOptimizer::state_bytes,
/// without their headers.
struct EngineBytes {
  std::int64_t shards = 0;
  std::int64_t gradients = 0;
  std::int64_t pool = 0;
  std::int64_t optimizer_state = 0;  ///< with the averages of optim.ema_decay
  std::int64_t staging = 0;          ///< buffer of saves in the background, about
  bool maps = false;                 ///< ranks of the host see each other's shards in place, which takes no memory
};

/// Bytes of one rank. Exact but for the activations.
struct MemoryPlan {
  EngineBytes engine;
  std::int64_t activations =
      0;  ///< estimate: saved for backward by one micro-batch, and the logits; with experts for an even load
  [[nodiscard]] std::int64_t total() const;
};

/// Bytes of the optimizer's state and of the averages for the whole model, without sharding and without the buffers of Muon.
[[nodiscard]] std::int64_t optimizer_bytes(const Config& config);
[[nodiscard]] MemoryPlan plan_memory(const Config& config, const BatchPlan& batches, const EngineBytes& engine);

}  // namespace hyper_parallel::train
