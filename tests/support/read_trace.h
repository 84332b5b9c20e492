#pragma once
// Traces read back: the JSON, and its spans.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/core/trace.h>

namespace hyper_parallel::testing {

/// A recording that ends with the scope, also when a test fails in it.
class TraceRecording {
 public:
  explicit TraceRecording(const std::string& path) { trace::start(path); }
  TraceRecording(const TraceRecording&) = delete;
  TraceRecording& operator=(const TraceRecording&) = delete;
  ~TraceRecording() {
    try {
      stop();
    } catch (const std::exception& error) {
      std::cerr << error.what() << '\n';
    }
  }
  std::vector<std::string> stop() { return std::exchange(running_, false) ? trace::stop() : std::vector<std::string>(); }

 private:
  bool running_ = true;
};

/// One span, from an "X" event or from a pair of "b" and "e". Times in ns, so that they compare exactly.
struct TraceSpan {
  std::string kind;  ///< category: "forward", "unshard", "all_gather_single", ...
  std::string label;
  int pid = -1;
  int tid = -1;
  std::int64_t begin = 0, end = 0;
  std::int64_t bytes = -1;
  bool unfinished = false;

  [[nodiscard]] bool overlaps(const TraceSpan& other) const { return begin < other.end && other.begin < end; }
};

/// Throws when `file` is no JSON.
inline nlohmann::json read_json(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("cannot read " + file);
  return nlohmann::json::parse(in);
}

inline std::int64_t nanoseconds(const nlohmann::json& microseconds) { return std::llround(microseconds.get<double>() * 1000); }

/// Spans by begin. An asynchronous one that never ended has `end` = `begin`.
inline std::vector<TraceSpan> spans_of(const nlohmann::json& trace) {
  std::vector<TraceSpan> spans;
  std::map<std::pair<int, std::string>, std::size_t> open;  // by pid and id
  for (const auto& event : trace.at("traceEvents")) {
    const std::string phase = event.at("ph");
    if (phase == "M") continue;
    if (phase == "e") {
      spans.at(open.at({event.at("pid"), event.at("id2").at("local")})).end = nanoseconds(event.at("ts"));
      continue;
    }
    TraceSpan span;
    span.kind = event.at("cat");
    span.pid = event.at("pid");
    span.tid = event.at("tid");
    span.begin = nanoseconds(event.at("ts"));
    span.end = span.begin + (phase == "X" ? nanoseconds(event.at("dur")) : 0);
    span.label = event.at("args").value("label", "");
    span.bytes = event.at("args").value("bytes", std::int64_t{-1});
    span.unfinished = event.at("args").value("unfinished", false);
    if (phase == "b") open[{span.pid, event.at("id2").at("local")}] = spans.size();
    spans.push_back(span);
  }
  std::stable_sort(spans.begin(), spans.end(), [](const TraceSpan& a, const TraceSpan& b) { return a.begin < b.begin; });
  return spans;
}

/// Those of one kind (and label, unless empty).
inline std::vector<TraceSpan> select(const std::vector<TraceSpan>& spans, const std::string& kind,
                                     const std::string& label = "") {
  std::vector<TraceSpan> found;
  for (const TraceSpan& span : spans) {
    if (span.kind == kind && (label.empty() || span.label == label)) found.push_back(span);
  }
  return found;
}

}  // namespace hyper_parallel::testing
