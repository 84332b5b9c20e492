#pragma once
// What the units of one tree share: memory pool, learned orders, reductions in flight, and the state of the backward.
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

#include "fsdp/backward_plan.h"
#include "fsdp/buffer.h"
#include "fsdp/frozen_watch.h"
#include "fsdp/learned_order.h"

namespace hyper_parallel::fsdp {

class ParamGroup;
class Unit;

/// Schedules the units of one tree. Order is program order: equal on all ranks that run the same program.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(c10::Allocator* allocator) : pool_(allocator) {}

  void add(Unit& unit);
  void remove(Unit& unit);
  /// Takes over all units of `other`, in front of this runtime's.
  void absorb(Runtime& other);

  [[nodiscard]] MemoryPool& pool() { return pool_; }
  [[nodiscard]] bool in_backward() const { return in_backward_; }
  [[nodiscard]] bool in_forward() const { return depth_ > 0 && !in_backward_; }
  /// Number of the outermost forward that is running or ran last.
  [[nodiscard]] std::int64_t pass() const { return pass_; }
  [[nodiscard]] bool idle() const { return !in_backward_ && depth_ == 0 && in_flight_.empty(); }

  /// The next forward compares the ranks again.
  void renew_agreement() { agreed_ = false; }
  /// The next forward is as the first: nothing is agreed, learned or in the pool. Between steps.
  void start_over();
  /// Called before the next forward or unshard() reads the shards.
  std::function<void()> post_optim_event;
  void wait_for_optimizer();
  void begin_forward(Unit& unit);
  /// The unit's gather is under way or done: starts that of the one that came next the last time.
  void look_ahead_forward(Unit& unit);
  /// The unit's forward is over, that of the outermost one maybe not.
  void leave_forward(Unit& unit);
  void end_forward(bool completed);
  /// The outermost forward has returned: no peer reads this rank's shards any more.
  void wait_after_forward();
  /// It threw: this rank reads no peer's shards any more, and waits for none.
  void abandon_reading();

  /// These units, in this order, ran inside one checkpoint and will run again there.
  void remember_segment(const std::vector<Unit*>& units);

  /// First gradient of a backward: queues the end-of-backward callback, once.
  void enter_backward();
  /// The gradient of a unit's output has arrived: catches up with what other ranks did before.
  void begin_unit_backward(Unit& unit);
  /// The unit's gather is under way or done: starts that of the one that came next the last time.
  void look_ahead_backward(Unit& unit);
  /// The unit's last gradient has arrived: catches up likewise. Without gradient synchronisation this is all.
  void end_unit_backward(Unit& unit);
  void reduce(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients);
  /// False: backwards leave reductions in flight.
  bool is_last_backward = true;
  /// Ends the reductions that backwards before the last one left in flight.
  void wait_for_gradients();
  /// Settles which units stay gathered between forward and backward within their memory budget.
  void decide_budgets();
  /// Drops everything that an aborted iteration left behind.
  void reset();
  /// The same for one unit.
  void reset(Unit& unit);

 private:
  struct Bit {
    ParamGroup* group;
    std::size_t parameter;
  };
  /// Which parameters have a gradient, and the exchange about it with the ranks that share them.
  struct Presence {
    std::vector<Bit> bits;
    at::Tensor mine, all;  // kept for their memory
    Work exchange;
  };
  void agree();
  void finish_reading();
  void wait_for_readers();
  void renumber();
  void finish_backward();
  void catch_up(const BackwardEvent& event);
  void settle_deferred(const BackwardEvent& now);
  /// A unit's forward begins or ends.
  struct Visit {
    int unit = 0;
    bool end = false;
    friend bool operator==(const Visit&, const Visit&) = default;
  };
  void record(Unit& unit, bool end);
  [[nodiscard]] std::vector<BackwardEvent> expected_backward() const;
  void expect(const Visit& visit, std::vector<BackwardEvent>& events) const;
  void expect_segment(const std::vector<int>& segment, std::vector<BackwardEvent>& events) const;
  void launch(Unit& unit, std::vector<std::vector<at::Tensor>>& gradients);
  void advance_reductions();
  /// True if any parameter can have got a gradient.
  bool complete_gradients();
  void start_presence();
  void install_gradients();
  void prefetch(Unit& unit);
  void look_ahead(const std::optional<std::vector<std::weak_ptr<Unit>>>& listed, std::optional<int> learned);

  MemoryPool pool_;
  std::vector<Unit*> units_;
  bool agreed_ = false;
  bool decided_ = false;
  int depth_ = 0;
  std::int64_t pass_ = 0;
  bool in_backward_ = false;
  bool backward_ended_ = false;                 // and no forward has begun since
  std::map<int, LearnedOrder> forward_orders_;  // by outermost unit
  LearnedOrder* forward_order_ = nullptr;
  BackwardPlan backward_plan_;
  std::vector<Visit> visits_;               // of the outermost forward that is running, until a backward has been learned
  std::vector<std::vector<Visit>> passes_;  // the different ones so far
  std::vector<std::vector<int>> segments_;  // units that run again together, until a backward has been learned
  std::deque<BackwardEvent> deferred_;      // reductions that fell due while the unit's gradients were inside of a segment
  std::deque<Unit*> in_flight_;
  std::shared_ptr<FrozenWatch> watch_;
  std::vector<std::pair<Comm, Presence>> presence_;  // by group of ranks, in the order in which the units name them
  std::vector<ParamGroup*> installs_;                // groups whose reductions told which gradients there are
};

/// Runtime::wait_for_gradients for every tree whose backward left reductions in flight on this thread.
void wait_for_all_gradients();

}  // namespace hyper_parallel::fsdp
