#include "comm/futex.h"

#include <cerrno>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hyper_parallel {

// The increment and the look at `sleepers` are sequentially consistent, and so is the increment of `sleepers` below. Either the
// sleeper is seen here and woken, or it increments later, and then the kernel finds that the count has changed.
void ring(Bell& bell) noexcept {
  word(bell.count).fetch_add(1, std::memory_order_seq_cst);
  if (word(bell.sleepers).load(std::memory_order_seq_cst) == 0) return;
  // Not FUTEX_PRIVATE: sleepers may be in other processes.
  ::syscall(SYS_futex, &bell.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool sleep_on(Bell& bell, Word seen, std::chrono::milliseconds patience) noexcept {
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(patience.count() / 1000);
  time.tv_nsec = static_cast<long>(patience.count() % 1000) * 1'000'000;
  word(bell.sleepers).fetch_add(1, std::memory_order_seq_cst);
  const auto result = ::syscall(SYS_futex, &bell.count, FUTEX_WAIT, seen, &time, nullptr, 0);
  const bool timed_out = result == -1 && errno == ETIMEDOUT;
  word(bell.sleepers).fetch_sub(1, std::memory_order_seq_cst);
  return !timed_out;
}

}  // namespace hyper_parallel
