// hp::trace without an engine: what is recorded, by whom, and what the file says.
#include <hyper_parallel/core/trace.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <map>
#include <new>
#include <stdexcept>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/core/log.h>

#include "support/message_of.h"
#include "support/process.h"
#include "support/read_trace.h"
#include "support/temp_folder.h"

namespace {
thread_local std::int64_t allocations = 0;
}  // namespace

// Counts what the calling thread allocates; memory is malloc's. Not inlined, or g++ sees free() on what new returned.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;

class Trace : public ::testing::Test {
 protected:
  void TearDown() override {
    trace::stop();
    trace::set_rank(-1, 0);
  }
  TempFolder folder_;
};

void nested() {
  const trace::Span outer("forward", "layers.0");
  const trace::Span inner("unshard", "layers.0", 4096);
}

TEST_F(Trace, SpansBecomeCompleteEvents) {
  const std::string file = folder_.file("t.json");
  trace::start(file);
  EXPECT_TRUE(trace::enabled());
  nested();
  EXPECT_EQ(trace::stop(), std::vector<std::string>{file});
  EXPECT_FALSE(trace::enabled());
  const auto json = read_json(file);
  EXPECT_EQ(json["otherData"]["dropped"], 0);
  EXPECT_EQ(json["otherData"]["unfinished"], 0);
  const auto spans = spans_of(json);
  ASSERT_EQ(spans.size(), 2U);
  const TraceSpan outer = select(spans, "forward", "layers.0").at(0), inner = select(spans, "unshard", "layers.0").at(0);
  EXPECT_LE(outer.begin, inner.begin);
  EXPECT_LE(inner.begin, inner.end);
  EXPECT_LE(inner.end, outer.end);
  EXPECT_EQ(inner.bytes, 4096);
  EXPECT_EQ(outer.bytes, -1);
  EXPECT_EQ(outer.pid, 0);
  EXPECT_EQ(outer.tid, inner.tid);
  std::vector<std::string> names;
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] == "M" && event["args"].contains("name")) names.push_back(event["args"]["name"]);
    if (event["ph"] == "X") names.push_back(event["name"]);
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("rank 0", "compute", "forward layers.0", "unshard layers.0"));
}

TEST_F(Trace, NothingIsRecordedAndNothingAllocatedWhileOff) {
  EXPECT_FALSE(trace::enabled());
  trace::AsyncSpan gather;
  const std::int64_t before = allocations;
  nested();
  gather.start(trace::Lane::kGather, "unshard", "layers.0", 16);
  gather.finish();
  trace::begin("forward", "x");
  trace::end("forward", "x");
  EXPECT_EQ(allocations, before);
  trace::start(folder_.file("t.json"));
  trace::stop();
  EXPECT_TRUE(spans_of(read_json(folder_.file("t.json"))).empty());
}

TEST_F(Trace, OnAllocatesOnlyTheBuffer) {
  const std::int64_t at_first = allocations;
  trace::start(folder_.file("t.json"), {.events_per_thread = 1000});
  nested();  // takes the buffer
  const std::int64_t before = allocations;
  EXPECT_GT(before, at_first) << "the counter does not see the library";
  for (int i = 0; i < 400; ++i) nested();  // beyond the end of the buffer, too
  EXPECT_EQ(allocations, before);
}

TEST_F(Trace, FullBuffersAreCounted) {
  trace::start(folder_.file("t.json"), {.events_per_thread = 10});
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 7; ++i) const trace::Span span("forward");
  trace::stop();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("t.json lacks 4 events"));
  const auto json = read_json(folder_.file("t.json"));
  EXPECT_EQ(json["otherData"]["dropped"], 4);
  EXPECT_EQ(spans_of(json).size(), 5U);
}

TEST_F(Trace, ExceptionsCloseSpans) {
  trace::start(folder_.file("t.json"));
  const trace::Span outer("step");
  try {
    const trace::Span inner("forward", "layers.0");
    throw std::runtime_error("no");
  } catch (const std::runtime_error&) {
    const trace::Span after("handler");
  }
  trace::stop();
  const auto json = read_json(folder_.file("t.json"));
  const auto spans = spans_of(json);
  EXPECT_LE(select(spans, "forward").at(0).end, select(spans, "handler").at(0).begin);
  EXPECT_FALSE(select(spans, "forward").at(0).unfinished);
  EXPECT_TRUE(select(spans, "step").at(0).unfinished) << "still open when the recording ends";
  EXPECT_EQ(json["otherData"]["unfinished"], 1);
}

TEST_F(Trace, AsyncSpansOverlapAndMove) {
  trace::start(folder_.file("t.json"));
  trace::AsyncSpan first, second;
  first.start(trace::Lane::kGather, "unshard", "a", 100);
  second.start(trace::Lane::kReduce, "reduce", "b");
  trace::AsyncSpan moved = std::move(first);
  first.finish();  // moved from: nothing
  moved.finish();
  moved.finish();
  { const trace::Span span("forward"); }
  second.start(trace::Lane::kReduce, "reduce", "c");  // ends b
  trace::AsyncSpan open;
  open.start(trace::Lane::kOther, "barrier");
  second = trace::AsyncSpan();
  trace::stop();
  open.finish();  // after the end: nothing
  const auto spans = spans_of(read_json(folder_.file("t.json")));
  ASSERT_EQ(spans.size(), 5U);
  const TraceSpan a = select(spans, "unshard", "a").at(0), b = select(spans, "reduce", "b").at(0);
  const TraceSpan c = select(spans, "reduce", "c").at(0), forward = select(spans, "forward").at(0);
  EXPECT_EQ(a.bytes, 100);
  EXPECT_LE(b.begin, a.end);
  EXPECT_LE(a.end, forward.begin);
  EXPECT_LE(forward.end, b.end);
  EXPECT_LE(b.end, c.end);
  EXPECT_FALSE(c.unfinished);
  EXPECT_TRUE(select(spans, "barrier").at(0).unfinished);
  EXPECT_NE(a.tid, b.tid);
  EXPECT_NE(a.tid, forward.tid);
}

TEST_F(Trace, SpansThatCrossAreCutSoThatRowsStayNested) {
  trace::start(folder_.file("t.json"));
  trace::end("never begun");
  trace::begin("backward", "a");
  trace::begin("backward", "b");
  trace::end("backward", "a");
  { const trace::Span span("optim"); }
  trace::end("backward", "b");
  trace::stop();
  const auto spans = spans_of(read_json(folder_.file("t.json")));
  ASSERT_EQ(select(spans, "backward", "a").size(), 1U);
  const auto parts = select(spans, "backward", "b");
  ASSERT_EQ(parts.size(), 2U);
  const TraceSpan a = select(spans, "backward", "a").at(0);
  EXPECT_EQ(parts[0].end, a.end);
  EXPECT_EQ(parts[1].begin, a.end);
  EXPECT_GE(parts[1].end, select(spans, "optim").at(0).end);
  EXPECT_TRUE(select(spans, "never begun").empty());
}

TEST_F(Trace, ThreadsAreTheRanksThatTheySay) {
  const std::string path = folder_.file("sub/trace-%r.json");
  trace::start(path);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([rank] {
      trace::set_rank(rank, 4);
      for (int i = 0; i < 1000; ++i) nested();
      std::thread([rank] {  // a helper thread of the rank, as autograd has them
        trace::set_rank(rank, 4);
        const trace::Span span("backward", "helper");
      })
          .join();
    });
  }
  for (auto& thread : threads) thread.join();
  { const trace::Span span("main"); }
  EXPECT_EQ(trace::stop().size(), 4U);
  for (int rank = 0; rank < 4; ++rank) {
    const auto spans = spans_of(read_json(folder_.file("sub/trace-" + std::to_string(rank) + ".json")));
    EXPECT_EQ(select(spans, "forward").size(), 1000U);
    EXPECT_EQ(select(spans, "unshard").size(), 1000U);
    EXPECT_EQ(select(spans, "main").size(), rank == 0 ? 1U : 0U) << "threads without a rank go to the first file";
    for (const TraceSpan& span : spans) EXPECT_EQ(span.pid, span.kind == "main" ? 4 : rank);
    EXPECT_NE(select(spans, "backward").at(0).tid, select(spans, "forward").at(0).tid);
  }
}

TEST_F(Trace, ASpanMayEndOnAnotherThreadOfItsRank) {
  trace::start(folder_.file("t.json"));
  trace::begin("backward", "a");
  std::thread([] { trace::end("backward", "a"); }).join();
  trace::stop();
  EXPECT_FALSE(select(spans_of(read_json(folder_.file("t.json"))), "backward", "a").at(0).unfinished);
}

TEST_F(Trace, AnyTextIsValidJson) {
  trace::start(folder_.file("t.json"));
  const std::string odd = "quote\" back\\slash\n\t\x01 \x7f \xc3\xa4 bad \xff\xc3 \xed\xa0\x80 \xf0\x9f\x98\x80";
  { const trace::Span span("forward", odd); }
  std::string much(84, 'x');
  much += "\xc3\xa4";  // two bytes, of which one would fit
  { const trace::Span span("long", much); }
  { const trace::Span span("short", std::string(3, '\0')); }
  trace::stop();
  const auto spans = spans_of(read_json(folder_.file("t.json")));
  EXPECT_EQ(select(spans, "forward").at(0).label,
            "quote\" back\\slash\n\t\x01 \x7f \xc3\xa4 bad \xef\xbf\xbd\xef\xbf\xbd \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd "
            "\xf0\x9f\x98\x80");
  EXPECT_EQ(select(spans, "long").at(0).label, std::string(84, 'x'));
  EXPECT_EQ(select(spans, "short").at(0).label, std::string(3, '\0'));
}

TEST_F(Trace, StartsNestAndTheLastStopWrites) {
  const std::string file = folder_.file("t.json");
  trace::start(file);
  trace::start(file);
  EXPECT_TRUE(trace::stop().empty());
  EXPECT_TRUE(trace::enabled());
  nested();
  EXPECT_EQ(trace::stop().size(), 1U);
  EXPECT_TRUE(trace::stop().empty());
  trace::start(file);  // a new recording: nothing of the old one
  { const trace::Span span("second"); }
  trace::stop();
  EXPECT_EQ(spans_of(read_json(file)).size(), 1U);
}

TEST_F(Trace, SpansAcrossRecordingsAreLeftOut) {
  trace::start(folder_.file("a.json"));
  trace::AsyncSpan async;
  {
    const trace::Span span("forward");
    async.start(trace::Lane::kGather, "unshard");
    trace::stop();
    trace::start(folder_.file("b.json"));
  }
  async.finish();
  trace::stop();
  EXPECT_EQ(spans_of(read_json(folder_.file("a.json"))).size(), 2U);
  EXPECT_TRUE(spans_of(read_json(folder_.file("b.json"))).empty());
}

TEST_F(Trace, Errors) {
  EXPECT_EQ(value_error([] { return trace::start(""), 0; }), "[trace] path is empty, want a file name, e.g. trace-%r.json");
  EXPECT_THAT(value_error([] { return trace::start("x", {.events_per_thread = 0}), 0; }),
              HasSubstr("[trace] events_per_thread is 0, want 1 to "));
  EXPECT_THAT(value_error([] { return trace::start("x", {.events_per_thread = std::numeric_limits<std::size_t>::max()}), 0; }),
              HasSubstr("events_per_thread is 18446744073709551615"));
  trace::set_rank(1, 3);
  EXPECT_EQ(value_error([] { return trace::start("x.json"), 0; }),
            "[trace] path \"x.json\" has no %r, want it: all 3 ranks would write the same file");
  trace::set_rank(-1, 0);
  const std::string file = folder_.file("t.json");
  trace::start(file);
  EXPECT_EQ(value_error([] { return trace::start("other.json"), 0; }),
            "[trace] already recording to \"" + file + "\", want stop() before \"other.json\"");
  trace::stop();
  const std::string folder = message_of<Error>([] { return trace::start("/proc/no/t.json"), 0; });
  EXPECT_THAT(folder, HasSubstr("[trace] cannot make the folder /proc/no: "));
  EXPECT_FALSE(trace::enabled());
  trace::start("/proc/no.json");
  EXPECT_EQ(message_of<Error>([] { return trace::stop(); }), "[trace] cannot write /proc/no.json");
  EXPECT_FALSE(trace::enabled());
}

/// What a program with HP_TRACE does: run below, in a process of its own.
TEST(Environment, DISABLED_Program) {
  EXPECT_TRUE(trace::enabled());
  std::cout << value_error([] { return trace::set_rank(1, 2), 0; }) << '\n';
  nested();
}

std::string run_program(const std::map<std::string, std::string>& environment) {
  Process process(self_path(), {"--gtest_filter=Environment.DISABLED_Program", "--gtest_also_run_disabled_tests"}, environment);
  EXPECT_EQ(process.wait(std::chrono::seconds(50)), 0) << process.output();
  return process.output();
}

TEST_F(Trace, EnvironmentStartsARecordingThatTheEndOfTheProgramWrites) {
  run_program({{"HP_TRACE", folder_.file("sub/t-%r.json")}, {"WORLD_SIZE", "2"}});
  const auto spans = spans_of(read_json(folder_.file("sub/t-1.json")));
  EXPECT_EQ(select(spans, "forward", "layers.0").size(), 1U);
  EXPECT_EQ(spans.at(0).pid, 1);
}

TEST_F(Trace, EnvironmentOfSeveralProcessesNeedsTheRank) {
  const std::string file = folder_.file("t.json");
  const std::string message = "[trace] HP_TRACE=\"" + file + "\" has no %r, want it: all 2 ranks would write the same file";
  EXPECT_THAT(run_program({{"HP_TRACE", file}, {"WORLD_SIZE", "2"}}), HasSubstr(message));
  EXPECT_THAT(run_program({{"HP_TRACE", file}}), HasSubstr("no ValueError")) << "threads of one process share the file";
}

}  // namespace
}  // namespace hyper_parallel::testing
