// What happens when ranks disagree, leave or pass something invalid: an error that names operation, label and peer, never wrong
// data.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>

#include "support/message_of.h"
#include "support/rank_threads.h"

namespace hyper_parallel {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::RankError;
using testing::RankOptions;
using testing::run_ranks;
using ::testing::StartsWith;

template <class Body>
void on_two_ranks(Body body) {
  run_ranks(2, RankOptions{.timeout = 20s}, [&](int rank) {
    const auto comm = current_world().comm();
    comm.barrier();  // both start together, however busy the machine is
    body(comm, rank);
  });
}

void expect_plain(const std::string& message) {
  EXPECT_THAT(message, AllOf(Not(HasSubstr("\n")), Not(HasSubstr(".cc")), Not(HasSubstr("frame #"))));
}

// The rank whose time is up first closes its connections; the other may notice that a moment before its own time is up. Both
// errors name both sides.
TEST(Disagreement, DifferentOperationsTimeOutWithBothNames) {
  std::atomic<int> timeouts = 0;
  on_two_ranks([&](const Comm& comm, int rank) {
    const auto a = torch::zeros({8});
    const auto b = torch::zeros({16});
    const auto body = [&] {
      if (rank == 0) {
        comm.all_gather_single(b, a, {.label = "layers.1", .timeout = 1500ms}).wait();
      } else {
        comm.reduce_scatter_single(a, b, {.label = "layers.1", .timeout = 1500ms}).wait();
      }
    };
    const auto message = message_of<CommError>(body);
    const std::string peer = rank == 0 ? "peer rank 1 (global 1)" : "peer rank 0 (global 0)";
    EXPECT_THAT(message,
                AnyOf(HasSubstr("no answer from " + peer + " within 1.5 s"), HasSubstr(peer + " closed the connection")));
    EXPECT_THAT(message,
                AllOf(StartsWith(rank == 0 ? "[all_gather_single]" : "[reduce_scatter_single]"), HasSubstr("unit layers.1"),
                      HasSubstr("group world"), HasSubstr("operation #2"), HasSubstr("64 B")));
    EXPECT_THAT(message, HasSubstr("about that peer: it "));
    EXPECT_THAT(message, HasSubstr(rank == 0 ? "in reduce_scatter_single #2" : "in all_gather_single #2"));
    expect_plain(message);
    if (message.find("no answer") != std::string::npos) ++timeouts;
  });
  EXPECT_GE(timeouts, 1);
}

TEST(Disagreement, DifferentLabelsTimeOut) {
  on_two_ranks([](const Comm& comm, int rank) {
    const auto a = torch::full({8}, rank, torch::kFloat);
    const auto b = torch::full({16}, 7.0F);
    const std::string mine = rank == 0 ? "layers.1" : "layers.2";
    const auto message = message_of<CommError>([&] { comm.all_gather_single(b, a, {.label = mine, .timeout = 1500ms}).wait(); });
    EXPECT_THAT(message, AllOf(HasSubstr("unit " + mine), HasSubstr(rank == 0 ? "unit layers.2" : "unit layers.1")));
    EXPECT_EQ(b[rank == 0 ? 15 : 0].item<float>(), 7.0F) << "data of another unit arrived";
  });
}

TEST(Disagreement, DifferentSizesFailInsteadOfCorrupting) {
  on_two_ranks([](const Comm& comm, int rank) {
    const std::int64_t n = rank == 0 ? 8 : 4096;
    const auto a = torch::zeros({n});
    const auto b = torch::full({2 * n}, 7.0F);
    const auto message = message_of<CommError>([&] { comm.all_gather_single(b, a, {.timeout = 1500ms}).wait(); });
    EXPECT_THAT(message, AllOf(HasSubstr("64 B"), HasSubstr("32.8 kB"))) << message;
  });
}

TEST(Disagreement, NothingAgainstSomething) {
  on_two_ranks([](const Comm& comm, int rank) {
    const std::int64_t n = rank == 0 ? 0 : 4;
    const auto body = [&] {
      comm.all_gather_single(torch::zeros({2 * n}), torch::zeros({n}), {.timeout = 1500ms}).wait();
      comm.barrier({.timeout = 1500ms});
    };
    EXPECT_THAT(message_of<CommError>(body), HasSubstr("peer rank"));
  });
}

TEST(Disagreement, AnOperationsOwnTimeoutWins) {
  on_two_ranks([](const Comm& comm, int rank) {
    if (rank == 1) return;
    const auto tensor = torch::zeros({4});
    const auto start = std::chrono::steady_clock::now();
    // Rank 1 ends without taking part: either its connection closes or the time is up.
    EXPECT_THROW(comm.broadcast(tensor, 1, {.timeout = 200ms}).wait(), CommError);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  });
}

TEST(Failure, LeavingRankIsNamedAndTheGroupStaysBroken) {
  run_ranks(3, RankOptions{.timeout = 20s}, [](int rank) {
    const auto comm = current_world().comm();
    comm.barrier();
    if (rank == 1) return;
    const auto input = torch::zeros({3 * 1000});
    const auto output = torch::zeros({1000});
    const auto start = std::chrono::steady_clock::now();
    const auto first = message_of<CommError>([&] { comm.reduce_scatter_single(output, input, {.label = "layers.4"}).wait(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 15s) << "waited for the timeout although the connection was closed";
    EXPECT_THAT(first, AllOf(HasSubstr("[reduce_scatter_single] peer rank"), HasSubstr("closed the connection"),
                             HasSubstr("unit layers.4"), HasSubstr("group world"), HasSubstr("12 kB"), HasSubstr("/3)")));
    // Whoever is blamed, the rank that left is in the text: directly, or in what the blamed peer reported.
    EXPECT_THAT(first, HasSubstr("peer rank 1 (global 1)"));
    expect_plain(first);
    const auto later = message_of<CommError>([&] { comm.barrier(); });
    EXPECT_THAT(later, AllOf(HasSubstr("[barrier] group world is broken by an earlier failure"), HasSubstr("unit layers.4")));
    const auto records = comm.flight_record();
    ASSERT_FALSE(records.empty());
    EXPECT_EQ(records.back().operation, "reduce_scatter_single");
    EXPECT_EQ(records.back().state, FlightRecord::State::kFailed);
  });
}

TEST(Failure, ErrorCarriesItsParts) {
  run_ranks(2, RankOptions{.timeout = 20s}, [](int rank) {
    const auto comm = current_world().comm();
    comm.barrier();
    try {
      auto tensor = torch::zeros({100});
      if (rank == 0) comm.all_reduce(tensor, {.label = "norm", .timeout = 500ms}).wait();
      if (rank == 1) std::this_thread::sleep_for(1500ms);
    } catch (const TimeoutError& error) {
      EXPECT_EQ(error.failure().operation, "all_reduce");
      EXPECT_EQ(error.failure().label, "norm");
      EXPECT_EQ(error.failure().group, "world");
      EXPECT_EQ(error.failure().bytes, 400);
      EXPECT_EQ(error.failure().peer, 1);
      EXPECT_EQ(error.failure().sequence, 2U);
      return;
    }
    EXPECT_EQ(rank, 1);
  });
}

TEST(Failure, DroppedWorksDoNotDisturbLaterOnes) {
  run_ranks(2, [](int rank) {
    const auto comm = current_world().comm();
    for (int i = 0; i < 5; ++i) {
      const auto output = torch::zeros({2000});
      { [[maybe_unused]] const auto dropped = comm.all_gather_single(output, torch::ones({1000})); }
      const auto sum = torch::full({10}, rank + 1.0F);
      comm.all_reduce(sum).wait();
      EXPECT_EQ(sum[9].item<float>(), 3.0F);
    }
    comm.barrier();
  });
}

TEST(Failure, MessagesBetweenTwoRanksDoNotConfuseTheOthers) {
  run_ranks(3, [](int rank) {
    const auto comm = current_world().comm();
    for (int i = 0; i < 3; ++i) {
      const auto tensor = torch::full({4}, rank + i, torch::kFloat);
      if (rank == 0) comm.send(tensor, 2).wait();
      if (rank == 2) comm.recv(tensor, 0).wait();
      EXPECT_EQ(tensor[3].item<float>(), static_cast<float>(rank == 2 ? i : rank + i));
      comm.barrier({.timeout = 10s});
    }
  });
}

TEST(Failure, FirstExceptionOfARankIsRethrownWithItsRank) {
  try {
    run_ranks(3, [](int rank) {
      const auto comm = current_world().comm();
      if (rank == 2) throw ValueError("[test] too bad");
      comm.barrier();
    });
    FAIL() << "nothing thrown";
  } catch (const RankError& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_STREQ(error.what(), "rank 2/3: [test] too bad");
    EXPECT_THROW(error.rethrow_cause(), ValueError);
  }
}

TEST(Control, AgreeThrowsTheSameErrorEverywhere) {
  run_ranks(3, [](int rank) {
    const auto comm = current_world().comm();
    const auto message = message_of<Error>([&] { comm.agree("load", rank == 1 ? "file a.bin is missing" : ""); });
    EXPECT_EQ(message, "[load] file a.bin is missing (rank 1/3)");
    comm.agree("load", "");
  });
}

TEST(Control, CheckSameNamesTheFirstDifference) {
  run_ranks(3, [](int rank) {
    const auto comm = current_world().comm();
    comm.check_same("plan", {"a", "b"});
    const auto changed = message_of<ValueError>([&] {
      comm.check_same("plan", {"same", rank == 2 ? "w: 4 x 4" : "w: 4 x 5", "x"});
    });
    EXPECT_EQ(changed, "[plan] ranks disagree, first in line 1: rank 0 has \"w: 4 x 5\", rank 2 has \"w: 4 x 4\" (group world)");
    std::vector<std::string> lines{"one"};
    if (rank == 1) lines.emplace_back("two");
    const auto longer = message_of<ValueError>([&] { comm.check_same("plan", lines); });
    EXPECT_EQ(longer, "[plan] ranks disagree, first in line 1: rank 0 has nothing, rank 1 has \"two\" (group world)");
    // Equal text cut into lines differently is a difference too.
    const auto cut = rank == 0 ? std::vector<std::string>{"ab", "c"} : std::vector<std::string>{"a", "bc"};
    EXPECT_THAT(message_of<ValueError>([&] { comm.check_same("plan", cut); }), HasSubstr("first in line 0"));
  });
}

TEST(Control, FlightRecorderKeepsTheLastOperations) {
  run_ranks(2, [](int) {
    const auto comm = current_world().comm();
    const auto tensor = torch::zeros({25});
    for (int i = 0; i < 70; ++i) comm.all_reduce(tensor, {.label = "layers." + std::to_string(i)}).wait();
    auto pending = comm.broadcast(tensor, 0, {.label = std::string(200, 'x')});
    const auto records = comm.flight_record();
    ASSERT_EQ(records.size(), 64U);
    EXPECT_EQ(records.front().sequence, 8U);
    EXPECT_EQ(records.front().label, "layers.7");
    EXPECT_EQ(records.front().bytes, 100);
    EXPECT_EQ(records.front().state, FlightRecord::State::kDone);
    EXPECT_EQ(records.back().operation, "broadcast");
    EXPECT_EQ(records.back().state, FlightRecord::State::kStarted);
    EXPECT_EQ(records.back().label, std::string(63, 'x'));
    pending.wait();
    EXPECT_EQ(comm.flight_record().back().state, FlightRecord::State::kDone);
    EXPECT_EQ(comm.counters().calls, 71);
  });
}

// Invalid arguments throw before anything is sent: the group works on afterwards.
TEST(Arguments, AreCheckedBeforeAnythingIsSent) {
  run_ranks(2, [](int) {
    const auto comm = current_world().comm();
    const auto f = [](std::int64_t n) { return torch::zeros({n}); };
    const auto expect = [&](const char* text, const std::function<void()>& body) {
      EXPECT_THAT(message_of<ValueError>(body), HasSubstr(text));
    };
    expect("[all_gather_single] output has 5 elements, want 2 x 2", [&] { comm.all_gather_single(f(5), f(2)).wait(); });
    expect("[all_gather_single] output is Double, want the input's Float",
           [&] { comm.all_gather_single(f(4).to(torch::kDouble), f(2)).wait(); });
    expect("[all_gather_single] input is undefined", [&] { comm.all_gather_single(f(4), {}).wait(); });
    expect("[all_gather_single] output is not contiguous", [&] {
      comm.all_gather_single(torch::zeros({2, 2}).t(), f(2)).wait();
    });
    expect("[all_gather_single] input is on meta", [&] { comm.all_gather_single(f(4), torch::zeros({2}, torch::kMeta)).wait(); });
    expect("[all_gather_v] 1 sizes, want one for each of 2 ranks",
           [&] { comm.all_gather_v(f(4), f(2), std::vector<std::int64_t>{4}).wait(); });
    expect("[all_gather_v] size -1 for output", [&] { comm.all_gather_v(f(4), f(2), std::vector<std::int64_t>{-1, 5}).wait(); });
    expect("[all_gather_v] output has 4 elements, want the sum of its sizes, 5", [&] {
      comm.all_gather_v(f(4), f(2), std::vector<std::int64_t>{2, 3}).wait();
    });
    expect("[all_gather_v] input has 3 elements, want the size of this rank, 2", [&] {
      comm.all_gather_v(f(4), f(3), std::vector<std::int64_t>{2, 2}).wait();
    });
    expect("[reduce_scatter_single] input has 3 elements, want 2 x 2", [&] { comm.reduce_scatter_single(f(2), f(3)).wait(); });
    expect("[reduce_scatter_single] output is Int for Float input",
           [&] { comm.reduce_scatter_single(f(2).to(torch::kInt), f(4)).wait(); });
    expect("[reduce_scatter_single] cannot average Long",
           [&] { comm.reduce_scatter_single(f(2).to(torch::kLong), f(4).to(torch::kLong), {.op = ReduceOp::kAvg}).wait(); });
    expect("[all_reduce] scale 0.5 for Int", [&] { comm.all_reduce(f(2).to(torch::kInt), {.scale = 0.5}).wait(); });
    expect("[all_reduce] cannot reduce ComplexFloat", [&] { comm.all_reduce(f(2).to(torch::kComplexFloat)).wait(); });
    const auto small = f(1);
    const auto other = f(9).to(torch::kDouble);
    expect("[reduce_scatter_single] workspace has 4 bytes, want at least 16",
           [&] { comm.reduce_scatter_single(f(2), f(4), {.workspace = &small}).wait(); });
    expect("[all_reduce] workspace is Double", [&] { comm.all_reduce(f(4), {.workspace = &other}).wait(); });
    expect("[all_to_all_single] input has 3 elements, want a multiple of the group size 2",
           [&] { comm.all_to_all_single(f(4), f(3)).wait(); });
    expect("[all_to_all_single] this rank sends itself", [&] {
      const std::vector<std::int64_t> out{2, 2};
      const std::vector<std::int64_t> in{1, 1};
      comm.all_to_all_single(f(4), f(2), out, in).wait();
    });
    expect("[broadcast] root 2, want 0 to 1", [&] { comm.broadcast(f(1), 2).wait(); });
    expect("[scatter] root -1", [&] { comm.scatter(f(1), f(2), -1).wait(); });
    expect("[send] peer 5, want 0 to 1", [&] { comm.send(f(1), 5).wait(); });
    expect("[recv] peer -1", [&] { comm.recv(f(1), -1).wait(); });
    expect("is this rank itself", [&] { comm.send(f(1), comm.rank()).wait(); });
    EXPECT_EQ(comm.counters().calls, 0);
    comm.barrier();
  });
}

TEST(Arguments, EmptyHandlesSayWhereToGetOne) {
  const Comm empty;
  EXPECT_THAT(message_of<ValueError>([&] { (void)empty.rank(); }), HasSubstr("empty Comm handle"));
  EXPECT_THAT(message_of<ValueError>([&] { empty.all_reduce(torch::zeros({1})).wait(); }), HasSubstr("empty Comm handle"));
  EXPECT_THAT(message_of<ValueError>([] { (void)World().rank(); }), HasSubstr("empty World handle"));
  Work nothing;
  EXPECT_FALSE(nothing.pending());
  nothing.wait();
}

}  // namespace
}  // namespace hyper_parallel
