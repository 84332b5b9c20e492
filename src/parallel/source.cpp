#include <hyper_parallel/parallel/source.h>

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/parallel/cut.h>

#include "fsdp/managed_registry.h"
#include "plan/resolve.h"

namespace hyper_parallel::parallel {
namespace {

constexpr std::string_view kOp = "source_shard_infos";

std::int64_t data_ranks(const DeviceMesh& mesh, std::string_view also = {}) {
  std::int64_t ranks = 1;
  for (std::int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    const std::string& name = mesh.mesh_dim_names()[static_cast<std::size_t>(axis)];
    if (name != "pp" && (is_fsdp_axis(name) || name == also)) ranks *= mesh.size(axis);
  }
  return ranks;
}

/// Where parameters may lie.
struct Side {
  DeviceMesh mesh;  ///< source axes; undefined without any
  std::vector<std::string> axes;
};

Side side_of(const DeviceMesh& whole) {
  Side side{.mesh = source_mesh(whole), .axes = {}};
  if (side.mesh.defined()) side.axes = side.mesh.mesh_dim_names();
  return side;
}

struct Named {
  std::string name;
  at::Tensor tensor;
  std::optional<SourceShardMetaInfo> info;  ///< of a name that a layer speaks of
};

class Conversion {
 public:
  Conversion(const torch::nn::Module& root, const SourceLayoutOptions& options)
      : options_(options), cuts_(parameter_cuts(root)), dense_(side_of(options.meshes.dense)) {
    check_value(options.meshes.dense.defined(), kOp, "meshes.dense is undefined, want the mesh of data parallelism, whole");
    expert_ = options.meshes.expert.defined() ? side_of(options.meshes.expert) : dense_;
    for (const auto& [name, cut] : cuts_) {
      const auto routed = [&](const AxisCut& axis) {
        return axis_name(axis) == options.expert_axis && axis.placement.is_shard();
      };
      if (std::any_of(cut.axes.begin(), cut.axes.end(), routed)) expert_modules_.insert(name.substr(0, name.rfind('.') + 1));
    }
    for (const auto& entry : root.named_parameters(/*recurse=*/true)) {
      if (entry.value().defined()) parameters_.push_back({entry.key(), entry.value(), {}});
    }
  }

  SourceShardInfos run() {
    for (Named& parameter : parameters_) {
      if (const auto unit = fsdp::managed_by(parameter.tensor))
        problems_.add(parameter.name, ": ", *unit, " manages it, want source layouts taken before fully_shard");
      if (const auto cut = cuts_.find(parameter.name); cut != cuts_.end()) parameter.info = layout_of(parameter, cut->second);
    }
    // A name that no layer speaks of follows its twin; alone it is a copy.
    std::unordered_map<const void*, const Named*> told;
    for (const Named& parameter : parameters_) {
      if (!parameter.info) continue;
      const auto [twin, added] = told.emplace(parameter.tensor.unsafeGetTensorImpl(), &parameter);
      const SourceShardMetaInfo &mine = *parameter.info, &other = *twin->second->info;
      if (added || mine == other) continue;
      problems_.add(twin->second->name, " and ", parameter.name, " are one tensor with two layouts: ", text_of(other), " and ",
                    text_of(mine), ", want one");
    }
    problems_.raise(kOp);
    SourceShardInfos infos;
    for (const Named& parameter : parameters_) {
      if (infos.find(parameter.tensor) != nullptr) continue;
      const auto twin = told.find(parameter.tensor.unsafeGetTensorImpl());
      const ParameterCut whole{.shape = parameter.tensor.sizes().vec(), .axes = {}};
      infos.set(parameter.tensor, twin != told.end() ? *twin->second->info : list(parameter.name, whole), parameter.name);
    }
    return infos;
  }

 private:
  static const std::string& axis_name(const AxisCut& axis) { return axis.mesh.mesh_dim_names().front(); }

  static std::string text_of(const SourceShardMetaInfo& info) {
    std::string text = concat(to_string(info.placements), " on ", info.mesh.to_string());
    for (const CopyGradient kind : info.copy_gradients) {
      if (kind == CopyGradient::kPartial) return text + " with partial gradients";
    }
    return text;
  }

  [[nodiscard]] bool beside_experts(const std::string& name) const {
    return std::any_of(expert_modules_.begin(), expert_modules_.end(),
                       [&](const std::string& prefix) { return name.starts_with(prefix); });
  }
  [[nodiscard]] const Side& side(const std::string& name) const { return beside_experts(name) ? expert_ : dense_; }

  /// One entry for each axis of the parameter's mesh.
  [[nodiscard]] SourceShardMetaInfo list(const std::string& name, const ParameterCut& cut) const {
    const bool expert = beside_experts(name);
    SourceShardMetaInfo info{.mesh = side(name).mesh, .shape = cut.shape};
    for (const std::string& axis : side(name).axes) {
      const auto own = std::find_if(cut.axes.begin(), cut.axes.end(), [&](const AxisCut& c) { return axis_name(c) == axis; });
      info.placements.push_back(own == cut.axes.end() ? Replicate() : own->placement);
      CopyGradient kind = own != cut.axes.end() && own->partial_gradient ? CopyGradient::kPartial : CopyGradient::kWhole;
      if (axis == options_.expert_axis) kind = expert ? CopyGradient::kPartial : CopyGradient::kUnitOp;
      info.copy_gradients.push_back(info.placements.back().is_replicate() ? kind : CopyGradient::kUnitOp);
    }
    return info;
  }

  SourceShardMetaInfo layout_of(const Named& parameter, const ParameterCut& cut) {
    const Side& where = side(parameter.name);
    std::set<std::int64_t> dims;
    bool known = true;
    for (const AxisCut& axis : cut.axes) {
      const std::string& name = axis_name(axis);
      const bool cuts = axis.placement.is_shard() && !axis.placement.is_strided_shard();
      if (!cuts && !axis.placement.is_replicate())
        problems_.add(parameter.name, ": ", axis.placement, " along ", name, ", want Shard or Replicate");
      if (cuts && !dims.insert(axis.placement.dim()).second)
        problems_.add(parameter.name, ": two axes cut dimension ", axis.placement.dim(), ", want one");
      if (axis.mesh.size() == 1) continue;
      if (is_fsdp_axis(name)) {
        problems_.add(parameter.name, ": ", axis.placement, " along ", name, ", which FSDP owns, want a source axis, e.g. tp");
      } else if (std::find(where.axes.begin(), where.axes.end(), name) == where.axes.end()) {
        problems_.add(parameter.name, ": ", axis.placement, " along ", name, ", which ", which_mesh(parameter.name), " lacks");
      } else if (where.mesh[name].ranks() != axis.mesh.ranks()) {
        problems_.add(parameter.name, ": the layer's ", name, " has ranks ", at::ArrayRef<int>(axis.mesh.ranks()), ", that of ",
                      which_mesh(parameter.name), ' ', at::ArrayRef<int>(where.mesh[name].ranks()), ", want the same");
      } else {
        continue;
      }
      known = false;
    }
    if (known && parameter.tensor.sizes() != at::IntArrayRef(local_shape(cut)))
      problems_.add(parameter.name, ": shape ", parameter.tensor.sizes(), ", want this rank's part of ",
                    at::IntArrayRef(cut.shape), ", ", at::IntArrayRef(local_shape(cut)));
    return list(parameter.name, cut);
  }

  [[nodiscard]] std::string which_mesh(const std::string& name) const {
    const bool expert = beside_experts(name) && options_.meshes.expert.defined();
    const DeviceMesh& mesh = expert ? options_.meshes.expert : options_.meshes.dense;
    return concat("the ", expert ? "expert" : "dense", " mesh ", mesh.to_string());
  }

  const SourceLayoutOptions& options_;
  ParameterCuts cuts_;
  Side dense_, expert_;
  std::set<std::string> expert_modules_;  ///< names with a dot at the end; "" is the root
  std::vector<Named> parameters_;
  plan::Problems problems_;
};

}  // namespace

PlanMeshes init_parallel_meshes(std::string_view device_type, const ParallelSizes& given) {
  constexpr std::string_view kMeshes = "init_parallel_meshes";
  ParallelSizes sizes = given;
  const std::int64_t world = get_world_size();
  const std::int64_t others = sizes.dp_replicate * sizes.cp * sizes.tp;
  for (const auto& [name, size] : {std::pair<const char*, std::int64_t>{"dp_replicate", sizes.dp_replicate},
                                   {"cp", sizes.cp},
                                   {"tp", sizes.tp},
                                   {"ep", sizes.ep}})
    check_value(size >= 1, kMeshes, name, " is ", size, ", want 1 or more");
  check_value(sizes.dp_shard >= 1 || sizes.dp_shard == -1, kMeshes, "dp_shard is ", sizes.dp_shard, ", want 1 or more, or -1");
  if (sizes.dp_shard == -1) {
    check_value(world % others == 0, kMeshes, "dp_replicate * cp * tp is ", others, ", want a divisor of the ", world, " ranks");
    sizes.dp_shard = world / others;
  }
  check_value(others * sizes.dp_shard == world, kMeshes, "dp_replicate * dp_shard * cp * tp is ", others * sizes.dp_shard,
              ", want the ", world, " ranks of the world");
  const std::int64_t shard = sizes.dp_shard * sizes.cp;
  check_value(shard % sizes.ep == 0, kMeshes, "ep is ", sizes.ep, ", want a divisor of dp_shard * cp, which is ", shard);

  const auto make = [&](const char* replicate, std::vector<std::string> names, std::vector<std::int64_t> shape) {
    if (sizes.dp_replicate > 1) {
      names.insert(names.begin(), replicate);
      shape.insert(shape.begin(), sizes.dp_replicate);
    }
    return init_device_mesh(device_type, shape, names);
  };
  PlanMeshes meshes{.dense = make("dp_replicate", {"dp_shard", "cp", "tp"}, {sizes.dp_shard, sizes.cp, sizes.tp})};
  if (sizes.ep > 1) meshes.expert = make("edp_replicate", {"edp_shard", "ep", "tp"}, {shard / sizes.ep, sizes.ep, sizes.tp});
  return meshes;
}

DeviceMesh data_mesh(const DeviceMesh& mesh) {
  constexpr std::string_view kData = "data_mesh";
  check_value(mesh.defined(), kData, "the mesh is undefined, want one with axes of data parallelism");
  std::vector<std::string> replicate, shard;
  for (const std::string& name : mesh.mesh_dim_names()) {
    if (name == "pp" || !is_fsdp_axis(name)) continue;
    check_value(!name.ends_with("_replicate") || shard.empty(), kData, "axis ", name, " of ", mesh.to_string(),
                " stands to the right of ", shard.empty() ? "" : shard.front(), ", want replicas first");
    (name.ends_with("_replicate") ? replicate : shard).push_back(name);
  }
  check_value(!shard.empty(), kData, mesh.to_string(), " has no axis to shard over, want one such as dp_shard");
  for (std::size_t axis = shard.size(); axis-- > 0 && shard.size() > 1;) {  // an axis of one rank adds nothing but its name
    if (mesh[shard[axis]].size() == 1) shard.erase(shard.begin() + static_cast<std::ptrdiff_t>(axis));
  }
  const auto joined = [&](const std::vector<std::string>& names) {
    return names.size() == 1 ? mesh[names.front()] : mesh[names].flatten();
  };
  if (replicate.empty()) return joined(shard);
  return DeviceMesh::concatenate({joined(replicate), joined(shard)});
}

double expert_gradient_factor(const PlanMeshes& meshes, std::string_view expert_axis) {
  check_value(meshes.dense.defined(), "expert_gradient_factor", "the dense mesh is undefined, want the whole mesh");
  const DeviceMesh& experts = meshes.expert.defined() ? meshes.expert : meshes.dense;
  return static_cast<double>(data_ranks(experts)) / static_cast<double>(data_ranks(meshes.dense, expert_axis));
}

SourceShardInfos source_shard_infos(const torch::nn::Module& root, const SourceLayoutOptions& options) {
  return Conversion(root, options).run();
}

}  // namespace hyper_parallel::parallel
