#include "train/stop_signal.h"

#include <atomic>
#include <mutex>

namespace hyper_parallel::train {
namespace {

std::atomic<bool> noted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");
std::mutex mutex;
int living = 0;
struct sigaction before {};

void note(int) { noted.store(true, std::memory_order_relaxed); }

}  // namespace

StopSignal::StopSignal() {
  const std::lock_guard lock(mutex);
  if (living++ > 0) return;
  noted = false;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGTERM, &action, &before);
}

StopSignal::~StopSignal() {
  const std::lock_guard lock(mutex);
  if (--living == 0) ::sigaction(SIGTERM, &before, nullptr);
}

bool StopSignal::received() noexcept { return noted.load(std::memory_order_relaxed); }

}  // namespace hyper_parallel::train
