// Collectives with gradients: each against the same program on whole tensors, in one process.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using parallel::all_gather_reduce_scatter;
using parallel::all_gather_split;
using parallel::all_reduce_identity;
using parallel::all_to_all;
using parallel::ceil_chunks;
using parallel::DimOptions;
using parallel::identity_all_reduce;
using parallel::reduce_scatter_all_gather;
using parallel::split_all_gather;
using torch::Tensor;
using Sizes = std::vector<int64_t>;

constexpr int kWorlds[] = {1, 2, 3, 4};

/// Lengths of the ranks' chunks: equal, ceil chunks of a number that W does not divide, any with an empty one.
std::vector<Sizes> cuts_of(int world) {
  Sizes odd;
  for (int r = 0; r < world; ++r) odd.push_back((r * 2 + 3) % 4);
  return {Sizes(static_cast<std::size_t>(world), 2), ceil_chunks(5, world), odd};
}

int64_t sum_of(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

/// (2, 3, 4) with `length` along `dim`; other values for other ranks and salts.
Tensor values(int64_t dim, int64_t length, int rank, int salt = 0) {
  Sizes shape{2, 3, 4};
  shape[static_cast<std::size_t>(dim)] = length;
  return wave(shape, 10 * rank + salt);
}

/// Every rank's tensor, made by every rank for the reference.
template <class Make>
std::vector<Tensor> of_all(int world, Make make, bool leaf = true) {
  std::vector<Tensor> all;
  for (int r = 0; r < world; ++r) all.push_back(make(r).detach().clone().requires_grad_(leaf));
  return all;
}

Tensor in_rank_order(const std::vector<Tensor>& tensors) {
  Tensor sum = tensors[0];
  for (std::size_t r = 1; r < tensors.size(); ++r) sum = sum + tensors[r];
  return sum;
}

/// y must be `want`, and the gradient of x for cotangent c must be that of `reference`.
void expect_same(const Tensor& y, const Tensor& want, const Tensor& x, const Tensor& cotangent, const Tensor& want_gradient,
                 const std::string& what) {
  EXPECT_TRUE(y.equal(want)) << what << '\n' << y << '\n' << want;
  y.backward(cotangent);
  ASSERT_TRUE(x.grad().defined()) << what;
  EXPECT_TRUE(x.grad().equal(want_gradient)) << what << '\n' << x.grad() << '\n' << want_gradient;
}

template <class Body>
void for_all_cuts(Body body) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      for (const Sizes& sizes : cuts_of(world)) {
        for (const int64_t dim : {0, 1, 2, -1})
          body(comm, rank, sizes, dim, concat("W=", world, " sizes ", sizes, " dim ", dim, " rank ", rank));
      }
    });
  }
}

TEST(ParallelFunctions, IdentityAndAllReduce) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      const auto make = [](int salt) { return [salt](int r) { return values(0, 5, r, salt); }; };
      const auto all = of_all(world, make(0)), cotangents = of_all(world, make(1), false);
      const auto mine = static_cast<std::size_t>(rank);
      Tensor x = all[mine].detach().clone().requires_grad_();
      expect_same(identity_all_reduce(x, comm), x, x, cotangents[mine], in_rank_order(cotangents), "identity_all_reduce");
      x = all[mine].detach().clone().requires_grad_();
      expect_same(all_reduce_identity(x, comm), in_rank_order(all).detach(), x, cotangents[0], cotangents[0],
                  "all_reduce_identity");
    });
  }
}

TEST(ParallelFunctions, AllGatherReduceScatter) {
  for_all_cuts([](const Comm& comm, int rank, const Sizes& sizes, int64_t dim, const std::string& what) {
    const int64_t d = dim < 0 ? dim + 3 : dim;
    const auto mine = static_cast<std::size_t>(rank);
    const auto all = of_all(comm.size(), [&](int r) { return values(d, sizes[static_cast<std::size_t>(r)], r); });
    const auto cotangents = of_all(
        comm.size(), [&](int r) { return values(d, sum_of(sizes), r, 1); }, false);
    const Tensor x = all[mine].detach().clone().requires_grad_();
    const Tensor whole = torch::cat(all, d).detach();
    expect_same(all_gather_reduce_scatter(x, comm, {.dim = dim, .sizes = sizes}), whole, x, cotangents[mine],
                in_rank_order(cotangents).split_with_sizes(sizes, d)[mine], what);
    // The gradient of a gather for one computation that all ranks share is a slice.
    const Tensor z = all[mine].detach().clone().requires_grad_();
    expect_same(all_gather_split(z, comm, {.dim = dim, .sizes = sizes}), whole, z, cotangents[0],
                cotangents[0].split_with_sizes(sizes, d)[mine], what + " split");
  });
}

TEST(ParallelFunctions, ReduceScatterAllGather) {
  for_all_cuts([](const Comm& comm, int rank, const Sizes& sizes, int64_t dim, const std::string& what) {
    const int64_t d = dim < 0 ? dim + 3 : dim;
    const auto mine = static_cast<std::size_t>(rank);
    const auto all = of_all(comm.size(), [&](int r) { return values(d, sum_of(sizes), r); });
    const auto cotangents = of_all(
        comm.size(), [&](int r) { return values(d, sizes[static_cast<std::size_t>(r)], r, 1); }, false);
    const Tensor x = all[mine].detach().clone().requires_grad_(), gradient = torch::cat(cotangents, d);
    expect_same(reduce_scatter_all_gather(x, comm, {.dim = dim, .sizes = sizes}),
                in_rank_order(all).detach().split_with_sizes(sizes, d)[mine], x, cotangents[mine], gradient, what);
    const Tensor z = all[0].detach().clone().requires_grad_();
    expect_same(split_all_gather(z, comm, {.dim = dim, .sizes = sizes}), all[0].detach().split_with_sizes(sizes, d)[mine], z,
                cotangents[mine], gradient, what + " split");
  });
}

TEST(ParallelFunctions, CeilChunksAreTheDefault) {
  EXPECT_EQ(ceil_chunks(5, 4), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(ceil_chunks(0, 2), (Sizes{0, 0}));
  EXPECT_EQ(ceil_chunks(6, 3), (Sizes{2, 2, 2}));
  run_ranks(4, [](int rank) {
    const Comm comm = current_world().comm();
    const Tensor x = wave({5, 2}, 0);
    EXPECT_EQ(split_all_gather(x, comm).size(0), ceil_chunks(5, 4)[static_cast<std::size_t>(rank)]);
    EXPECT_TRUE(reduce_scatter_all_gather(x, comm).allclose(4 * split_all_gather(x, comm)));
    EXPECT_TRUE(all_gather_split(split_all_gather(x, comm), comm, {.sizes = ceil_chunks(5, 4)}).equal(x));
  });
}

/// Rows from rank q to rank r.
int64_t rows_between(int q, int r) { return (3 * q + r) % 4; }

TEST(ParallelFunctions, AllToAll) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      Sizes in, out;
      for (int r = 0; r < world; ++r) {
        in.push_back(rows_between(rank, r));
        out.push_back(rows_between(r, rank));
      }
      // Rows of other widths too: none, one, several dimensions.
      for (const Sizes& row : {Sizes{}, Sizes{3}, Sizes{2, 2}}) {
        const auto make = [&](int from, int to) {
          Sizes shape = row;
          shape.insert(shape.begin(), rows_between(from, to));
          return wave(shape, from * 7 + to);
        };
        std::vector<Tensor> sent, received;
        for (int r = 0; r < world; ++r) {
          sent.push_back(make(rank, r));
          received.push_back(make(r, rank));
        }
        const Tensor x = torch::cat(sent).requires_grad_();
        const Tensor y = all_to_all(x, comm, {.output_rows = out, .input_rows = in});
        EXPECT_TRUE(y.equal(world == 1 ? x : torch::cat(received)));
        // What comes back is the transpose: here, all that was sent.
        y.backward(y.detach() * 2);
        EXPECT_TRUE(x.grad().equal(x.detach() * 2));
      }
    });
  }
}

TEST(ParallelFunctions, BytesAreThoseOfTheTable) {
  for (const int world : {2, 3, 4}) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      const auto sent = [&](const auto& call) {
        comm.reset_counters();
        call();
        return comm.counters().bytes_sent;
      };
      const int64_t peers = world - 1, row = 12 * 4;  // (n, 3, 4) floats
      const Sizes sizes = ceil_chunks(5, world);
      const int64_t own = sizes[static_cast<std::size_t>(rank)];
      const Tensor whole = wave({5, 3, 4}, rank).requires_grad_(), part = wave({own, 3, 4}, rank).requires_grad_();
      Tensor y;
      EXPECT_EQ(sent([&] { y = all_gather_reduce_scatter(part, comm, {.sizes = sizes}); }), peers * own * row);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), (5 - own) * row);
      EXPECT_EQ(sent([&] { y = reduce_scatter_all_gather(whole, comm); }), (5 - own) * row);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), peers * own * row);
      EXPECT_EQ(sent([&] { y = all_gather_split(part, comm, {.sizes = sizes}); }), peers * own * row);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), 0);
      EXPECT_EQ(sent([&] { y = split_all_gather(whole, comm); }), 0);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), peers * own * row);
      EXPECT_EQ(sent([&] { y = identity_all_reduce(whole, comm); }), 0);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), peers * 5 * row);  // small: everything to everybody
      EXPECT_EQ(sent([&] { y = all_reduce_identity(whole, comm); }), peers * 5 * row);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), 0);
      Sizes in, out;
      for (int r = 0; r < world; ++r) {
        in.push_back(rows_between(rank, r));
        out.push_back(rows_between(r, rank));
      }
      const Tensor rows = wave({sum_of(in), 3, 4}, rank).requires_grad_();
      const auto mine = static_cast<std::size_t>(rank);
      EXPECT_EQ(sent([&] { y = all_to_all(rows, comm, {.output_rows = out, .input_rows = in}); }), (sum_of(in) - in[mine]) * row);
      EXPECT_EQ(sent([&] { y.sum().backward(); }), (sum_of(out) - out[mine]) * row);
    });
  }
}

TEST(ParallelFunctions, WithoutGradientNothingIsRecordedOrSentBack) {
  run_ranks(2, [](int rank) {
    const Comm comm = current_world().comm();
    Tensor x = wave({4, 3}, rank);
    const auto all = [&] {
      return std::vector<Tensor>{identity_all_reduce(x, comm),
                                 all_reduce_identity(x, comm),
                                 all_gather_reduce_scatter(x, comm),
                                 reduce_scatter_all_gather(x, comm),
                                 all_gather_split(x, comm),
                                 split_all_gather(x, comm),
                                 all_to_all(x, comm, {.output_rows = {2, 2}, .input_rows = {2, 2}})};
    };
    for (const Tensor& y : all()) EXPECT_FALSE(y.requires_grad());
    x.requires_grad_();
    for (const Tensor& y : all()) EXPECT_TRUE(y.requires_grad());
    torch::NoGradGuard no_grad;
    for (const Tensor& y : all()) EXPECT_EQ(y.grad_fn(), nullptr);
  });
}

/// Everything once: gathers, reduces and exchanges between matrix products.
Tensor program(const Tensor& x, const Tensor& w, const Comm& comm) {
  Tensor h = all_gather_reduce_scatter(x, comm, {.dim = 1});
  h = torch::tanh(torch::matmul(h, w));
  h = reduce_scatter_all_gather(h, comm, {.dim = 1});
  const Sizes rows(static_cast<std::size_t>(comm.size()), h.size(0) / comm.size());
  h = all_to_all(h, comm, {.output_rows = rows, .input_rows = rows});
  return all_reduce_identity(torch::tanh(identity_all_reduce(h.sum(0), comm) * w.sum()), comm);
}

struct ProgramRun {
  Tensor x, w, y;
  explicit ProgramRun(int rank) : x(wave({4, 2, 3}, rank).requires_grad_()), w(wave({3, 3}, 20 + rank).requires_grad_()) {}
};

TEST(ParallelFunctions, RetainGraphAndCheckpoint) {
  for (const int world : {2, 4}) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      ProgramRun plain(rank), twice(rank), again(rank), nested(rank);
      program(plain.x, plain.w, comm).square().sum().backward();

      const Tensor loss = program(twice.x, twice.w, comm).square().sum();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      EXPECT_TRUE(twice.x.grad().equal(plain.x.grad() * 2));
      EXPECT_TRUE(twice.w.grad().allclose(plain.w.grad() * 2));

      const auto body = [&comm](const Tensor& x, const Tensor& w) { return program(x, w, comm); };
      checkpoint(body, again.x, again.w).square().sum().backward();
      EXPECT_TRUE(again.x.grad().equal(plain.x.grad()));
      EXPECT_TRUE(again.w.grad().equal(plain.w.grad()));

      const auto outer = [&body](const Tensor& x, const Tensor& w) { return checkpoint(body, x, w) * 1; };
      checkpoint(outer, nested.x, nested.w).square().sum().backward();
      EXPECT_TRUE(nested.x.grad().equal(plain.x.grad()));
    });
  }
}

TEST(ParallelFunctions, SecondDerivative) {
  // f = sum of squares of the gathered x on every rank: the gradient is 2 W x, that of its square 8 W^2 x.
  run_ranks(3, [](int rank) {
    const Comm comm = current_world().comm();
    const Tensor x = wave({2, 3}, rank).requires_grad_();
    const Tensor f = all_gather_reduce_scatter(x, comm).square().sum();
    const Tensor g = torch::autograd::grad({f}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_TRUE(g.allclose(6 * x));
    // Every rank's loss is the square of its own part of the gradient.
    const Tensor h = torch::autograd::grad({g.square().sum()}, {x})[0];
    EXPECT_TRUE(h.allclose(72 * x.detach())) << h << x;
  });
}

TEST(ParallelFunctions, OutputsMayBeChangedInPlace) {
  run_ranks(2, [](int rank) {
    const Comm comm = current_world().comm();
    const Tensor x = wave({4, 3}, rank).requires_grad_();
    for (Tensor y : {all_reduce_identity(x, comm), all_gather_reduce_scatter(x, comm), reduce_scatter_all_gather(x, comm)}) {
      x.mutable_grad() = Tensor();
      y.mul_(3).sum().backward();
      EXPECT_TRUE(x.grad().defined());
      EXPECT_NEAR(std::fmod(x.grad().max().item<double>(), 3.0), 0, 1e-6);
    }
  });
}

TEST(ParallelFunctions, HalfPrecisionIsSummedInSinglePrecision) {
  run_ranks(4, [](int rank) {
    const Comm comm = current_world().comm();
    const auto make = [](int r) { return wave({5, 3}, r).to(torch::kBFloat16); };
    Tensor want = make(0).to(torch::kFloat);
    for (int r = 1; r < 4; ++r) want = want + make(r).to(torch::kFloat);
    want = want.to(torch::kBFloat16);
    const Sizes sizes = ceil_chunks(5, 4);
    EXPECT_TRUE(all_reduce_identity(make(rank), comm).equal(want));
    EXPECT_TRUE(reduce_scatter_all_gather(make(rank), comm).equal(want.split_with_sizes(sizes)[static_cast<std::size_t>(rank)]));
  });
}

TEST(ParallelFunctions, Errors) {
  run_ranks(2, [](int rank) {
    const Comm comm = current_world().comm();
    const Tensor x = wave({4, 3}, rank);
    EXPECT_EQ(value_error([&] { return all_gather_reduce_scatter(x, comm, {.dim = 2}); }),
              "[all_gather_reduce_scatter] dim 2 of a tensor of shape [4, 3], want one of its 2 dimensions");
    EXPECT_EQ(value_error([&] { return identity_all_reduce({}, comm); }), "[identity_all_reduce] x is an undefined tensor");
    EXPECT_NE(
        value_error([&] { return all_gather_split(x, comm, {.sizes = {4}}); }).find("1 sizes, want one for each of 2 ranks"),
        std::string::npos);
    EXPECT_NE(value_error([&] {
                return all_gather_split(x, comm, {.sizes = {3, 3}});
              }).find("want length 3 along dim 0"),
              std::string::npos);
    EXPECT_NE(value_error([&] {
                return split_all_gather(x, comm, {.sizes = {3, 2}});
              }).find("want length 5 along dim 0, the sum"),
              std::string::npos);
    EXPECT_NE(value_error([&] {
                return split_all_gather(x, comm, {.sizes = {5, -1}});
              }).find("size -1, want 0 or more"),
              std::string::npos);
    EXPECT_NE(value_error([&] {
                return all_to_all(x, comm, {.output_rows = {1, 1}, .input_rows = {1, 1}});
              }).find("want 2 rows"),
              std::string::npos);
    EXPECT_NE(value_error([] { return ceil_chunks(-1, 2); }).find("[ceil_chunks] -1 elements over 2 ranks"), std::string::npos);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
