// Gathers that show what peers of the same host have, instead of copying it: docs/design/009-same-host.md.
#include <utility>

#include <ATen/core/grad_mode.h>

#include "fsdp/flat_tensor.h"
#include "fsdp/param_group.h"

namespace hyper_parallel::fsdp {

std::int64_t ParamGroup::slice_bytes() const {
  return layout_.shard_numel() * static_cast<std::int64_t>(compute_.dtype().itemsize());
}

/// Slice r of the full buffer is rank r's shard, and nothing else decides who owns what between forward and backward.
bool ParamGroup::can_map() const {
  return layout_.kind() == ShardLayout::kRagged && layout_.world() > 1 && layout_.in_place() && layout_.shard_numel() > 0 &&
         !options_.post_forward_comm.defined() && master_.device().is_cpu() && compute_.device().is_cpu() && !map_refused_ &&
         !options_.settings->all_gather && options_.shard_comm.maps_slices();
}

/// Memory of the shard: where peers can map it, if that is what they gather.
at::Tensor ParamGroup::allocate_shard() {
  gathered_slices_ = {};
  copy_.reset();
  if (!can_map() || !maps_shard()) return allocate_flat(layout_.shard_numel(), master_, host_allocator());
  gathered_slices_ = options_.shard_comm.gathered_buffer(slice_bytes());
  return flat_over(gathered_slices_.own(), layout_.shard_numel(), master_);
}

/// False: gather by copying.
bool ParamGroup::start_mapping(const GatherWay& way) {
  if (!way.map || !can_map()) return false;
  if (!gathered_slices_.defined()) {
    gathered_slices_ = options_.shard_comm.gathered_buffer(slice_bytes());
    copy_ = flat_over(gathered_slices_.own(), layout_.shard_numel(), compute_);
    copied_in_pass_ = way.pass - 1;
  }
  if (!gathered_slices_.connected() && !gathered_slices_.connect({.label = options_.unit})) {
    map_refused_ = true;
    copy_.reset();
    gathered_slices_ = {};
    return false;
  }
  // After an exception nobody has waited yet.
  if (wait_due_) wait_for_readers();
  if (copy_.defined() && std::exchange(copied_in_pass_, way.pass) != way.pass) copy_.copy_(shard_);
  gather_ = gathered_slices_.publish({.label = options_.unit});
  mapping_ = reading_ = true;
  return true;
}

bool ParamGroup::finish_reading() {
  if (!std::exchange(reading_, false)) return false;
  gathered_slices_.finish_reading();
  wait_due_ = true;
  return true;
}

void ParamGroup::wait_for_readers() {
  sent_.wait();
  if (std::exchange(wait_due_, false)) gathered_slices_.wait_for_readers({.label = options_.unit});
}

std::int64_t ParamGroup::copy_bytes() const {
  if (!gathered_slices_.connected()) return 0;
  return planned_copy_bytes(true);
}

std::int64_t ParamGroup::planned_copy_bytes(bool map) const {
  if (!map || !can_map()) return 0;
  return GatheredBuffer::private_bytes(slice_bytes(), layout_.world()) + (maps_shard() ? 0 : slice_bytes());
}

}  // namespace hyper_parallel::fsdp
