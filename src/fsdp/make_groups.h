#pragma once
// Which parameters of a unit share buffers and collectives.
#include <memory>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/fsdp/unit.h>

#include "fsdp/param_group.h"
#include "fsdp/source_layout.h"

namespace hyper_parallel::fsdp {

/// What was decided about one slot.
struct SlotPlan {
  std::int64_t shard_dim = 0;
  bool replicated = false;
  std::int64_t bytes = 0;  ///< of the largest block: the same on all ranks
};

/// The groups of ranks of one unit.
struct UnitComms {
  Comm shard;
  Comm replicate;      ///< undefined without replicas
  Comm data_parallel;  ///< all ranks
  Comm post_forward;   ///< see GroupOptions
  SourceMesh mesh;
};

/// One group per dtype, trainability, place (sharded or whole) and source axes that hold copies, cut at the bucket size, in order
/// of first appearance; one per parameter without fusion. Collective the first time that ranks meet in a group.
/// \param sources blocks by slot; empty without source axes. In the ragged layout, parameters that are cut unevenly are laid out
/// per
///   parameter, in groups of their own: ranks with other blocks would cut their buffers elsewhere.
[[nodiscard]] std::vector<std::unique_ptr<ParamGroup>> make_groups(const std::string& unit, std::vector<ParameterSlot> slots,
                                                                   const std::vector<SlotPlan>& plans,
                                                                   std::vector<SourceBlock> sources,
                                                                   const FullyShardOptions& options, const UnitComms& comms,
                                                                   const CommSettings& settings);

}  // namespace hyper_parallel::fsdp
