#include "fsdp/unit_impl.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/managed_registry.h"
#include "fsdp/runtime.h"
#include "fsdp/unit_node.h"

namespace hyper_parallel::fsdp {

torch::autograd::variable_list UnitNode::apply(torch::autograd::variable_list&& gradients) {
  check_value(!retired_, "fully_shard",
              "backward of a forward from before the parameters were converted, want one forward after ",
              "the conversion and its backward");
  if (const auto unit = unit_.lock()) unit->post_backward(std::move(gradients));
  return {};
}

Unit::Unit(std::string name, const FullyShardOptions& options, Comm shard_comm, Comm replicate_comm, Comm data_parallel_comm)
    : name_(std::move(name)),
      options_(options),
      shard_comm_(std::move(shard_comm)),
      replicate_comm_(std::move(replicate_comm)),
      data_parallel_comm_(std::move(data_parallel_comm)) {
  options_.ignored_params.clear();
  options_.shard_placement_fn = nullptr;
}

Unit::~Unit() {
  for (Unit* child : children()) child->parent_ = nullptr;  // it can become part of another tree
  if (runtime_) runtime_->remove(*this);
  for (auto& group : groups_) {
    for (auto& parameter : group->parameters()) {
      forget_managed(parameter.full);
      forget_managed(parameter.sharded);
    }
  }
}

std::string Unit::qualified(int member, const std::string& name) const {
  if (!paths_.empty()) return concat(paths_[static_cast<std::size_t>(member)], '.', name);
  return members == 1 ? name : concat(member, '.', name);
}

void Unit::add_groups(std::vector<ParameterSlot> slots, const std::vector<std::int64_t>& shard_dims) {
  runtime_ = std::make_shared<Runtime>(shard_comm_.allocator());
  runtime_->add(*this);
  node_ = c10::make_intrusive<UnitNode>(weak_from_this());

  // One group per dtype and trainability, in order of first appearance; one per parameter without fusion.
  struct Draft {
    at::ScalarType dtype;
    bool trainable;
    std::vector<ParameterSlot> slots;
    std::vector<ParameterShape> shapes;
  };
  std::vector<Draft> drafts;
  const bool ragged = options_.shard_layout == ShardLayout::kRagged;
  const bool fused = ragged || options_.comm_fusion;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor& parameter = slots[i].parameter;
    auto draft = std::find_if(drafts.begin(), drafts.end(), [&](const Draft& d) {
      return fused && d.dtype == parameter.scalar_type() && d.trainable == parameter.requires_grad();
    });
    if (draft == drafts.end()) draft = drafts.insert(drafts.end(), {parameter.scalar_type(), parameter.requires_grad(), {}, {}});
    draft->shapes.push_back({slots[i].name, parameter.sizes().vec(), shard_dims[i]});
    draft->slots.push_back(std::move(slots[i]));
  }

  const MixedPrecisionPolicy& policy = options_.mp_policy;
  for (Draft& draft : drafts) {
    GroupOptions group{.unit = name_, .shard_comm = shard_comm_, .replicate_comm = replicate_comm_};
    group.device = at::Device(options_.mesh.device_type()).type();
    const bool floating = at::isFloatingType(draft.dtype);
    group.compute_dtype = floating ? policy.param_dtype.value_or(draft.dtype) : draft.dtype;
    group.reduce_dtype = floating ? policy.reduce_dtype.value_or(group.compute_dtype) : draft.dtype;
    // A group of one parameter needs no alignment between parameters, and gathers in place when it is cut on dim 0.
    const std::int64_t alignment = fused ? 16 : 1;
    GroupLayout layout = ragged ? GroupLayout::ragged(std::move(draft.shapes), shard_comm_.size())
                                : GroupLayout::per_parameter(std::move(draft.shapes), shard_comm_.size(), alignment);
    groups_.push_back(std::make_unique<ParamGroup>(std::move(layout), std::move(draft.slots), std::move(group)));
  }

  aliased_ = true;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    aliased_ = aliased_ && groups_[g]->aliased();
    auto& parameters = groups_[g]->parameters();
    input_of_parameter_.emplace_back(parameters.size(), -1);
    gradients_.emplace_back(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      remember_managed(parameters[i].full, *this);
      remember_managed(parameters[i].sharded, *this);
      if (parameters[i].trainable) connect(parameters[i], g, i);
    }
  }
}

void Unit::connect(ManagedParameter& parameter, std::size_t group, std::size_t index_in_group) {
  int& input = input_of_parameter_[group][index_in_group];
  if (input < 0) {
    input = static_cast<int>(node_->add_input_metadata(parameter.full));
    node_inputs_.push_back({group, index_in_group});
  }
  torch::autograd::impl::set_gradient_edge(parameter.full, torch::autograd::Edge(node_, static_cast<std::uint32_t>(input)));
  // With a list of ours in place torch adds no hook to the node: post_backward calls those of before and after the wrapping,
  // and, as for a leaf, not where there is no gradient.
  auto& hooks = torch::autograd::impl::get_autograd_meta(parameter.full)->cpp_hooks_list_;
  if (!hooks) hooks = std::make_shared<torch::autograd::hooks_list>();
}

/// requires_grad of a leaf may be flipped at any time; the model's handle follows at the next forward.
void Unit::sync_requires_grad() {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    auto& parameters = groups_[g]->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto& parameter = parameters[i];
      if (parameter.sharded.requires_grad() == parameter.trainable) continue;
      parameter.trainable = !parameter.trainable;
      if (parameter.trainable) {
        connect(parameter, g, i);
      } else {
        torch::autograd::impl::set_gradient_edge(parameter.full, torch::autograd::Edge());
      }
    }
  }
}

void Unit::adopt(const std::vector<ChildUnit>& children) {
  for (const ChildUnit& child : children) {
    child.unit->paths_ = child.paths;
    child.unit->name_.clear();
    for (const std::string& path : child.paths) child.unit->name_ += (child.unit->name_.empty() ? "" : "+") + path;
    for (auto& group : child.unit->groups_) group->rename_unit(child.unit->name_);
    if (child.unit->parent_ != nullptr) continue;
    child.unit->parent_ = this;
    children_.push_back(child.unit);
    child.unit->reshard();
    runtime_->absorb(*child.unit->runtime_);
    std::vector<Unit*> below;
    child.unit->subtree(below);
    for (Unit* unit : below) unit->runtime_ = runtime_;
  }
}

void Unit::subtree(std::vector<Unit*>& units) {
  for (Unit* child : children()) child->subtree(units);
  units.push_back(this);
}

std::vector<Unit*> Unit::children() const {
  std::vector<Unit*> children;
  for (const auto& child : children_) {
    if (const auto unit = child.lock()) children.push_back(unit.get());
  }
  return children;
}

bool Unit::trainable() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->trainable(); });
}

void Unit::describe(std::vector<std::string>& lines) const {
  const auto dtype = [](const std::optional<at::ScalarType>& type) { return type ? concat(*type) : std::string("default"); };
  const MixedPrecisionPolicy& policy = options_.mp_policy;
  lines.push_back(concat("unit ", name_, ": ", options_.mesh.to_string(), ", layout ",
                         options_.shard_layout == ShardLayout::kRagged ? "ragged" : "per-parameter",
                         options_.comm_fusion ? "" : " unfused", ", param_dtype ", dtype(policy.param_dtype), ", reduce_dtype ",
                         dtype(policy.reduce_dtype), ", reshard_after_forward ", reshard_after_forward(),
                         options_.replica_init == ReplicaInit::kNone    ? ""
                         : options_.replica_init == ReplicaInit::kCheck ? ", replicas compared"
                                                                        : ", replicas broadcast"));
  for (const auto& group : groups_) {
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      const ManagedParameter& parameter = group->parameters()[i];
      lines.push_back(concat("parameter ", qualified(parameter), " of unit ", name_, ": ", group->shard().scalar_type(), ' ',
                             at::IntArrayRef(parameter.full_shape), ", sharded on dim ", group->layout().parameter(i).shard_dim,
                             parameter.trainable ? "" : ", frozen", parameter.uninitialised ? ", began on the meta device" : ""));
    }
  }
  for (const auto& buffer : buffers_without_values()) lines.push_back(concat("buffer ", buffer.first, " has no values"));
}

bool Unit::reshards_after_forward() const {
  // A forward without gradients has no backward to wait for.
  return reshard_after_forward() || (!at::GradMode::is_enabled() && !held);
}

/// The first collective of each kind is preceded by a comparison, so that ranks that run different programs stop with both names.
void Unit::verify_once(bool& done, const char* what) {
  if (done) return;
  // One label for all units: ranks that disagree must still find each other.
  data_parallel_comm_.check_same("fully_shard", {concat(what, " of unit ", name_)}, {.label = "order of units"});
  done = true;
}

void Unit::start_unshard() {
  if (state_ != State::kSharded) return;
  gathered_pass_ = runtime_->pass();
  if (!aliased_) {
    verify_once(gather_verified_, "all-gather");
    for (auto& group : groups_) group->start_gather(runtime_->pool());
  }
  state_ = State::kUnsharding;
}

void Unit::finish_unshard() {
  if (state_ == State::kUnsharded) return;
  start_unshard();
  for (auto& group : groups_) group->finish_gather(runtime_->pool());
  state_ = State::kUnsharded;
}

void Unit::reshard() {
  if (state_ == State::kSharded) return;
  for (auto& group : groups_) {
    if (state_ == State::kUnsharding) {
      group->drop_gather(runtime_->pool());
    } else {
      group->free_full(runtime_->pool());
    }
  }
  state_ = State::kSharded;
  held = false;
}

void Unit::pre_forward() {
  runtime_->begin_forward(*this);
  try {
    for (auto& group : groups_) group->readopt();
    sync_requires_grad();
    // What an earlier pass left gathered may be older than the shards: an optimizer can have written to them, unseen.
    if (state_ != State::kSharded && !held && gathered_pass_ != runtime_->pass() && !runtime_->in_backward()) reshard();
    finish_unshard();
    if (members_run_.empty()) runtime_->look_ahead_forward(*this);
    if (at::GradMode::is_enabled() && trainable()) owes_reduction = true;
  } catch (...) {
    runtime_->end_forward(false);
    throw;
  }
}

void Unit::post_forward(int member, bool completed) {
  runtime_->end_forward(completed);
  if (completed && members > 1) {
    if (std::find(members_run_.begin(), members_run_.end(), member) == members_run_.end()) members_run_.push_back(member);
    if (static_cast<int>(members_run_.size()) < members) return;
  }
  members_run_.clear();
  // Recomputation runs forwards inside backward: their parameters serve the backward that follows.
  if (!runtime_->in_backward() && (!completed || reshards_after_forward())) reshard();
}

void Unit::pre_backward() {
  if (in_backward_) return;
  if (runtime_->in_forward()) {
    // autograd::grad inside of a forward: it needs the parameters, the backward of the step comes later.
    if (unshard_in_backward) finish_unshard();
    return;
  }
  runtime_->begin_unit_backward(*this);
  start_backward();
}

void Unit::start_backward() {
  in_backward_ = true;
  if (unshard_in_backward) finish_unshard();
  runtime_->look_ahead_backward();
}

/// What the user registered with register_hook on the model's handles.
void Unit::call_hooks(std::vector<at::Tensor>& gradients) {
  for (std::size_t input = 0; input < gradients.size(); ++input) {
    if (!gradients[input].defined()) continue;
    const NodeInput& place = node_inputs_[input];
    const at::Tensor& handle = groups_[place.group]->parameters()[place.parameter].full;
    const auto& hooks = torch::autograd::impl::get_autograd_meta(handle)->cpp_hooks_list_;
    for (std::size_t i = 0; i < hooks->size(); ++i) {
      if (const auto& hook = (*hooks)[i]) {
        if (at::Tensor result(hook(gradients[input])); result.defined()) gradients[input] = std::move(result);
      }
    }
  }
}

void Unit::post_backward(std::vector<at::Tensor> gradients) {
  call_hooks(gradients);
  at::NoGradGuard no_grad;
  for (std::size_t input = 0; input < gradients.size(); ++input) {
    const NodeInput& place = node_inputs_[input];
    gradients_[place.group][place.parameter] = std::move(gradients[input]);
  }
  if (requires_gradient_sync) {
    runtime_->reduce(*this, gradients_);
    return;
  }
  runtime_->end_unit_backward(*this);
  in_backward_ = false;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g]->trainable()) groups_[g]->accumulate(gradients_[g], runtime_->pool());
  }
  awaits_backward = false;
  owes_reduction = true;
  reshard();
}

void Unit::start_reduce(std::vector<std::vector<at::Tensor>>& gradients) {
  MemoryPool& pool = runtime_->pool();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g]->trainable()) groups_[g]->start_reduce(gradients[g], reduced_in_backward, pool);
  }
  reshard();
  if (data_parallel_comm_.size() > 1) verify_once(reduce_verified_, "reduce-scatter");
  for (auto& group : groups_) group->launch_reduce(pool);
  in_backward_ = false;
  awaits_backward = false;
  owes_reduction = false;
  reduced_in_backward = true;
}

bool Unit::advance_reduce() {
  bool more = false;
  for (auto& group : groups_) more = group->advance_reduce(runtime_->pool()) || more;
  return more;
}

void Unit::end_backward() {
  in_backward_ = false;
  awaits_backward = false;
  reduced_in_backward = false;
  members_run_.clear();
  reshard();
}

void Unit::reset() {
  end_backward();
  for (auto& group : groups_) group->reset(runtime_->pool());
  for (auto& gradients : gradients_) {
    for (at::Tensor& gradient : gradients) gradient.reset();
  }
  owes_reduction = false;
}

}  // namespace hyper_parallel::fsdp
