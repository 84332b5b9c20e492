#include <hyper_parallel/parallel/parallelize.h>

#include <algorithm>
#include <map>
#include <typeinfo>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <hyper_parallel/dtensor/layout.h>
#include <hyper_parallel/nn/apply_plan.h>
#include <hyper_parallel/parallel/cut.h>
#include <hyper_parallel/parallel/embedding.h>
#include <hyper_parallel/parallel/source.h>
#include <hyper_parallel/plan/source_shard_info.h>

#include "nn/shared_parameters.h"
#include "parallel/unit_choice.h"

namespace hyper_parallel::parallel {
namespace {

constexpr std::string_view kOp = "parallelize";

bool cuts(const Placement& placement, const DeviceMesh& mesh, std::size_t axis) {
  return placement.is_shard() && mesh.size(static_cast<std::int64_t>(axis)) > 1;
}

bool is_cut(const SourceShardMetaInfo& info) {
  for (std::size_t axis = 0; axis < info.placements.size(); ++axis) {
    if (cuts(info.placements[axis], info.mesh, axis)) return true;
  }
  return false;
}

std::vector<int> sorted_ranks(const DeviceMesh& mesh) {
  std::vector<int> ranks = mesh.ranks();
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void check_meshes(const PlanMeshes& meshes) {
  check_value(meshes.dense.defined(), kOp, "meshes.dense is undefined, want the mesh of data parallelism, whole");
  for (const DeviceMesh& mesh : {meshes.dense, meshes.expert})
    check_value(!mesh.defined() || mesh.get_coordinate().has_value(), kOp, "this rank is not part of ", mesh.to_string());
  if (!meshes.expert.defined()) return;
  check_value(sorted_ranks(meshes.dense) == sorted_ranks(meshes.expert), kOp, "the dense mesh ", meshes.dense.to_string(),
              " and the expert mesh ", meshes.expert.to_string(), " have different ranks, want the same");
  for (const std::string& axis : source_axes(meshes.expert)) {
    const std::vector<std::string> dense = source_axes(meshes.dense);
    if (std::find(dense.begin(), dense.end(), axis) == dense.end()) continue;
    check_value(meshes.dense[axis].ranks() == meshes.expert[axis].ranks(), kOp, "axis ", axis, " has ranks ",
                at::ArrayRef<int>(meshes.dense[axis].ranks()), " in the dense mesh ", meshes.dense.to_string(), " and ",
                at::ArrayRef<int>(meshes.expert[axis].ranks()), " in the expert mesh ", meshes.expert.to_string(),
                ", want the same groups");
  }
}

void check_options(const ParallelizeOptions& options) {
  check_value(!options.fully_shard.mesh.defined(), kOp, "options.fully_shard.mesh is set, want the meshes argument instead");
  check_value(!options.fully_shard.source_shard_infos, kOp,
              "options.fully_shard.source_shard_infos is set, want a plan or parallel layers instead");
  for (const auto& [name, depth] :
       {std::pair{"forward", options.forward_prefetch_depth}, {"backward", options.backward_prefetch_depth}})
    check_value(depth.value_or(0) >= 0, kOp, name, "_prefetch_depth is ", depth.value_or(0), ", want 0 or more");
  check_value(!options.loss_parallel || options.gradients == BoundaryGradients::kSumOfLosses, kOp,
              "loss_parallel is true with kOneLoss, want it with kSumOfLosses only: one loss is whole on every rank");
}

/// Everything that is decided before anything changes, then the changes.
class Parallelization {
 public:
  Parallelization(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan* plan, const PlanMeshes& meshes,
                  const ParallelizeOptions& options)
      : module_(module), plan_(plan), meshes_(meshes), options_(options), tree_(module) {
    if (plan_ != nullptr) expert_axis_ = plan_->expert_axis;
    dense_mesh_ = data_mesh(meshes_.dense);
    expert_mesh_ = meshes_.expert.defined() ? data_mesh(meshes_.expert) : dense_mesh_;
    dense_source_ = source_mesh(meshes_.dense);
    expert_source_ = meshes_.expert.defined() ? source_mesh(meshes_.expert) : dense_source_;
  }

  ParallelModel run() {
    plan::Problems problems;
    take_layouts(problems);
    units_ = choose_units(tree_, options_, expert_modules(), problems);
    problems.raise(kOp);
    for (ChosenUnit& unit : units_) {
      for (const std::size_t i : unit.parameters) settle(unit, i, problems);
    }
    order_ = unit_order(problems);
    problems.raise(kOp);
    for (const std::size_t unit : deepest_first()) rehearse(units_[unit]);

    if (plan_ != nullptr)
      (void)apply_plan(module_, *plan_, {.meshes = meshes_, .boundaries_elsewhere = options_.boundaries_elsewhere});
    std::vector<HSDPModule> handles(units_.size());
    for (const std::size_t unit : deepest_first()) handles[unit] = wrap(units_[unit]);
    return finish(handles);
  }

 private:
  [[nodiscard]] bool experts_apart() const {
    const std::vector<std::string> axes = source_axes(meshes_.dense);
    return meshes_.expert.defined() || std::find(axes.begin(), axes.end(), expert_axis_) != axes.end();
  }

  /// The layout of every parameter, before any unit has a say.
  void take_layouts(plan::Problems& problems) {
    const SourceShardInfos told = source_shard_infos(*module_, {.meshes = meshes_, .expert_axis = expert_axis_});
    for (const RegisteredParameter& parameter : tree_.parameters) infos_.push_back(told.find(parameter.tensor)->info);
    const ParameterCuts layers = parameter_cuts(*module_);
    std::set<std::string> of_layers;
    for (const auto& [name, cut] : layers) {
      of_layers.insert(name);
      for (const AxisCut& axis : cut.axes) {
        if (axis.placement.is_shard() && axis.mesh.mesh_dim_names().front() == expert_axis_) note_expert(name);
        if (axis.mesh.size() > 1 && options_.gradients == BoundaryGradients::kSumOfLosses)
          problems.add(name, ": a parallel layer cuts it, want kOneLoss: these layers compute the gradients of one loss");
      }
    }
    if (options_.gradients == BoundaryGradients::kSumOfLosses) {
      for (SourceShardMetaInfo& info : infos_) info.copy_gradients.clear();
    }
    if (plan_ == nullptr) return;
    const std::vector<ParameterDescription> described = describe_parameters(*module_);
    plan_->validate(described, meshes_);
    const ShardingPlan expanded = plan_->expand(described);
    const NamedSourceShardInfos named =
        build_source_shard_info(expanded, source_mesh(meshes_.dense), {.expert_source_mesh = source_mesh(meshes_.expert)});
    for (const plan::Planned& planned : plan::planned_by_name(expanded)) {
      if (plan::is_expert(*plan_, planned)) expert_modules_.insert(planned.module);
    }
    for (std::size_t i = 0; i < tree_.parameters.size(); ++i) {
      const RegisteredParameter& parameter = tree_.parameters[i];
      for (const std::string& name : parameter.names) {
        const auto planned = named.find(name);
        if (planned == named.end()) continue;
        infos_[i] = planned->second;
        infos_[i].shape = parameter.tensor.sizes().vec();
        for (const std::string& other : parameter.names) {
          if (of_layers.contains(other))
            problems.add(name, ": a parallel layer holds it", other == name ? "" : concat(" as ", other),
                         ", want a plan without it: the layer cuts it by itself");
        }
        break;
      }
    }
  }

  void note_expert(const std::string& parameter) {
    const std::size_t dot = parameter.rfind('.');
    expert_modules_.insert(dot == std::string::npos ? "" : parameter.substr(0, dot));
  }

  [[nodiscard]] std::set<std::string> expert_modules() const {
    return experts_apart() ? expert_modules_ : std::set<std::string>();
  }

  /// The layout of a parameter on the source axes of its unit.
  void settle(const ChosenUnit& unit, std::size_t i, plan::Problems& problems) {
    SourceShardMetaInfo& info = infos_[i];
    const std::string& name = tree_.parameters[i].names.front();
    const DeviceMesh& source = unit.expert ? expert_source_ : dense_source_;
    const bool routed = on_expert_axis(info);
    if (routed && !unit.expert) {
      problems.add(name, ": routed experts belong to unit ", unit.title(),
                   ", want a unit of their own on the expert mesh: keep them in a module that shares no parameter with others");
      return;
    }
    if (!(info.mesh == source)) {
      if (is_cut(info)) {
        problems.add(name, ": lies on ", info.mesh.to_string(), ", but unit ", unit.title(), " on ", source.to_string(),
                     ", want one mesh in a unit: make the experts a module of their own");
        return;
      }
      info = copies_on(source, info);
    }
    if (!unit.expert || options_.gradients == BoundaryGradients::kSumOfLosses || !source.defined()) return;
    // The unit's factor counts on gradients that hold the tokens of all ranks of the axis; copies hold only their own.
    info.copy_gradients.resize(info.placements.size(), CopyGradient::kUnitOp);
    for (std::size_t axis = 0; axis < info.placements.size(); ++axis) {
      if (source.mesh_dim_names()[axis] == expert_axis_ && info.placements[axis].is_replicate())
        info.copy_gradients[axis] = CopyGradient::kPartial;
    }
  }

  [[nodiscard]] bool on_expert_axis(const SourceShardMetaInfo& info) const {
    for (std::size_t axis = 0; axis < info.placements.size(); ++axis) {
      if (info.placements[axis].is_shard() && info.mesh.mesh_dim_names()[axis] == expert_axis_) return true;
    }
    return false;
  }

  /// Copies along `source`; what ranks compute along an axis of both meshes stays what it is.
  static SourceShardMetaInfo copies_on(const DeviceMesh& source, const SourceShardMetaInfo& before) {
    SourceShardMetaInfo info{.mesh = source, .shape = before.shape};
    if (!source.defined()) return info;
    for (const std::string& axis : source.mesh_dim_names()) {
      info.placements.emplace_back(Replicate());
      info.copy_gradients.push_back(CopyGradient::kUnitOp);
      if (!before.mesh.defined() || before.copy_gradients.empty()) continue;
      const std::vector<std::string>& axes = before.mesh.mesh_dim_names();
      const auto found = std::find(axes.begin(), axes.end(), axis);
      if (found != axes.end()) info.copy_gradients.back() = before.copy_gradients[static_cast<std::size_t>(found - axes.begin())];
    }
    return info;
  }

  /// Units but the model, as the prefetch depths count them.
  std::vector<std::size_t> unit_order(plan::Problems& problems) const {
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i + 1 < units_.size(); ++i) order.push_back(i);
    if (options_.unit_order.empty()) return order;
    std::map<std::string, std::size_t> place;
    for (const std::size_t i : order) place[units_[i].name] = i;
    order.clear();
    for (const std::string& name : options_.unit_order) {
      const auto found = place.find(name);
      if (found == place.end()) {
        problems.add("unit_order: \"", name, "\" is no unit", name.empty() ? "" : ", or stands there twice");
        continue;
      }
      order.push_back(found->second);
      place.erase(found);
    }
    for (const auto& [name, i] : place) problems.add("unit_order: ", name, " is missing, want every unit once");
    return order;
  }

  [[nodiscard]] std::vector<std::size_t> deepest_first() const {
    const auto dots = [&](std::size_t i) {
      const std::string& name = units_[i].name;
      return name.empty() ? std::ptrdiff_t{-1} : std::count(name.begin(), name.end(), '.');
    };
    std::vector<std::size_t> order(units_.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return dots(a) > dots(b); });
    return order;
  }

  [[nodiscard]] FullyShardOptions options_of(const ChosenUnit& unit) const {
    FullyShardOptions options = options_.fully_shard;
    options.mesh = unit.expert ? expert_mesh_ : dense_mesh_;
    if (unit.name.empty()) options.reshard_after_forward = false;
    return options;
  }

  [[nodiscard]] bool owns(const ChosenUnit& unit, std::size_t i) const {
    return std::find(unit.parameters.begin(), unit.parameters.end(), i) != unit.parameters.end();
  }

  /// Makes the unit out of parameters without memory and drops it, so that fully_shard refuses it before anything has changed.
  void rehearse(const ChosenUnit& unit) const {
    FullyShardOptions options = options_of(unit);
    options.ignored_params.clear();
    options.replicate_params.clear();
    options.source_shard_infos.emplace();
    std::vector<fsdp::ParameterSlot> slots;
    for (const std::size_t i : unit.parameters) {
      const at::Tensor& parameter = tree_.parameters[i].tensor;
      const std::string& name = tree_.parameters[i].names.front();
      check_value(parameter.is_meta() || parameter.device().type() == at::Device(options.mesh.device_type()).type(), kOp, name,
                  " is on ", parameter.device(), ", want ", options.mesh.device_type(), ", the device of the mesh");
      at::Tensor twin = at::empty(block_shape(i), parameter.options().device(at::kMeta).requires_grad(false));
      twin.requires_grad_(parameter.requires_grad());
      options.source_shard_infos->set(twin, infos_[i], name);
      for (const at::Tensor& whole : options_.fully_shard.replicate_params) {
        if (whole.is_same(parameter)) options.replicate_params.push_back(twin);
      }
      slots.push_back({.name = unit.name.empty() ? name : name.substr(unit.name.size() + 1), .parameter = twin});
    }
    (void)managed_parameters({unit.module}, options_of(unit));
    (void)fsdp::make_unit(unit.title(), std::move(slots), options, {});
  }

  /// Shape of this rank's block once the plan was applied.
  [[nodiscard]] std::vector<std::int64_t> block_shape(std::size_t i) const {
    const SourceShardMetaInfo& info = infos_[i];
    const at::Tensor& parameter = tree_.parameters[i].tensor;
    if (!info.mesh.defined()) return parameter.sizes().vec();
    return Layout::from_placements(info.mesh.shape(), info.placements, parameter.dim())
        .local_shape(*info.shape, *info.mesh.get_coordinate());
  }

  HSDPModule wrap(const ChosenUnit& unit) const {
    FullyShardOptions options = options_of(unit);
    options.source_shard_infos.emplace();
    std::vector<at::Tensor> shared;
    for (std::size_t i = 0; i < tree_.parameters.size(); ++i) {
      const RegisteredParameter& parameter = tree_.parameters[i];
      const bool own = owns(unit, i);
      if (own) options.source_shard_infos->set(parameter.tensor, infos_[i], parameter.names.front());
      if (parameter.names.size() > 1) (own ? shared : options.ignored_params).push_back(parameter.tensor);
    }
    return nn::fully_shard_with({unit.module}, options, shared).front();
  }

  ParallelModel finish(const std::vector<HSDPModule>& handles) const {
    ParallelModel model{.root = handles.back(), .options = options_};
    double factor = 1.0;
    if (options_.gradients == BoundaryGradients::kSumOfLosses)
      factor = set_source_gradient_factor(model.root, meshes_.dense, {.loss_parallel = options_.loss_parallel});
    const double expert_factor = expert_gradient_factor(meshes_, expert_axis_);
    std::vector<std::size_t> order = order_;
    order.push_back(units_.size() - 1);
    for (const std::size_t i : order) {
      const ChosenUnit& unit = units_[i];
      ParallelUnit made{.name = unit.name,
                        .handle = handles[i],
                        .expert = unit.expert,
                        .mesh = options_of(unit).mesh,
                        .source_mesh = unit.expert ? expert_source_ : dense_source_,
                        .gradient_factor = factor};
      for (const std::size_t p : unit.parameters) {
        made.parameters.push_back(tree_.parameters[p].names.front());
        made.numel += c10::multiply_integers(*infos_[p].shape);
        for (std::size_t n = 1; n < tree_.parameters[p].names.size(); ++n)
          model.tied.emplace_back(tree_.parameters[p].names.front(), tree_.parameters[p].names[n]);
      }
      if (unit.expert && options_.gradients == BoundaryGradients::kOneLoss && expert_factor != 1.0) {
        made.gradient_factor = expert_factor;
        made.handle.set_gradient_scaling_factor(expert_factor);
      }
      // The gradient of a look-up does not read the table.
      const torch::nn::Module& front = *unit.module;
      if (typeid(front) == typeid(nn::Hooked<VocabParallelEmbeddingImpl>)) made.handle.set_unshard_in_backward(false);
      model.units.push_back(std::move(made));
    }
    set_prefetch(model);
    return model;
  }

  void set_prefetch(ParallelModel& model) const {
    const std::size_t n = model.units.size() - 1;
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<fsdp::UnitHandle> next, previous;
      ParallelUnit& unit = model.units[i];
      const auto ahead = [](const std::optional<int>& depth) { return static_cast<std::size_t>(depth.value_or(0)); };
      for (std::size_t k = i + 1; k < std::min(n, i + 1 + ahead(options_.forward_prefetch_depth)); ++k) {
        next.push_back(model.units[k].handle);
        unit.forward_prefetch.push_back(model.units[k].name);
      }
      for (std::size_t k = 1; k <= std::min(i, ahead(options_.backward_prefetch_depth)); ++k) {
        previous.push_back(model.units[i - k].handle);
        unit.backward_prefetch.push_back(model.units[i - k].name);
      }
      if (options_.forward_prefetch_depth) unit.handle.set_modules_to_forward_prefetch(next);
      if (options_.backward_prefetch_depth) unit.handle.set_modules_to_backward_prefetch(previous);
    }
  }

  std::shared_ptr<torch::nn::Module> module_;
  const ShardingPlan* plan_;
  const PlanMeshes& meshes_;
  const ParallelizeOptions& options_;
  ModelTree tree_;
  std::string expert_axis_ = "ep";
  DeviceMesh dense_mesh_, expert_mesh_, dense_source_, expert_source_;
  std::set<std::string> expert_modules_;
  std::vector<SourceShardMetaInfo> infos_;  ///< by parameter of the tree
  std::vector<ChosenUnit> units_;
  std::vector<std::size_t> order_;
};

ParallelModel run(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan* plan, const PlanMeshes& meshes,
                  const ParallelizeOptions& options) {
  check_value(module != nullptr, kOp, "module is null, want a torch::nn module");
  check_meshes(meshes);
  check_options(options);
  return Parallelization(module, plan, meshes, options).run();
}

}  // namespace

ParallelModel parallelize(const std::shared_ptr<torch::nn::Module>& module, const ShardingPlan& plan, const PlanMeshes& meshes,
                          const ParallelizeOptions& options) {
  return run(module, &plan, meshes, options);
}

ParallelModel parallelize(const std::shared_ptr<torch::nn::Module>& module, const PlanMeshes& meshes,
                          const ParallelizeOptions& options) {
  return run(module, nullptr, meshes, options);
}

}  // namespace hyper_parallel::parallel
