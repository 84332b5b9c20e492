#include <hyper_parallel/nn/apply_plan.h>

#include <algorithm>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/nn/fully_shard.h>

#include "fsdp/managed_registry.h"
#include "fsdp/unwritten.h"
#include "plan/resolve.h"

namespace hyper_parallel {
namespace {

using torch::nn::Module;

constexpr std::string_view kOp = "apply_plan";

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// With all names of a parameter that is registered more than once.
std::vector<NamedParameter> named_parameters(const Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& entry : module.named_parameters(/*recurse=*/true)) {
    if (entry.value().defined()) all.push_back({entry.key(), entry.value()});
  }
  return all;
}

bool is_below(const std::string& module, const std::string& name) { return module.empty() || name.starts_with(module + "."); }

bool is_cut(const SourceShardMetaInfo& info) {
  for (std::size_t axis = 0; axis < info.placements.size(); ++axis) {
    if (info.placements[axis].is_shard() && info.mesh.size(static_cast<std::int64_t>(axis)) > 1) return true;
  }
  return false;
}

/// Modules that communicate, outer ones first.
std::vector<std::pair<std::string, SourceBoundary*>> boundaries_of(Module& root) {
  std::vector<std::pair<std::string, SourceBoundary*>> boundaries;
  if (auto* boundary = dynamic_cast<SourceBoundary*>(&root)) boundaries.emplace_back("", boundary);
  for (const auto& entry : root.named_modules("", /*include_self=*/false)) {
    if (auto* boundary = dynamic_cast<SourceBoundary*>(entry.value().get())) boundaries.emplace_back(entry.key(), boundary);
  }
  return boundaries;
}

/// The part of `whole` that this rank keeps: no view of it, so that the rest can be freed.
at::Tensor block_of(const at::Tensor& whole, const SourceShardMetaInfo& info) {
  if (!whole.is_meta()) return distribute_tensor(whole.detach(), info.mesh, info.placements).to_local();
  const Layout layout = Layout::from_placements(info.mesh.shape(), info.placements, whole.dim());
  return at::empty(layout.local_shape(whole.sizes().vec(), *info.mesh.get_coordinate()), whole.options().requires_grad(false));
}

class Application {
 public:
  Application(const std::shared_ptr<Module>& module, const ShardingPlan& plan, const ApplyPlanOptions& options)
      : module_(*module), parameters_(named_parameters(*module)) {
    const std::vector<ParameterDescription> described = describe_parameters(*module);
    plan.validate(described, options.meshes);
    result_.named = build_source_shard_info(plan.expand(described), source_mesh(options.meshes.dense),
                                            {.expert_source_mesh = source_mesh(options.meshes.expert)});
    binding_.meshes = {.dense = source_mesh(options.meshes.dense), .expert = source_mesh(options.meshes.expert)};
    for (const NamedParameter& parameter : parameters_) {  // a name that is not planned follows its twin
      if (const auto planned = result_.named.find(parameter.name); planned != result_.named.end())
        info_of_.emplace(parameter.tensor.unsafeGetTensorImpl(), planned->second);
    }
    for (const NamedParameter& parameter : parameters_) {
      const auto info = info_of_.find(parameter.tensor.unsafeGetTensorImpl());
      if (info == info_of_.end()) continue;
      info->second.shape = parameter.tensor.sizes().vec();
      result_.named[parameter.name] = info->second;
    }
    boundaries_ = boundaries_of(module_);
    check(options);
  }

  AppliedPlan run() {
    at::NoGradGuard no_grad;
    for (const NamedParameter& parameter : parameters_) {
      const auto info = info_of_.find(parameter.tensor.unsafeGetTensorImpl());
      if (info == info_of_.end() || result_.infos.find(parameter.tensor) != nullptr) continue;
      if (is_cut(info->second)) fsdp::become(parameter.tensor, block_of(parameter.tensor, info->second));
      result_.infos.set(parameter.tensor, info->second, parameter.name);
    }
    for (auto boundary = boundaries_.rbegin(); boundary != boundaries_.rend(); ++boundary) {
      SourceBinding binding = binding_;
      const std::string& prefix = boundary->first;
      for (const auto& [name, info] : result_.named) {
        if (is_below(prefix, name)) binding.params.emplace(name.substr(prefix.empty() ? 0 : prefix.size() + 1), info);
      }
      boundary->second->bind_source(binding);
    }
    return std::move(result_);
  }

 private:
  void check(const ApplyPlanOptions& options) const {
    plan::Problems problems;
    for (const NamedParameter& parameter : parameters_) {
      const auto info = result_.named.find(parameter.name);
      if (info == result_.named.end()) continue;
      if (const auto unit = fsdp::managed_by(parameter.tensor))
        problems.add(parameter.name, ": ", *unit, " manages it, want the plan applied before fully_shard");
      if (parameter.tensor.grad().defined())
        problems.add(parameter.name, ": has a gradient, want the plan applied before training");
      if (options.boundaries_elsewhere || !is_cut(info->second)) continue;
      const auto stands_for = [&](const auto& boundary) { return is_below(boundary.first, parameter.name); };
      if (std::none_of(boundaries_.begin(), boundaries_.end(), stands_for))
        problems.add(parameter.name, ": cut, but no module around it is a SourceBoundary, want one that communicates");
    }
    problems.raise(kOp);
  }

  Module& module_;
  std::vector<NamedParameter> parameters_;
  std::unordered_map<const void*, SourceShardMetaInfo> info_of_;
  std::vector<std::pair<std::string, SourceBoundary*>> boundaries_;
  SourceBinding binding_;
  AppliedPlan result_;
};

}  // namespace

SourceBoundary::~SourceBoundary() = default;

std::vector<ParameterDescription> describe_parameters(const Module& module) {
  std::vector<ParameterDescription> described;
  std::unordered_map<const void*, std::size_t> number;
  for (const NamedParameter& parameter : named_parameters(module)) {
    const auto [place, added] = number.emplace(parameter.tensor.unsafeGetTensorImpl(), number.size());
    described.push_back({.name = parameter.name, .shape = parameter.tensor.sizes().vec(), .tensor = place->second});
  }
  return described;
}

AppliedPlan apply_plan(const std::shared_ptr<Module>& module, const ShardingPlan& plan, const ApplyPlanOptions& options) {
  check_value(module != nullptr, kOp, "module is null, want a torch::nn module");
  return Application(module, plan, options).run();
}

std::optional<SourceShardInfos> build_source_shard_info_by_param(const Module& module,
                                                                 const std::optional<NamedSourceShardInfos>& named,
                                                                 std::int64_t source_ranks) {
  constexpr std::string_view kBuild = "build_source_shard_info_by_param";
  check_value(source_ranks <= 1 || (named && !named->empty()), kBuild, "no source layouts for ", source_ranks,
              " source ranks, want those of build_source_shard_info");
  if (!named) return std::nullopt;
  plan::Problems problems;
  SourceShardInfos infos;
  std::map<std::string, at::Tensor> tensors;
  for (const NamedParameter& parameter : named_parameters(module)) tensors.emplace(parameter.name, parameter.tensor);
  for (const auto& [name, info] : *named) {
    const auto tensor = tensors.find(name);
    if (tensor == tensors.end()) {
      problems.add(name, ": the model has no such parameter");
      continue;
    }
    const auto partial = [](const Placement& placement) { return placement.is_partial(); };
    if (std::any_of(info.placements.begin(), info.placements.end(), partial))
      problems.add(name, ": ", to_string(info.placements), ", want Shard or Replicate: a parameter is no sum of what ranks hold");
    const SourceShardInfos::Entry* other = infos.find(tensor->second);
    if (other != nullptr && !(other->info.mesh == info.mesh && other->info.placements == info.placements)) {
      problems.add(other->name, " and ", name, " are one tensor with two layouts: ", to_string(other->info.placements), " on ",
                   other->info.mesh.to_string(), " and ", to_string(info.placements), " on ", info.mesh.to_string(),
                   ", want one");
    } else if (other == nullptr) {
      infos.set(tensor->second, info, name);
    }
  }
  problems.raise(kBuild);
  return infos;
}

std::optional<SourceShardInfos> managed_source_shard_infos(const std::vector<std::shared_ptr<Module>>& modules,
                                                           const FullyShardOptions& options,
                                                           const std::optional<SourceShardInfos>& infos) {
  constexpr std::string_view kManaged = "managed_source_shard_infos";
  if (!infos) return std::nullopt;
  check_value(options.mesh.defined(), kManaged, "options.mesh is undefined, want the mesh of data parallelism");
  const std::vector<std::pair<std::string, at::Tensor>> parameters = managed_parameters(modules, options);
  SourceShardInfos own;
  const SourceShardInfos::Entry* first = nullptr;
  for (const auto& [name, tensor] : parameters) {
    const SourceShardInfos::Entry* entry = infos->find(tensor);
    if (entry == nullptr) continue;
    own.set(tensor, entry->info, name);
    if (!entry->info.mesh.defined()) continue;
    if (first == nullptr) first = entry;
    check_value(entry->info.mesh == first->info.mesh, kManaged, "parameter ", name, " lies on ", entry->info.mesh.to_string(),
                ", but ", first->name, " on ", first->info.mesh.to_string(),
                ", want one source mesh in a unit: wrap experts as units of their own");
  }
  for (const auto& [name, tensor] : parameters) {
    if (own.find(tensor) != nullptr) continue;
    SourceShardMetaInfo info;
    if (first != nullptr) {
      info = {.mesh = first->info.mesh, .placements = std::vector<Placement>(first->info.placements.size())};
    } else {
      info = default_source_shard_info(options.mesh);
    }
    info.shape = tensor.sizes().vec();
    own.set(tensor, std::move(info), name);
  }
  return own;
}

}  // namespace hyper_parallel
