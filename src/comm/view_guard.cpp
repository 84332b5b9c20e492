#include "comm/view_guard.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <mutex>

#include <unistd.h>

namespace hyper_parallel {
namespace {

// Read by a signal handler: no locks, no allocation.
struct Range {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<bool> taken{false};
};
std::array<Range, 4096> ranges;
struct sigaction before {};

constexpr char kLine[] =
    "hyper_parallel: a write to gathered parameters: in memory that the ranks of a host share they are other ranks' shards, "
    "mapped "
    "read-only. Change the sharded parameters instead, or set HP_SAMEHOST=copy.\n";

void on_fault(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const auto& range : ranges) {
    if (address < range.begin.load(std::memory_order_acquire) || address >= range.end.load(std::memory_order_acquire)) continue;
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kLine, sizeof(kLine) - 1);
    break;
  }
  // The instruction runs again and meets what was there before us.
  ::sigaction(signal, &before, nullptr);
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction now {};
    now.sa_sigaction = &on_fault;
    now.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&now.sa_mask);
    ::sigaction(SIGSEGV, &now, &before);
  });
}

}  // namespace

void guard_view(const void* begin, std::size_t bytes) noexcept {
  install();
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  for (auto& range : ranges) {  // a full table costs the line, nothing else
    if (range.taken.exchange(true)) continue;
    range.begin.store(address, std::memory_order_relaxed);
    range.end.store(address + bytes, std::memory_order_release);
    return;
  }
}

void unguard_view(const void* begin) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  for (auto& range : ranges) {
    if (!range.taken.load() || range.begin.load() != address) continue;
    range.end.store(0);
    range.begin.store(0);
    range.taken.store(false);
    return;
  }
}

}  // namespace hyper_parallel
