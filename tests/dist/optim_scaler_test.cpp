// Loss scaling: one decision for all ranks, torch's rules for the scale, and gradients as if nothing had been scaled.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using optim::GradScaler;
using ::testing::HasSubstr;

/// Scaled training is unscaled training, with our optimizers and torch's, with clipping in between.
TEST(GradScaler, ScaledTrainingIsPlainTraining) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {3}, {2, 2}}) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      for (const bool torchs : {false, true}) {
        Net scaled = make_net(), plain = make_net();
        const HSDPModule root = shard_net(scaled, on_mesh(mesh)), plain_root = shard_net(plain, on_mesh(mesh));
        optim::SGD sgd(root, {.lr = 0.1});
        std::vector<torch::Tensor> leaves;  // parameters() has the tied weight twice
        for (auto& group : root.groups()) {
          for (auto& parameter : group.parameters) leaves.push_back(parameter.sharded);
        }
        torch::optim::SGD torch_sgd(leaves, torch::optim::SGDOptions(0.1));
        optim::SGD plain_sgd(plain_root, {.lr = 0.1});
        GradScaler scaler({.init_scale = 1024});  // a power of two loses no bit
        for (int step = 0; step < 3; ++step) {
          const Batch batch = make_batch(12, static_cast<uint64_t>(step)).part(rank, ranks_of(mesh));
          sgd.zero_grad(), plain_sgd.zero_grad();
          scaler.scale(net_loss(scaled(batch.tokens), batch.targets)).backward();
          net_loss(plain(batch.tokens), batch.targets).backward();
          scaler.unscale_(root);
          EXPECT_NEAR(clip_grad_norm_(root, 0.1), clip_grad_norm_(plain_root, 0.1), 1e-7);
          EXPECT_TRUE(torchs ? scaler.step(torch_sgd) : scaler.step(sgd));
          scaler.update();
          plain_sgd.step();
          EXPECT_LT(relative_difference(full_parameters(root), full_parameters(plain_root)), 1e-6);
        }
      }
    });
  }
}

/// A bad number on any one rank: no rank steps, the scale shrinks everywhere; the step after it goes on.
TEST(GradScaler, AllRanksSkipTogether) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{3}, {2, 2}}) {
      for (int culprit = 0; culprit < ranks_of(mesh); culprit += 2) {
        run_ranks(ranks_of(mesh), [&] {
          Net net = make_net();
          const HSDPModule root = shard_net(net, on_mesh(mesh));
          optim::AdamW adamw(root);
          GradScaler scaler({.init_scale = 64});
          const Tensors before = full_parameters(root);
          set_gradients(root, 0);
          spoil(root, culprit, bad);
          EXPECT_FALSE(scaler.step(adamw));  // unscales by itself
          EXPECT_TRUE(scaler.found_nonfinite());
          scaler.update();
          EXPECT_EQ(scaler.get_scale(), 32);
          expect_same_bits(full_parameters(root), before, "skipped");
          for (const auto& state : adamw.state()) EXPECT_EQ(state.step, 0);
          set_gradients(root, 0);
          EXPECT_TRUE(scaler.step(adamw));
          scaler.update();
          EXPECT_EQ(scaler.get_scale(), 32);
        });
      }
    }
  }
}

/// Units that only some ranks share, and trees that only some ranks hold.
TEST(GradScaler, RanksOfSeveralMeshesAgree) {
  for (const bool separate_trees : {false, true}) {
    run_ranks(4, [&] {
      const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"pp", "dp"});
      Net net = make_net();
      FullyShardOptions pair;
      pair.mesh = grid["dp"];
      if (!separate_trees) fully_shard(net->u1, on_mesh({4}));  // wider than the root's mesh
      const HSDPModule root = fully_shard(net, pair);
      optim::SGD sgd(root);
      GradScaler scaler(separate_trees ? optim::GradScalerOptions{.comm = current_world().comm()} : optim::GradScalerOptions{});
      for (int culprit = 0; culprit < 4; ++culprit) {
        set_gradients(root, 0);
        spoil(root, culprit, INFINITY, "u3.");
        EXPECT_FALSE(scaler.step(sgd)) << get_rank() << ' ' << culprit;
        scaler.update();
        set_gradients(root, 0);
        EXPECT_TRUE(scaler.step(sgd));
        scaler.update();
      }
    });
  }
}

/// Root on {0,1,2} {3,4,5}, a unit on {0,1} {2,3} {4,5}: what rank 5 finds reaches ranks 0 and 1 only by way of rank 2.
TEST(GradScaler, GroupsThatOverlap) {
  run_ranks(6, [] {
    Net net = make_net();
    FullyShardOptions threes, pairs;
    threes.mesh = init_device_mesh("cpu", {2, 3}, {"a", "b"})["b"];
    pairs.mesh = init_device_mesh("cpu", {3, 2}, {"c", "d"})["d"];
    fully_shard(net->u1, pairs);
    const HSDPModule root = fully_shard(net, threes);
    optim::SGD sgd(root);
    GradScaler scaler;
    set_gradients(root, 0);
    spoil(root, 5, INFINITY);
    EXPECT_FALSE(scaler.step(sgd)) << get_rank();
  });
}

TEST(GradScaler, TheScaleFollowsTorchsRules) {
  run_ranks(1, [] {
    nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
    const HSDPModule root = fully_shard(layer, on_all());
    optim::SGD sgd(root);
    const auto step = [&](GradScaler& scaler, float gradient) {
      layer->parameters()[0].mutable_grad() = torch::full({2, 2}, gradient);
      scaler.step(sgd);
      scaler.update();
      return scaler.get_scale();
    };
    GradScaler scaler({.init_scale = 8, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
    std::vector<double> scales;
    for (const float gradient : {1.0F, 1.0F, 1.0F, 1.0F, INFINITY, 1.0F, 1.0F, 1.0F}) scales.push_back(step(scaler, gradient));
    EXPECT_EQ(scales, (std::vector<double>{8, 8, 32, 32, 8, 8, 8, 32}));

    step(scaler, 1.0F);
    GradScaler resumed({.growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
    resumed.load_state(scaler.state());
    EXPECT_EQ(resumed.state(), scaler.state());
    for (int i = 0; i < 2; ++i) EXPECT_EQ(step(resumed, 1.0F), step(scaler, 1.0F));
    EXPECT_EQ(resumed.get_scale(), 128);

    GradScaler high({.init_scale = 0x1p127, .growth_interval = 1});
    EXPECT_EQ(step(high, 1.0F), 0x1p127) << "growing would leave fp32";
    GradScaler low({.init_scale = 0x1p-126});
    EXPECT_EQ(step(low, NAN), 0x1p-126) << "a scale of 0 would never come back";

    const auto half = scaler.scale(torch::full({}, 60000.0F, torch::kHalf));
    EXPECT_EQ(half.scalar_type(), torch::kFloat);
    EXPECT_EQ(half.item<float>(), 60000.0F * 128.0F);

    GradScaler off({.enabled = false});
    EXPECT_EQ(off.get_scale(), 1);
    layer->parameters()[0].mutable_grad() = torch::full({2, 2}, INFINITY);
    EXPECT_TRUE(off.step(sgd)) << "skips nothing";
    off.update();
  });
}

TEST(GradScaler, PlainParameters) {
  run_ranks(2, [](int rank) {
    nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
    const HSDPModule root = fully_shard(layer, on_all());
    optim::SGD sgd(root);
    torch::Tensor plain = torch::zeros({2}).set_requires_grad(true);
    GradScaler scaler({.init_scale = 4});
    plain.mutable_grad() = torch::full({2}, 8.0F);
    scaler.unscale_(root, {plain});
    EXPECT_TRUE(torch::equal(plain.grad(), torch::full({2}, 2.0F)));
    EXPECT_TRUE(scaler.step(sgd));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4);
    plain.mutable_grad() = torch::tensor({8.0F, 0.0F, 4.0F}).slice(0, 0, 3, 2);
    scaler.unscale_(root, {plain});
    EXPECT_TRUE(torch::equal(plain.grad(), torch::tensor({2.0F, 1.0F}))) << "not contiguous";
    scaler.update();
    plain.mutable_grad() = torch::full({2}, rank == 1 ? NAN : 1.0F);
    scaler.unscale_(root, {plain});
    EXPECT_FALSE(scaler.step(sgd));
  });
}

TEST(GradScaler, StepIfFinite) {
  run_ranks(2, [] {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    torch::optim::SGD torchs(net->parameters(), torch::optim::SGDOptions(0.1));
    optim::SGD ours(root);
    set_gradients(root, 0);
    EXPECT_TRUE(optim::step_if_finite(ours, clip_grad_norm_(root, 1.0)));
    EXPECT_TRUE(optim::step_if_finite(torchs, clip_grad_norm_(root, 1.0)));
    const Tensors before = full_parameters(root);
    spoil(root, 1, INFINITY);
    const double norm = clip_grad_norm_(root, 1.0);
    EXPECT_FALSE(optim::step_if_finite(ours, norm));
    EXPECT_FALSE(optim::step_if_finite(torchs, norm));
    expect_same_bits(full_parameters(root), before, "skipped");
  });
}

TEST(GradScaler, Errors) {
  const auto made = [](optim::GradScalerOptions options) { return value_error([&] { return GradScaler(std::move(options)); }); };
  EXPECT_THAT(made({.init_scale = 0}), HasSubstr("[GradScaler] init_scale is 0"));
  EXPECT_THAT(made({.init_scale = 1e300}), HasSubstr("init_scale is 1e+300"));
  EXPECT_THAT(made({.growth_factor = 1}), HasSubstr("growth_factor is 1"));
  EXPECT_THAT(made({.backoff_factor = 1}), HasSubstr("backoff_factor is 1"));
  EXPECT_THAT(made({.growth_interval = 0}), HasSubstr("growth_interval is 0"));
  GradScaler scaler;
  EXPECT_THAT(value_error([&] { scaler.load_state({.scale = -1}); }), HasSubstr("scale is -1"));
  EXPECT_THAT(value_error([&] { scaler.load_state({.scale = 1, .growth_tracker = -1}); }), HasSubstr("growth_tracker is -1"));
  EXPECT_THAT(value_error([&] { scaler.unscale_({}); }), HasSubstr("root is empty"));
  run_ranks(1, [&] {
    nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
    const HSDPModule root = fully_shard(layer, on_all());
    torch::optim::SGD torchs(layer->parameters(), torch::optim::SGDOptions(0.1));
    EXPECT_THAT(message_of<Error>([&] { return scaler.step(torchs); }), HasSubstr("no gradients were unscaled"));
    EXPECT_THAT(message_of<Error>([&] { scaler.update(); }), HasSubstr("no gradients were unscaled"));
    scaler.unscale_(root);
    EXPECT_THAT(message_of<Error>([&] { scaler.unscale_(root); }), HasSubstr("unscale_ was called before"));
    scaler.update();
    layer->parameters()[0].mutable_grad() = torch::ones({2, 2}, torch::kHalf);
    EXPECT_THAT(value_error([&] { scaler.unscale_(root); }), HasSubstr("the gradient of weight is Half, want fp32 or bf16"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
