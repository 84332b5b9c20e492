#pragma once
// SIGTERM as a wish to stop, instead of the end of the process.
#include <csignal>

namespace hyper_parallel::train {

/// While one lives, SIGTERM is noted; afterwards it does what it did before. Thread safety: any thread; the runs of a process
/// (ranks as threads) share the note.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;
  /// Whether the signal came since the first one of those that live was made.
  [[nodiscard]] static bool received() noexcept;
};

}  // namespace hyper_parallel::train
