#include "fsdp/make_groups.h"

#include <algorithm>
#include <utility>

namespace hyper_parallel::fsdp {
namespace {

struct Draft {
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  bool replicated = false;
  bool ragged = false;
  std::vector<std::int64_t> replica_axes = {};
  std::int64_t whole_copies = 1, partial_copies = 1;
  std::int64_t bytes = 0;
  std::vector<ParameterSlot> slots = {};
  std::vector<ParameterShape> shapes = {};
  std::vector<SourceBlock> sources = {};
};

std::vector<Draft> draft_groups(std::vector<ParameterSlot> slots, const std::vector<SlotPlan>& plans,
                                std::vector<SourceBlock> sources, const FullyShardOptions& options, bool fused) {
  std::vector<Draft> drafts;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor& parameter = slots[i].parameter;
    const std::int64_t bytes = plans[i].bytes;
    const bool ragged = options.shard_layout == ShardLayout::kRagged && (sources.empty() || sources[i].even);
    const SourceBlock source = sources.empty() ? SourceBlock() : sources[i];
    const auto fits = [&](const Draft& draft) {
      return fused && draft.dtype == parameter.scalar_type() && draft.trainable == parameter.requires_grad() &&
             draft.replicated == plans[i].replicated && draft.ragged == ragged && draft.replica_axes == source.replica_axes &&
             draft.whole_copies == source.whole_copies && draft.partial_copies == source.partial_copies &&
             (options.bucket_size < 0 || draft.bytes + bytes <= options.bucket_size);
    };
    // From behind: a bucket that is full stays so.
    auto draft = std::find_if(drafts.rbegin(), drafts.rend(), fits);
    if (draft == drafts.rend()) {
      drafts.push_back({.dtype = parameter.scalar_type(),
                        .trainable = parameter.requires_grad(),
                        .replicated = plans[i].replicated,
                        .ragged = ragged,
                        .replica_axes = source.replica_axes,
                        .whole_copies = source.whole_copies,
                        .partial_copies = source.partial_copies});
      draft = drafts.rbegin();
    }
    draft->bytes += bytes;
    draft->shapes.push_back({slots[i].name, parameter.sizes().vec(), plans[i].shard_dim});
    draft->slots.push_back(std::move(slots[i]));
    if (!sources.empty()) draft->sources.push_back(std::move(sources[i]));
  }
  return drafts;
}

/// Copies along source axes are reduced like those of HSDP, with them and over the same groups: one all-reduce for both.
void join_source_axes(GroupOptions& group, const Draft& draft, const SourceMesh& mesh) {
  std::vector<std::int64_t> copies, parts;
  if (mesh.fsdp_axes == 2) copies.push_back(0);
  (draft.replicated ? copies : parts).push_back(mesh.shard_axis());
  const std::vector<std::int64_t>& replica_axes = draft.replica_axes;
  copies.insert(copies.end(), replica_axes.begin(), replica_axes.end());
  for (std::int64_t axis = mesh.fsdp_axes; axis < mesh.whole.ndim(); ++axis) {
    if (std::find(replica_axes.begin(), replica_axes.end(), axis) == replica_axes.end()) parts.push_back(axis);
  }
  if (!copies.empty()) group.replicate_comm = mesh.along(copies);
  group.parts_comm = mesh.along(parts);
}

GroupOptions group_options(const std::string& unit, const Draft& draft, const FullyShardOptions& options,
                           const UnitComms& comms) {
  GroupOptions group{.unit = unit,
                     .shard_comm = comms.shard,
                     .replicate_comm = comms.replicate,
                     .parts_comm = {},
                     .post_forward_comm = comms.post_forward};
  if (draft.replicated) {
    group.shard_comm = comms.shard.self();
    group.replicate_comm = comms.data_parallel;
    group.post_forward_comm = Comm();
    group.replicated = true;
  }
  group.parts_comm = group.shard_comm;
  if (comms.mesh.has_source()) join_source_axes(group, draft, comms.mesh);
  const MixedPrecisionPolicy& policy = options.mp_policy;
  const bool floating = at::isFloatingType(draft.dtype);
  group.compute_dtype = floating ? policy.param_dtype.value_or(draft.dtype) : draft.dtype;
  group.reduce_dtype = floating ? policy.reduce_dtype.value_or(group.compute_dtype) : draft.dtype;
  group.main_grad = floating && policy.apply_grad_on_fp32_main_grad;
  group.device = at::Device(options.mesh.device_type()).type();
  if (const auto* offload = std::get_if<CPUOffloadPolicy>(&options.offload_policy)) {
    group.offload = true;
    group.pin_memory = offload->pin_memory && options.mesh.device_type() != "cpu";
  }
  return group;
}

}  // namespace

std::vector<std::unique_ptr<ParamGroup>> make_groups(const std::string& unit, std::vector<ParameterSlot> slots,
                                                     const std::vector<SlotPlan>& plans, std::vector<SourceBlock> sources,
                                                     const FullyShardOptions& options, const UnitComms& comms,
                                                     const CommSettings& settings) {
  const bool fused = options.shard_layout == ShardLayout::kRagged || options.comm_fusion;
  // A group of one parameter needs no alignment between parameters, and gathers in place when it is cut on dim 0.
  const std::int64_t alignment = fused ? 16 : 1;
  std::vector<std::unique_ptr<ParamGroup>> groups;
  for (Draft& draft : draft_groups(std::move(slots), plans, std::move(sources), options, fused)) {
    GroupOptions group = group_options(unit, draft, options, comms);
    group.settings = &settings;
    group.source = std::move(draft.sources);
    group.whole_copies = draft.whole_copies;
    group.partial_copies = draft.partial_copies;
    const int world = group.shard_comm.size();
    // What stays whole keeps its shape, a scalar's too: ragged parts are rows.
    GroupLayout layout = draft.ragged && !group.replicated
                             ? GroupLayout::ragged(std::move(draft.shapes), world)
                             : GroupLayout::per_parameter(std::move(draft.shapes), world, alignment);
    groups.push_back(std::make_unique<ParamGroup>(std::move(layout), std::move(draft.slots), std::move(group)));
  }
  if (!fused || options.bucket_size >= 0) return groups;
  std::vector<ParamGroup*> together;
  for (const auto& group : groups) {
    if (!group->options().replicated) together.push_back(group.get());
  }
  if (together.size() > 1) together.front()->gather_together({together.begin() + 1, together.end()});
  return groups;
}

}  // namespace hyper_parallel::fsdp
