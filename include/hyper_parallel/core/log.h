#pragma once
// Log lines of the library: to standard error, with rank and level; level from HP_LOG (debug, info, warn, error, off; default
// warn).
#include <string_view>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::log {

enum class Level { kDebug, kInfo, kWarn, kError, kOff };

/// Sets the lowest level that is written. Thread safety: any thread.
HP_API void set_level(Level level);
[[nodiscard]] HP_API bool enabled(Level level);
/// Rank that the calling thread's lines show; negative (the default): none. init_process_group sets it.
HP_API void set_rank(int rank);
/// Writes one line if `level` is enabled. Thread safety: any thread.
HP_API void write(Level level, std::string_view message);

template <class... Args>
void debug(const Args&... args) {
  if (enabled(Level::kDebug)) write(Level::kDebug, concat(args...));
}
template <class... Args>
void info(const Args&... args) {
  if (enabled(Level::kInfo)) write(Level::kInfo, concat(args...));
}
template <class... Args>
void warn(const Args&... args) {
  if (enabled(Level::kWarn)) write(Level::kWarn, concat(args...));
}

template <class... Args>
void error(const Args&... args) {
  if (enabled(Level::kError)) write(Level::kError, concat(args...));
}

}  // namespace hyper_parallel::log
