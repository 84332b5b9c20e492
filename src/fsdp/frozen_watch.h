#pragma once
// Tells during a backward when a unit's frozen parameters are not wanted any more; see
// docs/design/004-unit-node-and-permanent-views.md.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <torch/csrc/autograd/function.h>

namespace hyper_parallel::fsdp {

class Unit;

/// One forward of a unit with frozen parameters. The hooks on its results own it, so that it lives as long as its graph.
struct ForwardPass {
  std::uint64_t thread = 0;  ///< that ran it
  /// Sequence numbers of the thread's nodes that can have used the parameters: those made until they were freed.
  std::uint64_t begin = 0, end = std::numeric_limits<std::uint64_t>::max();
  bool by_hand = false;     ///< the user had gathered the unit: what else used the parameters is unknown
  bool in_segment = false;  ///< runs again in backward, where a node in `results` does so
  /// Through one of them a backward reaches this pass. Compared only.
  std::vector<const torch::autograd::Node*> results;
};

/// Watches one backward: once all of its nodes that can use a unit's parameters have run, calls Unit::frozen_done.
///
/// The passes of all units cut the sequence numbers into intervals. Every node leads to one of its interval whose next nodes are
/// all in other intervals: when these last nodes have run, all nodes of the interval have, and hooks on them tell.
class FrozenWatch : public std::enable_shared_from_this<FrozenWatch> {
 public:
  /// Null when there is nothing to watch. During a backward; units that it cannot follow keep their parameters until its end.
  [[nodiscard]] static std::shared_ptr<FrozenWatch> start(const std::vector<Unit*>& units);

  /// One of the last nodes of this interval has run.
  void node_ran(std::size_t interval);
  [[nodiscard]] int graph_task() const { return graph_task_; }

 private:
  struct Interval {
    std::vector<std::size_t> watchers;  ///< positions in watched_
    std::size_t pending = 0;            ///< last nodes that have not run
  };
  struct Watched {
    Unit* unit = nullptr;
    std::vector<std::shared_ptr<ForwardPass>> passes;
    std::size_t pending = 0;  ///< intervals
  };
  [[nodiscard]] std::size_t interval_of(const torch::autograd::Node& node) const;
  void cut();
  void visit(torch::autograd::Node& node);

  int graph_task_ = -1;
  std::uint64_t thread_ = 0;
  std::vector<std::uint64_t> cuts_;  ///< rising; interval i + 1 begins at cuts_[i]
  std::vector<Interval> intervals_;  ///< the last two: nodes of other threads; leaves and units
  std::vector<Watched> watched_;
};

/// `node` runs these passes again: it keeps them, and belongs to them.
void attach_passes(torch::autograd::Node& node, const std::vector<std::shared_ptr<ForwardPass>>& passes);

}  // namespace hyper_parallel::fsdp
