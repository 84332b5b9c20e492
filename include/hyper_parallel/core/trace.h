#pragma once
// Traces: what each rank did when, as Chrome trace JSON for https://ui.perfetto.dev or chrome://tracing. See
// docs/guide/tracing.md.
//
//   rank 0  compute   [forward layers.0][forward layers.1][forward layers.2] ...
//           gather    [unshard layers.1][unshard layers.2] ...
//           reduce                                                 [reduce layers.2] ...
//
// Recording is per process. Each thread has a buffer of its own, so that recording takes no lock; each event carries the rank of
// its thread, so that ranks that are threads of one process stay apart. While nothing is recorded a span costs one relaxed load.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <hyper_parallel/core/export.h>

namespace hyper_parallel::trace {

/// Rows of a rank: what its thread does, and what travels meanwhile.
enum class Lane : std::uint8_t { kCompute, kGather, kReduce, kOther };

struct StartOptions {
  /// Space of each thread, taken at its first event (128 bytes each). Events beyond it are dropped and counted in the file.
  std::size_t events_per_thread = std::size_t{1} << 16;
};

/// Starts recording for all threads of this process; `path` is the file, in which %r stands for the rank. Missing folders are
/// made. Calls nest: a start with the same path joins the recording, which ends with the last stop. HP_TRACE=path in the
/// environment is a start when the program starts and a stop when it exits normally.
///
/// Local. Thread safety: any thread. ValueError: another path is recorded already; no %r on a thread whose world has several
/// ranks; empty path; no space for events. Error: the folder cannot be made.
HP_API void start(const std::string& path, const StartOptions& options = {});
/// Ends what start began. The last stop writes one file for each rank that recorded something (one for all ranks when the path
/// has no %r) and returns the names; others return nothing. Without a start it does nothing. Spans that are still open end here,
/// marked as unfinished.
///
/// Local. Thread safety: any thread. Error: a file cannot be written.
HP_API std::vector<std::string> stop();  // NOLINT(modernize-use-nodiscard): most callers know the path
/// Rank of the calling thread's events, and the size of its world; negative (the default): none. Threads without a rank count as
/// the only rank of the process, or get a row of their own. init_process_group calls it. ValueError: HP_TRACE without %r in one
/// of several processes.
HP_API void set_rank(int rank, int world_size);

namespace detail {
HP_API extern std::atomic<bool> recording;
HP_API void begin(const char* name, std::string_view label, std::int64_t bytes) noexcept;
HP_API void end(const char* name, std::string_view label) noexcept;
[[nodiscard]] HP_API std::uint64_t begin_async(Lane lane, const char* name, std::string_view label, std::int64_t bytes) noexcept;
HP_API void end_async(std::uint64_t id) noexcept;
}  // namespace detail

[[nodiscard]] inline bool enabled() noexcept { return detail::recording.load(std::memory_order_relaxed); }

/// Opens a span on the calling thread's compute lane. `name` is a string literal; `label` says whose it is, e.g. a unit's name,
/// and is copied (beyond 85 bytes it is cut). For a span within one scope use Span.
inline void begin(const char* name, std::string_view label = {}) noexcept {
  if (enabled()) detail::begin(name, label, -1);
}
/// Closes the latest open span of that name and label; without one it does nothing.
inline void end(const char* name, std::string_view label = {}) noexcept {
  if (enabled()) detail::end(name, label);
}

/// A span from construction to destruction, on the calling thread's compute lane. `label` must outlive it.
class Span {
 public:
  explicit Span(const char* name, std::string_view label = {}, std::int64_t bytes = -1) noexcept : name_(name), label_(label) {
    if (!enabled()) return;
    open_ = true;
    detail::begin(name, label, bytes);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  ~Span() {
    if (open_) detail::end(name_, label_);
  }

 private:
  const char* name_;
  std::string_view label_;
  bool open_ = false;
};

/// Something that goes on while the thread does other things: from start to finish, or to the object's end. May overlap any other
/// span. Thread safety: one thread at a time.
class AsyncSpan {
 public:
  AsyncSpan() = default;
  AsyncSpan(AsyncSpan&& other) noexcept : id_(std::exchange(other.id_, 0)) {}
  AsyncSpan& operator=(AsyncSpan&& other) noexcept {
    if (this != &other) {
      finish();
      id_ = std::exchange(other.id_, 0);
    }
    return *this;
  }
  ~AsyncSpan() { finish(); }

  /// Ends the span that this object still holds, then opens a new one. `bytes`: payload; negative: none.
  void start(Lane lane, const char* name, std::string_view label = {}, std::int64_t bytes = -1) noexcept {
    finish();
    if (enabled()) id_ = detail::begin_async(lane, name, label, bytes);
  }
  void finish() noexcept {
    if (id_ != 0) detail::end_async(std::exchange(id_, 0));
  }

 private:
  std::uint64_t id_ = 0;
};

}  // namespace hyper_parallel::trace
