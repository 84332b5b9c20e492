#pragma once
// Parameters that are blocks of larger ones: how the axes of FSDP and those of the source layout make one mesh and one layout.
//
//   unit mesh   [dp_replicate, dp_shard]              whole mesh  [dp_replicate, dp_shard, tp]
//   source mesh [tp]                                  layout      what tp did; dp_shard cuts last
//
//   axes that hold copies of a block     reduce its gradient: dp_replicate, and tp where it replicates
//   axes that hold different parts       make the parameter up: dp_shard, and tp where it cuts
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/dtensor/layout.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel::fsdp {

/// The block that a managed parameter is. Everything but `offset` is the same on all ranks of the unit.
struct SourceBlock {
  Layout layout;  ///< over the unit's whole mesh; the axes of FSDP replicate
  std::vector<std::int64_t> whole_shape = {};
  std::vector<std::int64_t> offset = {};        ///< of this rank's block
  std::vector<std::int64_t> replica_axes = {};  ///< source axes, of more than one rank, that hold copies
  std::int64_t whole_copies = 1;                ///< ranks along those of them that compute whole gradients: CopyGradient::kWhole
  std::int64_t partial_copies = 1;              ///< and along those that compute summands: CopyGradient::kPartial
  bool even = true;                             ///< all ranks have blocks of one shape
  std::int64_t largest_numel = 0;               ///< elements of the largest block
};

/// The mesh of a unit and its source axes.
struct SourceMesh {
  DeviceMesh whole;            ///< the axes of FSDP, then the source axes
  std::int64_t fsdp_axes = 0;  ///< how many of them are FSDP's

  [[nodiscard]] std::int64_t shard_axis() const { return fsdp_axes - 1; }
  [[nodiscard]] bool has_source() const { return whole.ndim() > fsdp_axes; }
  /// All ranks. Collective among them the first time.
  [[nodiscard]] Comm all() const;
  /// The ranks along `axes` (ascending) through this one; this rank alone for none. Collective among them the first time.
  [[nodiscard]] Comm along(const std::vector<std::int64_t>& axes) const;
};

struct SourcePlan {
  SourceMesh mesh;
  std::vector<SourceBlock> blocks = {};  ///< by slot; empty without source layouts
};

/// Checks options.source_shard_infos against the parameters of a unit and works out their blocks. Local. ValueError of
/// fully_shard: an entry missing, one too many, a layout that the parameter does not have, source axes that do not join the
/// unit's mesh.
[[nodiscard]] SourcePlan plan_sources(const std::string& unit, const std::vector<ParameterSlot>& slots,
                                      const FullyShardOptions& options);

/// The layout of a parameter over the whole mesh once FSDP has cut it too.
[[nodiscard]] Layout composed_layout(const SourceMesh& mesh, const SourceBlock* block, const GroupLayout& group, std::size_t i,
                                     bool whole_on_every_rank);

}  // namespace hyper_parallel::fsdp
