#include "train/assemble.h"

#include <torch/torch.h>

#include <hyper_parallel/fsdp/zero.h>
#include <hyper_parallel/train/shard_llama.h>

#include "train/dtypes.h"

namespace hyper_parallel::train {
namespace {

FullyShardOptions shard_options(const Config& config, const DeviceMesh& mesh) {
  FullyShardOptions options;
  options.mesh = mesh;
  const ParallelConfig& p = config.parallel;
  constexpr double kMega = 1e6;
  options.reshard_after_forward = p.reshard_after_forward;
  if (p.reshard_ranks > 0) options.reshard_after_forward = static_cast<int>(p.reshard_ranks);
  if (p.memory_budget_mb > 0) options.reshard_after_forward = MemoryBudget{static_cast<std::int64_t>(p.memory_budget_mb * kMega)};
  if (p.offload) options.offload_policy = CPUOffloadPolicy{};
  if (p.bucket_mb > 0) options.bucket_size = static_cast<std::int64_t>(p.bucket_mb * kMega);
  options.threshold = p.replicate_below;
  options.comm_fusion = p.comm_fusion;
  if (p.replica_init == "check") options.replica_init = ReplicaInit::kCheck;
  if (p.replica_init == "broadcast") options.replica_init = ReplicaInit::kBroadcast;
  options.mp_policy = {.param_dtype = dtype_of(config.precision.param_dtype),
                       .reduce_dtype = dtype_of(config.precision.reduce_dtype),
                       .apply_grad_on_fp32_main_grad = config.precision.main_grad};
  options.shard_layout = config.parallel.layout == "ragged" ? ShardLayout::kRagged : ShardLayout::kPerParameter;
  return options;
}

}  // namespace

ShardedLlama assemble(const Config& config, const TrainMeshes& meshes) {
  ShardedLlama sharded;
  {
    const MetaInit no_memory;
    sharded.model = Llama(config.model, std::uint64_t{0}, meshes.model);
  }
  sharded.model->checkpoint_every = checkpoint_every(config.train.activation_checkpoint);
  sharded.root = fully_shard_llama(sharded.model, shard_options(config, meshes.dense), meshes.experts);
  return sharded;
}

void begin_micro_batch(const Config& config, const HSDPModule& root, bool last) {
  if (config.parallel.late_waits) root.set_is_last_backward(last);
  if (const std::int64_t level = config.parallel.zero_level; level > 0) {
    set_zero_level(root, static_cast<ZeroLevel>(level), last);
    return;
  }
  const std::string& kind = config.parallel.accumulation;
  root.set_requires_gradient_sync(kind != "local" || last);
  root.set_requires_all_reduce(kind != "partial" || last);
}

EngineBytes plan_engine(const Config& config, const BatchPlan& batches, const HSDPModule& root, const Updater& updater) {
  begin_micro_batch(config, root, true);
  const std::string kind = batches.accumulation > 1 ? accumulation_of(config.parallel) : "each";
  const fsdp::MemoryUse use = root.plan_memory({.local = kind == "local", .partial = kind == "partial"});
  // Replicas share what they write.
  const bool staged = config.checkpoint.every > 0 && config.checkpoint.async;
  return {.shards = use.shards,
          .gradients = use.gradients,
          .pool = use.pool + use.copies,
          .optimizer_state = updater.state_bytes(),
          .staging = staged ? (use.shards + updater.state_bytes()) / batches.dp_replicate : 0,
          .maps = use.copies > 0};
}

}  // namespace hyper_parallel::train
