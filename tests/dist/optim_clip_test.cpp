// Norms and clipping give the numbers of torch's, on every mesh, and count everything once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ClipGradNorm, EqualsTorch) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.05, 1e6}) {
      Net plain = make_net();
      const Batch batch = make_batch(12, 1);
      net_loss(plain(batch.tokens), batch.targets).backward();
      // The tied weight has two names: clip each tensor once.
      std::vector<torch::Tensor> parameters;
      for (auto& entry : plain->named_parameters()) {
        if (entry.key() != "head.weight") parameters.push_back(entry.value());
      }
      const double want = torch::nn::utils::clip_grad_norm_(parameters, max_norm, p);
      for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {2}, {3}, {2, 2}}) {
        const int world = ranks_of(mesh);
        run_ranks(world, [&](int rank) {
          for (const auto layout : kLayouts) {
            Net net = make_net();
            const HSDPModule root = shard_net(net, on_mesh(mesh, layout));
            const Batch mine = batch.part(rank, world);
            net_loss(net(mine.tokens), mine.targets).backward();
            EXPECT_NEAR(clip_grad_norm_(root, max_norm, {.norm_type = p}), want, 1e-5 * want);
            Tensors gradients = plain_gradients(*plain);
            gradients.erase("head.weight");
            EXPECT_LT(relative_difference(full_gradients(root), gradients), 2e-5);
          }
        });
      }
    }
  }
}

/// Parameters outside of the tree are counted once (B38), and every rank gets the same plain number (B39).
TEST(ClipGradNorm, PlainParametersAndEqualNumbers) {
  run_ranks(3, [] {
    nn::Linear layer(torch::nn::LinearOptions(5, 4).bias(false));
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kPerParameter));
    layer(torch::ones({1, 5})).sum().backward();  // gradient: 20 ones
    torch::Tensor plain = torch::ones({16}).set_requires_grad(true);
    plain.mutable_grad() = torch::ones({16});
    const double norm = clip_grad_norm_(root, 3.0, {.plain_parameters = {plain}});
    EXPECT_DOUBLE_EQ(norm, 6.0);
    EXPECT_NEAR(plain.grad()[0].item<double>(), 0.5, 1e-6);
    for (const std::string& other : current_world().comm().all_gather_string(std::to_string(norm)))
      EXPECT_EQ(other, std::to_string(norm));
  });
}

TEST(ClipGradNorm, Errors) {
  run_ranks(2, [](int rank) {
    nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kPerParameter));
    EXPECT_THAT([&] { clip_grad_norm_(root, -1); }, ThrowsMessage<ValueError>(HasSubstr("max_norm is -1")));
    EXPECT_THAT([&] { clip_grad_norm_(root, 1, {.norm_type = 0}); }, ThrowsMessage<ValueError>(HasSubstr("norm_type is 0")));
    layer(torch::full({1, 4}, rank == 0 ? INFINITY : 1.0F)).sum().backward();
    const Tensors before = full_gradients(root);
    EXPECT_THAT([&] { clip_grad_norm_(root, 1, {.error_if_nonfinite = true}); },
                ThrowsMessage<Error>(HasSubstr("want a finite number")));
    EXPECT_TRUE(torch::equal(full_gradients(root).at("weight"), before.at("weight"))) << "nothing was scaled";
  });
}

/// Two units on two meshes, of one and of two dimensions, and a plain parameter: the number of one process (B38).
TEST(ClipGradNorm, UnitsOnDifferentMeshesAndAPlainParameter) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    run_ranks(4, [&](int rank) {
      for (const auto layout : kLayouts) {
        Net net = make_net();
        fully_shard(net->u1, on_mesh({4}, layout));
        fully_shard(net->u2, on_mesh({2, 2}, layout));
        fully_shard(net->u3, on_mesh({4, 1}, layout));  // as good as replicated
        auto options = on_mesh({4}, layout);
        torch::Tensor plain = net->u4->scale;
        options.ignored_params = {plain};
        const HSDPModule root = fully_shard(net, options);
        set_gradients(root, 1);
        plain.mutable_grad() = torch::tensor(3.0F);
        std::vector<torch::Tensor> whole = {torch::tensor(3.0F)};
        for (auto& [name, gradient] : full_gradients(root)) whole.push_back(gradient.clone());
        std::vector<torch::Tensor> leaves;
        for (auto& gradient : whole) {
          leaves.push_back(torch::zeros_like(gradient).set_requires_grad(true));
          leaves.back().mutable_grad() = gradient;
        }
        const double want = torch::nn::utils::clip_grad_norm_(leaves, 0.5, p);
        EXPECT_NEAR(get_total_norm(root, {.norm_type = p, .plain_parameters = {plain}}), want, 1e-5 * want);
        const double norm = clip_grad_norm_(root, 0.5, {.norm_type = p, .plain_parameters = {plain}});
        EXPECT_NEAR(norm, want, 1e-5 * want);
        EXPECT_NEAR(plain.grad().item<float>(), whole[0].item<float>(), 1e-6);
        std::size_t i = 1;
        for (auto& [name, gradient] : full_gradients(root))
          EXPECT_TRUE(torch::allclose(gradient, whole[i++], 1e-5, 1e-7)) << name << " rank " << rank;
        const std::string bits = concat(std::hexfloat, norm);
        for (const std::string& other : current_world().comm().all_gather_string(bits)) EXPECT_EQ(other, bits);
      }
    });
  }
}

/// Gradients in another dtype than the shards (fp32 main gradients), low-precision ones, and sums that fp32 could not hold.
TEST(ClipGradNorm, GradientsOfAnyDtype) {
  for (const auto shard : {torch::kBFloat16, torch::kHalf, torch::kFloat, torch::kDouble}) {
    for (const auto gradient : {torch::kBFloat16, torch::kHalf, torch::kFloat, torch::kDouble}) {
      run_ranks(3, [&] {
        Net net = make_net();
        net->to(shard);
        const HSDPModule root = shard_net(net, on_all());
        set_gradients(root, 1, gradient);
        for (const double p : {1.0, 2.0, 2.5, std::numeric_limits<double>::infinity()}) {
          double want = 0;
          for (auto& [name, tensor] : root.named_dtensors()) {
            const auto values = whole_gradient(name, tensor.shape(), 1).to(gradient).to(torch::kDouble).abs();
            const double part = std::isinf(p) ? values.max().item<double>() : values.pow(p).sum().item<double>();
            want = std::isinf(p) ? std::max(want, part) : want + part;
          }
          want = std::isinf(p) ? want : std::pow(want, 1 / p);
          EXPECT_NEAR(get_total_norm(root, {.norm_type = p}), want, 1e-12 * want) << shard << ' ' << gradient << ' ' << p;
        }
        clip_grad_norm_(root, 0.5);
        EXPECT_NEAR(get_total_norm(root), 0.5, 0.5 * (gradient == torch::kBFloat16 ? 0x1p-8 : 1e-4));
      });
    }
  }
  run_ranks(2, [] {
    nn::Linear layer(torch::nn::LinearOptions(4, 4).bias(false));
    const HSDPModule root = fully_shard(layer, on_all());
    for (auto& parameter : layer->parameters()) parameter.mutable_grad() = torch::full_like(parameter, 1e30F);
    EXPECT_NEAR(clip_grad_norm_(root, 1.0), 4e30, 1e24);
    for (auto& parameter : layer->parameters()) EXPECT_NEAR(parameter.grad().max().item<float>(), 0.25, 1e-6);
  });
}

TEST(ClipGradNorm, NanOfOneRankIsNanOfAll) {
  for (const double p : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    run_ranks(3, [&] {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all());
      set_gradients(root, 0);
      spoil(root, 1, NAN);
      EXPECT_TRUE(std::isnan(clip_grad_norm_(root, 1.0, {.norm_type = p})));
    });
  }
}

TEST(ClipGradValue, LimitsEveryElement) {
  run_ranks(3, [] {
    for (const auto layout : kLayouts) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all(layout));
      set_gradients(root, 2);
      torch::Tensor plain = torch::zeros({3}).set_requires_grad(true);
      plain.mutable_grad() = torch::tensor({-5.0F, 0.1F, 5.0F});
      clip_grad_value_(root, 0.25, {.plain_parameters = {plain}});
      for (auto& [name, gradient] : full_gradients(root))
        EXPECT_TRUE(torch::equal(gradient, whole_gradient(name, gradient.sizes().vec(), 2).clamp(-0.25, 0.25))) << name;
      EXPECT_TRUE(torch::equal(plain.grad(), torch::tensor({-0.25F, 0.1F, 0.25F})));
      EXPECT_THAT(value_error([&] { clip_grad_value_(root, -1); }), HasSubstr("[clip_grad_value_] clip_value is -1"));
      EXPECT_THAT(value_error([&] { clip_grads_with_norm_(root, -1, 1); }), HasSubstr("[clip_grads_with_norm_] max_norm is -1"));
      EXPECT_THAT(value_error([&] { return get_total_norm(root, {.norm_type = -2}); }), HasSubstr("[get_total_norm] norm_type"));
    }
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
