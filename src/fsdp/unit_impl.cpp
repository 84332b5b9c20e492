#include "fsdp/unit_impl.h"

#include <algorithm>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "fsdp/frozen_watch.h"
#include "fsdp/managed_registry.h"
#include "fsdp/runtime.h"
#include "fsdp/segment.h"
#include "fsdp/unit_node.h"

namespace hyper_parallel::fsdp {

torch::autograd::variable_list UnitNode::apply(torch::autograd::variable_list&& gradients) {
  check_value(!retired_, "fully_shard",
              "backward of a forward from before the parameters were converted, want one forward after ",
              "the conversion and its backward");
  if (const auto unit = unit_.lock()) unit->post_backward(std::move(gradients));
  return {};
}

Unit::Unit(std::string name, const FullyShardOptions& options, SourceMesh mesh, Comm shard_comm, Comm data_parallel_comm)
    : name_(std::move(name)),
      options_(options),
      mesh_(std::move(mesh)),
      shard_comm_(std::move(shard_comm)),
      data_parallel_comm_(std::move(data_parallel_comm)),
      unit_comm_(mesh_.has_source() ? mesh_.all() : data_parallel_comm_) {
  options_.ignored_params.clear();
  options_.replicate_params.clear();
  options_.shard_placement_fn = nullptr;
  options_.source_shard_infos.reset();
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

void Unit::add_groups(std::vector<std::unique_ptr<ParamGroup>> groups) {
  groups_ = std::move(groups);
  runtime_ = std::make_shared<Runtime>(shard_comm_.allocator());
  runtime_->add(*this);
  node_ = c10::make_intrusive<UnitNode>(weak_from_this());

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
      const bool trainable = parameter.leaf ? parameter.leaf->requires_grad() : parameter.sharded.requires_grad();
      if (trainable == parameter.trainable) continue;
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
    for (Unit* unit : child.unit->reached(true)) unit->runtime_ = runtime_;
  }
}

void Unit::subtree(std::vector<Unit*>& units) {
  for (Unit* child : children()) child->subtree(units);
  units.push_back(this);
}

std::vector<Unit*> Unit::reached(bool recurse) {
  std::vector<Unit*> units;
  if (recurse) {
    subtree(units);
  } else {
    units.push_back(this);
  }
  return units;
}

std::vector<Unit*> Unit::children() const {
  std::vector<Unit*> children;
  for (const auto& child : children_) {
    if (const auto unit = child.lock()) children.push_back(unit.get());
  }
  return children;
}

std::uint64_t Unit::priority() const { return node_->sequence_nr(); }

bool Unit::trainable() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->trainable(); });
}

bool Unit::has_frozen() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->has_frozen(); });
}

/// The root's backward comes first: by default its parameters stay.
Unit::AfterForward Unit::after_forward() const {
  const auto& choice = options_.reshard_after_forward;
  if (!choice) return is_root() ? AfterForward::kKeep : AfterForward::kFree;
  if (std::holds_alternative<int>(*choice)) return AfterForward::kCut;
  const bool* free = std::get_if<bool>(&*choice);
  return (free != nullptr ? *free : !budget_keeps) ? AfterForward::kFree : AfterForward::kKeep;
}

const MemoryBudget* Unit::budget() const {
  const auto& choice = options_.reshard_after_forward;
  return choice ? std::get_if<MemoryBudget>(&*choice) : nullptr;
}

/// The first collective of each kind is preceded by a comparison, so that ranks that run different programs stop with both names.
void Unit::verify_once(bool& done, const char* what) {
  if (done) return;
  // One label for all units: ranks that disagree must still find each other.
  unit_comm_.check_same("fully_shard", {concat(what, " of unit ", name_)}, {.label = "order of units"});
  done = true;
}

void Unit::start_unshard(bool by_hand) {
  if (state_ != State::kSharded) return;
  gathered_pass_ = runtime_->pass();
  if (!reshard_after_backward) kept_version_ = version();
  if (!aliased_) {
    verify_once(gather_verified_, "all-gather");
    const trace::Span span("start unshard", name_);
    unshard_span_.start(trace::Lane::kGather, "unshard", name_);
    state_ = State::kUnsharding;  // also if a gather throws: reshard() drops those before it
    const GatherWay way{.pass = gathered_pass_, .map = maps() && !by_hand};
    for (auto& group : groups_) group->start_gather(way, runtime_->pool());
  }
  has_parts_ = false;
  state_ = State::kUnsharding;
}

void Unit::finish_unshard() {
  if (state_ == State::kUnsharded) return;
  start_unshard();
  const trace::Span span("wait unshard", name_);
  for (auto& group : groups_) group->finish_gather(runtime_->pool());
  unshard_span_.finish();
  state_ = State::kUnsharded;
}

void Unit::reshard() {
  if (state_ == State::kSharded && !has_parts_) return;
  const trace::Span span("reshard", name_);
  for (auto& group : groups_) {
    if (state_ == State::kUnsharding) {
      group->drop_gather(runtime_->pool());
    } else {
      group->free_full(runtime_->pool());
    }
  }
  unshard_span_.finish();
  state_ = State::kSharded;
  has_parts_ = kept_ = held = false;
  show(false);
}

/// Calls the front end when there is something new to show.
void Unit::show(bool gathered) {
  if (std::exchange(shown_, gathered) != gathered && front_end.show) front_end.show(gathered);
}

/// Back to the sharded state, except that groups which are cut over fewer ranks keep their parts.
void Unit::cut() {
  if (state_ != State::kUnsharded) return;
  const trace::Span span("reshard", name_);
  for (auto& group : groups_) group->cut(runtime_->pool());
  state_ = State::kSharded;
  has_parts_ = true;
  kept_ = held = false;
  show(false);
}

std::uint64_t Unit::version() const {
  std::uint64_t sum = 0;
  for (const auto& group : groups_) sum += group->version();
  return sum;
}

/// What an earlier pass left gathered may be older than the shards: an optimizer can have written to them, unseen.
bool Unit::stale() {
  if ((state_ == State::kSharded && !has_parts_) || held || runtime_->in_backward()) return false;
  return kept_ ? kept_version_ != version() : gathered_pass_ != runtime_->pass();
}

void Unit::readopt() {
  bool moved = false;
  for (auto& group : groups_) moved = group->readopt() || moved;
  if (moved) kept_ = false;
}

/// The shards are where and what they should be, and nothing gathered is older than they are.
void Unit::refresh() {
  readopt();
  if (stale()) reshard();
}

/// Gathers the parameters and starts on the unit that comes next. The gather of that one is posted before waiting for the own, so
/// that there is always one on its way, unless that would hold two rank-major buffers at the same time.
template <class LookAhead>
void Unit::unshard_and(const LookAhead& look_ahead) {
  const bool early = std::all_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->layout().in_place(); });
  if (early) {
    start_unshard();
    look_ahead();
  }
  finish_unshard();
  if (!early) look_ahead();
}

void Unit::start_hold(std::string_view op) {
  runtime_->wait_for_optimizer();
  follow_module();
  refresh();
  // Between passes an optimizer may have written to the shards, and no new pass tells so.
  if (!held && !kept_ && runtime_->idle()) reshard();
  for (auto& group : groups_) group->check_memory(op);
  leave_mapping();
  by_hand_ = true;
  frozen_ = Frozen::kUnknown;
  start_unshard(/*by_hand=*/true);
  held = true;
}

void Unit::pre_forward() {
  runtime_->begin_forward(*this);
  try {
    refresh();
    sync_requires_grad();
    if (!runtime_->in_backward()) begin_pass();
    if (SegmentScope* segment = SegmentScope::current(); segment != nullptr && !runtime_->in_backward()) {
      segment->note(shared_from_this());
      segment->keep(pass_);
      recomputed = true;
    }
    // A recomputation: the unit's backward begins here, since it uses the parameters that this forward gathers.
    if (runtime_->in_backward() && at::GradMode::is_enabled()) {
      if (frozen_ == Frozen::kDone) frozen_ = Frozen::kUnknown;  // not one of the checkpoints that the watch knows
      pre_backward();
    }
    unshard_and([this] {
      if (members_run_.empty()) runtime_->look_ahead_forward(*this);
    });
    show(true);
    if (at::GradMode::is_enabled() && trainable()) owes_reduction = true;
    ++running_;
    trace::begin("forward", name_);
  } catch (...) {
    if (running_ == 0) pass_.reset();
    runtime_->end_forward(false);
    throw;
  }
}

void Unit::post_forward(int member, bool completed) {
  trace::end("forward", name_);
  --running_;
  if (completed && members > 1 && std::find(members_run_.begin(), members_run_.end(), member) == members_run_.end())
    members_run_.push_back(member);
  if (running_ == 0 && !runtime_->in_backward()) show(held);
  const bool more = running_ > 0 || (completed && members > 1 && static_cast<int>(members_run_.size()) < members);
  if (completed && !more) runtime_->leave_forward(*this);
  runtime_->end_forward(completed);
  if (more) return;
  members_run_.clear();
  const auto pass = std::exchange(pass_, nullptr);
  // Recomputation runs forwards inside backward: their parameters serve the backward that follows.
  if (runtime_->in_backward()) return;
  if (completed && scopes > 0) return;
  const AfterForward after = after_forward();
  // A forward without gradients has no backward to wait for.
  const bool waits_for_backward = at::GradMode::is_enabled() || held || kept_;
  if (!completed || after == AfterForward::kFree || !waits_for_backward) {
    reshard();
  } else if (after == AfterForward::kCut) {
    cut();
  }
  // Parameters that stay may be used by what is made later, too.
  if (pass && state_ == State::kSharded) pass->end = at::sequence_number::peek();
}

void Unit::pre_backward() {
  if (frozen_ == Frozen::kDone) return;  // an input that the forward handed through
  if (in_backward_) {
    awaits_gradients_ = true;
    return;
  }
  if (runtime_->in_forward()) {
    // autograd::grad inside of a forward: it needs the parameters, the backward of the step comes later.
    if (unshard_in_backward) finish_unshard();
    if (is_unsharded()) show(true);
    return;
  }
  runtime_->begin_unit_backward(*this);
  start_backward();
  awaits_gradients_ = true;
  trace::begin("backward", name_);
}

void Unit::start_backward() {
  in_backward_ = true;
  const auto look_ahead = [this] { runtime_->look_ahead_backward(*this); };
  gathers_in_backward() ? unshard_and(look_ahead) : look_ahead();
  if (is_unsharded()) show(true);
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
  awaits_gradients_ = gradients_due_ = false;
  call_hooks(gradients);
  trace::end("backward", name_);
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
  const trace::Span span("accumulate", name_);
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g]->trainable()) groups_[g]->accumulate(gradients_[g], runtime_->pool());
  }
  awaits_backward = false;
  owes_reduction = true;
  if (!keeps_frozen()) free_after_backward();
}

void Unit::free_after_backward() {
  if (reshard_after_backward || state_ != State::kUnsharded || mapped()) reshard();
}

void Unit::start_reduce(std::vector<std::vector<at::Tensor>>& gradients) {
  MemoryPool& pool = runtime_->pool();
  const trace::Span span("start reduce", name_);
  const bool park = !requires_all_reduce;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    ParamGroup& group = *groups_[g];
    if (!group.trainable() && !group.holds_gradients()) continue;  // frozen since it accumulated some
    if (park && group.alone()) {
      group.accumulate(gradients[g], pool);
    } else {
      group.start_reduce(gradients[g], awaits_install, pool);
    }
  }
  // In time for the receive space to take this memory, unless the parameters may still be wanted. Where frozen ones are not any
  // more, they stay all the same, so that the pool's size does not depend on which gradient comes last.
  const bool mixed = has_frozen();
  if (!mixed && !awaits_gradients_) free_after_backward();
  if (unit_comm_.size() > 1) verify_once(reduce_verified_, "reduce-scatter");
  if (unit_comm_.size() > 1) reduce_span_.start(trace::Lane::kReduce, "reduce", name_);
  for (auto& group : groups_) group->launch_reduce(park, pool);
  in_backward_ = awaits_gradients_;
  awaits_backward = false;
  owes_reduction = park;
  reduced_in_backward = true;
  awaits_install = awaits_install || !park;
  if (mixed && !keeps_frozen() && !awaits_gradients_) free_after_backward();
}

bool Unit::advance_reduce() {
  bool more = false;
  const trace::Span span("wait reduce", name_);
  for (auto& group : groups_) more = group->advance_reduce(runtime_->pool()) || more;
  if (!more) reduce_span_.finish();
  return more;
}

void Unit::end_backward(bool stale) {
  if (in_backward_) trace::end("backward", name_);  // no gradient said so: frozen, or the backward threw
  in_backward_ = awaits_gradients_ = false;
  awaits_backward = false;
  recomputed = false;
  reduced_in_backward = false;
  members_run_.clear();
  frozen_ = Frozen::kUnknown;
  gradients_due_ = by_hand_ = false;
  free_after_backward();
  if (state_ == State::kUnsharded) kept_ = !stale || !trainable();
  show(held);
}

void Unit::gradients_completed() {
  if (trainable()) kept_ = false;
}

void Unit::reset() {
  end_backward(true);
  reshard();
  running_ = 0;
  for (auto& group : groups_) group->reset(runtime_->pool());
  reduce_span_.finish();
  for (auto& gradients : gradients_) {
    for (at::Tensor& gradient : gradients) gradient.reset();
  }
  owes_reduction = false;
  awaits_install = false;
}

bool Unit::holds_gradients() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->holds_gradients(); });
}

}  // namespace hyper_parallel::fsdp
