#include <hyper_parallel/fsdp/zero.h>

#include "fsdp/unit_impl.h"

namespace hyper_parallel {

void set_zero_level(const fsdp::UnitHandle& root, ZeroLevel level, bool last_micro_batch) {
  check_value(root.defined(), "set_zero_level", "the handle has no unit, want that of a sharded module");
  const bool sharded_parameters = level == ZeroLevel::k3;
  for (fsdp::Unit* unit : root.unit()->reached(true)) {
    unit->set_reshard_after_forward(sharded_parameters ? std::nullopt : std::optional(false));
    unit->reshard_after_backward = sharded_parameters;
    unit->requires_gradient_sync = level != ZeroLevel::k1 || last_micro_batch;
    unit->requires_all_reduce = level != ZeroLevel::k2 || last_micro_batch;
  }
}

}  // namespace hyper_parallel
