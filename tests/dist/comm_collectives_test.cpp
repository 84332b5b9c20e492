// Every collective against a direct computation, over worlds, dtypes and sizes.
#include <cstring>
#include <numeric>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>

#include "support/counting_allocator.h"
#include "support/rank_threads.h"

namespace hyper_parallel {
namespace {

using torch::Tensor;
using Sizes = std::vector<std::int64_t>;

const std::vector<torch::Dtype> kFloating{torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16};
const std::vector<torch::Dtype> kAll{torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kChar,
                                     torch::kByte,  torch::kShort,  torch::kInt,  torch::kLong,     torch::kBool,
                                     at::kUInt16,   at::kUInt32,    at::kUInt64};
constexpr std::int64_t kLarge = 70001;

bool is_floating(torch::Dtype type) { return c10::isFloatingType(type); }

// Small integers, so that sums and products of eight ranks are exact in every dtype (integers may wrap, the same way everywhere).
Tensor integers(int rank, std::int64_t n, torch::Dtype type, ReduceOp op = ReduceOp::kSum) {
  const auto base = torch::arange(n, torch::kLong) * 3 + rank * 7;
  if (type == torch::kBool) return base.remainder(2);
  return op == ReduceOp::kProduct && is_floating(type) ? base.remainder(2) + 1 : base.remainder(5);
}

Tensor data(int rank, std::int64_t n, torch::Dtype type, ReduceOp op = ReduceOp::kSum) {
  return integers(rank, n, type, op).to(type);
}

Tensor reduced(int world, std::int64_t n, torch::Dtype type, ReduceOp op) {
  std::vector<Tensor> parts;
  for (int q = 0; q < world; ++q) parts.push_back(integers(q, n, type, op));
  const auto all = torch::stack(parts);
  const bool is_bool = type == torch::kBool;
  if (n == 0) return torch::empty({0}, type);
  switch (op) {
    case ReduceOp::kSum:
      return is_bool ? all.amax(0).to(type) : all.sum(0).to(type);
    case ReduceOp::kAvg:
      return (all.sum(0).to(torch::kDouble) / world).to(type);
    case ReduceOp::kProduct:
      return all.prod(0).to(type);
    case ReduceOp::kMin:
      return all.amin(0).to(type);
    case ReduceOp::kMax:
      return all.amax(0).to(type);
  }
  return {};
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.numel() == y.numel() &&
         (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

// A generator of its own: the default one is shared by the rank threads.
Tensor random_numbers(std::int64_t n, int seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  return torch::randn({n}, generator, torch::TensorOptions());
}

std::string where(torch::Dtype type, std::int64_t n) { return std::string(c10::toString(type)) + " x " + std::to_string(n); }

// Bytes that this rank sent to peers since the last call.
std::int64_t sent(const Comm& comm) {
  const auto counters = comm.counters();
  comm.reset_counters();
  return counters.bytes_sent;
}

std::vector<std::int64_t> sizes_for(torch::Dtype type, int world) {
  Sizes sizes{0, 1, 5, 999};
  if (type == torch::kFloat || type == torch::kBFloat16 || type == torch::kInt) sizes.push_back((kLarge / world) | 1);
  return sizes;
}

class Collectives : public ::testing::TestWithParam<int> {
 protected:
  template <class Body>
  void on_ranks(Body body) {
    testing::run_ranks(GetParam(), [&](int rank) { body(current_world().comm(), rank, GetParam()); });
  }
};

TEST_P(Collectives, AllGather) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kAll) {
      for (const auto n : sizes_for(type, world)) {
        std::vector<Tensor> parts;
        for (int q = 0; q < world; ++q) parts.push_back(data(q, n, type));
        const auto expected = torch::cat(parts);
        const auto input = data(rank, n, type);
        const auto output = torch::zeros({n * world}, type);
        sent(comm);
        comm.all_gather_single(output, input).wait();
        EXPECT_TRUE(same_bits(output, expected)) << where(type, n);
        EXPECT_EQ(sent(comm), (world - 1) * n * static_cast<std::int64_t>(input.element_size()));
        const auto in_place = torch::zeros({n * world}, type);
        const auto slice = in_place.narrow(0, rank * n, n);
        slice.copy_(input);
        comm.all_gather_single(in_place, slice).wait();
        EXPECT_TRUE(same_bits(in_place, expected)) << "in place " << where(type, n);
      }
    }
  });
}

TEST_P(Collectives, AllGatherOfDifferentSizes) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kAll) {
      Sizes sizes;
      std::vector<Tensor> parts;
      for (int q = 0; q < world; ++q) {
        sizes.push_back(q % 3 == 1 ? 0 : 3 + 2 * q);
        parts.push_back(data(q, sizes.back(), type));
      }
      const auto expected = torch::cat(parts);
      const auto output = torch::zeros({expected.numel()}, type);
      const auto input = parts[static_cast<std::size_t>(rank)];
      sent(comm);
      comm.all_gather_v(output, input, sizes).wait();
      EXPECT_TRUE(same_bits(output, expected)) << c10::toString(type);
      EXPECT_EQ(sent(comm), (world - 1) * static_cast<std::int64_t>(input.nbytes()));
    }
  });
}

TEST_P(Collectives, ReduceScatter) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kAll) {
      for (const auto op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
        for (const auto n : sizes_for(type, world)) {
          const auto input = data(rank, n * world, type, op);
          const auto output = torch::zeros({n}, type);
          sent(comm);
          comm.reduce_scatter_single(output, input, {.op = op}).wait();
          const auto expected = reduced(world, n * world, type, op).narrow(0, rank * n, n);
          EXPECT_TRUE(same_bits(output, expected)) << where(type, n) << " op " << static_cast<int>(op);
          EXPECT_EQ(sent(comm), (world - 1) * n * static_cast<std::int64_t>(input.element_size()));
        }
      }
    }
  });
}

TEST_P(Collectives, AllReduce) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kAll) {
      for (const auto op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
        for (const auto n : sizes_for(type, world)) {
          const auto tensor = data(rank, n, type, op);
          const auto width = static_cast<std::int64_t>(tensor.element_size());
          sent(comm);
          comm.all_reduce(tensor, {.op = op}).wait();
          EXPECT_TRUE(same_bits(tensor, reduced(world, n, type, op))) << where(type, n) << " op " << static_cast<int>(op);
          const bool direct = n * width <= (world == 2 ? 65536 : 4096);
          const auto chunk = (n + world - 1) / world;
          const auto mine = std::clamp<std::int64_t>(n - rank * chunk, 0, chunk);
          const auto formula = direct ? (world - 1) * n * width : (n - mine + (world - 1) * mine) * width;
          EXPECT_EQ(sent(comm), formula) << where(type, n);
        }
      }
    }
  });
}

TEST_P(Collectives, Averages) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kFloating) {
      const double tolerance = type == torch::kHalf || type == torch::kBFloat16 ? 1e-2 : 1e-6;
      for (const std::int64_t n : {std::int64_t{1}, std::int64_t{5}, kLarge}) {
        const auto expected = reduced(world, n * world, type, ReduceOp::kAvg).narrow(0, rank * n, n);
        const auto output = torch::zeros({n}, type);
        comm.reduce_scatter_single(output, data(rank, n * world, type), {.op = ReduceOp::kAvg}).wait();
        EXPECT_TRUE(output.allclose(expected, tolerance, tolerance)) << where(type, n);
        const auto tensor = data(rank, n, type);
        comm.all_reduce(tensor, {.op = ReduceOp::kAvg, .scale = 2.0}).wait();
        EXPECT_TRUE(tensor.allclose(reduced(world, n, type, ReduceOp::kAvg) * 2, tolerance, tolerance)) << where(type, n);
      }
    }
  });
}

TEST_P(Collectives, AllToAll) {
  on_ranks([](const Comm& comm, int rank, int world) {
    // Rank s sends count(s, d) elements of value 10 s + d to rank d.
    const auto count = [](int s, int d) { return static_cast<std::int64_t>((s + 2 * d) % 4); };
    for (const auto type : kAll) {
      const auto fill = [&](int s, int d, std::int64_t n) {
        return torch::full({n}, type == torch::kBool ? (s + d) % 2 : 10 * s + d).to(type);
      };
      Sizes in;
      Sizes out;
      std::vector<Tensor> input;
      std::vector<Tensor> expected;
      std::vector<Tensor> equal_input;
      std::vector<Tensor> equal_expected;
      for (int q = 0; q < world; ++q) {
        in.push_back(count(rank, q));
        out.push_back(count(q, rank));
        input.push_back(fill(rank, q, in.back()));
        expected.push_back(fill(q, rank, out.back()));
        equal_input.push_back(fill(rank, q, 3));
        equal_expected.push_back(fill(q, rank, 3));
      }
      const auto want = torch::cat(expected);
      const auto output = torch::zeros({want.numel()}, type);
      sent(comm);
      const auto all = torch::cat(input);
      comm.all_to_all_single(output, all, out, in).wait();
      EXPECT_TRUE(same_bits(output, want)) << c10::toString(type);
      EXPECT_EQ(sent(comm), (all.numel() - count(rank, rank)) * static_cast<std::int64_t>(all.element_size()));
      const auto equal = torch::zeros({3 * world}, type);
      comm.all_to_all_single(equal, torch::cat(equal_input)).wait();
      EXPECT_TRUE(same_bits(equal, torch::cat(equal_expected))) << c10::toString(type);
    }
  });
}

TEST_P(Collectives, BroadcastAndScatterFromEveryRoot) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto type : kAll) {
      for (int root = 0; root < world; ++root) {
        for (const auto n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{77}}) {
          const auto tensor = rank == root ? data(root, n, type) : torch::zeros({n}, type);
          sent(comm);
          comm.broadcast(tensor, root).wait();
          EXPECT_TRUE(same_bits(tensor, data(root, n, type))) << where(type, n) << " root " << root;
          EXPECT_EQ(sent(comm), rank == root ? (world - 1) * static_cast<std::int64_t>(tensor.nbytes()) : 0);
          const auto output = torch::zeros({n}, type);
          comm.scatter(output, rank == root ? data(root, n * world, type) : Tensor(), root).wait();
          EXPECT_TRUE(same_bits(output, data(root, n * world, type).narrow(0, rank * n, n))) << where(type, n);
        }
      }
    }
  });
}

TEST_P(Collectives, PointToPointAroundARing) {
  on_ranks([](const Comm& comm, int rank, int world) {
    const int next = (rank + 1) % world;
    if (world == 1) {
      EXPECT_THROW(comm.send(torch::zeros({1}), next).wait(), ValueError);
      return;
    }
    const int before = (rank - 1 + world) % world;
    for (const auto type : kAll) {
      const auto first = torch::zeros({9}, type);
      const auto second = torch::zeros({9}, type);
      auto receive_first = comm.recv(first, before);
      auto receive_second = comm.recv(second, before);
      auto send_first = comm.send(data(rank, 9, type), next, {.label = "a"});
      auto send_second = comm.send(data(rank + 1, 9, type), next, {.label = "b"});
      receive_second.wait();
      receive_first.wait();
      send_first.wait();
      send_second.wait();
      EXPECT_TRUE(same_bits(first, data(before, 9, type)));
      EXPECT_TRUE(same_bits(second, data(before + 1, 9, type)));
    }
  });
}

// Random numbers whose sum depends on the order: the result must be that of a plain loop in rank order, bit for bit.
TEST_P(Collectives, SumsRunInRankOrderInSinglePrecision) {
  on_ranks([](const Comm& comm, int rank, int world) {
    for (const auto n : {std::int64_t{3}, std::int64_t{5000}}) {
      for (const auto type : kFloating) {
        std::vector<Tensor> inputs;
        for (int q = 0; q < world; ++q) {
          inputs.push_back((random_numbers(n * world, 1000 + q) * std::pow(10.0, q % 3)).to(type));
        }
        const auto wide = type == torch::kDouble ? torch::kDouble : torch::kFloat;
        auto sum = inputs[0].to(wide);
        for (int q = 1; q < world; ++q) sum = sum + inputs[static_cast<std::size_t>(q)].to(wide);
        const auto mine = inputs[static_cast<std::size_t>(rank)];
        const auto slice = sum.narrow(0, rank * n, n);
        const auto output = torch::zeros({n}, type);
        comm.reduce_scatter_single(output, mine).wait();
        EXPECT_TRUE(same_bits(output, slice.to(type))) << where(type, n);
        const auto wider = torch::zeros({n}, wide);
        comm.reduce_scatter_single(wider, mine).wait();
        EXPECT_TRUE(same_bits(wider, slice)) << where(type, n);
        const auto whole = mine.clone();
        comm.all_reduce(whole).wait();
        EXPECT_TRUE(same_bits(whole, sum.to(type))) << where(type, n);
      }
    }
  });
}

TEST_P(Collectives, ScaleAndAccumulate) {
  on_ranks([](const Comm& comm, int rank, int world) {
    constexpr std::int64_t kN = 3001;
    for (const auto type : {torch::kFloat, torch::kBFloat16}) {
      std::vector<Tensor> inputs;
      for (int q = 0; q < world; ++q) {
        inputs.push_back(random_numbers(kN * world, 50 + q).to(type));
      }
      auto sum = inputs[0].to(torch::kFloat);
      for (int q = 1; q < world; ++q) sum = sum + inputs[static_cast<std::size_t>(q)].to(torch::kFloat);
      const auto before = torch::arange(kN, torch::kFloat) / 7;
      const auto output = before.clone();
      const auto workspace = torch::empty({kN * world}, type);
      comm.reduce_scatter_single(output, inputs[static_cast<std::size_t>(rank)],
                                 {.scale = 0.1, .accumulate = true, .workspace = &workspace})
          .wait();
      const auto scaled = sum.narrow(0, rank * kN, kN) * torch::tensor(0.1F);
      EXPECT_TRUE(same_bits(output, before + scaled));
      comm.reduce_scatter_single(output, inputs[static_cast<std::size_t>(rank)], {.scale = 0.1}).wait();
      EXPECT_TRUE(same_bits(output, scaled));
    }
    const auto counts = torch::full({4}, 5, torch::kLong);
    comm.reduce_scatter_single(counts, torch::full({4 * world}, rank, torch::kLong), {.accumulate = true}).wait();
    EXPECT_EQ(counts[3].item<std::int64_t>(), 5 + world * (world - 1) / 2);
  });
}

TEST_P(Collectives, ManyInFlightAndWaitedForInAnyOrder) {
  on_ranks([](const Comm& comm, int rank, int world) {
    constexpr int kCount = 20;
    std::vector<Tensor> outputs;
    std::vector<Tensor> inputs;
    std::vector<Work> works;
    for (int i = 0; i < kCount; ++i) {
      inputs.push_back(torch::full({64 * world}, rank + i, torch::kFloat));
      outputs.push_back(torch::zeros({64}));
      works.push_back(comm.reduce_scatter_single(outputs.back(), inputs.back(), {.label = "layers.1"}));
    }
    for (int i = 0; i < kCount; ++i) {
      const auto at = static_cast<std::size_t>((i * 7 + rank) % kCount);
      works[at].wait();
      EXPECT_FALSE(works[at].pending());
    }
    for (int i = 0; i < kCount; ++i) {
      EXPECT_EQ(outputs[static_cast<std::size_t>(i)][63].item<float>(), static_cast<float>(world * i + world * (world - 1) / 2));
    }
    comm.barrier();
  });
}

TEST_P(Collectives, ControlDataOfAllLengths) {
  on_ranks([](const Comm& comm, int rank, int world) {
    const auto texts =
        comm.all_gather_string(std::string(static_cast<std::size_t>(rank % 3) * 100, static_cast<char>('a' + rank)));
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(world));
    for (int q = 0; q < world; ++q) {
      EXPECT_EQ(texts[static_cast<std::size_t>(q)],
                std::string(static_cast<std::size_t>(q % 3) * 100, static_cast<char>('a' + q)));
    }
    comm.agree("test", "");
    comm.reset_counters();
    comm.check_same("test", {"one", "two", ""});
    EXPECT_EQ(comm.counters().bytes_sent, 16 * (world - 1));
  });
}

// With a workspace given, repeated operations take no tensor memory at all.
TEST_P(Collectives, SteadyStateAllocatesNothing) {
  testing::RankOptions options;
  options.allocator = testing::counting_allocator();
  testing::run_ranks(GetParam(), options, [&](int rank) {
    const auto comm = current_world().comm();
    const int world = comm.size();
    EXPECT_EQ(comm.allocator(), testing::counting_allocator());
    constexpr std::int64_t kN = 20000;
    const auto input = data(rank, kN * world, torch::kFloat);
    const auto output = torch::zeros({kN});
    const auto gathered = torch::zeros({kN * world});
    const auto workspace = torch::empty({kN * world});
    const auto small = torch::ones({3});
    const auto step = [&] {
      comm.all_gather_single(gathered, output).wait();
      comm.reduce_scatter_single(output, input, {.workspace = &workspace}).wait();
      comm.all_reduce(output, {.workspace = &workspace}).wait();
      comm.all_reduce(small).wait();
    };
    step();
    comm.barrier();
    if (rank == 0) testing::reset_allocation_counts();
    comm.barrier();
    const auto before = testing::allocation_counts();
    for (int i = 0; i < 5; ++i) step();
    const auto after = testing::allocation_counts();
    // The barriers' tokens of slower ranks may still come in between: 64 bytes a rank at most.
    EXPECT_LE(after.peak, before.live + 64 * world);
    comm.barrier();
    if (world > 1) {
      comm.reduce_scatter_single(output, input).wait();
      EXPECT_GE(testing::allocation_counts().peak, before.live + kN * 4) << "the allocator does not see receive space";
    }
    comm.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives, ::testing::Values(1, 2, 3, 4, 8));

}  // namespace
}  // namespace hyper_parallel
