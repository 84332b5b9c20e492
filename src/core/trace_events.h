#pragma once
// What a trace is made of, from the recording threads to the file.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/trace.h>

namespace hyper_parallel::trace {

/// One entry of a thread's buffer. Names are literals; the label is copied, because its owner may be gone when the file is
/// written.
struct Event {
  enum class Kind : std::uint8_t { kBegin, kEnd, kAsyncBegin, kAsyncEnd };
  std::int64_t time = 0;  ///< ns, monotonic clock
  const char* name = nullptr;
  std::uint64_t id = 0;     ///< of asynchronous spans
  std::int64_t bytes = -1;  ///< negative: none
  std::int32_t rank = -1;
  Kind kind = Kind::kBegin;
  Lane lane = Lane::kCompute;
  std::uint8_t label_size = 0;
  std::array<char, 85> label_text;

  [[nodiscard]] std::string_view label() const { return {label_text.data(), label_size}; }
};
static_assert(sizeof(Event) == 128);

/// Events of one thread. The thread writes a slot and then publishes it with `count`; slots below `count` never change.
struct Buffer {
  explicit Buffer(std::size_t size) : events(std::make_unique_for_overwrite<Event[]>(size)), capacity(size) {}
  std::unique_ptr<Event[]> events;
  std::size_t capacity;
  std::atomic<std::size_t> count{0};
  std::atomic<std::uint64_t> dropped{0};
};

/// A recording that has ended.
struct Recording {
  std::string path;
  std::vector<std::shared_ptr<Buffer>> buffers;  ///< by the order in which their threads came
  std::uint64_t dropped = 0;                     ///< events that found no buffer
  std::int64_t end_time = 0;
};

/// Writes the files of `recording` and returns their names. Error: one cannot be written.
std::vector<std::string> write_files(const Recording& recording);
/// `path` with `rank` for every %r.
std::string expand(const std::string& path, int rank);

}  // namespace hyper_parallel::trace
