#pragma once
// The order in which units are visited, learned from one pass and used to look ahead in the next ones.
#include <cstddef>
#include <optional>
#include <vector>

namespace hyper_parallel::fsdp {

/// Remembers the sequence of visits of the last complete pass. A pass that leaves the learned order is recorded and replaces it.
/// Once passes have differed, an order is looked ahead in when two in a row have had it: where each pass skips other units,
/// hardly anything is gathered in vain.
class LearnedOrder {
 public:
  /// Starts a pass; what an unfinished pass recorded is kept only if it went further than the learned order.
  void begin() {
    finish();
    cursor_ = 0;
    follows_ = learned_.has_value();
    recorded_.clear();
    active_ = true;
  }

  /// Records a visit; returns who is expected next while the pass follows the learned order.
  std::optional<int> visit(int unit) {
    recorded_.push_back(unit);
    if (!follows_) return std::nullopt;
    if (cursor_ >= learned_->size() || (*learned_)[cursor_] != unit) {
      follows_ = trusted_ = false;
      return std::nullopt;
    }
    ++cursor_;
    if (cursor_ == learned_->size() || !trusted_) return std::nullopt;
    return (*learned_)[cursor_];
  }

  /// Ends a pass: what it recorded is the order from now on.
  void finish() {
    if (active_ && !recorded_.empty()) {
      const bool same = follows_ && cursor_ == learned_->size();
      trusted_ = same || !learned_;
      if (!same) learned_ = recorded_;
    }
    active_ = false;
  }

  /// Forgets the pass in progress (it was aborted).
  void abandon() {
    active_ = false;
    recorded_.clear();
  }

 private:
  std::optional<std::vector<int>> learned_;
  std::vector<int> recorded_;
  std::size_t cursor_ = 0;
  bool follows_ = false;
  bool trusted_ = false;
  bool active_ = false;
};

}  // namespace hyper_parallel::fsdp
