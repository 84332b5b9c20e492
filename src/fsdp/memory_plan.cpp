// Predicts the pool: replays the schedule of a step on a pool whose allocator gives nothing.
#include <algorithm>
#include <utility>
#include <vector>

#include <hyper_parallel/fsdp/unit.h>

#include "fsdp/buffer.h"
#include "fsdp/runtime.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel {
namespace fsdp {
namespace {

struct NoMemory final : c10::Allocator {
  at::DataPtr allocate(std::size_t /*bytes*/) override { return {}; }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) const override {}
};

/// A buffer that is taken from the pool and given back, like SwappedBuffer.
struct Lease {
  std::size_t bytes = 0;
  bool held = false;
  MemoryPool::Use use = MemoryPool::Use::kData;
  MemoryPool::Block block = {};

  void take(MemoryPool& pool) {
    if (held || bytes == 0) return;
    block = pool.take(bytes, use);
    held = true;
  }
  void give(MemoryPool& pool) {
    if (held) pool.give(std::move(block));
    held = false;
  }
};

struct GroupReplay {
  GroupFootprint size;
  Lease full, gathered, part, pack, receive, sum, sum_receive, partial, exchange;
  enum class Stage { kIdle, kReduceScatter, kAllReduce, kSpread } stage = Stage::kIdle;
  bool accumulated = false;
  bool park = false;  ///< the reduction in flight ends parked

  explicit GroupReplay(const GroupFootprint& footprint) : size(footprint) {
    full.bytes = size.full;
    gathered.bytes = size.gathered;
    part.bytes = size.part;
    pack.bytes = size.wire;
    receive.bytes = size.wire_receive;
    sum.bytes = size.accumulation;
    sum_receive.bytes = size.accumulation_receive;
    partial.bytes = size.partial;
    exchange.bytes = size.exchange;
    gathered.use = size.gathered_use;
    receive.use = sum_receive.use = size.receive_use;
  }
};

class Replay {
 public:
  explicit Replay(Unit& root) : root_(root) {
    order_ = root.reached(true);
    for (Unit* unit : order_) {
      units_.resize(std::max(units_.size(), static_cast<std::size_t>(unit->index) + 1));
      for (const auto& group : unit->groups()) at(*unit).groups.emplace_back(group->footprint(unit->maps()));
    }
    forward_order(root);
    backward_order(root);
  }

  enum class Gradients { kReduce, kPark, kAccumulate };

  void step(bool learned, Gradients gradients) {
    learned_ = learned;
    forward(root_);
    backward(root_, gradients);
    while (!in_flight_.empty()) advance();
    for (Unit* unit : order_) free_after_backward(*unit);
  }

  [[nodiscard]] std::size_t capacity() const { return pool_.capacity(); }

 private:
  struct UnitReplay {
    std::vector<GroupReplay> groups;
    enum class State { kSharded, kUnsharding, kUnsharded } state = State::kSharded;
    bool has_backward = false;  ///< something trainable is in it or before it
  };
  using State = UnitReplay::State;

  UnitReplay& at(const Unit& unit) { return units_[static_cast<std::size_t>(unit.index)]; }

  void forward_order(Unit& unit) {
    forward_.push_back(&unit);
    gradients_flow_ = gradients_flow_ || unit.trainable();
    for (Unit* child : unit.children()) forward_order(*child);
    at(unit).has_backward = gradients_flow_;
  }
  void backward_order(Unit& unit) {
    if (!at(unit).has_backward) return;
    backward_.push_back(&unit);
    const std::vector<Unit*> children = unit.children();
    for (auto child = children.rbegin(); child != children.rend(); ++child) backward_order(**child);
  }

  void prefetch_after(const std::vector<Unit*>& order, const Unit& unit, bool backward) {
    if (!learned_) return;
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      if (order[i] == &unit && (!backward || order[i + 1]->unshard_in_backward)) start(*order[i + 1]);
    }
  }

  void start(Unit& unit) {
    if (at(unit).state != State::kSharded) return;
    for (auto& group : at(unit).groups) {
      (group.size.gathered > 0 && !group.part.held ? group.gathered : group.full).take(pool_);
      group.part.give(pool_);
    }
    at(unit).state = State::kUnsharding;
  }
  void finish(Unit& unit) {
    if (at(unit).state == State::kUnsharded) return;
    start(unit);
    auto& groups = at(unit).groups;
    for (auto first = groups.begin(); first != groups.end(); ++first) {
      // What was received together is copied to its places together; a part comes back by itself.
      const bool alone = !first->size.together || first->full.held;
      const auto end = alone ? std::next(first) : groups.end();
      const auto joins = [&](const GroupReplay& group) { return alone || group.size.together; };
      for (auto group = first; group != end; ++group) {
        if (joins(*group)) group->full.take(pool_);
      }
      for (auto group = first; group != end; ++group) {
        if (joins(*group)) group->gathered.give(pool_);
      }
    }
    at(unit).state = State::kUnsharded;
  }
  void reshard(Unit& unit) {
    for (auto& group : at(unit).groups) {
      group.gathered.give(pool_);
      group.full.give(pool_);
      group.part.give(pool_);
    }
    at(unit).state = State::kSharded;
  }
  void free_after_backward(Unit& unit) {
    if (unit.reshard_after_backward || at(unit).state != State::kUnsharded) reshard(unit);
  }
  void cut(Unit& unit) {
    for (auto& group : at(unit).groups) {
      group.part.take(pool_);
      group.full.give(pool_);
    }
    at(unit).state = State::kSharded;
  }

  void forward(Unit& unit) {
    finish(unit);
    prefetch_after(forward_, unit, false);
    for (Unit* child : unit.children()) forward(*child);
    if (unit.after_forward() == Unit::AfterForward::kFree) reshard(unit);
    if (unit.after_forward() == Unit::AfterForward::kCut) cut(unit);
  }

  void backward(Unit& unit, Gradients gradients) {
    if (!at(unit).has_backward) return;
    if (unit.unshard_in_backward) finish(unit);
    prefetch_after(backward_, unit, true);
    const std::vector<Unit*> children = unit.children();
    for (auto child = children.rbegin(); child != children.rend(); ++child) backward(**child, gradients);
    if (unit.trainable()) gradients == Gradients::kAccumulate ? accumulate(unit) : reduce(unit, gradients == Gradients::kPark);
    if (unit.has_frozen()) free_after_backward(unit);
  }

  void accumulate(Unit& unit) {
    for (auto& group : at(unit).groups) {
      if (!group.size.trainable) continue;
      (group.sum.bytes > 0 ? group.sum : group.pack).take(pool_);
      group.accumulated = true;
    }
    free_after_backward(unit);
  }

  void reduce(Unit& unit, bool park) {
    advance();
    for (auto& group : at(unit).groups) {
      if (group.size.trainable && !group.accumulated) group.pack.take(pool_);
    }
    if (!unit.has_frozen()) free_after_backward(unit);
    for (auto& group : at(unit).groups) {
      if (!group.size.trainable) continue;
      group.park = park;
      if (group.partial.held && group.size.custom) group.exchange.take(pool_);
      if (group.size.staged || park || group.partial.held) group.partial.take(pool_);
      (group.accumulated && group.sum.bytes > 0 ? group.sum_receive : group.receive).take(pool_);
      group.accumulated = false;
      group.stage = GroupReplay::Stage::kReduceScatter;
    }
    in_flight_.push_back(&unit);
  }

  void advance() {
    std::vector<Unit*> left;
    for (Unit* unit : in_flight_) {
      bool more = false;
      for (auto& group : at(*unit).groups) {
        const bool scattered = group.stage == GroupReplay::Stage::kReduceScatter;
        for (Lease* lease : {&group.pack, &group.receive, &group.sum, &group.sum_receive}) {
          if (scattered) lease->give(pool_);
        }
        if (scattered) group.exchange.give(pool_);
        if (group.park) {
          group.stage = GroupReplay::Stage::kIdle;
          continue;
        }
        if (scattered && group.size.replicated) {
          group.exchange.take(pool_);
          group.stage = GroupReplay::Stage::kAllReduce;
          more = true;
          continue;
        }
        if (group.stage == GroupReplay::Stage::kAllReduce) {
          group.exchange.give(pool_);
          group.stage = GroupReplay::Stage::kSpread;
          more = true;
          continue;
        }
        group.partial.give(pool_);
        group.stage = GroupReplay::Stage::kIdle;
      }
      if (more) left.push_back(unit);
    }
    in_flight_ = left;
  }

  NoMemory allocator_;
  MemoryPool pool_{&allocator_};
  Unit& root_;
  bool learned_ = false;
  bool gradients_flow_ = false;
  std::vector<Unit*> order_, forward_, backward_, in_flight_;
  std::vector<UnitReplay> units_;
};

}  // namespace

MemoryUse plan_memory(Unit& root, const Accumulation& accumulation) {
  MemoryUse plan;
  for (Unit* unit : root.reached(true)) {
    for (const auto& group : unit->groups()) {
      plan.shards += group->shard_bytes();
      plan.gradients += group->planned_grad_bytes();
      plan.copies += group->planned_copy_bytes(unit->maps());
    }
  }
  using Gradients = Replay::Gradients;
  Replay replay(root);
  bool learned = false;
  for (int step = 0; step < 3; ++step) {
    for (const auto& [wanted, gradients] :
         {std::pair{accumulation.local, Gradients::kAccumulate}, std::pair{accumulation.partial, Gradients::kPark},
          std::pair{true, Gradients::kReduce}}) {
      if (wanted) replay.step(std::exchange(learned, true), gradients);
    }
  }
  plan.pool = static_cast<std::int64_t>(replay.capacity());
  return plan;
}

MemoryUse UnitHandle::plan_memory(const Accumulation& accumulation) const {
  get().runtime().decide_budgets();
  return fsdp::plan_memory(get(), accumulation);
}

}  // namespace fsdp
}  // namespace hyper_parallel
