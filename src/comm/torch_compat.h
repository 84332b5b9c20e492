#pragma once
// What we need of torch beyond its documented interface; the place for differences between its releases.

namespace hyper_parallel {

/// While one lives, torch's own log writes errors only: c10d reports a lost store as a warning with a stack trace before it
/// throws, and our exception already says what happened. HP_LOG=debug keeps the warnings. Thread safety: any thread.
class QuietTorchLog {
 public:
  QuietTorchLog();
  QuietTorchLog(const QuietTorchLog&) = delete;
  QuietTorchLog& operator=(const QuietTorchLog&) = delete;
  ~QuietTorchLog();
};

/// Writing to a connection whose peer is gone must be an error, not a signal that ends the process: Gloo writes without
/// MSG_NOSIGNAL. Leaves a handler that the program installed alone.
void ignore_broken_pipes();

}  // namespace hyper_parallel
