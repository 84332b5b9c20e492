#include "fsdp/runtime.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <hyper_parallel/core/log.h>

#include "fsdp/settle_values.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {

namespace {

/// Each rank decides from what it holds itself: ranks that gather together must hold as much of the whole tree. Blocks of source
/// axes differ in size, and only with one and the same set of data-parallel ranks do all of them have the same block.
void check_ranks_of_budget(const std::vector<Unit*>& units) {
  const bool blocks = std::any_of(units.begin(), units.end(), [](const Unit* unit) { return unit->mesh().has_source(); });
  if (!blocks) return;
  const Unit& root = *units.back();
  for (const Unit* unit : units) {
    check_value(unit->data_parallel_comm().ranks() == root.data_parallel_comm().ranks(), "fully_shard",
                "memory budget in a tree whose units are sharded over different ranks: unit ", unit->name(),
                " not over those of unit ", root.name(), ", want reshard_after_forward = true or false with experts");
  }
}

/// The entry for the ranks of `comm`, made on first use: entries keep the order in which the units name their groups.
template <class T>
T& entry_for(std::vector<std::pair<Comm, T>>& entries, const Comm& comm) {
  const auto known =
      std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return entry.first.ranks() == comm.ranks(); });
  return known != entries.end() ? known->second : entries.emplace_back(comm, T()).second;
}

/// Trees whose backward left reductions in flight on this thread.
thread_local std::vector<std::weak_ptr<Runtime>> unfinished;

/// Once, however many backwards go by before somebody waits.
void remember_unfinished(std::weak_ptr<Runtime> runtime) {
  const auto same = [&](const auto& other) { return !other.owner_before(runtime) && !runtime.owner_before(other); };
  std::erase_if(unfinished, [](const auto& other) { return other.expired(); });
  if (std::none_of(unfinished.begin(), unfinished.end(), same)) unfinished.push_back(std::move(runtime));
}

/// Whether one of the `ranks` rows of `bytes` bytes has bit `i`.
bool any_bit(const at::Tensor& rows, std::size_t ranks, std::size_t bytes, std::size_t i) {
  const auto* row = static_cast<const std::uint8_t*>(rows.const_data_ptr());
  for (std::size_t rank = 0; rank < ranks; ++rank, row += bytes) {
    if ((row[i / 8] >> (i % 8)) & 1U) return true;
  }
  return false;
}

}  // namespace

void Runtime::add(Unit& unit) {
  units_.push_back(&unit);
  renumber();
}

void Runtime::remove(Unit& unit) {
  std::erase(units_, &unit);
  std::erase(in_flight_, &unit);
  renumber();
}

/// Learned orders and the agreement speak of indices, which have changed.
void Runtime::renumber() {
  for (std::size_t i = 0; i < units_.size(); ++i) units_[i]->index = static_cast<int>(i);
  forward_orders_.clear();
  forward_order_ = nullptr;
  backward_plan_ = {};
  deferred_.clear();
  segments_.clear();
  presence_.clear();
  visits_.clear();
  passes_.clear();
  watch_.reset();
  agreed_ = decided_ = false;
}

void Runtime::start_over() {
  renumber();
  pool_.clear();
}

void Runtime::wait_for_optimizer() {
  if (const auto wait = std::exchange(post_optim_event, nullptr)) wait();
}

void Runtime::absorb(Runtime& other) {
  if (&other == this) return;
  check_internal(other.idle(), "fully_shard", "an inner unit is in the middle of a step");
  const std::vector<Unit*> theirs = std::exchange(other.units_, {});
  units_.insert(units_.end() - 1, theirs.begin(), theirs.end());  // the outermost unit stays last
  renumber();
}

void Runtime::decide_budgets() {
  if (decided_) return;
  std::int64_t bytes = 0;
  std::vector<Unit*> candidates;
  for (Unit* unit : units_) {
    unit->budget_keeps = false;
    if (const MemoryBudget* budget = unit->budget()) {
      bytes = candidates.empty() ? budget->bytes : std::min(bytes, budget->bytes);
      candidates.push_back(unit);
    }
  }
  if (!candidates.empty()) check_ranks_of_budget(units_);
  decided_ = true;
  if (candidates.empty()) return;
  Unit& root = *units_.back();
  const auto planned = [&] { return plan_memory(root, {}).total(); };
  if (const std::int64_t least = planned(); least > bytes) {
    log::warn("fully_shard: unit ", root.name(), " needs ", least,
              " bytes even if everything is freed after forward, more than its memory budget of ", bytes);
    return;
  }
  // Units are in wrap order, children first and in forward order: the backward begins at the end.
  for (auto unit = candidates.rbegin(); unit != candidates.rend(); ++unit) {
    (*unit)->budget_keeps = true;
    if (planned() <= bytes) continue;
    (*unit)->budget_keeps = false;
    return;
  }
}

void Runtime::agree() {
  for (Unit* unit : units_) {
    for (auto& group : unit->groups()) group->readopt();  // torch::load may have brought values
  }
  decide_budgets();
  // One comparison per group of ranks.
  std::vector<std::pair<Comm, std::vector<std::string>>> plans;
  for (Unit* unit : units_) unit->describe(entry_for(plans, unit->unit_comm()));
  for (const auto& [comm, lines] : plans) {
    if (comm.size() > 1) comm.check_same("fully_shard", lines, {.label = "agreement of units"});
  }
  settle_values(units_);
  agreed_ = true;
}

void Runtime::begin_forward(Unit& unit) {
  const bool inside_autograd = torch::autograd::get_current_graph_task_id() != -1;
  // A backward that threw never reached its end; one that is running is a recomputation.
  if (in_backward_ && !inside_autograd) reset();
  // The recomputation of a checkpoint. Its backward may run in a nested call of the engine, whose end would come too early for
  // ours: enter while the outermost one is current.
  if (inside_autograd && depth_ == 0 && at::GradMode::is_enabled()) enter_backward();
  if (depth_ == 0 && !in_backward_) {
    wait_for_optimizer();
    for (Unit* each : units_) each->follow_module();
  }
  if (!agreed_) agree();
  if (depth_++ > 0 || in_backward_) return;
  ++pass_;
  if (std::exchange(backward_ended_, false)) {
    for (Unit* each : units_) each->ran = false;
  }
  forward_order_ = &forward_orders_[unit.index];
  forward_order_->begin();
  visits_.clear();
}

void Runtime::look_ahead_forward(Unit& unit) {
  if (in_backward_ || forward_order_ == nullptr) return;
  unit.ran = true;
  record(unit, /*end=*/false);
  look_ahead(unit.forward_prefetch, forward_order_->visit(unit.index));
}

void Runtime::look_ahead(const std::optional<std::vector<std::weak_ptr<Unit>>>& listed, std::optional<int> learned) {
  if (listed) {
    for (const auto& weak : *listed) {
      if (const auto unit = weak.lock()) prefetch(*unit);
    }
  } else if (learned) {
    prefetch(*units_[static_cast<std::size_t>(*learned)]);
  }
}

/// Only a forward with gradients has a backward.
void Runtime::record(Unit& unit, bool end) {
  if (backward_plan_.learned() || !at::GradMode::is_enabled()) return;
  visits_.push_back({unit.index, end});
}

void Runtime::leave_forward(Unit& unit) {
  if (!in_backward_ && forward_order_ != nullptr) record(unit, /*end=*/true);
}

void Runtime::end_forward(bool completed) {
  if (--depth_ > 0 || in_backward_ || forward_order_ == nullptr) return;
  if (completed) {
    forward_order_->finish();
    if (!visits_.empty() && std::find(passes_.begin(), passes_.end(), visits_) == passes_.end()) passes_.push_back(visits_);
  } else {
    forward_order_->abandon();
  }
  forward_order_ = nullptr;
}

/// In forward, the next unit's shards must be what they will be when it runs, and nothing gathered earlier may be left. In
/// backward, what no forward has used will not be wanted.
void Runtime::prefetch(Unit& unit) {
  if (in_backward_ && !(unit.ran && unit.gathers_in_backward())) return;
  if (!in_backward_) unit.refresh();
  unit.start_unshard();
}

/// Backward runs through the forwards in reverse. A unit's gradients are complete where its first forward began.
std::vector<BackwardEvent> Runtime::expected_backward() const {
  std::vector<BackwardEvent> events;
  for (auto pass = passes_.rbegin(); pass != passes_.rend(); ++pass) {
    for (auto visit = pass->rbegin(); visit != pass->rend(); ++visit) expect(*visit, events);
  }
  return events;
}

void Runtime::expect(const Visit& visit, std::vector<BackwardEvent>& events) const {
  const BackwardEvent gather{BackwardEvent::Kind::kGather, visit.unit}, reduce{BackwardEvent::Kind::kReduce, visit.unit};
  const bool gathered = std::find(events.begin(), events.end(), gather) != events.end();
  const auto segment = std::find_if(segments_.begin(), segments_.end(), [&](const std::vector<int>& units) {
    return std::find(units.begin(), units.end(), visit.unit) != units.end();
  });
  if (segment != segments_.end()) {
    if (!gathered) expect_segment(*segment, events);
    return;
  }
  if (!gathered) events.push_back(gather);
  if (visit.end) return;
  std::erase(events, reduce);
  events.push_back(reduce);
}

void Runtime::remember_segment(const std::vector<Unit*>& units) {
  if (in_backward_ || backward_plan_.learned()) return;
  std::vector<int> segment;
  for (const Unit* unit : units) segment.push_back(unit->index);
  for (std::vector<int>& other : segments_)
    std::erase_if(other, [&](int unit) { return std::find(segment.begin(), segment.end(), unit) != segment.end(); });
  segments_.push_back(std::move(segment));
}

/// A segment is gathered as it runs again, forwards. Its gradients come out at its end, those of the unit made last first.
void Runtime::expect_segment(const std::vector<int>& segment, std::vector<BackwardEvent>& events) const {
  for (const int unit : segment) events.push_back({BackwardEvent::Kind::kGather, unit});
  std::vector<int> reductions = segment;
  std::sort(reductions.begin(), reductions.end(), [this](int a, int b) {
    return units_[static_cast<std::size_t>(a)]->priority() > units_[static_cast<std::size_t>(b)]->priority();
  });
  for (const int unit : reductions) events.push_back({BackwardEvent::Kind::kReduce, unit});
}

void Runtime::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  for (Unit* unit : units_) {
    for (auto& group : unit->groups()) group->go_on_reading();
  }
  backward_plan_.begin([this] { return expected_backward(); });
  watch_ = FrozenWatch::start(units_);
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto runtime = self.lock()) runtime->finish_backward();
  });
}

/// A unit that ran forward here and gets no gradient (its output is not part of this rank's loss) is gathered and contributes
/// zeros at its place in the order, because the ranks where it does get one do so there. It keeps its parameters if its backward
/// is running: then its gradient may still come, in another order than expected, and is reduced as well.
void Runtime::catch_up(const BackwardEvent& event) {
  Unit& unit = *units_[static_cast<std::size_t>(event.unit)];
  if (event.kind == BackwardEvent::Kind::kGather) {
    if (!unit.awaits_backward || unit.in_backward()) return;
    backward_plan_.record_skipped(event);
    unit.start_backward();
    return;
  }
  if (!unit.owes_reduction || unit.reduced_in_backward || !(unit.trainable() || unit.holds_gradients())) return;
  if (unit.segments_in_backward > 0) {  // its gradients come when the segment ends
    deferred_.push_back(event);
    return;
  }
  backward_plan_.record_skipped(event);
  if (!unit.requires_gradient_sync || !unit.reduce_scatter_unused_params) return;
  launch(unit, unit.no_gradients());
}

/// Before the first event that follows a segment: what fell due in it, up to the event itself.
void Runtime::settle_deferred(const BackwardEvent& now) {
  while (!deferred_.empty()) {
    const BackwardEvent event = deferred_.front();
    if (units_[static_cast<std::size_t>(event.unit)]->segments_in_backward > 0) return;
    deferred_.pop_front();
    if (event == now) return;
    catch_up(event);
  }
}

void Runtime::begin_unit_backward(Unit& unit) {
  enter_backward();
  const BackwardEvent now{BackwardEvent::Kind::kGather, unit.index};
  settle_deferred(now);
  backward_plan_.reach(now, [this](const BackwardEvent& event) { catch_up(event); });
}

void Runtime::look_ahead_backward(Unit& unit) { look_ahead(unit.backward_prefetch, backward_plan_.next_gather()); }

void Runtime::end_unit_backward(Unit& unit) {
  enter_backward();
  const BackwardEvent now{BackwardEvent::Kind::kReduce, unit.index};
  settle_deferred(now);
  backward_plan_.reach(now, [this](const BackwardEvent& event) { catch_up(event); });
}

void Runtime::reduce(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients) {
  end_unit_backward(unit);
  launch(unit, gradients);
}

/// The buffers of the previous unit come back before this one takes its own.
void Runtime::launch(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients) {
  do {
    advance_reductions();
  } while (std::find(in_flight_.begin(), in_flight_.end(), &unit) != in_flight_.end());
  unit.start_reduce(gradients);
  in_flight_.push_back(&unit);
}

/// One stage on for everything in flight.
void Runtime::advance_reductions() {
  for (auto it = in_flight_.begin(); it != in_flight_.end();) {
    it = (*it)->advance_reduce() ? std::next(it) : in_flight_.erase(it);
  }
}

void Runtime::finish_backward() {
  at::NoGradGuard no_grad;
  const trace::Span span("finish backward");
  while (!deferred_.empty()) {
    catch_up(deferred_.front());
    deferred_.pop_front();
  }
  backward_plan_.reach_end([this](const BackwardEvent& event) { catch_up(event); });
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    catch_up({BackwardEvent::Kind::kGather, (*unit)->index});
    catch_up({BackwardEvent::Kind::kReduce, (*unit)->index});
  }
  finish_reading();
  const bool completed = is_last_backward && complete_gradients();
  if (!is_last_backward) remember_unfinished(weak_from_this());
  watch_.reset();
  for (Unit* unit : units_) unit->end_backward(completed);
  backward_plan_.finish();
  in_backward_ = false;
  backward_ended_ = true;
  wait_for_readers();
}

bool Runtime::complete_gradients() {
  const bool any = std::any_of(units_.begin(), units_.end(), [](const Unit* unit) { return unit->awaits_install; });
  if (any) start_presence();
  while (!in_flight_.empty()) advance_reductions();
  if (!any) return false;
  wait_for_readers();  // hooks of the parameters may write them
  install_gradients();
  return true;
}

void Runtime::wait_for_gradients() {
  check_value(!in_backward_, "wait_for_gradients", "a backward is running, want its end");
  at::NoGradGuard no_grad;
  if (!complete_gradients()) return;
  for (Unit* unit : units_) unit->gradients_completed();
}

void wait_for_all_gradients() {
  for (const auto& weak : std::exchange(unfinished, {})) {
    if (const auto runtime = weak.lock()) runtime->wait_for_gradients();
  }
}

/// A parameter gets its .grad when any rank had a gradient for it. The reductions carry a bit per parameter; where they do not
/// reach all ranks, or are the user's, the bits are exchanged once per backward, while the last reductions travel.
void Runtime::start_presence() {
  for (auto& [comm, presence] : presence_) presence.bits.clear();
  installs_.clear();
  for (Unit* unit : units_) {
    if (!std::exchange(unit->awaits_install, false)) continue;
    for (auto& group : unit->groups()) {
      if (group->knows_presence(unit->unit_comm().size())) {
        installs_.push_back(group.get());
        continue;
      }
      std::vector<Bit>& bits = entry_for(presence_, unit->unit_comm()).bits;
      for (std::size_t i = 0; i < group->parameters().size(); ++i) bits.push_back({group.get(), i});
    }
  }
  for (auto& [comm, presence] : presence_) {
    const auto bytes = static_cast<std::int64_t>(presence.bits.size() + 7) / 8;
    if (bytes == 0) continue;
    if (!presence.mine.defined() || presence.mine.numel() < bytes) {
      presence.mine = at::empty({bytes}, at::kByte);
      presence.all = at::empty({bytes * comm.size()}, at::kByte);
    }
    auto* mine = static_cast<std::uint8_t*>(presence.mine.mutable_data_ptr());
    std::fill_n(mine, bytes, std::uint8_t{0});
    for (std::size_t i = 0; i < presence.bits.size(); ++i) {
      const auto [group, parameter] = presence.bits[i];
      if (group->parameters()[parameter].present) mine[i / 8] |= static_cast<std::uint8_t>(1U << (i % 8));
    }
    presence.exchange = comm.all_gather_single(presence.all.narrow(0, 0, bytes * comm.size()), presence.mine.narrow(0, 0, bytes),
                                               {.label = "gradients present"});
  }
}

void Runtime::install_gradients() {
  for (ParamGroup* group : installs_) {
    for (std::size_t i = 0; i < group->parameters().size(); ++i) {
      if (group->parameters()[i].present) group->install_grad(i);
    }
    group->forget_presence();
  }
  for (auto& [comm, presence] : presence_) {
    presence.exchange.wait();
    const std::size_t bytes = (presence.bits.size() + 7) / 8, ranks = static_cast<std::size_t>(comm.size());
    for (std::size_t i = 0; i < presence.bits.size(); ++i) {
      const auto [group, index] = presence.bits[i];
      if (any_bit(presence.all, ranks, bytes, i)) group->install_grad(index);
    }
    for (const Bit& bit : presence.bits) bit.group->forget_presence();
  }
}

void Runtime::reset() {
  in_flight_.clear();
  presence_.clear();
  installs_.clear();
  deferred_.clear();
  watch_.reset();
  for (Unit* unit : units_) unit->reset();
  finish_reading();
  if (forward_order_ != nullptr) forward_order_->abandon();
  forward_order_ = nullptr;
  in_backward_ = false;
  depth_ = 0;
}

void Runtime::reset(Unit& unit) {
  std::erase(in_flight_, &unit);
  unit.reset();
}

}  // namespace hyper_parallel::fsdp
