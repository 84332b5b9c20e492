#include "fsdp/frozen_watch.h"

#include <algorithm>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdp/segment.h"
#include "fsdp/unit_impl.h"
#include "fsdp/unit_node.h"

namespace hyper_parallel::fsdp {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Stays on its node; a backward that watches the node aims it.
class WatchHook final : public torch::autograd::FunctionPostHook {
 public:
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    for (const Target& target : targets_) {
      const auto watch = target.watch.lock();
      // Another call of the engine may run the node, too, while the watched one waits.
      if (watch && watch->graph_task() == torch::autograd::get_current_graph_task_id()) watch->node_ran(target.interval);
    }
    return outputs;
  }

  void aim(std::weak_ptr<FrozenWatch> watch, std::size_t interval) {
    std::erase_if(targets_, [](const Target& target) { return target.watch.expired(); });
    targets_.push_back({std::move(watch), interval});
  }

  std::vector<std::shared_ptr<ForwardPass>> passes;  ///< that the node runs again

 private:
  struct Target {
    std::weak_ptr<FrozenWatch> watch;
    std::size_t interval;
  };
  std::vector<Target> targets_;  // one for each tree
};

WatchHook& hook_of(Node& node) {
  for (const auto& hook : node.post_hooks()) {
    if (auto* ours = dynamic_cast<WatchHook*>(hook.get())) return *ours;
  }
  auto hook = std::make_unique<WatchHook>();
  WatchHook& result = *hook;
  node.add_post_hook(std::move(hook));
  return result;
}

/// The engine hands gradients to leaves and units at once; neither computes with parameters.
bool is_end(const Node& node) { return node.sequence_nr() >= std::uint64_t{1} << 63; }

}  // namespace

std::shared_ptr<FrozenWatch> FrozenWatch::start(const std::vector<Unit*>& units) {
  if (std::none_of(units.begin(), units.end(), [](const Unit* unit) { return unit->may_watch(); })) return nullptr;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  // A backward for some inputs only leaves nodes out.
  if (nodes == nullptr || (selected != nullptr && !selected->empty())) return nullptr;
  const auto current = torch::autograd::get_current_node();  // the root is not among the nodes

  auto watch = std::make_shared<FrozenWatch>();
  watch->graph_task_ = torch::autograd::get_current_graph_task_id();
  const auto in_graph = [&](const Node* node) { return node == current.get() || nodes->contains(const_cast<Node*>(node)); };
  for (Unit* unit : units) {
    if (!unit->may_watch()) continue;
    auto passes = unit->passes();
    std::erase_if(passes, [&](const auto& pass) { return std::none_of(pass->results.begin(), pass->results.end(), in_graph); });
    if (passes.empty()) continue;
    if (watch->watched_.empty()) watch->thread_ = passes.front()->thread;
    const auto known = [&](const auto& pass) { return !pass->by_hand && pass->thread == watch->thread_; };
    if (std::all_of(passes.begin(), passes.end(), known)) watch->watched_.push_back({unit, std::move(passes)});
  }
  if (watch->watched_.empty()) return nullptr;
  watch->cut();
  for (Node* node : *nodes) watch->visit(*node);
  if (current && !nodes->contains(current.get())) watch->visit(*current);
  for (const Watched& watched : watch->watched_) {
    if (watched.pending > 0) watched.unit->watch(in_graph(watched.unit->node()));
  }
  return watch;
}

/// The intervals, and who watches them.
void FrozenWatch::cut() {
  for (const Watched& watched : watched_) {
    for (const auto& pass : watched.passes) cuts_.insert(cuts_.end(), {pass->begin, pass->end});
  }
  std::sort(cuts_.begin(), cuts_.end());
  cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  intervals_.resize(cuts_.size() + 3);
  const auto place = [&](std::uint64_t cut) {
    return static_cast<std::size_t>(std::lower_bound(cuts_.begin(), cuts_.end(), cut) - cuts_.begin()) + 1;
  };
  for (std::size_t w = 0; w < watched_.size(); ++w) {
    const auto add = [&](std::vector<std::size_t>& watchers) {
      if (watchers.empty() || watchers.back() != w) watchers.push_back(w);
    };
    for (const auto& pass : watched_[w].passes) {
      for (std::size_t i = place(pass->begin); i < place(pass->end); ++i) add(intervals_[i].watchers);
    }
    add(intervals_[cuts_.size() + 1].watchers);  // what other threads made may use every unit's parameters
  }
}

std::size_t FrozenWatch::interval_of(const Node& node) const {
  if (is_end(node)) return cuts_.size() + 2;
  if (node.thread_id() != thread_) return cuts_.size() + 1;
  return static_cast<std::size_t>(std::upper_bound(cuts_.begin(), cuts_.end(), node.sequence_nr()) - cuts_.begin());
}

void FrozenWatch::visit(Node& node) {
  const std::size_t own = interval_of(node);
  Interval& interval = intervals_[own];
  if (interval.watchers.empty()) return;
  const auto& edges = node.next_edges();
  const auto stays = [&](const auto& edge) { return edge.is_valid() && interval_of(*edge.function) == own; };
  if (std::any_of(edges.begin(), edges.end(), stays)) return;
  if (interval.pending++ == 0) {
    for (const std::size_t w : interval.watchers) ++watched_[w].pending;
  }
  hook_of(node).aim(weak_from_this(), own);
}

void FrozenWatch::node_ran(std::size_t index) {
  Interval& interval = intervals_[index];
  if (--interval.pending > 0) return;
  for (const std::size_t w : interval.watchers) {
    if (--watched_[w].pending == 0) watched_[w].unit->frozen_done();
  }
}

// ---- A unit's part in it.

bool Unit::may_watch() const { return !passes_.empty() && reshard_after_backward && !held && !aliased_ && has_frozen(); }

std::vector<std::shared_ptr<ForwardPass>> Unit::passes() const {
  std::vector<std::shared_ptr<ForwardPass>> passes;
  for (const auto& weak : passes_) {
    if (auto pass = weak.lock()) passes.push_back(std::move(pass));
  }
  return passes;
}

const UnitNode* Unit::node() const { return node_.get(); }

/// For the first of nested or listed forwards, if their parameters will have to stay for somebody.
void Unit::begin_pass() {
  if (running_ > 0 || !members_run_.empty()) return;
  pass_.reset();
  if (aliased_ || !at::GradMode::is_enabled() || !has_frozen()) return;
  pass_ = std::make_shared<ForwardPass>();
  pass_->thread = at::RecordFunction::currentThreadId();
  pass_->begin = at::sequence_number::peek();
  pass_->by_hand = by_hand_;
  pass_->in_segment = SegmentScope::current() != nullptr;
  std::erase_if(passes_, [](const auto& pass) { return pass.expired(); });
  passes_.push_back(pass_);
}

void Unit::watch(bool gradients_due) {
  frozen_ = Frozen::kWatched;
  gradients_due_ = gradients_due;
}

void Unit::frozen_done() {
  if (frozen_ != Frozen::kWatched) return;
  frozen_ = Frozen::kDone;
  if (gradients_due_) return;  // post_backward frees
  if (in_backward_) trace::end("backward", name_);
  in_backward_ = awaits_gradients_ = false;
  awaits_backward = false;
  free_after_backward();
}

void attach_passes(Node& node, const std::vector<std::shared_ptr<ForwardPass>>& passes) {
  if (passes.empty()) return;
  for (const auto& pass : passes) {
    pass->results.push_back(&node);
    pass->end = std::max(pass->end, node.sequence_nr() + 1);
  }
  hook_of(node).passes = passes;
}

}  // namespace hyper_parallel::fsdp
