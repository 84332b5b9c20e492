// What a checkpoint does with inputs, results, captured tensors, random numbers, autocast, memory, and mistakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <ATen/autocast_mode.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;

Tensor leaf(at::IntArrayRef shape, int step) { return wave(shape, step).requires_grad_(); }

/// Gradients of `leaves` after backward of what `run` returns, and the gradients cleared again.
template <class Run>
std::vector<Tensor> gradients_of(const std::vector<Tensor>& leaves, Run run) {
  for (const Tensor& one : leaves) one.mutable_grad() = Tensor();
  run().backward();
  std::vector<Tensor> gradients;
  for (const Tensor& one : leaves) gradients.push_back(std::exchange(one.mutable_grad(), Tensor()));
  return gradients;
}

void expect_same(const std::vector<Tensor>& got, const std::vector<Tensor>& want, const std::string& what = "") {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << what << ' ' << i;
    EXPECT_TRUE(!want[i].defined() || torch::equal(got[i], want[i])) << what << ' ' << i;
  }
}

struct Result {
  Tensor first;
  std::map<std::string, Tensor> named;
  std::optional<Tensor> maybe;
  int count = 0;
  template <class F>
  void walk_tensors(F& f) {
    nn::walk_tensors(first, f);
    nn::walk_tensors(named, f);
    nn::walk_tensors(maybe, f);
  }
};

struct Scale {
  double factor = 1;
};

/// Every kind of input, every kind of result, and any part of it used.
TEST(CheckpointFunction, ContainersInAndOut) {
  const Tensor a = leaf({3, 4}, 1), b = leaf({4}, 2), constant = wave({3, 4}, 3);
  const Tensor numbers = torch::tensor({2, 0, 1});
  const auto fn = [](const Tensor& x, const std::vector<Tensor>& list, const std::optional<Tensor>& none, const Tensor& rows,
                     int times, const Scale& scale, const std::string& name) {
    Tensor y = torch::tanh(x * list[0] + list[1]).index_select(0, rows) * times * scale.factor;
    return Result{y.sin(), {{name, y.cos()}, {"rows", rows}}, none ? *none : y + list[1], static_cast<int>(y.dim())};
  };
  for (int part = 0; part < 4; ++part) {
    const auto loss = [&](const Result& r) {
      EXPECT_EQ(r.count, 2);
      EXPECT_TRUE(r.named.at("rows").equal(numbers));
      if (part == 0) return r.first.square().sum();
      if (part == 1) return r.named.at("n").square().sum();
      if (part == 2) return r.maybe->square().sum();
      return (r.first * r.named.at("n") + *r.maybe).square().sum();
    };
    const std::vector<Tensor> list = {b, constant};
    const auto plain = gradients_of({a, b}, [&] { return loss(fn(a, list, {}, numbers, 3, Scale{0.5}, "n")); });
    const auto got =
        gradients_of({a, b}, [&] { return loss(checkpoint(fn, a, list, std::optional<Tensor>(), numbers, 3, Scale{0.5}, "n")); });
    expect_same(got, plain, std::to_string(part));
  }
}

/// Parameters, inputs' ancestors and other tensors that fn captures count like inputs; each end of the graph gets one gradient.
TEST(CheckpointFunction, CapturedTensors) {
  torch::nn::Linear linear(4, 4);
  seed_parameters(*linear, 2);
  const Tensor x = leaf({3, 4}, 1), w = leaf({4}, 2);
  int calls = 0;
  w.register_hook([&](const Tensor&) { ++calls; });
  const auto run = [&](bool checkpointed) {
    const Tensor h1 = x * w, h2 = torch::sin(h1);  // both captured, one an ancestor of the other
    auto fn = [linear, h1, h2, w](const Tensor& y) mutable { return torch::tanh(linear(y) * h1 + linear(h2)) * w; };
    const Tensor result = checkpointed ? checkpoint(fn, h2) : fn(h2);
    return (result * w + h1).square().sum();
  };
  const std::vector<Tensor> leaves = {x, w, linear->weight, linear->bias};
  const auto plain = gradients_of(leaves, [&] { return run(false); });
  calls = 0;
  const auto got = gradients_of(leaves, [&] { return run(true); });
  EXPECT_EQ(calls, 1);
  for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], plain[i], 1e-5, 1e-6)) << i;
}

TEST(CheckpointFunction, PassedThroughUnusedAndWithoutGradient) {
  const Tensor a = leaf({3}, 1), b = leaf({3}, 2), c = leaf({3}, 3), constant = wave({3}, 4);
  const auto fn = [&](const Tensor& x, const Tensor& unused, const Tensor& plain) {
    return std::tuple(x, x * c, plain + 1, c, x.detach() * 2, unused.sin());
  };
  const auto loss = [](const auto& out) {
    return (std::get<0>(out) + std::get<1>(out) * std::get<2>(out) + std::get<3>(out) * std::get<4>(out)).square().sum();
  };
  const auto out = checkpoint(fn, a, b, constant);
  EXPECT_FALSE(std::get<2>(out).requires_grad());
  EXPECT_FALSE(std::get<4>(out).requires_grad());
  expect_same(gradients_of({a, b, c}, [&] { return loss(checkpoint(fn, a, b, constant)); }),
              gradients_of({a, b, c}, [&] { return loss(fn(a, b, constant)); }));
  const auto nothing = checkpoint([](const Tensor& x) { return x * 2; }, constant);
  EXPECT_FALSE(nothing.requires_grad());
}

TEST(CheckpointFunction, WithoutGradModeItIsAPlainCall) {
  int runs = 0;
  const Tensor a = leaf({3}, 1);
  const torch::NoGradGuard no_grad;
  const Tensor y = checkpoint([&](const Tensor& x) { return ++runs, x * 2; }, a);
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(y.requires_grad());
}

TEST(CheckpointFunction, NestedAndResultsChangedInPlace) {
  const Tensor a = leaf({3, 4}, 1), w = leaf({4}, 2);
  int runs = 0;
  const std::function<Tensor(const Tensor&, int)> deep = [&](const Tensor& x, int depth) -> Tensor {
    ++runs;
    const Tensor h = torch::tanh(x * w);
    return depth == 0 ? h : checkpoint(deep, h, depth - 1) * w;
  };
  const std::function<Tensor(const Tensor&, int)> plain = [&](const Tensor& x, int depth) -> Tensor {
    const Tensor h = torch::tanh(x * w);
    return depth == 0 ? h : plain(h, depth - 1) * w;
  };
  const auto want = gradients_of({a, w}, [&] { return plain(a, 3).mul_(2).square().sum(); });
  const auto got = gradients_of({a, w}, [&] { return checkpoint(deep, a, 3).mul_(2).square().sum(); });
  EXPECT_EQ(runs, 4 + 4 + 3 + 2 + 1) << "each level once more for every checkpoint around it";
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(torch::allclose(got[i], want[i])) << i;
}

/// A force inside of fn: a leaf that fn makes, and derivatives of gradients that stay within.
TEST(CheckpointFunction, GradientsInsideOfTheFunction) {
  const Tensor a = leaf({3, 4}, 1), w = leaf({4}, 2);
  const auto fn = [&](const Tensor& x) {
    const Tensor position = x.detach().requires_grad_();
    const Tensor energy = torch::tanh(position * w).square().sum();
    const Tensor force = torch::autograd::grad({energy}, {position}, {}, true, /*create_graph=*/true)[0];
    return torch::sin(x * force);
  };
  expect_same(gradients_of({a, w}, [&] { return checkpoint(fn, a).square().sum(); }),
              gradients_of({a, w}, [&] { return fn(a).square().sum(); }));
}

/// The mask of the forward is drawn again, and the generators go on as if nothing had been.
TEST(CheckpointRandom, SameNumbersAgain) {
  const Tensor ones = torch::ones({1000});
  const auto drop = [](const Tensor& x) { return torch::dropout(x, 0.5, true); };
  const auto mask_and_gradient = [&](const CheckpointOptions& options) {
    const Tensor x = ones.clone().requires_grad_();
    const Tensor y = checkpoint(options, drop, x);
    torch::rand({5});  // something else draws in between
    y.sum().backward();
    return std::pair(y.detach(), x.grad());
  };
  torch::manual_seed(3);
  const auto [y, gradient] = mask_and_gradient({});
  const Tensor next = torch::rand({4});
  EXPECT_TRUE(torch::equal(y, gradient));
  torch::manual_seed(3);
  drop(ones), torch::rand({5});
  EXPECT_TRUE(torch::equal(next, torch::rand({4})));
  const auto [other_y, other_gradient] = mask_and_gradient({.preserve_rng_state = false});
  EXPECT_FALSE(torch::equal(other_y, other_gradient));

  at::Generator own = at::detail::createCPUGenerator(5);
  const auto noise = [own](const Tensor& x) { return x * torch::empty_like(x).uniform_(0.0, 1.0, own); };
  const Tensor x = ones.clone().requires_grad_();
  const Tensor z = checkpoint({.preserve_rng_state = false, .generators = {own}}, noise, x);
  own.set_current_seed(9);
  z.sum().backward();
  EXPECT_TRUE(torch::equal(z.detach(), x.grad()));
}

/// Autocast of the forward, although backward runs outside of it. Its cache does not make the two differ.
TEST(CheckpointAutocast, StateOfTheForward) {
  const Tensor x = leaf({4, 8}, 1), w = leaf({8, 8}, 2);
  const auto fn = [&](const Tensor& h) { return torch::tanh(torch::matmul(h, w)); };
  const auto run = [&](bool checkpointed) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
    const Tensor y = checkpointed ? checkpoint(fn, checkpoint(fn, x)) : fn(fn(x));
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return y.to(torch::kFloat).square().sum();
  };
  const auto want = gradients_of({x, w}, [&] { return run(false); });
  const auto got = gradients_of({x, w}, [&] { return run(true); });
  EXPECT_TRUE(torch::equal(got[0], want[0]));
  EXPECT_TRUE(torch::allclose(got[1], want[1], 1e-2, 1e-2)) << "without the cache the sum over both uses is in fp32";
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

/// Sixteen segments of eight tensors each: only the inputs of the segments stay, and one segment at a time comes back.
TEST(CheckpointMemory, ActivationsAreNotKept) {
  constexpr int64_t kSegments = 16, kDepth = 8, kBytes = 4 * 256 * 256;
  const CountCpuAllocations count;
  const Tensor x = leaf({256, 256}, 1), w = leaf({256, 256}, 2);
  const auto segment = [&](Tensor h) {
    for (int64_t i = 0; i < kDepth; ++i) h = torch::tanh(h);
    return h * w;
  };
  const auto measure = [&](bool checkpointed) {
    const int64_t before = allocation_counts().live;
    reset_allocation_counts();
    Tensor h = x;
    for (int64_t i = 0; i < kSegments; ++i) h = checkpointed ? checkpoint({.preserve_rng_state = false}, segment, h) : segment(h);
    Tensor loss = h.sum();
    h.reset();
    const double held = static_cast<double>(allocation_counts().live - before) / kBytes;
    loss.backward();
    const double peak = static_cast<double>(allocation_counts().peak - before) / kBytes;
    loss.reset(), x.mutable_grad().reset(), w.mutable_grad().reset();
    EXPECT_LT(allocation_counts().live - before, kBytes) << "all given back";
    return std::pair(held, peak);
  };
  const auto [plain_held, plain_peak] = measure(false);
  const auto [held, peak] = measure(true);
  EXPECT_GE(plain_held, kSegments * kDepth);
  EXPECT_LE(held, kSegments + 0.5) << "the output of each segment";
  EXPECT_LE(peak, kSegments + kDepth + 5.5) << "one segment again, the gradients under way and those of the leaves";
  EXPECT_LT(peak, plain_peak / 4);
}

std::string backward_error(const Tensor& y) {
  return message_of<ValueError>([&] { return y.sum().backward(), 0; });
}

TEST(CheckpointMistakes, InputsChangedInPlace) {
  const Tensor a = leaf({3}, 1), constant = wave({3}, 2);
  EXPECT_THAT(value_error([&] { return checkpoint([](Tensor x) { return x.mul_(2).sin(); }, a * 2); }),
              AllOf(HasSubstr("[checkpoint] input tensor 0 was changed in place by fn"), HasSubstr("change a clone instead")));
  const Tensor y = checkpoint([&](const Tensor& x, const Tensor& other) { return x * other; }, a, constant);
  constant.add_(1);
  EXPECT_THAT(backward_error(y), HasSubstr("[checkpoint] input tensor 1 was changed in place after the forward"));
}

TEST(CheckpointMistakes, AnotherResultTheSecondTime) {
  const Tensor a = leaf({4}, 1), b = leaf({4}, 2);
  int runs = 0;
  // What the forward and the recomputation return.
  const auto varying = [&](std::function<std::vector<Tensor>(const Tensor&)> first,
                           std::function<std::vector<Tensor>(const Tensor&)> second) {
    runs = 0;
    const auto y = checkpoint([&runs, first, second](const Tensor& x) { return ++runs == 1 ? first(x) : second(x); }, a);
    return backward_error(y[0]);
  };
  using List = std::vector<Tensor>;
  const auto twice = [](const Tensor& x) { return List{x * 2}; };
  EXPECT_THAT(varying(twice,
                      [](const Tensor& x) {
                        return List{x * 2, x};
                      }),
              HasSubstr("[checkpoint] the recomputation gave 2 tensors, the forward 1; want fn to compute the same again"));
  EXPECT_THAT(varying(twice, [](const Tensor& x) { return List{x.narrow(0, 0, 2) * 2}; }),
              HasSubstr("output 0 as float [2] on cpu, the forward as float [4] on cpu"));
  EXPECT_THAT(varying(twice, [](const Tensor& x) { return List{x.to(torch::kDouble) * 2}; }),
              HasSubstr("output 0 as double [4] on cpu, the forward as float [4] on cpu"));
  EXPECT_THAT(varying(twice, [](const Tensor&) { return List{Tensor()}; }), HasSubstr("output 0 as an undefined tensor"));
  EXPECT_THAT(varying(twice, [](const Tensor& x) { return List{x.detach() * 2}; }), HasSubstr("needs no gradient"));
  EXPECT_THAT(varying(twice, [&](const Tensor& x) { return List{x * b}; }),
              HasSubstr("depend on 2 parameters and inputs, 1 of them among the 1 of the forward"));
  EXPECT_THAT(varying([&](const Tensor& x) { return List{x * b}; }, twice),
              HasSubstr("depend on 1 parameters and inputs, 1 of them among the 2 of the forward"));
  EXPECT_THAT(varying(twice, [](const Tensor&) -> List { throw ValueError("thrown again"); }), HasSubstr("thrown again"));
  EXPECT_EQ(varying(twice, twice), "nothing thrown");
}

TEST(CheckpointMistakes, BackwardTwiceAndDerivativesOfGradients) {
  const Tensor a = leaf({3}, 1);
  const auto fn = [](const Tensor& x) { return x.sin() * x; };
  Tensor y = checkpoint(fn, a);
  y.sum().backward({}, /*retain_graph=*/true);
  const Tensor once = a.grad().clone();
  y.sum().backward();
  EXPECT_TRUE(torch::equal(a.grad(), once * 2));
  EXPECT_THAT(backward_error(y), HasSubstr("[checkpoint] backward a second time"));
  y = checkpoint(fn, a);
  EXPECT_THAT(message_of<ValueError>([&] { return torch::autograd::grad({y.sum()}, {a}, {}, true, /*create_graph=*/true); }),
              HasSubstr("[checkpoint] backward with create_graph = true, want false"));
}

/// The generator and autocast are as before, whatever fn throws.
TEST(CheckpointMistakes, ExceptionsLeaveNothingBehind) {
  const Tensor a = leaf({3}, 1);
  bool fails = true;
  const auto fn = [&](const Tensor& x) {
    if (fails) throw std::runtime_error("not now");
    return torch::dropout(x, 0.5, true);
  };
  EXPECT_THROW((void)checkpoint(fn, a), std::runtime_error);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  fails = false;
  const Tensor y = checkpoint(fn, a);
  fails = true;
  torch::manual_seed(4);
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  const Tensor next = torch::rand({3});
  torch::manual_seed(4);
  EXPECT_TRUE(torch::equal(next, torch::rand({3})));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

}  // namespace
}  // namespace hyper_parallel::testing
