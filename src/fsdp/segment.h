#pragma once
// Which units run inside a checkpointed segment.
#include <algorithm>
#include <memory>
#include <vector>

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
  /// In the order in which they began.
  [[nodiscard]] const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }

 private:
  std::vector<std::shared_ptr<Unit>> units_;
};

}  // namespace hyper_parallel::fsdp
