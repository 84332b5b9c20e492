// Recording: one buffer per thread, no locks once it is there.
#include <hyper_parallel/core/trace.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>

#include "core/trace_events.h"

namespace hyper_parallel::trace {

std::atomic<bool> detail::recording{false};

namespace {

constexpr std::string_view kOp = "trace";
constexpr std::size_t kMostEvents = std::size_t{1} << 28;

struct Session {
  Recording recording;
  StartOptions options;
  int users = 1;
  bool from_environment = false;
};

struct State {
  std::mutex mutex;
  std::optional<Session> session;
  std::atomic<std::uint64_t> generation{0};  ///< of the session: buffers of older ones are stale
  std::atomic<std::uint64_t> next_id{1};
  std::atomic<std::uint64_t> homeless{0};  ///< events of threads that got no buffer
};

/// Never destroyed: threads may record while the program ends.
State& state() {
  static auto* const the_state = new State;
  return *the_state;
}

thread_local int this_rank = -1;
thread_local int this_world = 0;
thread_local bool thread_ended = false;

struct ThisThread {
  std::shared_ptr<Buffer> buffer;
  std::uint64_t generation = 0;
  ~ThisThread() { thread_ended = true; }
};
thread_local ThisThread this_thread;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The calling thread's buffer in the running session; null when there is none.
Buffer* find_buffer() {
  State& all = state();
  if (thread_ended) return nullptr;
  if (this_thread.generation == all.generation.load(std::memory_order_acquire)) return this_thread.buffer.get();
  const std::lock_guard lock(all.mutex);
  this_thread.buffer.reset();
  this_thread.generation = all.generation.load(std::memory_order_relaxed);
  if (!all.session) return nullptr;
  this_thread.buffer = std::make_shared<Buffer>(all.session->options.events_per_thread);
  all.session->recording.buffers.push_back(this_thread.buffer);
  return this_thread.buffer.get();
}

/// Cut between characters, not inside one.
std::size_t fitting(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text.size();
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0U) == 0x80U) --most;
  return most;
}

void record(Event::Kind kind, const char* name, std::string_view label, std::uint64_t id, std::int64_t bytes,
            Lane lane) noexcept {
  Buffer* buffer = nullptr;
  try {
    buffer = find_buffer();
  } catch (const std::exception&) {  // no memory for a buffer: the trace is incomplete and says so
  }
  if (buffer == nullptr) {
    state().homeless.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const std::size_t at = buffer->count.load(std::memory_order_relaxed);
  if (at == buffer->capacity) {
    buffer->dropped.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Event& event = buffer->events[at];
  event.time = now();
  event.name = name;
  event.id = id;
  event.bytes = bytes;
  event.rank = this_rank;
  event.kind = kind;
  event.lane = lane;
  event.label_size = static_cast<std::uint8_t>(fitting(label, event.label_text.size()));
  if (!label.empty()) std::memcpy(event.label_text.data(), label.data(), event.label_size);
  buffer->count.store(at + 1, std::memory_order_release);
}

bool has_rank(const std::string& path) { return path.find("%r") != std::string::npos; }

void make_folder(const std::string& path) {
  const auto folder = std::filesystem::path(expand(path, std::max(this_rank, 0))).parent_path();
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw Error(concat('[', kOp, "] cannot make the folder ", folder.string(), ": ", error.message()));
}

void open_session(const std::string& path, const StartOptions& options, bool from_environment) {
  State& all = state();
  Session& session = all.session.emplace();
  session.recording.path = path;
  session.options = options;
  session.from_environment = from_environment;
  all.homeless = 0;
  all.generation.fetch_add(1, std::memory_order_release);
  detail::recording.store(true, std::memory_order_relaxed);
}

/// HP_TRACE: from the start of the program to its normal end.
[[maybe_unused]] const bool from_environment_done = [] {
  const char* path = std::getenv("HP_TRACE");
  if (path == nullptr || *path == '\0') return false;
  const std::lock_guard lock(state().mutex);
  open_session(path, {}, true);
  std::atexit([] {
    try {
      stop();
    } catch (const std::exception& error) {
      log::error(error.what());
    }
  });
  return true;
}();

bool launched_with_peers() {
  const char* size = std::getenv("WORLD_SIZE");
  return size != nullptr && std::atoi(size) > 1;
}

}  // namespace

void start(const std::string& path, const StartOptions& options) {
  check_value(!path.empty(), kOp, "path is empty, want a file name, e.g. trace-%r.json");
  check_value(options.events_per_thread >= 1 && options.events_per_thread <= kMostEvents, kOp, "events_per_thread is ",
              options.events_per_thread, ", want 1 to ", kMostEvents);
  check_value(this_world <= 1 || has_rank(path), kOp, "path \"", path, "\" has no %r, want it: all ", this_world,
              " ranks would write the same file");
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (all.session) {
    check_value(all.session->recording.path == path, kOp, "already recording to \"", all.session->recording.path, '"',
                all.session->from_environment ? " (HP_TRACE)" : "", ", want stop() before \"", path, '"');
    ++all.session->users;
    return;
  }
  make_folder(path);
  open_session(path, options, false);
}

std::vector<std::string> stop() {
  State& all = state();
  std::optional<Session> session;
  {
    const std::lock_guard lock(all.mutex);
    if (!all.session || --all.session->users > 0) return {};
    detail::recording.store(false, std::memory_order_relaxed);
    session = std::move(all.session);
    all.session.reset();
    all.generation.fetch_add(1, std::memory_order_release);
    session->recording.dropped = all.homeless.load(std::memory_order_relaxed);
  }
  session->recording.end_time = now();
  if (session->from_environment) make_folder(session->recording.path);
  return write_files(session->recording);
}

void set_rank(int rank, int world_size) {
  State& all = state();
  {
    const std::lock_guard lock(all.mutex);
    const bool clash = rank >= 0 && all.session && all.session->from_environment && launched_with_peers() &&
                       !has_rank(all.session->recording.path);
    check_value(!clash, kOp, "HP_TRACE=\"", clash ? all.session->recording.path : "", "\" has no %r, want it: all ", world_size,
                " ranks would write the same file");
  }
  this_rank = rank;
  this_world = world_size;
}

void detail::begin(const char* name, std::string_view label, std::int64_t bytes) noexcept {
  record(Event::Kind::kBegin, name, label, 0, bytes, Lane::kCompute);
}

void detail::end(const char* name, std::string_view label) noexcept {
  record(Event::Kind::kEnd, name, label, 0, -1, Lane::kCompute);
}

std::uint64_t detail::begin_async(Lane lane, const char* name, std::string_view label, std::int64_t bytes) noexcept {
  const std::uint64_t id = state().next_id.fetch_add(1, std::memory_order_relaxed);
  record(Event::Kind::kAsyncBegin, name, label, id, bytes, lane);
  return id;
}

void detail::end_async(std::uint64_t id) noexcept {
  if (enabled()) record(Event::Kind::kAsyncEnd, "", {}, id, -1, Lane::kCompute);
}

}  // namespace hyper_parallel::trace
