#pragma once
// Options of fully_shard that need no module type.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/group_layout.h>
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
  friend bool operator==(const MixedPrecisionPolicy&, const MixedPrecisionPolicy&) = default;
};

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
  /// Free the gathered parameters after forward and gather them again for backward. Unset: true, but false for the root unit,
  /// whose backward comes first anyway.
  std::optional<bool> reshard_after_forward = {};
  /// Dimension on which a parameter is cut (negative counts from the end), nullopt for the default 0. Per-parameter layout only.
  std::function<std::optional<std::int64_t>(const std::string& name, const at::Tensor& parameter)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  /// Parameters that are not managed: not sharded, not synchronised, left as they are.
  std::vector<at::Tensor> ignored_params = {};
  /// One collective for all parameters of a dtype that are equally trainable or frozen (true) or one for each parameter (false).
  /// The ragged layout has always one.
  bool comm_fusion = true;
  ShardLayout shard_layout = ShardLayout::kPerParameter;
  /// What the first forward does about replicas (HSDP) that may have begun with different values.
  ReplicaInit replica_init = ReplicaInit::kNone;
};

}  // namespace hyper_parallel
