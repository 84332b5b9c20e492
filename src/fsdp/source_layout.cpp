#include "fsdp/source_layout.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace hyper_parallel {

void SourceShardInfos::set(const at::Tensor& parameter, SourceShardMetaInfo info, std::string name) {
  check_value(parameter.defined(), "SourceShardInfos", "parameter ", name, " is undefined, want a tensor");
  const auto [place, added] = index_.emplace(parameter.unsafeGetTensorImpl(), entries_.size());
  Entry entry{decltype(Entry::parameter)(parameter.getIntrusivePtr()), std::move(name), std::move(info)};
  if (added) {
    entries_.push_back(std::move(entry));
  } else {
    entries_[place->second] = std::move(entry);
  }
}

// A weak reference keeps the address of a dead tensor from being used again, so the key is enough.
const SourceShardInfos::Entry* SourceShardInfos::find(const at::Tensor& parameter) const {
  const auto place = index_.find(parameter.unsafeGetTensorImpl());
  return place == index_.end() ? nullptr : &entries_[place->second];
}

std::size_t SourceShardInfos::size() const {
  return static_cast<std::size_t>(
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& entry) { return !entry.parameter.expired(); }));
}

namespace fsdp {
namespace {

constexpr std::string_view kOp = "fully_shard";

std::size_t at_index(std::int64_t index) { return static_cast<std::size_t>(index); }

/// Where a message is about.
std::string where(const ParameterSlot& slot, const std::string& unit) {
  return concat(" (parameter ", slot.name, " of unit ", unit, ')');
}

void check_cover(const std::string& unit, const std::vector<ParameterSlot>& slots, const SourceShardInfos& infos) {
  std::unordered_set<const void*> managed;
  for (const ParameterSlot& slot : slots) {
    managed.insert(slot.parameter.unsafeGetTensorImpl());
    const SourceShardInfos::Entry* entry = infos.find(slot.parameter);
    check_value(entry != nullptr, kOp, "source_shard_infos has no entry, want one for every parameter of the unit",
                where(slot, unit));
    check_value(!entry->info.origin_is_dtensor, kOp, "origin_is_dtensor is true, want false: the parameter is a plain tensor",
                where(slot, unit));
  }
  for (const SourceShardInfos::Entry& entry : infos.entries()) {
    const auto parameter = entry.parameter.lock();
    check_value(!parameter || managed.contains(parameter.get()), kOp, "source_shard_infos has an entry for ",
                entry.name.empty() ? concat("a tensor of shape ", parameter ? parameter->sizes() : at::IntArrayRef())
                                   : concat("parameter ", entry.name),
                ", which is none of the parameters of this unit, want entries for these only (unit ", unit, ')');
  }
}

/// The mesh that all entries of the unit name; undefined when none does.
DeviceMesh common_mesh(const std::string& unit, const std::vector<ParameterSlot>& slots, const SourceShardInfos& infos) {
  const ParameterSlot* first = nullptr;
  DeviceMesh mesh;
  for (const ParameterSlot& slot : slots) {
    const SourceShardMetaInfo& info = infos.find(slot.parameter)->info;
    const std::int64_t axes = info.mesh.defined() ? info.mesh.ndim() : 0;
    check_value(static_cast<std::int64_t>(info.placements.size()) == axes, kOp, "source layout has ", info.placements.size(),
                " placements ", to_string(info.placements), ", want one for each of the ", axes, " axes of ",
                info.mesh.to_string(), where(slot, unit));
    const std::size_t kinds = info.copy_gradients.size();
    check_value(kinds == 0 || kinds == info.placements.size(), kOp, "source layout has ", kinds,
                " copy_gradients, want none, or one for each of the ", axes, " axes of ", info.mesh.to_string(),
                where(slot, unit));
    if (!info.mesh.defined()) continue;
    if (first == nullptr) {
      first = &slot;
      mesh = info.mesh;
    }
    check_value(info.mesh == mesh, kOp, "source mesh is ", info.mesh.to_string(), " over ranks ",
                at::ArrayRef<int>(info.mesh.ranks()), ", but that of parameter ", first->name, " is ", mesh.to_string(),
                " over ranks ", at::ArrayRef<int>(mesh.ranks()), ", want one source mesh in a unit", where(slot, unit));
  }
  return mesh;
}

SourceMesh join(const std::string& unit, const DeviceMesh& mesh, const DeviceMesh& source) {
  SourceMesh joined{.whole = mesh, .fsdp_axes = mesh.ndim()};
  if (!source.defined()) return joined;
  try {
    joined.whole = DeviceMesh::concatenate({mesh, source});
  } catch (const ValueError& error) {
    throw ValueError(concat('[', kOp, "] source axes ", source.to_string(), " do not join the unit's mesh ", mesh.to_string(),
                            ", want axes of one root mesh, those of FSDP before the others: ", error.what(), " (unit ", unit,
                            ')'));
  }
  return joined;
}

Layout source_layout(const SourceMesh& mesh, const SourceShardMetaInfo& info, const ParameterSlot& slot,
                     const std::string& unit) {
  std::vector<Placement> placements(at_index(mesh.fsdp_axes));
  for (std::size_t i = 0; i < info.placements.size(); ++i) {
    const Placement& placement = info.placements[i];
    check_value(placement.is_replicate() || placement.is_shard(), kOp, "source layout is ", placement, " on axis ",
                info.mesh.mesh_dim_names()[i], ", want Shard, StridedShard or Replicate", where(slot, unit));
    placements.push_back(placement);
  }
  placements.resize(at_index(mesh.whole.ndim()));  // a parameter without source axes is whole on those of the unit
  try {
    return Layout::from_placements(mesh.whole.shape(), std::move(placements), slot.parameter.dim());
  } catch (const ValueError& error) {
    throw ValueError(concat('[', kOp, "] source layout ", to_string(info.placements), " on ", info.mesh.to_string(), ": ",
                            error.what(), where(slot, unit)));
  }
}

SourceBlock plan_block(const SourceMesh& mesh, const SourceShardMetaInfo& info, const ParameterSlot& slot,
                       const std::string& unit) {
  SourceBlock block{.layout = source_layout(mesh, info, slot, unit)};
  const std::vector<std::int64_t> local = slot.parameter.sizes().vec();
  std::vector<std::int64_t> cuts(local.size(), 1);
  for (std::size_t d = 0; d < local.size(); ++d) {
    for (const std::int64_t axis : block.layout.axes(static_cast<std::int64_t>(d))) cuts[d] *= mesh.whole.shape()[at_index(axis)];
    block.whole_shape.push_back(local[d] * cuts[d]);
  }
  if (info.shape) block.whole_shape = *info.shape;
  check_value(block.whole_shape.size() == local.size(), kOp, "source layout says that the whole parameter has shape ",
              at::IntArrayRef(block.whole_shape), ", want ", local.size(), " dimensions as in its block ", slot.parameter.sizes(),
              where(slot, unit));
  std::vector<std::int64_t> coordinate = *mesh.whole.get_coordinate();
  const std::vector<std::int64_t> want = block.layout.local_shape(block.whole_shape, coordinate);
  check_value(local == want, kOp, "parameter has shape ", slot.parameter.sizes(), ", want ", at::IntArrayRef(want),
              ", this rank's block of ", at::IntArrayRef(block.whole_shape), " in ",
              block.layout.to_string(mesh.whole.mesh_dim_names()),
              info.shape ? "" : ": give the whole shape if the cut is uneven", where(slot, unit));
  for (std::size_t d = 0; d < local.size(); ++d) block.even = block.even && block.whole_shape[d] % cuts[d] == 0;
  for (std::int64_t axis = mesh.fsdp_axes; axis < mesh.whole.ndim(); ++axis) {
    const bool copies = block.layout.placements()[at_index(axis)].is_replicate();
    if (!copies || mesh.whole.size(axis) == 1) continue;
    block.replica_axes.push_back(axis);
    if (info.copy_gradients.empty()) continue;
    const CopyGradient kind = info.copy_gradients[at_index(axis - mesh.fsdp_axes)];
    if (kind == CopyGradient::kWhole) block.whole_copies *= mesh.whole.size(axis);
    if (kind == CopyGradient::kPartial) block.partial_copies *= mesh.whole.size(axis);
  }
  const auto boxes = block.layout.boxes(block.whole_shape, coordinate);
  block.offset = boxes.empty() ? std::vector<std::int64_t>(local.size(), 0) : boxes.front().offset;
  std::fill(coordinate.begin(), coordinate.end(), 0);  // chunks are rounded up, so the first one is the largest
  const std::vector<std::int64_t> largest = block.layout.local_shape(block.whole_shape, coordinate);
  block.largest_numel = std::accumulate(largest.begin(), largest.end(), std::int64_t{1}, std::multiplies<>());
  return block;
}

}  // namespace

Comm SourceMesh::all() const {
  std::vector<std::int64_t> axes(at_index(whole.ndim()));
  std::iota(axes.begin(), axes.end(), std::int64_t{0});
  return along(axes);
}

Comm SourceMesh::along(const std::vector<std::int64_t>& axes) const {
  if (axes.empty()) return whole.get_group(std::int64_t{0}).self();
  if (axes.size() == 1) return whole.get_group(axes.front());
  std::vector<std::string> names;
  std::string joined;
  for (const std::int64_t axis : axes) {
    names.push_back(whole.mesh_dim_names()[at_index(axis)]);
    joined += concat(joined.empty() ? "" : "+", names.back());
  }
  return whole[names].flatten(joined).get_group(std::int64_t{0});
}

SourcePlan plan_sources(const std::string& unit, const std::vector<ParameterSlot>& slots, const FullyShardOptions& options) {
  SourcePlan plan{.mesh = {.whole = options.mesh, .fsdp_axes = options.mesh.ndim()}};
  if (!options.source_shard_infos) return plan;
  const SourceShardInfos& infos = *options.source_shard_infos;
  check_cover(unit, slots, infos);
  plan.mesh = join(unit, options.mesh, common_mesh(unit, slots, infos));
  if (!plan.mesh.has_source()) return plan;
  for (const ParameterSlot& slot : slots)
    plan.blocks.push_back(plan_block(plan.mesh, infos.find(slot.parameter)->info, slot, unit));
  return plan;
}

Layout composed_layout(const SourceMesh& mesh, const SourceBlock* block, const GroupLayout& group, std::size_t i,
                       bool whole_on_every_rank) {
  const auto ndim = static_cast<std::int64_t>(group.parameter(i).shape.size());
  const std::vector<std::int64_t>& shape = mesh.whole.shape();
  const Layout source =
      block != nullptr ? block->layout : Layout::from_placements(shape, std::vector<Placement>(shape.size()), ndim);
  if (whole_on_every_rank) return source;
  const std::int64_t axis = mesh.shard_axis();
  if (group.kind() == ShardLayout::kPerParameter && ndim > 0) return source.shard_innermost(axis, group.parameter(i).shard_dim);
  std::vector<Placement> placements = source.placements();
  if (group.kind() == ShardLayout::kRagged) {
    placements[at_index(axis)] = RaggedShard(group.ragged_dims(i), group.ragged_units(i));
  } else {  // a scalar belongs to the first rank
    std::vector<std::int64_t> units(at_index(group.world()), 0);
    units[0] = 1;
    placements[at_index(axis)] = RaggedShard(0, units);
  }
  return Layout::from_placements(shape, std::move(placements), ndim);
}

}  // namespace fsdp
}  // namespace hyper_parallel
