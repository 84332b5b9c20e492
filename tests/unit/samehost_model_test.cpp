// The protocols of docs/design/009-same-host.md in every interleaving of their steps. Each model has mutations, and the checker
// must find what they break; the order of memory is not modelled, only that of the steps.
#include <array>
#include <memory>

#include <gtest/gtest.h>

#include "support/explore.h"

namespace hyper_parallel::testing {
namespace {

using Byte = std::uint8_t;

// ---- Mapped gathers. Ranks run passes over two units, the second one prefetched. What peers read is written in two steps with a
// torn value in between: shards by an optimizer between the passes, copies in another dtype right before they are published.

constexpr int kMaxRanks = 3, kUnits = 2, kPasses = 3;
constexpr Byte kTorn = 99;

struct Gathers {
  std::array<Byte, kMaxRanks> pc = {};
  std::array<std::array<Byte, kUnits>, kMaxRanks> slice = {};  ///< pass whose values it holds
  std::array<std::array<Byte, kUnits>, kMaxRanks> published = {}, finished = {};
  Byte wrong = 0;  ///< somebody has read another value than the one of its pass
};

enum class Fault {
  kNone,
  kNoWaitForReaders,      ///< a phase ends when this rank has read
  kPublishBeforeWriting,  ///< copies only
  kFinishBeforeReading,   ///< of the last unit
  kOnePassBehind,         ///< a gather is content with the slices of the pass before
};

struct GatherModel {
  int ranks = 2;
  bool copies = false;
  bool aborts = false;  ///< passes end by exceptions, after the last gather: finished without waiting, no optimizer step
  Fault fault = Fault::kNone;

  [[nodiscard]] Program<Gathers> program(int rank) const {
    const auto me = static_cast<std::size_t>(rank);
    Program<Gathers> out;
    const auto others = [&](auto f) {
      for (int r = 0; r < ranks; ++r) {
        if (r != rank) f(static_cast<std::size_t>(r));
      }
    };
    const auto write = [&](std::size_t u, int pass) {
      out.push_back({"write", {}, [=](Gathers& s) { s.slice[me][u] = kTorn; }});
      out.push_back({"written", {}, [=](Gathers& s) { s.slice[me][u] = static_cast<Byte>(pass); }});
    };
    const auto publish = [&](std::size_t u) { out.push_back({"publish", {}, [=](Gathers& s) { ++s.published[me][u]; }}); };
    const auto finish = [&](std::size_t u) { out.push_back({"finish", {}, [=](Gathers& s) { ++s.finished[me][u]; }}); };
    const auto wait_for_readers = [&](std::size_t u, int passes) {
      if (fault == Fault::kNoWaitForReaders) return;
      others([&](std::size_t r) {
        out.push_back({"wait for readers", [=](const Gathers& s) { return s.finished[r][u] >= passes; }, [](Gathers&) {}});
      });
    };
    const auto start = [&](std::size_t u, int pass) {
      if (aborts) wait_for_readers(u, pass);
      if (fault == Fault::kPublishBeforeWriting) publish(u);
      if (copies) write(u, pass);
      if (fault != Fault::kPublishBeforeWriting) publish(u);
    };
    const auto read = [&](std::size_t u, int pass) {
      const int want = fault == Fault::kOnePassBehind ? pass : pass + 1;
      others([&](std::size_t r) {
        out.push_back({"wait for slice", [=](const Gathers& s) { return s.published[r][u] >= want; }, [](Gathers&) {}});
      });
      others([&](std::size_t r) {
        out.push_back({"read", {}, [=](Gathers& s) { s.wrong |= static_cast<Byte>(s.slice[r][u] != pass); }});
      });
    };
    for (int pass = 0; pass < kPasses; ++pass) {
      if (!copies && pass > 0) write(0, pass), write(1, pass);
      start(0, pass);
      start(1, pass);
      read(0, pass);
      const bool early = fault == Fault::kFinishBeforeReading;
      if (early) finish(0), finish(1);
      read(1, pass);
      if (!early) finish(0), finish(1);
      if (!aborts) wait_for_readers(0, pass + 1), wait_for_readers(1, pass + 1);
    }
    return out;
  }

  [[nodiscard]] Verdict check() const {
    std::vector<Program<Gathers>> programs;
    for (int r = 0; r < ranks; ++r) programs.push_back(program(r));
    return explore<Gathers>({}, programs, [](const Gathers& s) { return s.wrong != 0 ? "read another pass's values" : ""; });
  }
};

TEST(MappedGathers, ReadTheValuesOfTheirPassInEveryInterleaving) {
  for (const bool copies : {false, true}) {
    const Verdict two = GatherModel{.ranks = 2, .copies = copies}.check(),
                  three = GatherModel{.ranks = 3, .copies = copies}.check();
    EXPECT_EQ(two.problem, "");
    EXPECT_EQ(three.problem, "");
    EXPECT_GT(two.states, 300);
    EXPECT_GT(three.states, 5000);
  }
}

TEST(MappedGathers, CopiesAreSafeAfterExceptionsToo) {
  for (const int ranks : {2, 3}) EXPECT_EQ((GatherModel{.ranks = ranks, .copies = true, .aborts = true}.check().problem), "");
}

TEST(MappedGathers, EveryMutationIsFound) {
  for (const bool copies : {false, true}) {
    for (const Fault fault :
         {Fault::kNoWaitForReaders, Fault::kPublishBeforeWriting, Fault::kFinishBeforeReading, Fault::kOnePassBehind}) {
      if (fault == Fault::kPublishBeforeWriting && !copies) continue;
      EXPECT_EQ((GatherModel{.ranks = 2, .copies = copies, .fault = fault}.check().problem), "read another pass's values")
          << static_cast<int>(fault);
    }
  }
}

// ---- Sleeping. One thread sets a flag and rings, the other looks for the flag and sleeps.

struct Sleeping {
  std::array<Byte, 2> pc = {};
  Byte flag = 0, count = 0, sleepers = 0, asleep = 0, seen = 0, saw = 0;
};

enum class BellFault { kNone, kReadAfterLooking, kLookAtSleepersFirst, kNoKernelComparison };

Verdict check_bell(BellFault fault) {
  const Step<Sleeping> read{"read bell", {}, [](Sleeping& s) { s.seen = s.count; }};
  const Step<Sleeping> find{"look", {}, [](Sleeping& s) {
                              if (s.flag != 0) s.pc[0] = 6;
                            }};
  const bool late = fault == BellFault::kReadAfterLooking;
  const bool blind = fault == BellFault::kNoKernelComparison;
  const Program<Sleeping> waiter = {
      late ? find : read,
      late ? read : find,
      {"enter", {}, [](Sleeping& s) { ++s.sleepers; }},
      {"futex wait", {}, [=](Sleeping& s) { s.asleep = static_cast<Byte>(blind || s.count == s.seen); }},
      {"sleep", [](const Sleeping& s) { return s.asleep == 0; }, [](Sleeping& s) { --s.sleepers; }},
      {"again", {}, [](Sleeping& s) { s.pc[0] = 0; }},
  };
  const Step<Sleeping> count{"count", {}, [](Sleeping& s) { ++s.count; }};
  const Step<Sleeping> sleepers{"sleepers?", {}, [](Sleeping& s) { s.saw = s.sleepers; }};
  const bool early = fault == BellFault::kLookAtSleepersFirst;
  const Program<Sleeping> ringer = {{"set", {}, [](Sleeping& s) { s.flag = 1; }},
                                    early ? sleepers : count,
                                    early ? count : sleepers,
                                    {"futex wake", {}, [](Sleeping& s) {
                                       if (s.saw != 0) s.asleep = 0;
                                     }}};
  return explore<Sleeping>({}, {waiter, ringer}, [](const Sleeping&) { return ""; });
}

TEST(Bell, NobodySleepsThroughARing) {
  EXPECT_EQ(check_bell(BellFault::kNone).problem, "");
  for (const BellFault fault : {BellFault::kReadAfterLooking, BellFault::kLookAtSleepersFirst, BellFault::kNoKernelComparison}) {
    EXPECT_NE(check_bell(fault).problem, "") << static_cast<int>(fault);
  }
}

// ---- A sender that gives up, against a receiver that copies.

struct GivingUp {
  std::array<Byte, 2> pc = {};
  Byte entry = 1;  ///< 1 posted, 2 claimed, 3 done, 4 revoked
  Byte freed = 0, torn = 0;
};

Verdict check_revoke(bool compare) {
  const Program<GivingUp> sender = {{"revoke",
                                     {},
                                     [=](GivingUp& s) {
                                       if (!compare || s.entry == 1) s.entry = 4;
                                     }},
                                    {"wait", [](const GivingUp& s) { return s.entry == 3 || s.entry == 4; }, [](GivingUp&) {}},
                                    {"free", {}, [](GivingUp& s) { s.freed = 1; }}};
  const auto copy = [](GivingUp& s) { s.torn |= s.freed; };
  const Program<GivingUp> receiver = {{"claim", {}, [](GivingUp& s) { s.entry == 1 ? s.entry = 2 : s.pc[1] = 4; }},
                                      {"copy", {}, copy},
                                      {"copy on", {}, copy},
                                      {"done", {}, [](GivingUp& s) { s.entry = 3; }}};
  return explore<GivingUp>({}, {sender, receiver}, [](const GivingUp& s) { return s.torn != 0 ? "read freed memory" : ""; });
}

TEST(GivingUpAMessage, WaitsForAReaderInTheMiddle) {
  EXPECT_EQ(check_revoke(true).problem, "");
  EXPECT_EQ(check_revoke(false).problem, "read freed memory");
}

}  // namespace
}  // namespace hyper_parallel::testing
