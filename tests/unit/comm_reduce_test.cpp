// The arithmetic of reductions, through groups without peers: data from others is this rank's own.
#include <cstring>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel {
namespace {

using torch::Tensor;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.numel() == b.numel() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// All 65536 bit patterns of a 16-bit float.
Tensor all_patterns(torch::Dtype type) { return torch::arange(65536, torch::kInt).to(torch::kShort).view(type); }

// NaNs keep no particular payload.
void expect_equal_numbers(const Tensor& a, const Tensor& b) {
  EXPECT_TRUE(a.isnan().equal(b.isnan()));
  EXPECT_TRUE(same_bits(a.nan_to_num(0, 1e9, -1e9), b.nan_to_num(0, 1e9, -1e9)));
}

TEST(Reduce, EveryHalfPrecisionNumberIsReadExactly) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    const auto input = all_patterns(type);
    for (const auto wide : {torch::kFloat, torch::kDouble}) {
      const auto output = torch::empty({65536}, wide);
      Comm::fake(0, 1).reduce_scatter_single(output, input).wait();
      expect_equal_numbers(output, input.to(wide));
    }
  }
}

TEST(Reduce, HalfPrecisionIsRoundedOnceToNearestEven) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    const auto input = all_patterns(type);
    for (const double scale : {1.0, 0.3, 1.0 / 3.0, 1e-4, 7.3e-6, 1.25, 1000.7}) {
      const auto output = torch::empty({65536}, type);
      const auto twice = torch::cat({input, input});
      Comm::fake(0, 2).reduce_scatter_single(output, twice, {.scale = scale}).wait();
      const auto wide = input.to(torch::kFloat);
      expect_equal_numbers(output, ((wide + wide) * torch::tensor(static_cast<float>(scale))).to(type));
    }
  }
}

TEST(Reduce, DoubleOutputSumsInDoublePrecision) {
  const auto input = torch::tensor({16777217.0, 1.0}).to(torch::kFloat).repeat({3});
  const auto output = torch::empty({2}, torch::kDouble);
  Comm::fake(0, 3).reduce_scatter_single(output, input).wait();
  EXPECT_TRUE(same_bits(output, input.narrow(0, 0, 2).to(torch::kDouble) * 3));
}

TEST(Reduce, NotANumberWinsMinAndMax) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto tensor = torch::tensor({nan, 1.0F});
    Comm::fake(0, 2).all_reduce(tensor, {.op = op}).wait();
    EXPECT_TRUE(std::isnan(tensor[0].item<float>()));
    EXPECT_EQ(tensor[1].item<float>(), 1.0F);
  }
}

TEST(Reduce, IntegersWrapAndKeepTheirSign) {
  const auto bytes = torch::tensor({100, -100, 127}).to(torch::kChar);
  Comm::fake(0, 2).all_reduce(bytes).wait();
  EXPECT_TRUE(bytes.equal(torch::tensor({-56, 56, -2}).to(torch::kChar)));
  const auto lowest = torch::tensor({-5, 3}).to(torch::kChar);
  Comm::fake(0, 2).all_reduce(lowest, {.op = ReduceOp::kMin}).wait();
  EXPECT_TRUE(lowest.equal(torch::tensor({-5, 3}).to(torch::kChar)));
}

TEST(Reduce, WorldOfOneScalesAndAccumulates) {
  const auto input = torch::arange(5000, torch::kFloat);
  const auto output = torch::ones({5000});
  const auto comm = Comm::fake(0, 1);
  comm.reduce_scatter_single(output, input, {.scale = 0.5, .accumulate = true}).wait();
  EXPECT_TRUE(output.equal(input * 0.5 + 1));
  comm.reduce_scatter_single(output, input, {.op = ReduceOp::kAvg}).wait();
  EXPECT_TRUE(output.equal(input));
  EXPECT_EQ(comm.counters().calls, 2);
  EXPECT_EQ(comm.counters().bytes_sent, 0);
}

TEST(Fake, LargeWorldsAnswerWithOwnDataAndCountBytes) {
  constexpr int kWorld = 1024;
  const auto comm = Comm::fake(3, kWorld);
  const auto input = torch::arange(4, torch::kFloat);
  const auto output = torch::zeros({4 * kWorld});
  comm.all_gather_single(output, input).wait();
  EXPECT_TRUE(output.equal(input.repeat({kWorld})));
  EXPECT_EQ(comm.counters().bytes_sent, 16 * (kWorld - 1));
  EXPECT_EQ(comm.counters().bytes_received, 16 * (kWorld - 1));
  const auto sum = torch::zeros({4});
  comm.reduce_scatter_single(sum, output).wait();
  EXPECT_TRUE(sum.equal(input * kWorld));
  comm.all_reduce(sum, {.op = ReduceOp::kAvg}).wait();
  EXPECT_TRUE(sum.equal(input * kWorld));
  comm.barrier();
  comm.broadcast(sum, 0).wait();
  comm.agree("test", "");
  comm.check_same("test", {"a"});
  EXPECT_THROW(comm.agree("test", "bad"), Error);
  EXPECT_EQ(comm.all_gather_string("x").size(), static_cast<std::size_t>(kWorld));
  comm.all_to_all_single(output, input.repeat({kWorld})).wait();
  EXPECT_TRUE(output.equal(input.repeat({kWorld})));
  comm.reset_counters();
  const auto large = torch::ones({2048 * kWorld});
  comm.all_reduce(large).wait();
  EXPECT_EQ(large[-1].item<float>(), kWorld);
  EXPECT_EQ(comm.counters().bytes_sent, 2 * (kWorld - 1) * 2048 * 4);
  EXPECT_EQ(comm.counters().bytes_received, 2 * (kWorld - 1) * 2048 * 4);
}

}  // namespace
}  // namespace hyper_parallel
