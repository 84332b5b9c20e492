// Rows that are read where they are, and notes that travel with reductions: what the engine has beyond Comm's public functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "comm/rows.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_host_mode.h"

namespace hyper_parallel::testing {
namespace {

using torch::Tensor;

constexpr std::int64_t kLarge = 70001;

Tensor values(int rank, std::int64_t n, torch::Dtype type) {
  return (torch::arange(n, torch::kLong) * 3 + rank * 7).remainder(120).to(type);
}

/// World size, and HP_SAMEHOST: over Gloo, in one process's memory, and as between processes.
class Rows : public ::testing::TestWithParam<std::tuple<int, const char*>> {
 protected:
  template <class Body>
  void on_ranks(Body body) {
    const auto [world, way] = GetParam();
    const Mode mode(way);
    run_ranks(world, [&, ranks = world](int rank) { body(current_world().comm(), rank, ranks); });
  }
};

TEST_P(Rows, AGatherHandsOutEachRowOnce) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : {torch::kFloat, torch::kBFloat16, torch::kByte}) {
      for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{999}, kLarge}) {
        for (const bool own_row : {false, true}) {
          const Tensor space = torch::zeros({n * world}, type), result = torch::zeros({n * world}, type);
          Tensor input = values(rank, n, type);
          if (own_row) input = space.narrow(0, rank * n, n).copy_(input);
          std::vector<int> seen(static_cast<std::size_t>(world));
          const CommCounters before = comm.counters();
          const auto read = [&](int r, const void* row) {
            ++seen[static_cast<std::size_t>(r)];
            std::memcpy(result.narrow(0, r * n, n).data_ptr(), row, input.nbytes());
          };
          gather_rows(comm, std::vector<RowGather>{{space, input, read}}).wait();
          EXPECT_EQ(seen, std::vector<int>(seen.size(), n > 0 ? 1 : 0));
          for (int r = 0; r < world; ++r) EXPECT_TRUE(result.narrow(0, r * n, n).equal(values(r, n, type))) << n << " of " << r;
          EXPECT_EQ(comm.counters().calls - before.calls, 1);
          EXPECT_EQ(comm.counters().bytes_sent - before.bytes_sent, (world - 1) * static_cast<std::int64_t>(input.nbytes()));
        }
      }
    }
  });
}

// Equal and different sizes and dtypes, one of them empty, in one operation; then another, whose messages must not meet these.
TEST_P(Rows, SeveralTensorsAreOneOperation) {
  on_ranks([](const Comm& comm, int rank, int world) {
    const std::vector<std::pair<std::int64_t, torch::Dtype>> kinds{
        {5000, torch::kFloat}, {0, torch::kFloat}, {5000, torch::kFloat}, {kLarge, torch::kBFloat16}, {3, torch::kByte}};
    for (int round = 0; round < 3; ++round) {
      std::vector<RowGather> parts;
      std::vector<Tensor> results;
      std::int64_t bytes = 0;
      for (std::size_t p = 0; p < kinds.size(); ++p) {
        const auto [n, type] = kinds[p];
        const Tensor input = values(rank + static_cast<int>(p) + round, n, type);
        bytes += static_cast<std::int64_t>(input.nbytes());
        const Tensor result = results.emplace_back(torch::zeros({n * world}, type));
        const auto read = [result, width = input.nbytes()](int r, const void* row) {
          std::memcpy(static_cast<char*>(result.data_ptr()) + static_cast<std::size_t>(r) * width, row, width);
        };
        parts.push_back({torch::empty({n * world}, type), input, read});
      }
      const CommCounters before = comm.counters();
      gather_rows(comm, parts).wait();
      EXPECT_EQ(comm.counters().calls - before.calls, 1);
      EXPECT_EQ(comm.counters().bytes_sent - before.bytes_sent, (world - 1) * bytes);
      for (std::size_t p = 0; p < kinds.size(); ++p) {
        const auto [n, type] = kinds[p];
        for (int r = 0; r < world; ++r) {
          EXPECT_TRUE(results[p].narrow(0, r * n, n).equal(values(r + static_cast<int>(p) + round, n, type))) << p << " of " << r;
        }
      }
    }
  });
}

TEST_P(Rows, AGatherMeetsAPlainOne) {
  on_ranks([](const Comm& comm, int rank, int world) {
    const std::int64_t n = 5000;
    const Tensor input = values(rank, n, torch::kFloat), result = torch::zeros({n * world});
    Tensor want = torch::zeros({n * world});
    for (int r = 0; r < world; ++r) want.narrow(0, r * n, n).copy_(values(r, n, torch::kFloat));
    for (int plain = 0; plain < world; ++plain) {
      result.zero_();
      if (rank == plain) {
        comm.all_gather_single(result, input).wait();
      } else {
        const auto read = [&](int r, const void* row) {
          std::memcpy(result.narrow(0, r * n, n).data_ptr(), row, input.nbytes());
        };
        gather_rows(comm, std::vector<RowGather>{{torch::empty({n * world}), input, read}}).wait();
      }
      EXPECT_TRUE(result.equal(want)) << "plain on rank " << plain;
    }
  });
}

/// The row of rank r: its number, then its double.
Tensor notes_of(int rank, int world, std::int64_t bytes) {
  const Tensor notes = torch::full({world * bytes}, 255, torch::kByte);
  notes.narrow(0, rank * bytes, bytes).copy_(torch::arange(bytes, torch::kLong).mul(rank + 1).remainder(251));
  return notes;
}

Tensor all_notes(int world, std::int64_t bytes) {
  const Tensor notes = torch::empty({world * bytes}, torch::kByte);
  for (int r = 0; r < world; ++r) notes.narrow(0, r * bytes, bytes).copy_(notes_of(r, world, bytes).narrow(0, r * bytes, bytes));
  return notes;
}

TEST_P(Rows, NotesTravelWithAReduceScatter) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{999}, kLarge}) {
      for (const std::int64_t bytes : {1, 200, 9000}) {
        const Tensor input = values(rank, n * world, torch::kFloat), output = torch::zeros({n}), plain = torch::zeros({n});
        comm.reduce_scatter_single(plain, input).wait();
        const Tensor notes = notes_of(rank, world, bytes);
        const CommCounters before = comm.counters();
        reduce_scatter_with_notes(comm, output, input, notes).wait();
        EXPECT_TRUE(output.equal(plain));
        EXPECT_TRUE(notes.equal(all_notes(world, bytes)));
        EXPECT_EQ(comm.counters().calls - before.calls, 1);
        EXPECT_EQ(comm.counters().bytes_sent - before.bytes_sent, (world - 1) * (n * 4 + bytes));
      }
    }
  });
}

TEST_P(Rows, NotesTravelWithAnAllReduce) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{999}, kLarge}) {
      const std::int64_t bytes = 3;
      const Tensor plain = values(rank, n, torch::kFloat), tensor = plain.clone();
      comm.all_reduce(plain).wait();
      const Tensor notes = notes_of(rank, world, bytes);
      Work work = all_reduce_with_notes(comm, tensor, notes);
      const bool more = work.advance();
      EXPECT_TRUE(notes.equal(all_notes(world, bytes))) << "with the first phase";
      if (more) work.wait();
      EXPECT_TRUE(tensor.equal(plain));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Rows,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values("0", "1", "processes")));

TEST(RowsAlone, ADryRunHasItsOwn) {
  const Comm comm = Comm::fake(1, 3);
  const Tensor input = values(1, 4, torch::kFloat), result = torch::zeros({12});
  const auto read = [&](int r, const void* row) { std::memcpy(result.narrow(0, r * 4, 4).data_ptr(), row, input.nbytes()); };
  gather_rows(comm, std::vector<RowGather>{{torch::empty({12}), input, read}}).wait();
  EXPECT_TRUE(result.equal(input.repeat({3})));
  const Tensor notes = notes_of(1, 3, 2), output = torch::zeros({4});
  reduce_scatter_with_notes(comm, output, result, notes).wait();
  EXPECT_TRUE(notes.equal(notes_of(1, 3, 2).narrow(0, 2, 2).repeat({3})));
}

TEST(RowsAlone, WhatDoesNotFitIsRefused) {
  const Comm comm = Comm::fake(0, 2);
  const auto nothing = [](int, const void*) {};
  EXPECT_EQ(value_error([&] {
              gather_rows(comm, std::vector<RowGather>{{torch::zeros({7}), torch::zeros({4}), nothing}}).wait();
            }),
            "[all_gather_single] space has 7 elements, want 2 x 4 (group fake)");
  EXPECT_EQ(value_error([&] {
              reduce_scatter_with_notes(comm, torch::zeros({4}), torch::zeros({8}), torch::zeros({3}, torch::kByte)).wait();
            }),
            "[reduce_scatter_single] notes are 3 of Byte, want bytes, a multiple of the group size 2 (group fake)");
  EXPECT_EQ(value_error([&] { all_reduce_with_notes(comm, torch::zeros({4}), torch::zeros({2})).wait(); }),
            "[all_reduce] notes are 2 of Float, want bytes, a multiple of the group size 2 (group fake)");
  EXPECT_EQ(comm.counters().calls, 0) << "refused before anything was numbered";
}

}  // namespace
}  // namespace hyper_parallel::testing
