#include "fsdp/runtime.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "fsdp/settle_values.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {

namespace {

/// The entry for the ranks of `comm`, made on first use: entries keep the order in which the units name their groups.
template <class T>
T& entry_for(std::vector<std::pair<Comm, T>>& entries, const Comm& comm) {
  const auto known =
      std::find_if(entries.begin(), entries.end(), [&](const auto& entry) { return entry.first.ranks() == comm.ranks(); });
  return known != entries.end() ? known->second : entries.emplace_back(comm, T()).second;
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
  first_forwards_.clear();
  agreed_ = false;
}

void Runtime::absorb(Runtime& other) {
  if (&other == this) return;
  check_internal(other.idle(), "fully_shard", "an inner unit is in the middle of a step");
  const std::vector<Unit*> theirs = std::exchange(other.units_, {});
  units_.insert(units_.end() - 1, theirs.begin(), theirs.end());  // the outermost unit stays last
  renumber();
}

void Runtime::agree() {
  for (Unit* unit : units_) {
    for (auto& group : unit->groups()) group->readopt();  // torch::load may have brought values
  }
  // One comparison per group of ranks.
  std::vector<std::pair<Comm, std::vector<std::string>>> plans;
  for (Unit* unit : units_) unit->describe(entry_for(plans, unit->data_parallel_comm()));
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
  if (depth_ == 0 && !in_backward_) {
    for (Unit* each : units_) each->follow_module();
  }
  if (!agreed_) agree();
  if (depth_++ > 0 || in_backward_) return;
  ++pass_;
  forward_order_ = &forward_orders_[unit.index];
  forward_order_->begin();
}

void Runtime::look_ahead_forward(Unit& unit) {
  if (in_backward_ || forward_order_ == nullptr) return;
  if (std::find(first_forwards_.begin(), first_forwards_.end(), unit.index) == first_forwards_.end())
    first_forwards_.push_back(unit.index);
  if (const auto next = forward_order_->visit(unit.index)) {
    for (auto& group : units_[static_cast<std::size_t>(*next)]->groups()) group->readopt();
    prefetch(*next);
  }
}

void Runtime::end_forward(bool completed) {
  if (--depth_ > 0 || in_backward_ || forward_order_ == nullptr) return;
  if (completed) {
    forward_order_->finish();
  } else {
    forward_order_->abandon();
  }
  forward_order_ = nullptr;
}

void Runtime::prefetch(int index) { units_[static_cast<std::size_t>(index)]->start_unshard(); }

/// Backward runs through a unit's own and its inner units' modules in reverse, and ends with the unit's gradients.
void Runtime::expect_backward(Unit& unit, std::vector<BackwardEvent>& events) const {
  events.push_back({BackwardEvent::Kind::kGather, unit.index});
  for (auto index = first_forwards_.rbegin(); index != first_forwards_.rend(); ++index) {
    Unit& other = *units_[static_cast<std::size_t>(*index)];
    if (other.parent() == &unit) expect_backward(other, events);
  }
  events.push_back({BackwardEvent::Kind::kReduce, unit.index});
}

void Runtime::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  backward_plan_.begin([this] {
    std::vector<BackwardEvent> expected;
    for (auto index = first_forwards_.rbegin(); index != first_forwards_.rend(); ++index) {
      Unit& unit = *units_[static_cast<std::size_t>(*index)];
      if (unit.is_root()) expect_backward(unit, expected);
    }
    return expected;
  });
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto runtime = self.lock()) runtime->finish_backward();
  });
}

/// A unit that ran forward here and gets no gradient (its output is not part of this rank's loss) is gathered and contributes
/// zeros at its place in the order, because the ranks where it does get one do so there.
void Runtime::catch_up(const BackwardEvent& event) {
  Unit& unit = *units_[static_cast<std::size_t>(event.unit)];
  if (event.kind == BackwardEvent::Kind::kGather) {
    if (!unit.awaits_backward || unit.in_backward()) return;
    backward_plan_.record_skipped(event);
    unit.start_backward();
    return;
  }
  if (!unit.owes_reduction || unit.reduced_in_backward || !unit.trainable()) return;
  backward_plan_.record_skipped(event);
  if (!unit.requires_gradient_sync) return;
  launch(unit, unit.no_gradients());
}

void Runtime::begin_unit_backward(Unit& unit) {
  enter_backward();
  backward_plan_.reach({BackwardEvent::Kind::kGather, unit.index}, [this](const BackwardEvent& event) { catch_up(event); });
}

void Runtime::look_ahead_backward() {
  const auto next = backward_plan_.next_gather();
  if (next && units_[static_cast<std::size_t>(*next)]->unshard_in_backward) prefetch(*next);
}

void Runtime::end_unit_backward(Unit& unit) {
  enter_backward();
  backward_plan_.reach({BackwardEvent::Kind::kReduce, unit.index}, [this](const BackwardEvent& event) { catch_up(event); });
}

void Runtime::reduce(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients) {
  end_unit_backward(unit);
  launch(unit, gradients);
}

/// The buffers of the previous unit come back before this one takes its own.
void Runtime::launch(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients) {
  advance_reductions();
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
  backward_plan_.reach_end([this](const BackwardEvent& event) { catch_up(event); });
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    catch_up({BackwardEvent::Kind::kGather, (*unit)->index});
    catch_up({BackwardEvent::Kind::kReduce, (*unit)->index});
  }
  while (!in_flight_.empty()) advance_reductions();
  install_gradients();
  for (Unit* unit : units_) unit->end_backward();
  backward_plan_.finish();
  in_backward_ = false;
}

/// A parameter gets its .grad when any rank had a gradient for it: one bit per parameter, exchanged once per backward.
void Runtime::install_gradients() {
  struct Bit {
    ParamGroup* group;
    std::size_t parameter;
  };
  std::vector<std::pair<Comm, std::vector<Bit>>> exchanges;
  for (Unit* unit : units_) {
    if (!unit->reduced_in_backward) continue;
    std::vector<Bit>& bits = entry_for(exchanges, unit->data_parallel_comm());
    for (auto& group : unit->groups()) {
      for (std::size_t i = 0; i < group->parameters().size(); ++i) bits.push_back({group.get(), i});
    }
  }
  for (auto& [comm, bits] : exchanges) {
    const auto world = static_cast<std::size_t>(comm.size());
    const std::size_t bytes = (bits.size() + 7) / 8;
    std::vector<std::uint8_t> any(bytes, 0);
    for (std::size_t i = 0; i < bits.size(); ++i) {
      if (bits[i].group->parameters()[bits[i].parameter].present) any[i / 8] |= static_cast<std::uint8_t>(1U << (i % 8));
    }
    if (world > 1 && bytes > 0) {
      if (!presence_.defined() || presence_.numel() < static_cast<std::int64_t>(bytes)) {
        presence_ = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
        all_presence_ = at::empty({static_cast<std::int64_t>(bytes * world)}, at::kByte);
      }
      const at::Tensor mine = presence_.narrow(0, 0, static_cast<std::int64_t>(bytes));
      const at::Tensor all = all_presence_.narrow(0, 0, static_cast<std::int64_t>(bytes * world));
      std::memcpy(mine.mutable_data_ptr(), any.data(), bytes);
      comm.all_gather_single(all, mine, {.label = "gradients present"}).wait();
      const auto* received = static_cast<const std::uint8_t*>(all.const_data_ptr());
      for (std::size_t i = 0; i < bytes * world; ++i) any[i % bytes] |= received[i];
    }
    for (std::size_t i = 0; i < bits.size(); ++i) {
      auto& parameter = bits[i].group->parameters()[bits[i].parameter];
      if ((any[i / 8] >> (i % 8)) & 1U) bits[i].group->install_grad(bits[i].parameter);
      parameter.present = false;
    }
  }
}

void Runtime::reset() {
  in_flight_.clear();
  for (Unit* unit : units_) unit->reset();
  if (forward_order_ != nullptr) forward_order_->abandon();
  forward_order_ = nullptr;
  in_backward_ = false;
  depth_ = 0;
}

}  // namespace hyper_parallel::fsdp
