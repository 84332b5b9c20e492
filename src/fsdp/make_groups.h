#pragma once
// Which parameters of a unit share buffers and collectives.
#include <memory>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/fsdp/unit.h>

#include "fsdp/param_group.h"

namespace hyper_parallel::fsdp {

/// What was decided about one slot.
struct SlotPlan {
  std::int64_t shard_dim = 0;
  bool replicated = false;
};

/// The groups of ranks of one unit.
struct UnitComms {
  Comm shard;
  Comm replicate;      ///< undefined without replicas
  Comm data_parallel;  ///< all ranks
  Comm post_forward;   ///< see GroupOptions
};

/// One group per dtype, trainability and place (sharded or whole), cut at the bucket size, in order of first appearance; one per
/// parameter without fusion.
[[nodiscard]] std::vector<std::unique_ptr<ParamGroup>> make_groups(const std::string& unit, std::vector<ParameterSlot> slots,
                                                                   const std::vector<SlotPlan>& plans,
                                                                   const FullyShardOptions& options, const UnitComms& comms,
                                                                   const CommSettings& settings);

}  // namespace hyper_parallel::fsdp
