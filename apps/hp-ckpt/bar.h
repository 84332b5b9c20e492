#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace hyper_parallel::apps {

/// A progress bar of bytes on standard error, where that is a terminal. Thread safety: one thread at a time.
class Bar {
 public:
  Bar(std::string what, bool quiet);
  ~Bar();
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;
  void show(std::uint64_t done, std::uint64_t all);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point start_ = Clock::now(), last_ = {};
};

}  // namespace hyper_parallel::apps
