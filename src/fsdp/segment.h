#pragma once
// Which units run inside a checkpointed segment.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/frozen_watch.h"

namespace hyper_parallel::fsdp {

class Unit;

/// Lives while the function of a checkpoint runs in a forward, and collects the units that run meanwhile. Of nested ones the
/// outermost collects, since its recomputation runs all of them. Thread safety: belongs to the thread that made it.
class SegmentScope {
 public:
  SegmentScope() {
    if (current() == nullptr) current() = this;
  }
  ~SegmentScope() {
    if (current() == this) current() = nullptr;
  }
  SegmentScope(const SegmentScope&) = delete;
  SegmentScope& operator=(const SegmentScope&) = delete;

  /// The one that is under way in this thread, or null.
  [[nodiscard]] static SegmentScope*& current() {
    static thread_local SegmentScope* scope = nullptr;
    return scope;
  }

  void note(const std::shared_ptr<Unit>& unit) {
    if (std::find(units_.begin(), units_.end(), unit) == units_.end()) units_.push_back(unit);
  }
  void keep(const std::shared_ptr<ForwardPass>& pass) {
    if (pass != nullptr && std::find(passes_.begin(), passes_.end(), pass) == passes_.end()) passes_.push_back(pass);
  }
  /// What was kept will run again in `node`.
  void attach_to(torch::autograd::Node& node) { attach_passes(node, std::exchange(passes_, {})); }
  /// In the order in which they began.
  [[nodiscard]] const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }

 private:
  std::vector<std::shared_ptr<Unit>> units_;
  std::vector<std::shared_ptr<ForwardPass>> passes_;
};

}  // namespace hyper_parallel::fsdp
