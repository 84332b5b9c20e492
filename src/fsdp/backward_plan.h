#pragma once
// The order of gathers and reductions in a backward: expected from the forward at first, then learned from the last pass.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace hyper_parallel::fsdp {

struct BackwardEvent {
  enum class Kind { kGather, kReduce } kind = Kind::kGather;
  int unit = 0;
  friend bool operator==(const BackwardEvent&, const BackwardEvent&) = default;
};

/// Follows a backward along the expected events. All ranks have the same plan, so that a rank on which a unit gets no gradient
/// knows at which place the others gather and reduce it.
class BackwardPlan {
 public:
  /// `fallback()` gives the events to expect while nothing has been learned.
  template <class Fallback>
  void begin(Fallback&& fallback) {
    if (!learned_) expected_ = fallback();
    cursor_ = 0;
    recorded_.clear();
  }

  /// Calls skipped(event) for every expected event between the last one and this one, then records this one. An event that is not
  /// expected any more skips nothing.
  template <class Skipped>
  void reach(const BackwardEvent& event, Skipped&& skipped) {
    const auto from = expected_.begin() + static_cast<std::ptrdiff_t>(cursor_);
    const auto here = std::find(from, expected_.end(), event);
    if (here != expected_.end()) {
      const auto end = static_cast<std::size_t>(here - expected_.begin());
      while (cursor_ < end) skipped(expected_[cursor_++]);
      ++cursor_;
    }
    // The event came after all: it was not its absence, only another order than expected.
    std::erase(recorded_, Recorded{event, true});
    recorded_.push_back({event, false});
  }

  /// Events that were expected and did not come.
  template <class Skipped>
  void reach_end(Skipped&& skipped) {
    while (cursor_ < expected_.size()) skipped(expected_[cursor_++]);
  }

  /// The unit that is gathered next, once that is known.
  [[nodiscard]] std::optional<int> next_gather() const {
    if (!learned_) return std::nullopt;
    for (std::size_t i = cursor_; i < expected_.size(); ++i) {
      if (expected_[i].kind == BackwardEvent::Kind::kGather) return expected_[i].unit;
    }
    return std::nullopt;
  }

  [[nodiscard]] bool learned() const { return learned_; }

  void finish() {
    expected_.clear();
    for (const Recorded& recorded : recorded_) expected_.push_back(recorded.event);
    learned_ = true;
  }
  /// A skipped event that the caller made up for.
  void record_skipped(const BackwardEvent& event) { recorded_.push_back({event, true}); }

 private:
  struct Recorded {
    BackwardEvent event;
    bool skipped = false;
    friend bool operator==(const Recorded&, const Recorded&) = default;
  };
  std::vector<BackwardEvent> expected_;
  std::vector<Recorded> recorded_;
  std::size_t cursor_ = 0;
  bool learned_ = false;
};

}  // namespace hyper_parallel::fsdp
