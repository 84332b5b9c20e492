// Our AdamW gives the numbers of torch's, on every number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

torch::optim::AdamWOptions torch_options() { return torch::optim::AdamWOptions(0.02).betas({0.8, 0.95}).weight_decay(0.1); }

/// Both optimizers see exactly the same gradients: those of the sharded model, put into a torch optimizer over the whole tensors.
TEST(AdamW, EqualsTorchOnTheSameGradients) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](int rank) {
      for (const auto layout : kLayouts) {
        Net net = make_net({.skip_last = true});  // u4 never gets a gradient
        const HSDPModule root = shard_net(net, on_all(layout));
        optim::AdamW adamw(root, {.lr = 0.02, .betas = {0.8, 0.95}, .weight_decay = 0.1});
        Tensors whole = full_parameters(root);
        std::vector<torch::Tensor> list;
        for (auto& [name, tensor] : whole) list.push_back(tensor.set_requires_grad(true));
        torch::optim::AdamW reference(list, torch_options());
        for (int step = 0; step < 6; ++step) {
          net->options.skip_last = step < 2 || step == 4;  // its step count falls behind
          adamw.zero_grad();
          const Batch mine = make_batch(6, static_cast<uint64_t>(step)).part(rank, world);
          net_loss(net(mine.tokens), mine.targets).backward();
          const Tensors gradients = full_gradients(root);
          for (auto& [name, tensor] : whole) {
            const auto gradient = gradients.find(name);
            tensor.mutable_grad() = gradient == gradients.end() ? torch::Tensor() : gradient->second;
          }
          adamw.step();
          reference.step();
          EXPECT_LT(relative_difference(full_parameters(root), whole), 2e-6) << "step " << step;
        }
        for (const auto& state : adamw.state()) EXPECT_EQ(state.step, state.name.starts_with("u4.") ? 3 : 6) << state.name;
      }
    });
  }
}

TEST(AdamW, WeightDecayByParameter) {
  run_ranks(2, [](int rank) {
    for (const auto layout : kLayouts) {
      Net net = make_net(), other = make_net();
      const HSDPModule root = shard_net(net, on_all(layout));
      optim::AdamW adamw(root,
                         {.lr = 0.02, .weight_decay = 0.5, .decays = [](const std::string&, const std::vector<int64_t>& shape) {
                            return shape.size() >= 2;
                          }});
      const HSDPModule plain_root = shard_net(other, on_all(layout));
      optim::AdamW no_decay(plain_root, {.lr = 0.02, .weight_decay = 0});
      const Batch mine = make_batch(4, 1).part(rank, 2);
      net_loss(net(mine.tokens), mine.targets).backward();
      net_loss(other(mine.tokens), mine.targets).backward();
      const Tensors before = full_parameters(root);
      adamw.step(), no_decay.step();
      const Tensors decayed = full_parameters(root);
      for (const auto& [name, value] : full_parameters(plain_root)) {
        const auto want = value - (value.dim() >= 2 ? 0.02 * 0.5 * before.at(name) : torch::zeros_like(value));
        EXPECT_TRUE(torch::allclose(decayed.at(name), want, 1e-5, 1e-6)) << name;
      }
    }
  });
}

TEST(AdamW, TakesGradientsThatTheUserReplaced) {
  run_ranks(2, [] {
    nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kPerParameter));
    optim::AdamW adamw(root, {.lr = 0.1, .weight_decay = 0});
    layer(torch::ones({1, 4})).sum().backward();
    torch::Tensor shard = layer->parameters()[0];
    shard.mutable_grad() = -torch::ones_like(shard);
    const auto before = shard.detach().clone();
    adamw.step();
    EXPECT_TRUE(torch::allclose(shard, before + 0.1, 1e-4, 1e-5));
  });
}

TEST(AdamW, Errors) {
  run_ranks(1, [] {
    nn::Linear layer(4, 4);
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kPerParameter));
    EXPECT_THAT([&] { optim::AdamW(root, {.lr = -1}); }, ThrowsMessage<ValueError>(HasSubstr("[AdamW] lr is -1")));
    EXPECT_THAT([&] { optim::AdamW(root, {.betas = {0.9, 1.0}}); }, ThrowsMessage<ValueError>(HasSubstr("betas are 0.9 and 1")));
    EXPECT_THAT([&] { optim::AdamW(root, {.eps = -1}); }, ThrowsMessage<ValueError>(HasSubstr("eps is -1")));
    EXPECT_THAT([&] { optim::AdamW(root, {.weight_decay = -1}); }, ThrowsMessage<ValueError>(HasSubstr("weight_decay is -1")));
    EXPECT_THAT([&] { optim::AdamW(fsdp::UnitHandle{}); }, ThrowsMessage<ValueError>(HasSubstr("root is empty")));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
