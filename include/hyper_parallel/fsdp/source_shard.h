#pragma once
// How tensor or expert parallelism has cut parameters before fully_shard cuts them again.
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/placement.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

/// What the gradients are that the ranks of a source axis compute for their copies of one parameter.
enum class CopyGradient {
  kUnitOp,   ///< combined by the unit's reduction, like those of data-parallel ranks: averaged with "avg", added with "sum"
  kWhole,    ///< each rank has the whole gradient: averaged
  kPartial,  ///< each rank has a summand, e.g. of its part of a sequence: added
};

/// The source layout of a parameter: the parameter's tensor is this rank's block of a larger one.
struct SourceShardMetaInfo {
  /// The source axes, e.g. mesh["tp"]. Undefined: there are none.
  DeviceMesh mesh = {};
  /// One for each axis of `mesh`: Shard and StridedShard where the axis cuts, Replicate where its ranks hold copies. Negative
  /// dimensions count from the end.
  std::vector<Placement> placements = {};
  /// For HyperParallel's callers: true there says that the parameter is a DTensor. Parameters here never are.
  bool origin_is_dtensor = false;
  /// Shape of the larger tensor. Without it all source axes are taken to cut evenly: sizes multiply.
  std::optional<std::vector<std::int64_t>> shape = {};
  /// One for each axis of `mesh`, of which those count that hold copies; empty: kUnitOp for all.
  std::vector<CopyGradient> copy_gradients = {};

  friend bool operator==(const SourceShardMetaInfo&, const SourceShardMetaInfo&) = default;
};

/// Source layouts by parameter. Parameters are compared by identity and held weakly: the map keeps no tensor and no memory alive.
/// Thread safety: const members from any thread.
class HP_API SourceShardInfos {
 public:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter;
    std::string name;  ///< for messages; may be empty
    SourceShardMetaInfo info;
  };

  /// Adds an entry, or replaces the one of this parameter. ValueError: an undefined tensor.
  void set(const at::Tensor& parameter, SourceShardMetaInfo info, std::string name = {});
  /// The entry of a parameter, or null.
  [[nodiscard]] const Entry* find(const at::Tensor& parameter) const;
  /// Number of entries whose parameter is alive.
  [[nodiscard]] std::size_t size() const;
  /// In the order in which they were added, those of dead parameters included.
  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<const void*, std::size_t> index_;
};

}  // namespace hyper_parallel
