#pragma once
// Options of fully_shard that need no module type.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/group_layout.h>
#include <hyper_parallel/fsdp/source_shard.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

/// Dtypes of compute and of gradient reduction. The sharded parameters keep their own dtype (the master precision),
/// and so do buffers: HSDPModule::cast_buffers casts them.
struct MixedPrecisionPolicy {
  /// Dtype of gathered parameters, and so of compute and gradients. Default: the parameter's own.
  std::optional<c10::ScalarType> param_dtype = {};
  /// Dtype in which gradients are reduced and accumulated. Default: the dtype that the gradients have. Sums run in fp32 or wider;
  /// gradients travel in their own dtype when that loses nothing.
  std::optional<c10::ScalarType> reduce_dtype = {};
  /// Floating outputs of the unit's forward are cast to this.
  std::optional<c10::ScalarType> output_dtype = {};
  /// Cast floating inputs of the unit's forward to `param_dtype` (only when that is set).
  bool cast_forward_inputs = true;
  /// Reduced gradients are kept in fp32 as main gradients, whatever the parameters' dtype; `.grad` stays undefined. Our
  /// optimizers and clipping use them; others find them with UnitHandle::main_grad.
  bool apply_grad_on_fp32_main_grad = false;
  friend bool operator==(const MixedPrecisionPolicy&, const MixedPrecisionPolicy&) = default;
};

/// Shards, gradients and optimizer state stay on the device of the mesh.
struct OffloadPolicy {
  friend bool operator==(const OffloadPolicy&, const OffloadPolicy&) = default;
};
/// Shards, gradients and optimizer state live in host memory; parameters are copied to the mesh's device when they are gathered,
/// reduced gradients back. On a CPU mesh that is the case anyway, and the policy changes nothing.
struct CPUOffloadPolicy {
  bool pin_memory = true;  ///< page-locked host memory, where the mesh's device is an accelerator
  friend bool operator==(const CPUOffloadPolicy&, const CPUOffloadPolicy&) = default;
};

/// Keep as many units gathered between forward and backward as fit: those first whose backward comes first. `bytes` bounds what
/// the engine holds on this rank for the whole tree (UnitHandle::plan_memory, steps without accumulation); optimizer state and
/// activations are not included. With several budgets in a tree the smallest holds.
struct MemoryBudget {
  std::int64_t bytes = 0;
  friend bool operator==(const MemoryBudget&, const MemoryBudget&) = default;
};

/// What happens to gathered parameters after forward.
///  - true: freed, gathered again for backward; false: kept until backward
///  - an integer k, a factor of the shard group's size W: cut over groups of k consecutive ranks, which gather them again among
///    themselves. 1 is like false, W like true
///  - MemoryBudget: true or false for each unit, decided when the first forward begins
using ReshardAfterForward = std::variant<bool, int, MemoryBudget>;

/// What happens to the parameters of the replicas before the first forward that follows wrapping, loading or initialisation.
enum class ReplicaInit {
  kNone,   ///< nothing: whoever gives them values gives them alike
  kCheck,  ///< shards must be equal byte for byte; otherwise ValueError on all of them, naming the first parameter that is not
  kBroadcast,  ///< the first replica's values are sent to the others
};

/// Options of fully_shard. Aggregate: use designated initialisers in this order.
struct FullyShardOptions {
  /// 1-D: shards over it. 2-D: axis 0 replicates, axis 1 shards (HSDP). Undefined: one axis over the whole world on the
  /// parameters' device.
  DeviceMesh mesh = {};
  /// Unset: true, but false for the root unit, whose backward comes first anyway.
  std::optional<ReshardAfterForward> reshard_after_forward = {};
  /// Dimension on which a parameter is cut (negative counts from the end), nullopt for the default 0. Per-parameter layout only.
  std::function<std::optional<std::int64_t>(const std::string& name, const at::Tensor& parameter)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  std::variant<OffloadPolicy, CPUOffloadPolicy> offload_policy = {};
  /// Parameters that are not managed: not sharded, not synchronised, left as they are. Wins over replicate_params.
  std::vector<at::Tensor> ignored_params = {};
  /// Parameters that stay whole on every rank; their gradients are reduced over all ranks of the mesh. Those of other units are
  /// ignored.
  std::vector<at::Tensor> replicate_params = {};
  /// One collective for all parameters of a dtype that are equally trainable or frozen (true) or one for each parameter (false).
  /// The ragged layout has always one.
  bool comm_fusion = true;
  /// For HyperParallel's callers: shards of a bucket always lie in one flat buffer, so that nothing is packed before a gather,
  /// whatever this says. True without comm_fusion is an error there and here.
  std::optional<bool> comm_fusion_zero_copy = {};
  /// Largest size of a bucket, in bytes of the gathered parameters in their own dtype: a unit with more is cut into several
  /// collectives (a larger parameter is one of its own). Negative: one bucket.
  std::int64_t bucket_size = -1;
  /// Parameters of fewer bytes than this stay whole, like replicate_params.
  std::int64_t threshold = 0;
  ShardLayout shard_layout = ShardLayout::kPerParameter;
  /// What the first forward does about replicas (HSDP) that may have begun with different values.
  ReplicaInit replica_init = ReplicaInit::kNone;
  /// For parameters that tensor or expert parallelism has cut before: how, for every parameter of the unit and no other one.
  /// Their source axes join the mesh on its right. Unset: the parameters are whole.
  std::optional<SourceShardInfos> source_shard_infos = {};
};

}  // namespace hyper_parallel
