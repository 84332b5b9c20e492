#include "bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include <hyper_parallel/train/progress.h>

namespace hyper_parallel::apps {

Bar::Bar(std::string what, bool quiet) : what_(std::move(what)), terminal_(!quiet && ::isatty(STDERR_FILENO) == 1) {}

Bar::~Bar() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void Bar::show(std::uint64_t done, std::uint64_t all) {
  const Clock::time_point now = Clock::now();
  if (!terminal_ || now - last_ < std::chrono::milliseconds(100)) return;
  last_ = now;
  shown_ = true;
  constexpr int kWidth = 20;
  const double share = all == 0 ? 1.0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(all));
  const int filled = static_cast<int>(share * kWidth);
  const std::string bar =
      std::string(static_cast<std::size_t>(filled), '#') + std::string(static_cast<std::size_t>(kWidth - filled), '.');
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double left = done == 0 ? 0.0 : seconds * static_cast<double>(all - std::min(done, all)) / static_cast<double>(done);
  const double rate = seconds > 0 ? static_cast<double>(done) / seconds : 0.0;
  std::fprintf(stderr, "\r\033[K%s [%s] %3.0f %%  %s of %s  %s/s  ETA %s", what_.c_str(), bar.c_str(), 100 * share,
               train::format_bytes(static_cast<std::int64_t>(done)).c_str(),
               train::format_bytes(static_cast<std::int64_t>(all)).c_str(),
               train::format_bytes(static_cast<std::int64_t>(rate)).c_str(), train::format_seconds(left).c_str());
  std::fflush(stderr);
}

}  // namespace hyper_parallel::apps
