#include <gtest/gtest.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>

#include "support/rank_threads.h"

#include <torch/torch.h>
namespace hp = hyper_parallel;
TEST(Smoke, All) {
  hp::testing::run_ranks(3, [](int rank) {
    auto comm = hp::current_world().comm();
    auto in = torch::full({5}, rank, torch::kFloat);
    auto out = torch::empty({15});
    comm.all_gather_single(out, in).wait();
    EXPECT_EQ(out[10].item<float>(), 2);
    auto rs = torch::empty({5});
    comm.reduce_scatter_single(rs, out).wait();
    EXPECT_EQ(rs[0].item<float>(), 3 * rank);
    auto big = torch::full({10001}, rank + 1.0F);
    comm.all_reduce(big).wait();
    EXPECT_TRUE(big.equal(torch::full({10001}, 6.0F)));
    comm.barrier();
    comm.check_same("x", {"a"});
  });
}
