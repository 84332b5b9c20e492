// What happens to gathered parameters between steps: scopes that fail, optimizers that are still running.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/net_on_ranks.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

/// A gather that throws in the middle: nothing stays that an optimizer step would make stale.
TEST(UnshardScope, ThatFailsLeavesNothingGathered) {
  run_ranks(2, [](int) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const Batch batch = make_batch(4, 1);
    const torch::NoGradGuard no_grad;
    const torch::Tensor before = net(batch.tokens);
    HSDPModule::of(net->u2).unshard();  // by hand: stays
    HSDPModule::of(net->u3).set_custom_all_gather(
        [](const Comm&, const at::Tensor&, const at::Tensor&) -> CommWait { throw ValueError("no gather"); });
    for (int i = 0; i < 2; ++i) EXPECT_EQ(value_error([&] { const UnshardScope scope(root); }), "no gather");
    for (const auto& module : {HSDPModule::of(net->u1), HSDPModule::of(net->u2->inner), HSDPModule::of(net->u3), root})
      EXPECT_FALSE(module.is_unsharded());
    EXPECT_TRUE(HSDPModule::of(net->u2).is_unsharded());
    HSDPModule::of(net->u2).reshard();
    HSDPModule::of(net->u3).set_custom_all_gather({});
    for (auto& parameter : net->u1->parameters()) parameter.set_data(parameter + 0.25);
    EXPECT_FALSE(torch::allclose(net(batch.tokens), before)) << "computed with what the scope had gathered";
    for (auto& parameter : net->u1->parameters()) parameter.set_data(parameter - 0.25);
    EXPECT_TRUE(torch::allclose(net(batch.tokens), before, 1e-4, 1e-5));
    {
      const UnshardScope scope(root);
      EXPECT_TRUE(root.is_unsharded());
    }
    const std::int64_t whole = root.memory_use().pool;
    for (int i = 0; i < 2; ++i) const UnshardScope scope(root);
    EXPECT_EQ(root.memory_use().pool, whole);
  });
  EXPECT_EQ(value_error([] { const UnshardScope scope{fsdp::UnitHandle()}; }),
            "[UnshardScope] the handle has no unit, want that of a sharded module");
}

/// The optimizer step is still running when the next forward begins.
TEST(PostOptimEvent, IsWaitedForOnceBeforeTheShardsAreRead) {
  for (const int world : {1, 2}) {
    run_ranks(world, [](int) {
      Net net = make_net(), reference = make_net();
      const HSDPModule root = shard_net(net, on_all()), reference_root = shard_net(reference, on_all());
      torch::optim::SGD sgd(net->parameters(), 0.5), reference_sgd(reference->parameters(), 0.5);
      const auto last = HSDPModule::of(net->u4);  // any handle of the tree will do
      int waits = 0;
      for (int step = 0; step < 3; ++step) {
        loss_of(net, get_rank()).backward(), loss_of(reference, get_rank()).backward();
        EXPECT_EQ(waits, step) << "backward and the rest of the forward do not wait again";
        reference_sgd.step();
        last.set_post_optim_event([&] { ++waits, sgd.step(); });
        if (step == 1) {
          HSDPModule::of(net->u1).unshard();  // gathers by hand, which reads the shards
          EXPECT_EQ(waits, 2);
          HSDPModule::of(net->u1).reshard();
        }
        EXPECT_TRUE(torch::equal(loss_of(net, get_rank()), loss_of(reference, get_rank())));
        EXPECT_EQ(waits, step + 1);
        root.reset_iter_state(), reference_root.reset_iter_state();
        sgd.zero_grad(), reference_sgd.zero_grad();
      }
      root.set_post_optim_event([] { throw ValueError("the optimizer failed"); });
      EXPECT_EQ(value_error([&] { (void)loss_of(net, get_rank()); }), "the optimizer failed");
      root.set_post_optim_event([&] { ++waits; });
      root.set_post_optim_event({});
      loss_of(net, get_rank()).backward();
      loss_of(reference, get_rank()).backward();
      EXPECT_EQ(waits, 3);
      EXPECT_EQ(relative_difference(full_gradients(root), full_gradients(reference_root)), 0);
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
