// Mixed precision: dtypes where they belong, and gradients that are bit for bit those of an unsharded low-precision run.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

struct Case {
  std::string name;
  std::vector<int64_t> mesh = {2};
  ShardLayout layout = ShardLayout::kPerParameter;
  bool fusion = true;
  at::ScalarType dtype = at::kBFloat16;
  int micro_batches = 1;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// Each rank's low-precision gradients of an unsharded model, accumulated over micro-batches in fp32, then averaged in rank
/// order.
Tensors low_precision_gradients(const Case& c, const Batch& batch, int64_t world) {
  Tensors sum;
  for (int64_t rank = 0; rank < world; ++rank) {
    Net net = make_net();
    net->to(c.dtype);
    Tensors mine;
    for (int64_t micro = 0; micro < c.micro_batches; ++micro) {
      net->zero_grad();
      const Batch part = batch.part(micro, c.micro_batches).part(rank, world);
      (net_loss(net(part.tokens), part.targets) / c.micro_batches).backward();
      for (auto& [name, gradient] : plain_gradients(*net)) {
        if (name == "head.weight") continue;  // tied: one owner in the sharded model
        auto& total = mine[name];
        total = total.defined() ? total + gradient.to(torch::kFloat) : gradient.to(torch::kFloat);
      }
    }
    for (auto& [name, gradient] : mine) {
      auto& total = sum[name];
      total = total.defined() ? total + gradient : gradient;
    }
  }
  for (auto& [name, gradient] : sum) gradient.mul_(static_cast<float>(1.0 / static_cast<double>(world)));
  return sum;
}

class Precision : public ::testing::TestWithParam<Case> {};

TEST_P(Precision, BitwiseTheUnshardedGradients) {
  const Case& c = GetParam();
  const int world = ranks_of(c.mesh);
  const Batch batch = make_batch(12, 7);
  const Tensors want = low_precision_gradients(c, batch, world);
  run_ranks(world, [&](int rank) {
    Net net = make_net();
    FullyShardOptions options = on_mesh(c.mesh, c.layout);
    options.mp_policy = {.param_dtype = c.dtype, .reduce_dtype = torch::kFloat};
    options.comm_fusion = c.fusion;
    const HSDPModule root = shard_net(net, options);
    for (int step = 0; step < 2; ++step) {
      root.zero_grad();
      for (int micro = 0; micro < c.micro_batches; ++micro) {
        root.set_requires_gradient_sync(micro + 1 == c.micro_batches);
        const Batch mine = batch.part(micro, c.micro_batches).part(rank, world);
        const auto logits = net(mine.tokens);
        EXPECT_EQ(logits.scalar_type(), c.dtype);
        (net_loss(logits, mine.targets) / c.micro_batches).backward();
      }
      const Tensors got = full_gradients(root);
      for (const auto& [name, gradient] : got) EXPECT_EQ(gradient.scalar_type(), torch::kFloat) << name;
      EXPECT_EQ(relative_difference(got, want), 0.0) << "step " << step;
    }
    for (const auto& parameter : net->parameters())
      EXPECT_EQ(parameter.scalar_type(), torch::kFloat) << "the master keeps its dtype";
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [mesh_name, mesh] : {std::pair<std::string, std::vector<int64_t>>{"w1", {1}},
                                        {"w2", {2}},
                                        {"w3", {3}},
                                        {"hsdp12", {1, 2}},
                                        {"hsdp21", {2, 1}}}) {
    for (const int layout : {0, 1, 2}) {
      for (const int micro : {1, 2}) {
        for (const auto dtype : {at::kBFloat16, at::kHalf}) {
          all.push_back({.name = mesh_name + std::array{"Fused", "Unfused", "Ragged"}[static_cast<std::size_t>(layout)] +
                                 (micro == 1 ? "" : "Accumulate") + (dtype == at::kHalf ? "Half" : "BFloat16"),
                         .mesh = mesh,
                         .layout = layout == 2 ? ShardLayout::kRagged : ShardLayout::kPerParameter,
                         .fusion = layout != 1,
                         .dtype = dtype,
                         .micro_batches = micro});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, Precision, ::testing::ValuesIn(cases()), [](const auto& instance) { return instance.param.name; });

struct ProbeImpl : torch::nn::Module {
  ProbeImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 4));
    count = register_buffer("count", torch::ones({1}));
  }
  std::tuple<torch::Tensor, std::vector<torch::Tensor>> forward(const torch::Tensor& x,
                                                                const std::map<std::string, torch::Tensor>& extra) {
    seen = {x.scalar_type(), extra.at("float").scalar_type(), extra.at("long").scalar_type(), layer->weight.scalar_type(),
            count.scalar_type()};
    return {layer(x), {extra.at("float") * 2, extra.at("long")}};
  }
  torch::nn::Linear layer = nullptr;
  torch::Tensor count;
  std::vector<at::ScalarType> seen;
};
HP_MODULE(Probe);

TEST(Policy, CastsInputsAndOutputsInContainers) {
  run_ranks(2, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"});
    Probe probe;
    fully_shard(probe, {.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
    const std::map<std::string, torch::Tensor> extra = {{"float", torch::ones({4})}, {"long", torch::ones({4}, torch::kLong)}};
    auto [y, list] = probe(torch::ones({2, 4}), extra);
    // Buffers keep their dtype (documented), integers are left alone.
    EXPECT_EQ(probe->seen,
              (std::vector<at::ScalarType>{torch::kBFloat16, torch::kBFloat16, torch::kLong, torch::kBFloat16, torch::kFloat}));
    EXPECT_EQ(y.scalar_type(), torch::kFloat);
    EXPECT_EQ(list[0].scalar_type(), torch::kFloat);
    EXPECT_EQ(list[1].scalar_type(), torch::kLong);
    EXPECT_EQ(extra.at("float").scalar_type(), torch::kFloat) << "the caller's tensors are untouched";
    y.sum().backward();
    EXPECT_TRUE(probe->layer->named_parameters()["weight"].grad().defined());

    Probe uncast;
    fully_shard(uncast, {.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false}});
    EXPECT_THROW((void)uncast(torch::ones({2, 4}), extra), std::exception) << "float input, bf16 weight";
    EXPECT_EQ(uncast->seen[0], torch::kFloat);
  });
}

/// Master parameters that are themselves low-precision: fp32 sums, rounded once into the gradient of the master's dtype.
TEST(Policy, LowPrecisionMaster) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {2}, {2, 2}}) {
    const int world = ranks_of(mesh);
    const Case c{.name = "", .mesh = mesh, .micro_batches = 2};
    const Batch batch = make_batch(16, 7);
    Tensors want = low_precision_gradients(c, batch, world);
    for (auto& [name, gradient] : want) gradient = gradient.to(torch::kBFloat16);
    run_ranks(world, [&](int rank) {
      for (const auto param_dtype : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
        Net net = make_net();
        net->to(torch::kBFloat16);
        FullyShardOptions options = on_mesh(mesh);
        options.mp_policy = {.param_dtype = param_dtype, .reduce_dtype = torch::kFloat};
        const HSDPModule root = shard_net(net, options);
        for (int micro = 0; micro < 2; ++micro) {
          root.set_requires_gradient_sync(micro == 1);
          const Batch mine = batch.part(micro, 2).part(rank, world);
          (net_loss(net(mine.tokens), mine.targets) / 2).backward();
        }
        const Tensors got = full_gradients(root);
        for (const auto& [name, gradient] : got) EXPECT_EQ(gradient.scalar_type(), torch::kBFloat16) << name;
        // At world 1 the flat gradient itself accumulates, in the master's dtype.
        const double bound = param_dtype ? 5e-2 : world == 1 ? 2e-2 : 0.0;
        EXPECT_LE(relative_difference(got, want), bound);
      }
    });
  }
}

/// The reduce dtype is what travels when it is the narrower one.
TEST(Policy, LowPrecisionReduction) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{2}, {2, 2}}) {
    const int64_t world = mesh.size() == 1 ? 2 : 4;
    Net plain = make_net();
    const Batch batch = make_batch(12, 3);
    net_loss(plain(batch.tokens), batch.targets).backward();
    Tensors want = plain_gradients(*plain);
    want.erase("head.weight");
    run_ranks(world, [&](int rank) {
      for (const auto dtype : {at::kBFloat16, at::kHalf}) {
        Net net = make_net();
        FullyShardOptions options = on_mesh(mesh);
        options.mp_policy.reduce_dtype = dtype;
        const HSDPModule root = shard_net(net, options);
        const Comm axis = options.mesh.get_group(options.mesh.ndim() - 1);
        const Batch mine = batch.part(rank, world);
        net_loss(net(mine.tokens), mine.targets).backward();
        const double difference = relative_difference(full_gradients(root), want);
        EXPECT_LT(difference, 2e-2);
        EXPECT_GT(difference, 0.0);
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
