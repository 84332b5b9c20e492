// When may a rank write its shard, which its peers may have mapped? A phase is an outermost forward or a backward; they begin and
// end in the same order on all ranks. Each phase ends with a wait until no peer reads any more. Proof:
// docs/design/009-same-host.md.
#include <algorithm>

#include "fsdp/runtime.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {

void Runtime::finish_reading() {
  for (Unit* unit : units_) {
    for (auto& group : unit->groups()) group->finish_reading();
  }
}

void Runtime::wait_for_readers() {
  for (Unit* unit : units_) {
    for (auto& group : unit->groups()) group->wait_for_readers();
  }
}

void Runtime::wait_after_forward() {
  if (depth_ > 0 || in_backward_) return;
  for (Unit* unit : units_) unit->finish_sending();
  finish_reading();
  wait_for_readers();
}

void Runtime::abandon_reading() {
  if (depth_ == 0 && !in_backward_) finish_reading();
}

bool Unit::mapped() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->mapped(); });
}

/// A gather that nobody has waited for, such as a prefetch that was not used, lets peers read the shards.
void Unit::finish_sending() {
  if (std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->sends_shard(); })) finish_unshard();
}

/// Before the parameters are gathered for longer than a phase: by copying.
void Unit::leave_mapping() {
  finish_sending();
  if (mapped()) reshard();
  for (auto& group : groups_) {
    if (group->finish_reading()) group->wait_for_readers();
  }
}

}  // namespace hyper_parallel::fsdp
