// From events to Chrome's trace format: spans are put together, nested properly, and written as JSON.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>

#include "core/trace_events.h"

namespace hyper_parallel::trace {
namespace {

constexpr int kLanes = 4;
constexpr std::array<const char*, kLanes> kLaneNames{"compute", "gather", "reduce", "other"};

/// Length of the UTF-8 character at `text[i]`; 0 when there is none.
std::size_t character_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0U; };
  const unsigned lead = byte(i);
  const std::size_t length = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  for (std::size_t k = 1; k < length; ++k) {
    if ((byte(i + k) & 0xC0U) != 0x80U) return 0;
  }
  const unsigned second = byte(i + 1);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool outside = (lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F);
  return overlong || outside ? 0 : length;
}

/// `text` as a JSON string; bytes that are no UTF-8 become U+FFFD.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = character_length(text, i);
    if (length == 0) {
      out += "\\ufffd";
      ++i;
      continue;
    }
    const auto c = static_cast<unsigned char>(text[i]);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += text[i];
    } else if (c < 0x20 || c == 0x7F) {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escape.data();
    } else {
      out += text.substr(i, length);
    }
    i += length;
  }
  return out + '"';
}

std::string microseconds(std::int64_t ns) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%lld.%03lld", static_cast<long long>(ns / 1000), static_cast<long long>(ns % 1000));
  return text.data();
}

/// Where an event came from: its rank's row, and which of the rank's threads.
struct Source {
  int pid = 0;
  int thread = 0;
  [[nodiscard]] int tid(Lane lane) const { return thread * kLanes + static_cast<int>(lane) + 1; }
};

struct Open {
  const Event* event;
  Source source;
  std::int64_t begin;  ///< of this part: a span that another one cuts in two has several
};

/// The events of one file, in the order of time.
struct Entry {
  const Event* event;
  Source source;
};

/// Turns entries into the lines of a file.
class Writer {
 public:
  explicit Writer(std::int64_t end_time) : end_time_(end_time) {}

  void add(const Entry& entry) {
    const Event& event = *entry.event;
    switch (event.kind) {
      case Event::Kind::kBegin:
        stacks_[key(entry.source)].push_back({&event, entry.source, event.time});
        return;
      case Event::Kind::kEnd:
        close(event, entry.source);
        return;
      case Event::Kind::kAsyncBegin:
        open_async_[event.id] = entry;
        return;
      case Event::Kind::kAsyncEnd:
        if (const auto open = open_async_.find(event.id); open != open_async_.end()) {
          write_async(open->second, event.time);
          open_async_.erase(open);
        }
        return;
    }
  }

  /// What is still open ends with the recording.
  void finish() {
    for (auto& [where, stack] : stacks_) {
      for (; !stack.empty(); stack.pop_back()) {
        ++unfinished_;
        write_span(stack.back(), end_time_, true);
      }
    }
    for (const auto& [id, entry] : open_async_) {
      ++unfinished_;
      write_async(entry, std::nullopt);
    }
  }

  [[nodiscard]] std::vector<std::string> take_lines() { return std::move(lines_); }
  [[nodiscard]] const std::set<std::pair<int, int>>& rows() const { return rows_; }
  [[nodiscard]] std::size_t unfinished() const { return unfinished_; }

 private:
  using Key = std::pair<int, int>;
  static Key key(const Source& source) { return {source.pid, source.thread}; }

  static bool same(const Event& a, const Event& b) { return std::string_view(a.name) == b.name && a.label() == b.label(); }

  /// Usually the innermost span of the thread ends. Otherwise those inside are cut in two, so that the rows stay nested; and a
  /// span may end on another thread of its rank.
  void close(const Event& end, const Source& source) {
    if (close_in(stacks_[key(source)], end)) return;
    for (auto& [where, stack] : stacks_) {
      if (where.first == source.pid && close_in(stack, end)) return;
    }
  }

  bool close_in(std::vector<Open>& stack, const Event& end) {
    const auto found = std::find_if(stack.rbegin(), stack.rend(), [&](const Open& open) { return same(*open.event, end); });
    if (found == stack.rend()) return false;
    const auto index = static_cast<std::size_t>(stack.rend() - found) - 1;
    for (std::size_t i = stack.size(); i-- > index;) write_span(stack[i], end.time, false);
    for (std::size_t i = index + 1; i < stack.size(); ++i) stack[i].begin = end.time;
    stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(index));
    return true;
  }

  std::string head(const Event& event, const char* phase, const Source& source, Lane lane, std::int64_t time) {
    rows_.insert({source.pid, source.tid(lane)});
    std::string name(event.name);
    if (event.label_size > 0) name += concat(' ', event.label());
    return concat("{\"name\":", quoted(name), ",\"cat\":", quoted(event.name), ",\"ph\":\"", phase, "\",\"pid\":", source.pid,
                  ",\"tid\":", source.tid(lane), ",\"ts\":", microseconds(time));
  }

  static std::string arguments(const Event& event, bool unfinished) {
    std::string out;
    if (event.label_size > 0) out += concat("\"label\":", quoted(event.label()));
    if (event.bytes >= 0) out += concat(out.empty() ? "" : ",", "\"bytes\":", event.bytes);
    if (unfinished) out += concat(out.empty() ? "" : ",", "\"unfinished\":true");
    return concat(",\"args\":{", out, '}');
  }

  void write_span(const Open& open, std::int64_t end, bool unfinished) {
    lines_.push_back(concat(head(*open.event, "X", open.source, open.event->lane, open.begin), ",\"dur\":",
                            microseconds(std::max<std::int64_t>(end - open.begin, 0)), arguments(*open.event, unfinished), '}'));
  }

  void write_async(const Entry& entry, std::optional<std::int64_t> end) {
    const Event& event = *entry.event;
    const auto id = concat(",\"id2\":{\"local\":\"", event.id, "\"}");
    lines_.push_back(concat(head(event, "b", entry.source, event.lane, event.time), id, arguments(event, !end.has_value()), '}'));
    if (end) lines_.push_back(concat(head(event, "e", entry.source, event.lane, *end), id, '}'));
  }

  std::int64_t end_time_;
  std::map<Key, std::vector<Open>> stacks_;
  std::map<std::uint64_t, Entry> open_async_;
  std::vector<std::string> lines_;
  std::set<std::pair<int, int>> rows_;  ///< (pid, tid)
  std::size_t unfinished_ = 0;
};

struct File {
  std::vector<Entry> entries;
  std::set<int> pids;
};

std::set<int> ranks_of(const Recording& recording) {
  std::set<int> ranks;
  for (const auto& buffer : recording.buffers) {
    const std::size_t count = buffer->count.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < count; ++i) {
      if (buffer->events[i].rank >= 0) ranks.insert(buffer->events[i].rank);
    }
  }
  return ranks;
}

/// Events by file. Those of threads without a rank belong to the only rank, or form a row of their own in the first file.
std::map<std::string, File> sort_events(const Recording& recording, int pid_without_rank, int first_rank) {
  std::map<std::string, File> files;
  std::map<int, int> threads;  // by pid, so far
  for (const auto& buffer : recording.buffers) {
    std::map<int, int> thread_of;  // by pid: a thread may serve several ranks one after the other
    const std::size_t count = buffer->count.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < count; ++i) {
      const Event& event = buffer->events[i];
      const int pid = event.rank >= 0 ? event.rank : pid_without_rank;
      const auto [thread, added] = thread_of.try_emplace(pid, 0);
      if (added) thread->second = threads[pid]++;
      File& file = files[expand(recording.path, event.rank >= 0 ? event.rank : first_rank)];
      file.entries.push_back({&event, {pid, thread->second}});
      file.pids.insert(pid);
    }
  }
  for (auto& [path, file] : files) {
    std::stable_sort(file.entries.begin(), file.entries.end(),
                     [](const Entry& a, const Entry& b) { return a.event->time < b.event->time; });
  }
  return files;
}

std::vector<std::string> row_names(const Writer& writer, const std::set<int>& pids, int pid_of_others) {
  std::vector<std::string> lines;
  const auto describe = [&](const char* what, int pid, int tid, const std::string& name, const char* sort, int position) {
    const auto where = concat(",\"pid\":", pid, ",\"tid\":", tid);
    lines.push_back(concat("{\"name\":\"", what, "\",\"ph\":\"M\"", where, ",\"args\":{\"name\":", quoted(name), "}}"));
    lines.push_back(concat("{\"name\":\"", sort, "\",\"ph\":\"M\"", where, ",\"args\":{\"sort_index\":", position, "}}"));
  };
  for (const int pid : pids)
    describe("process_name", pid, 0, pid == pid_of_others ? "threads without a rank" : concat("rank ", pid), "process_sort_index",
             pid);
  for (const auto& [pid, tid] : writer.rows()) {
    const int thread = (tid - 1) / kLanes;
    const std::string name = kLaneNames[static_cast<std::size_t>((tid - 1) % kLanes)];
    describe("thread_name", pid, tid, thread == 0 ? name : concat(name, " (thread ", thread + 1, ')'), "thread_sort_index", tid);
  }
  return lines;
}

void write_file(const std::string& path, const File& file, const Recording& recording, std::uint64_t dropped, int pid_of_others) {
  Writer writer(recording.end_time);
  for (const Entry& entry : file.entries) writer.add(entry);
  writer.finish();
  std::vector<std::string> lines = row_names(writer, file.pids, pid_of_others);
  for (std::string& line : writer.take_lines()) lines.push_back(std::move(line));
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped\":" << dropped << ",\"unfinished\":" << writer.unfinished()
      << ",\"clock\":\"monotonic, common to the processes of a host\"},\n\"traceEvents\":[\n";
  for (std::size_t i = 0; i < lines.size(); ++i) out << lines[i] << (i + 1 < lines.size() ? ",\n" : "\n");
  out << "]}\n";
  out.close();
  if (!out) throw Error(concat("[trace] cannot write ", path));
  if (dropped > 0)
    log::warn("[trace] ", path, " lacks ", dropped, " events: trace fewer steps, or raise StartOptions::events_per_thread");
}

}  // namespace

std::string expand(const std::string& path, int rank) {
  std::string out = path;
  const std::string text = std::to_string(rank);
  for (std::size_t at = 0; (at = out.find("%r", at)) != std::string::npos; at += text.size()) out.replace(at, 2, text);
  return out;
}

std::vector<std::string> write_files(const Recording& recording) {
  const std::set<int> ranks = ranks_of(recording);
  const int first_rank = ranks.empty() ? 0 : *ranks.begin();
  const int pid_of_others = ranks.size() > 1 ? *ranks.rbegin() + 1 : -1;
  std::map<std::string, File> files = sort_events(recording, ranks.size() > 1 ? pid_of_others : first_rank, first_rank);
  if (files.empty()) files[expand(recording.path, first_rank)];  // a trace in which nothing happened
  // A thread is not bound to one file, so each file tells what is missing anywhere.
  std::uint64_t dropped = recording.dropped;
  for (const auto& buffer : recording.buffers) dropped += buffer->dropped.load(std::memory_order_relaxed);
  std::vector<std::string> names;
  for (const auto& [path, file] : files) {
    write_file(path, file, recording, dropped, pid_of_others);
    names.push_back(path);
  }
  return names;
}

}  // namespace hyper_parallel::trace
