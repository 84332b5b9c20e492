#include "fsdp/param_group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include "comm/rows.h"
#include "fsdp/flat_tensor.h"

namespace hyper_parallel::fsdp {
namespace {

at::TensorOptions options_of(const std::vector<ParameterSlot>& slots, at::DeviceType device) {
  // Parameters on meta tell the dtype only.
  const auto real = std::find_if(slots.begin(), slots.end(), [](const auto& slot) { return !slot.parameter.is_meta(); });
  const at::TensorOptions options = slots.front().parameter.options().requires_grad(false).memory_format({});
  return options.device(real == slots.end() ? at::Device(device) : real->parameter.device());
}

std::string guard_message(const std::string& unit) {
  return concat(
      "[fully_shard] the parameters of unit ", unit,
      " are resharded: they were used outside of its forward and backward. Call the module itself (in C++ holder(x) or "
      "holder->forward(x), not a pointer to its Impl), keep it until its backward has run, return every tensor that the loss "
      "depends on from its forward, or call unshard() first. Gradients of gradients are not supported. "
      "set_unshard_in_backward(false) is for units whose backward does not read them.");
}

std::string no_memory_message(const std::string& unit) {
  return concat("[fully_shard] the parameters of unit ", unit,
                " have no memory yet: they began on the meta device. Call to_empty and reset_parameters, load_full or "
                "load_from_rank0 on the root's handle.");
}

/// In a world of one nothing needs to be freed, so that a forward behind the hooks works there and fails on two ranks. Debug
/// builds and HP_STRICT_GUARD=1 free all the same, to find it early.
bool strict_guard() {
  const char* wish = std::getenv("HP_STRICT_GUARD");
#ifdef NDEBUG
  return wish != nullptr && *wish == '1';
#else
  return wish == nullptr || *wish != '0';
#endif
}

}  // namespace

ParamGroup::ParamGroup(GroupLayout layout, std::vector<ParameterSlot> slots, GroupOptions options)
    : layout_(std::move(layout)), options_(std::move(options)) {
  at::NoGradGuard no_grad;
  rank_ = options_.shard_comm.rank();
  replicas_ = options_.replicate_comm.defined() ? options_.replicate_comm.size() : 1;
  master_ = options_of(slots, options_.device);
  if (options_.offload) master_ = master_.device(at::kCPU);
  may_alias_ = layout_.world() == 1 && (options_.replicated || !strict_guard());
  set_dtypes(options_.compute_dtype, options_.reduce_dtype);

  fill_shard(slots);
  for (const auto& parameter : parameters_) {
    parameter.full.mutable_grad() = at::Tensor();
    parameter.full.set_requires_grad(false);
  }
  build_full_views();
  build_gather_copies();
  make_leaves(slots);
}

/// Memory of shards and gradients.
c10::Allocator* ParamGroup::host_allocator() const {
  if (options_.offload && options_.pin_memory && !compute_.device().is_cpu())
    return at::globalContext().getAcceleratorHooksInterface(compute_.device().type()).getPinnedMemoryAllocator();
  return options_.shard_comm.allocator();
}

void ParamGroup::set_dtypes(at::ScalarType compute, at::ScalarType reduce) {
  options_.compute_dtype = compute;
  options_.reduce_dtype = reduce;
  compute_ = (options_.offload ? master_.device(options_.device) : master_).dtype(compute);
  aliased_ = may_alias_ && compute_.dtype() == master_.dtype() && compute_.device() == master_.device();
  choose_wire_dtype();
}

void ParamGroup::fill_shard(const std::vector<ParameterSlot>& slots) {
  const bool no_values = std::all_of(slots.begin(), slots.end(), [](const auto& slot) { return slot.parameter.is_meta(); });
  if (no_values) {
    shard_ = at::empty({layout_.shard_numel()}, master_.device(at::kMeta));
  } else {
    shard_ = allocate_shard();
    shard_.zero_();
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const auto& slice = layout_.slice(i, rank_);
    ManagedParameter parameter;
    parameter.name = slots[i].name;
    parameter.member = slots[i].member;
    parameter.full_shape = slots[i].parameter.sizes().vec();
    parameter.whole_shape = options_.source.empty() ? parameter.full_shape : options_.source[i].whole_shape;
    parameter.full = slots[i].parameter;
    parameter.trainable = slots[i].parameter.requires_grad();
    parameter.home = part_of_flat(shard_, slice.shard_offset, slice.numel, slice.shape);
    parameter.uninitialised = slots[i].parameter.is_meta();
    if (!parameter.uninitialised && slice.numel > 0) parameter.home.copy_(own_part(slots[i].parameter.detach(), i));
    parameters_.push_back(std::move(parameter));
  }
}

at::Tensor ParamGroup::block_of(const at::Tensor& whole, std::size_t i) const {
  if (options_.source.empty()) return whole;
  at::Tensor block = whole;
  const std::vector<std::int64_t>& shape = parameters_[i].full_shape;
  for (std::size_t d = 0; d < shape.size(); ++d)
    block = block.narrow(static_cast<std::int64_t>(d), options_.source[i].offset[d], shape[d]);
  return block;
}

at::Tensor ParamGroup::part_of(const at::Tensor& whole, std::size_t i, int shard_rank) const {
  const auto& slice = layout_.slice(i, shard_rank);
  if (layout_.kind() == ShardLayout::kRagged)
    return whole.contiguous().view(-1).narrow(0, slice.start, slice.numel).view(slice.shape);
  if (whole.dim() == 0) return slice.numel > 0 ? whole : whole.reshape({1}).narrow(0, 0, 0);
  const std::int64_t dim = layout_.parameter(i).shard_dim;
  return whole.narrow(dim, slice.start, slice.shape[static_cast<std::size_t>(dim)]);
}

at::Tensor ParamGroup::own_part(const at::Tensor& whole, std::size_t i) const { return part_of(whole, i, rank_); }

void ParamGroup::build_full_views() {
  at::Tensor flat = shard_;
  full_ = {};
  part_ = {};
  if (!aliased_) {
    const std::int64_t cuts = options_.post_forward_comm.defined() ? options_.post_forward_comm.size() : 1;
    const std::int64_t part = (layout_.full_numel() + cuts - 1) / cuts;
    full_ = SwappedBuffer(part * cuts, compute_, guard_message(options_.unit));
    if (cuts > 1) part_ = SwappedBuffer(part, compute_, "[fully_shard] internal: part of the parameters used after it was freed");
    flat = full_.flat();
  } else if (on_meta()) {
    // Autograd must know the device from the start, so the model's handles wait on a storage without memory.
    flat = SwappedBuffer(layout_.full_numel(), compute_, no_memory_message(options_.unit)).flat();
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    become(parameters_[i].full, flat.narrow(0, layout_.full_offset(i), layout_.numel(i)).view(parameters_[i].full_shape));
}

void ParamGroup::make_leaves(const std::vector<ParameterSlot>& slots) {
  for (std::size_t i = 0; i < slots.size(); ++i) {
    auto& parameter = parameters_[i];
    // variable_data: same memory, own version counter, so that optimizer writes are not seen as writes to other parameters.
    parameter.sharded = parameter.home.variable_data();
    if (parameter.uninitialised) parameter.unwritten = Unwritten(parameter.sharded);
    if (slots[i].make_leaf) parameter.leaf = slots[i].make_leaf(parameter.sharded);
    if (!parameter.leaf) parameter.sharded.set_requires_grad(parameter.trainable);
    for (const auto& install : slots[i].install) install(parameter.sharded);
  }
}

void ParamGroup::rename_unit(const std::string& unit) {
  options_.unit = unit;
  if (full_.defined()) full_.set_guard_message(guard_message(unit));
}

bool ParamGroup::trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& parameter) { return parameter.trainable; });
}

bool ParamGroup::has_frozen() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& parameter) { return !parameter.trainable; });
}

std::string ParamGroup::describe(std::size_t i) const {
  return concat("parameter ", parameters_[i].name, " of unit ", options_.unit);
}

bool ParamGroup::readopt() {
  bool any = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    auto* leaf = parameter.sharded.unsafeGetTensorImpl();
    const auto* storage = parameter.home.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl();
    if (leaf->storage().unsafeGetStorageImpl() == storage && leaf->sizes() == parameter.home.sizes()) continue;
    const at::Tensor& moved = parameter.sharded;
    check_value(
        moved.scalar_type() == shard_.scalar_type() && moved.device() == shard_.device(), "fully_shard", describe(i), " became ",
        moved.scalar_type(), " on ", moved.device(), ", want ", shard_.scalar_type(), " on ", shard_.device(),
        ", like the other parameters of its dtype in the unit: convert the whole unit, or set MixedPrecisionPolicy::param_dtype");
    const bool local = moved.sizes() == parameter.home.sizes();
    check_value(local || moved.sizes() == at::IntArrayRef(parameter.whole_shape), "fully_shard", describe(i),
                " was replaced by a tensor of shape ", moved.sizes(), ", want this rank's part ", parameter.home.sizes(),
                " or the whole ", at::IntArrayRef(parameter.whole_shape));
    at::NoGradGuard no_grad;
    const at::Tensor values = moved.detach();
    if (parameter.home.numel() > 0) parameter.home.copy_(local ? values : own_part(block_of(values, i), i));
    parameter.sharded.set_data(parameter.home);
    any = true;
    parameter.uninitialised = false;
  }
  return any;
}

std::uint64_t ParamGroup::version() const {
  std::uint64_t sum = 0;
  for (const auto& parameter : parameters_) {
    sum += parameter.sharded.unsafeGetTensorImpl()->version_counter().current_version();
    if (parameter.leaf) sum += parameter.leaf->version();
  }
  return sum;
}

/// Ranks that share memory read each other's rows where they are, and receive them only where one is late.
MemoryPool::Use ParamGroup::gathered_use() const {
  return options_.shard_comm.transport_name() == "samehost" ? MemoryPool::Use::kSpare : MemoryPool::Use::kData;
}

/// What a rank has of parameter i is one piece of the gathered parameter, which a plain copy puts into place.
bool ParamGroup::in_one_piece(std::size_t i) const { return layout_.parameter(i).shard_dim == 0 && compute_.device().is_cpu(); }

void ParamGroup::build_gather_copies() {
  const int world = layout_.world();
  gathered_ = {};
  row_ = {};
  row_sources_.clear();
  row_places_.clear();
  if (layout_.in_place() || aliased_) return;
  gathered_ = SwappedBuffer(layout_.shard_numel() * world, compute_,
                            "[fully_shard] internal: gather buffer used after it was freed", gathered_use());
  row_ = SwappedBuffer(layout_.shard_numel(), compute_, "[fully_shard] internal: row of a gather used after it was freed");
  row_sources_.resize(static_cast<std::size_t>(world));
  row_places_.resize(static_cast<std::size_t>(world));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (in_one_piece(i)) continue;
    const std::int64_t dim = layout_.parameter(i).shard_dim;
    const at::Tensor whole = full_.flat().narrow(0, layout_.full_offset(i), layout_.numel(i));
    for (int rank = 0; rank < world; ++rank) {
      const auto& slice = layout_.slice(i, rank);
      if (slice.numel == 0) continue;
      const at::Tensor source = row_.flat().narrow(0, slice.shard_offset, slice.numel);
      std::vector<at::Tensor>& places = row_places_[static_cast<std::size_t>(rank)];
      std::vector<at::Tensor>& sources = row_sources_[static_cast<std::size_t>(rank)];
      if (dim == 0) {
        places.push_back(whole.narrow(0, rank * layout_.slice(i, 0).numel, slice.numel));
        sources.push_back(source);
        continue;
      }
      const at::Tensor shaped = whole.view(parameters_[i].full_shape);
      places.push_back(shaped.narrow(dim, slice.start, slice.shape[static_cast<std::size_t>(dim)]));
      sources.push_back(source.view(slice.shape));
    }
  }
}

/// Copies what rank `rank` has of each parameter to its place.
void ParamGroup::unpack_row(int rank, const void* row, MemoryPool& pool) {
  if (!unpacks_) return;
  const auto width = static_cast<std::int64_t>(compute_.dtype().itemsize());
  auto* full = static_cast<char*>(full_.flat().mutable_data_ptr());
  if (layout_.in_place()) {
    const std::int64_t bytes = layout_.shard_numel() * width;
    if (full + rank * bytes != row) std::memcpy(full + rank * bytes, row, static_cast<std::size_t>(bytes));
    return;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& slice = layout_.slice(i, rank);
    if (slice.numel == 0 || !in_one_piece(i)) continue;
    const std::int64_t place = layout_.full_offset(i) + rank * layout_.slice(i, 0).numel;
    std::memcpy(full + place * width, static_cast<const char*>(row) + slice.shard_offset * width,
                static_cast<std::size_t>(slice.numel * width));
  }
  const auto r = static_cast<std::size_t>(rank);
  if (row_places_[r].empty()) return;
  row_.lend(at::DataPtr(const_cast<void*>(row), compute_.device()));
  at::_foreach_copy_(row_places_[r], row_sources_[r]);
  row_.release(pool);
}

PendingComm ParamGroup::all_gather(const Comm& comm, const at::Tensor& output, const at::Tensor& input) const {
  if (options_.settings->all_gather) return PendingComm(options_.settings->all_gather(comm, output, input));
  return comm.all_gather_single(output, input, {.label = options_.unit});
}

void ParamGroup::start_gather(const GatherWay& way, MemoryPool& pool) {
  if (aliased_ || joined_) return;
  at::NoGradGuard no_grad;
  if (start_mapping(way)) return;
  regathering_ = has_part_;
  if (has_part_) {
    full_.acquire(pool);
    const Comm& comm = options_.post_forward_comm;
    const at::Tensor own = full_.flat().narrow(0, comm.rank() * part_.flat().numel(), part_.flat().numel());
    own.copy_(part_.flat());
    part_.release(pool);
    has_part_ = false;
    gather_ = all_gather(comm, full_.flat(), own);
    return;
  }
  if (layout_.world() == 1) {
    full_.acquire(pool);
    full_.flat().copy_(shard_, /*non_blocking=*/options_.pin_memory);
    return;
  }
  sent_.wait();
  const bool own_way = options_.settings->all_gather || !compute_.device().is_cpu();
  together_.assign(1, this);
  for (ParamGroup* group : others_) {
    if (!own_way && !(way.map && group->can_map())) together_.push_back(group);
  }
  reads_rows_ = !own_way && (!layout_.in_place() || together_.size() > 1);
  if (!reads_rows_) {
    const RowGather rows = row_gather(false, pool);
    gather_ = all_gather(options_.shard_comm, rows.space, rows.input);
    return;
  }
  const bool from_shard = way.map && std::all_of(together_.begin(), together_.end(), [](const ParamGroup* group) {
                            return group->maps_shard() && group->master_.device() == group->compute_.device();
                          });
  parts_.clear();
  for (ParamGroup* group : together_) {
    parts_.push_back(group->row_gather(from_shard, pool));
    group->reads_rows_ = true;
    group->joined_ = group != this;
  }
  gather_ = gather_rows(options_.shard_comm, parts_, {.label = options_.unit});
  parts_.clear();
}

/// Space for the rows, and what this rank sends. The cast to the compute dtype goes straight into this rank's row.
RowGather ParamGroup::row_gather(bool from_shard, MemoryPool& pool) {
  SwappedBuffer& buffer = layout_.in_place() ? full_ : gathered_;
  buffer.acquire(pool);
  regathering_ = unpacks_ = false;
  sends_shard_ = from_shard;
  at::Tensor own = shard_;
  if (!from_shard) {
    own = buffer.flat().narrow(0, rank_ * layout_.shard_numel(), layout_.shard_numel());
    own.copy_(shard_, /*non_blocking=*/options_.pin_memory);
  }
  return {buffer.flat(), own, [this, &pool](int rank, const void* row) { unpack_row(rank, row, pool); }};
}

void ParamGroup::finish_gather(MemoryPool& pool) {
  if (aliased_ || layout_.world() == 1 || std::exchange(joined_, false)) return;
  if (mapping_ || regathering_ || (layout_.in_place() && !reads_rows_)) {
    gather_.wait();
    if (std::exchange(mapping_, false)) full_.lend(gathered_slices_.view());
    return;
  }
  at::NoGradGuard no_grad;
  for (ParamGroup* group : together_) {
    if (!group->layout_.in_place()) group->full_.acquire(pool);
    group->unpacks_ = true;
  }
  if (sends_shard_) {
    // A peer that is late reads later: nobody waits for it before the shard may change.
    gather_.advance();
    sent_ = std::exchange(gather_, PendingComm());
  } else {
    gather_.wait();
  }
  if (!reads_rows_) {
    const auto* rows = static_cast<const char*>(gathered_.flat().const_data_ptr());
    for (int rank = 0; rank < layout_.world(); ++rank)
      unpack_row(rank, rows + rank * layout_.shard_numel() * static_cast<std::int64_t>(compute_.dtype().itemsize()), pool);
  }
  for (ParamGroup* group : together_) group->gathered_.release(pool);
}

void ParamGroup::drop_gather(MemoryPool& pool) {
  unpacks_ = joined_ = false;
  if (!std::exchange(mapping_, false) && gather_.pending()) gather_.wait();
  gather_ = PendingComm();
  gathered_.release(pool);
  free_full(pool);
}

void ParamGroup::free_full(MemoryPool& pool) {
  full_.release(pool);
  part_.release(pool);
  has_part_ = false;
}

void ParamGroup::cut(MemoryPool& pool) {
  if (!part_.defined()) {
    free_full(pool);
    return;
  }
  at::NoGradGuard no_grad;
  part_.acquire(pool);
  part_.flat().copy_(full_.flat().narrow(0, options_.post_forward_comm.rank() * part_.flat().numel(), part_.flat().numel()));
  full_.release(pool);
  has_part_ = true;
}

}  // namespace hyper_parallel::fsdp
