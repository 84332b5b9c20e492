// Mixture of experts over ranks against one rank that has all experts and all tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/parallel_layers.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using namespace parallel;  // NOLINT: the layers under test
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kDim = 6;

MoEOptions options_of(int64_t n_experts, int64_t top_k) {
  return {.n_experts = n_experts, .top_k = top_k, .ffn_dim = 5, .aux_loss_weight = 0.3};
}

/// The layer as its definition reads: each token through each of its experts.
Tensor by_definition(MixtureOfExpertsImpl& moe, const Tensor& x) {
  const auto choice = moe.router(x);
  std::vector<Tensor> rows;
  for (int64_t n = 0; n < x.size(0); ++n) {
    Tensor sum = torch::zeros({kDim});
    for (int64_t j = 0; j < moe.options.top_k; ++j) {
      const int64_t e = choice.experts[n][j].item<int64_t>();
      const Tensor gate = torch::mv(moe.experts->gate_proj[e], x[n]), up = torch::mv(moe.experts->up_proj[e], x[n]);
      sum = sum + choice.weights[n][j] * torch::mv(moe.experts->down_proj[e], torch::silu(gate) * up);
    }
    rows.push_back(sum);
  }
  return torch::stack(rows);
}

TEST(ParallelMoE, OneRankIsTheDefinition) {
  for (const auto score : {RouterScore::kSoftmax, RouterScore::kSigmoid}) {
    for (const bool normalize : {true, false}) {
      for (const auto& [n_experts, top_k] : {std::pair<int64_t, int64_t>{5, 2}, {3, 3}, {4, 1}, {1, 1}}) {
        if (normalize && top_k == 1) continue;  // always 1: the router's gradient is rounding
        MoEOptions options = options_of(n_experts, top_k);
        options.score = score;
        options.normalize_weights = normalize;
        options.route_scale = 1.5;
        MixtureOfExperts moe(kDim, options);
        seed_parameters(*moe, 3);
        const Tensor x = wave({7, kDim}, 1).requires_grad_(), z = wave({7, kDim}, 1).requires_grad_();
        const MoEOutput got = moe(x);
        const Tensor cotangent = wave({7, kDim}, 2);
        got.output.backward(cotangent);
        const Tensors gradients = plain_gradients(*moe);
        moe->zero_grad();
        const Tensor want = by_definition(*moe, z);
        want.backward(cotangent);
        EXPECT_TRUE(got.output.allclose(want, 1e-5, 1e-6));
        EXPECT_TRUE(x.grad().allclose(z.grad(), 1e-5, 1e-5));
        EXPECT_LT(relative_difference(gradients, plain_gradients(*moe)), 1e-5);
      }
    }
  }
}

TEST(ParallelMoE, RouterWeightsAndTies) {
  MoEOptions options = options_of(4, 2);
  MoERouter router(kDim, options);
  const Tensor x = wave({3, kDim}, 1);
  auto choice = router(x);
  EXPECT_TRUE(choice.weights.sum(-1).allclose(torch::ones({3})));
  EXPECT_TRUE(choice.scores.allclose(torch::softmax(torch::matmul(x, router->weight.t()), -1)));
  {
    torch::NoGradGuard no_grad;
    router->weight.zero_();
  }
  EXPECT_TRUE(router(x).experts.equal(torch::tensor({{0, 1}, {0, 1}, {0, 1}}, torch::kLong)));
  EXPECT_TRUE(router(x.to(torch::kBFloat16)).weights.scalar_type() == torch::kFloat);
}

TEST(ParallelMoE, AuxLossIsSmallestWhenBalanced) {
  MoEOptions options = options_of(4, 1);
  MixtureOfExperts moe(kDim, options);
  torch::NoGradGuard no_grad;
  // One expert for everything, with certainty: n_experts * 1 * 1. Even: 1.
  moe->router->weight.zero_();
  moe->router->weight[2].fill_(100);
  EXPECT_NEAR(moe(torch::ones({8, kDim})).aux_loss.item<double>(), 0.3 * 4, 1e-5);
  moe->router->weight.zero_();
  moe->router->weight.narrow(1, 0, 4).copy_(100 * torch::eye(4));
  EXPECT_NEAR(moe(torch::eye(4, kDim).repeat({2, 1})).aux_loss.item<double>(), 0.3, 1e-5);
}

struct Case {
  int world, ep, tp;
  int64_t n_experts, top_k;
  bool sequence;
  bool split = false;  ///< split_tokens, with the experts shared out over all ranks
};

/// Sum of the ranks' gradients of the router, which each has of its own tokens.
void sum_router(MixtureOfExpertsImpl& moe, const Comm& ep) {
  if (ep.size() > 1) ep.all_reduce(moe.router->weight.grad()).wait();
}

void expect_same_as_one_rank(const Case& c, torch::Dtype dtype, bool checkpointed, const std::vector<int64_t>& tokens_of_ranks,
                             int64_t length) {
  run_ranks(c.world, [&](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {c.ep, c.tp}, {"ep", "tp"});
    const std::string what = concat("ep=", c.ep, " tp=", c.tp, " experts=", c.n_experts, " k=", c.top_k, " seq=", c.sequence,
                                    " split=", c.split, " tokens ", tokens_of_ranks, ' ', dtype);
    MoEOptions options = options_of(c.n_experts, c.top_k);
    options.shared_ffn_dim = 7;
    MixtureOfExperts whole(kDim, options);
    options.ep_mesh = options.balance_mesh = mesh["ep"];
    options.tp_mesh = mesh["tp"];
    options.sequence_parallel = c.sequence;
    options.split_tokens = c.split;
    if (c.split) options.ep_mesh = options.balance_mesh = mesh.flatten("all");
    MixtureOfExperts cut(kDim, options);
    seed_parameters(*whole, 3);
    load_whole(cut, parameters_of(*whole));
    whole->to(dtype);
    cut->to(dtype);

    // Tokens (batch, length, dim): a batch of its own for each rank of ep, all of them for the whole layer.
    const auto ep_rank = static_cast<std::size_t>(mesh.get_local_rank("ep"));
    const int64_t all = std::accumulate(tokens_of_ranks.begin(), tokens_of_ranks.end(), int64_t{0});
    const Tensor values = wave({all, length, kDim}, 1).to(dtype);
    const Tensor x = values.clone().requires_grad_();
    const MoEOutput want = whole(x);
    const Tensor cotangent = wave(want.output.sizes(), 2).to(dtype);
    (want.output * cotangent).sum().backward({}, /*retain_graph=*/true);
    const double ranks = c.ep;
    (want.aux_loss * ranks).backward();  // the ranks' losses are summed here, and each has the whole one in the mean

    const auto mine = [&](const Tensor& t) {
      Tensor part = t.split_with_sizes(tokens_of_ranks)[ep_rank];
      if (!c.sequence) return part;
      return part.split_with_sizes(ceil_chunks(length, c.tp), 1)[static_cast<std::size_t>(mesh.get_local_rank("tp"))];
    };
    const Tensor local = mine(values).clone().requires_grad_();
    const auto run = [&](const Tensor& t) { return cut(t, c.sequence ? length : 0); };
    const MoEOutput got = checkpointed ? checkpoint(run, local) : run(local);
    ((got.output * mine(cotangent)).sum() + got.aux_loss).backward();
    sum_partial_gradients(cut);
    sum_router(*cut, mesh.get_group("ep"));
    const double tolerance = dtype == torch::kFloat ? 1e-5 : 4e-2;
    // Gradients of the whole layer's shared expert are sums over all ranks' tokens, like the router's.
    for (auto& item : cut->shared_expert->named_parameters()) mesh.get_group("ep").all_reduce(item.value().grad()).wait();
    EXPECT_LT(relative_difference({{"y", got.output.detach()}}, {{"y", mine(want.output.detach())}}), tolerance) << what;
    EXPECT_LT(relative_difference({{"dx", local.grad()}}, {{"dx", mine(x.grad())}}), tolerance * 2) << what;
    expect_same_whole_gradients(cut, plain_gradients(*whole), tolerance * 2, what);
    Tensor mean = got.aux_loss.detach().clone();
    mesh.get_group("ep").all_reduce(mean, {.op = ReduceOp::kAvg}).wait();
    EXPECT_NEAR(mean.item<double>(), want.aux_loss.item<double>(), tolerance) << what;
  });
}

TEST(ParallelMoE, EqualsOneRank) {
  const Case cases[] = {
      {1, 1, 1, 4, 2, false}, {2, 2, 1, 4, 2, false}, {2, 2, 1, 5, 2, false}, {3, 3, 1, 4, 1, false}, {4, 4, 1, 5, 3, false},
      {4, 4, 1, 2, 1, false}, {2, 1, 2, 3, 2, false}, {2, 1, 2, 3, 2, true},  {4, 2, 2, 3, 2, false}, {4, 2, 2, 3, 2, true},
  };
  for (const Case& c : cases) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      expect_same_as_one_rank(c, dtype, false, std::vector<int64_t>(static_cast<std::size_t>(c.ep), 2), 5);
    }
    expect_same_as_one_rank(c, torch::kFloat, true, std::vector<int64_t>(static_cast<std::size_t>(c.ep), 1), 4);
  }
}

/// Groups of ep that span ranks of tp, which share out the tokens.
TEST(ParallelMoE, TokensSharedOutOverTensorParallelRanks) {
  for (const bool sequence : {false, true}) {
    for (const auto& [data, tp, experts] : {std::tuple{1, 2, 4}, {1, 3, 5}, {2, 2, 5}, {2, 1, 3}}) {
      const Case c{data * tp, data, tp, experts, 2, sequence, /*split=*/true};
      for (const auto dtype : {torch::kFloat, torch::kBFloat16})
        expect_same_as_one_rank(c, dtype, false, std::vector<int64_t>(static_cast<std::size_t>(data), 2), 5);
      expect_same_as_one_rank(c, torch::kFloat, true, std::vector<int64_t>(static_cast<std::size_t>(data), 1), 4);
    }
    expect_same_as_one_rank({4, 2, 2, 5, 2, sequence, true}, torch::kFloat, false, {0, 2}, 3);
    expect_same_as_one_rank({3, 1, 3, 3, 2, sequence, true}, torch::kFloat, false, {1}, 2);  // a rank without tokens
  }
}

TEST(ParallelMoE, TokensSharedOutSendEachRowOnce) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"});
    MoEOptions options{.n_experts = 4, .top_k = 1, .ffn_dim = 5};
    options.ep_mesh = options.tp_mesh = mesh;
    options.split_tokens = true;
    MixtureOfExperts moe(kDim, options);
    EXPECT_EQ(moe->experts->gate_proj.sizes(), (std::vector<int64_t>{2, 5, kDim}));
    {
      torch::NoGradGuard no_grad;
      moe->router->weight.zero_();
      moe->router->weight[3].fill_(1);
    }
    const Comm comm = mesh.get_group();
    comm.reset_counters();
    (void)moe(torch::ones({2, 6, kDim}));
    // Counts of 2 experts; 2 x 3 rows of rank 0 to rank 1 and back; and the gathered result.
    const int64_t row = kDim * 4;
    EXPECT_EQ(comm.counters().bytes_sent, 2 * 8 + 6 * row + 6 * row) << rank;
  });
}

TEST(ParallelMoE, RanksWithoutTokens) {
  expect_same_as_one_rank({3, 3, 1, 5, 2, false}, torch::kFloat, false, {2, 0, 1}, 3);
  expect_same_as_one_rank({4, 4, 1, 5, 2, false}, torch::kFloat, true, {0, 0, 0, 3}, 2);
  expect_same_as_one_rank({4, 2, 2, 5, 2, true}, torch::kFloat, false, {0, 2}, 3);
}

TEST(ParallelMoE, ExpertsWithoutTokensHaveZeroGradients) {
  run_ranks(2, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"ep"});
    MoEOptions options = options_of(4, 1);
    options.ep_mesh = mesh;
    MixtureOfExperts moe(kDim, options);
    {
      torch::NoGradGuard no_grad;
      moe->router->weight.zero_();
      moe->router->weight[1].fill_(1);
    }
    moe(torch::ones({3, kDim})).output.sum().backward();
    for (int64_t e = 0; e < 2; ++e) {
      const bool used = get_rank() == 0 && e == 1;
      ASSERT_TRUE(moe->experts->down_proj.grad().defined());
      EXPECT_EQ(moe->experts->down_proj.grad()[e].abs().sum().item<double>() > 0, used);
    }
  });
}

TEST(ParallelMoE, SameBitsForEveryNumberOfRanks) {
  // What is summed, and in which order, does not depend on the ranks. Whole numbers make the router's products exact, which of
  // other numbers a matrix product of more rows may round differently; so may one of rows that are not aligned to 64 bytes.
  constexpr int64_t kWide = 16;
  std::map<int, Tensor> outputs;
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world}, {"ep"});
      MoEOptions options = options_of(6, 3);
      options.ffn_dim = kWide;
      MixtureOfExperts whole(kWide, options);
      seed_parameters(*whole, 3);
      options.ep_mesh = mesh;
      MixtureOfExperts cut(kWide, options);
      Tensors values = parameters_of(*whole);
      values["router.weight"] = (values["router.weight"] * 4).round();
      load_whole(cut, values);
      const Tensor tokens = (wave({8, kWide}, 1) * 4).round();
      const Tensor y = cut(tokens.chunk(world)[static_cast<std::size_t>(rank)]).output.detach();
      const Tensor all = all_gather_split(y, mesh.get_group());
      if (rank == 0) outputs[world] = all;
    });
  }
  EXPECT_TRUE(outputs.at(1).equal(outputs.at(2)));
  EXPECT_TRUE(outputs.at(1).equal(outputs.at(4)));
}

TEST(ParallelMoE, BytesOfDispatchAndCombine) {
  run_ranks(3, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"ep"});
    const Comm comm = mesh.get_group();
    MoEOptions options = options_of(4, 1);  // two experts on ranks 0 and 1, none on rank 2
    options.aux_loss_weight = 0;
    options.ep_mesh = mesh;
    MixtureOfExperts moe(kDim, options);
    {
      torch::NoGradGuard no_grad;
      moe->router->weight.zero_();
      moe->router->weight[3].fill_(1);  // everything to rank 1
    }
    const int64_t n = 2 + rank;
    const Tensor x = torch::ones({n, kDim}).requires_grad_();
    comm.reset_counters();
    const Tensor y = moe(x).output;
    const int64_t row = kDim * 4, others = rank == 1 ? 2 + 4 : 0, mine = rank == 1 ? 0 : n;
    const int64_t counts = (rank == 2 ? 4 : 2) * 8;  // numbers about the other ranks' experts
    EXPECT_EQ(comm.counters().bytes_sent, counts + mine * row + others * row);
    comm.reset_counters();
    y.sum().backward();
    EXPECT_EQ(comm.counters().bytes_sent, mine * row + others * row);
  });
}

TEST(ParallelMoE, BiasBalancesTheLoad) {
  std::map<int, Tensor> biases;
  for (const int world : {1, 2}) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world}, {"ep"});
      MoEOptions options = options_of(4, 1);
      options.score = RouterScore::kSigmoid;
      options.bias_update_speed = 0.005;
      options.ep_mesh = options.balance_mesh = mesh;
      MixtureOfExperts moe(kDim, options);
      seed_parameters(*moe->router, 3);
      auto generator = at::detail::createCPUGenerator(4);
      Tensor all_tokens = torch::randn({32, kDim}, generator);
      all_tokens.select(1, 0).fill_(1);
      {
        torch::NoGradGuard no_grad;
        moe->router->weight[2][0] += 1;  // everybody's favourite
      }
      const Tensor tokens = all_tokens.chunk(world)[static_cast<std::size_t>(rank)];
      const auto loads = [&] {
        (void)moe(tokens);
        Tensor all = moe->router->tokens_per_expert.clone();
        mesh.get_group().all_reduce(all).wait();
        return all;
      };
      const int64_t before = loads().max().item<int64_t>();
      moe->update_bias();
      EXPECT_EQ(moe->router->tokens_per_expert.sum().item<int64_t>(), 0);
      for (int step = 0; step < 150; ++step) {
        (void)moe(tokens);
        moe->update_bias();
      }
      const int64_t after = loads().max().item<int64_t>();
      EXPECT_GE(before, 20);
      EXPECT_LE(after, 12);  // 8 would be even
      // Evaluation counts nothing; the bias is no part of the weights.
      moe->update_bias();
      moe->eval();
      (void)moe(tokens);
      EXPECT_EQ(moe->router->tokens_per_expert.sum().item<int64_t>(), 0);
      EXPECT_TRUE(moe->router(tokens).weights.allclose(torch::ones({tokens.size(0), 1})));
      if (rank == 0) biases[world] = moe->router->expert_bias.clone();
    });
  }
  EXPECT_TRUE(biases.at(1).equal(biases.at(2)));
}

TEST(ParallelMoE, BiasStaysExactInALowPrecisionModel) {
  MoEOptions options = options_of(2, 1);
  options.bias_update_speed = 0.001;  // too small a step for a bias of 1 in bf16
  MixtureOfExperts moe(kDim, options);
  moe->to(torch::kBFloat16);
  {
    torch::NoGradGuard no_grad;
    moe->router->weight.zero_();
    moe->router->expert_bias.copy_(torch::tensor({1.0, 0.5}));
  }
  for (int step = 0; step < 10; ++step) {
    (void)moe(torch::ones({4, kDim}, torch::kBFloat16));  // all to expert 0
    moe->update_bias();
  }
  EXPECT_TRUE(moe->router->expert_bias.allclose(torch::tensor({0.99, 0.51}), 1e-5));
}

TEST(ParallelMoE, ExpertsAsUnitsOfTheirOwn) {
  // ep 2 x edp 2: each expert lies on two ranks, which share it as shards; everything else is sharded over all four.
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"edp", "ep"});
    MoEOptions options = options_of(3, 2);
    options.aux_loss_weight = 0;
    MixtureOfExperts whole(kDim, options);
    options.ep_mesh = mesh["ep"];
    MixtureOfExperts cut(kDim, options);
    seed_parameters(*whole, 3);
    load_whole(cut, parameters_of(*whole));
    const auto cuts = parameter_cuts(cut);
    fully_shard(cut->experts, {.mesh = mesh["edp"]});
    HSDPModule root = fully_shard(cut, {.mesh = mesh.flatten("dp")});

    const Tensor tokens = wave({8, kDim}, 1), cotangent = wave({8, kDim}, 2);
    (whole(tokens).output * cotangent).sum().backward();
    const auto mine = [&](const Tensor& t) { return t.narrow(0, rank * 2, 2); };
    (cut(mine(tokens)).output * mine(cotangent)).sum().backward();
    for (auto& [name, gradient] : root.named_grad_dtensors()) {
      // Means over 4 ranks, or over the 2 that share an expert, of what the whole layer sums.
      const double ranks = name.starts_with("experts.") ? 2 : 4;
      const Tensor got = full_tensor(cuts.at(name), gradient.full_tensor() * ranks);
      EXPECT_LT(relative_difference({{name, got}}, {{name, plain_gradients(*whole).at(name)}}), 1e-5) << name;
    }
  });
}

TEST(ParallelMoE, ValuesDependOnTheSeedOnly) {
  const auto draw = [](const MoEOptions& options) {
    torch::manual_seed(7);
    return MixtureOfExperts(kDim, options);
  };
  MoEOptions options = options_of(5, 2);
  const MixtureOfExperts plain = draw(options);
  const Tensors want = parameters_of(*plain);
  EXPECT_LE(want.at("experts.gate_proj").abs().max().item<double>(), 1 / std::sqrt(6.0));
  EXPECT_LE(want.at("experts.down_proj").abs().max().item<double>(), 1 / std::sqrt(5.0));
  std::mutex one_at_a_time;
  run_ranks(4, [&] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"ep", "tp"});
    (void)mesh.get_group("ep");
    (void)mesh.get_group("tp");
    MoEOptions cut_options = options;
    cut_options.ep_mesh = mesh["ep"];
    cut_options.tp_mesh = mesh["tp"];
    std::unique_lock lock(one_at_a_time);
    const MixtureOfExperts cut = draw(cut_options);
    lock.unlock();
    for (const auto& [name, value] : whole_parameters(cut)) EXPECT_TRUE(value.equal(want.at(name))) << name;
  });
}

TEST(ParallelMoE, ResetParametersOfUnitsGivesTheSameModelForEveryWorld) {
  std::map<int, Tensors> values;
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {1, world}, {"edp", "ep"});
      MoEOptions options = options_of(5, 2);
      options.bias_update_speed = 0.1;
      options.ep_mesh = mesh["ep"];
      MixtureOfExperts model{nullptr};
      {
        const MetaInit no_memory;
        model = MixtureOfExperts(kDim, options);
      }
      const auto cuts = parameter_cuts(model);
      fully_shard(model->experts, {.mesh = mesh["edp"]});
      HSDPModule root = fully_shard(model, {.mesh = mesh["ep"]});
      root.reset_parameters(3);
      EXPECT_TRUE(model->router->expert_bias.equal(torch::zeros({5})));
      Tensors whole;
      for (auto& [name, parameter] : root.named_dtensors()) whole[name] = full_tensor(cuts.at(name), parameter.full_tensor());
      if (rank == 0) values[world] = whole;
    });
  }
  for (const auto& [name, value] : values.at(1)) {
    EXPECT_GT(value.std().item<double>(), 0.1) << name;
    EXPECT_TRUE(value.equal(values.at(2).at(name))) << name;
    EXPECT_TRUE(value.equal(values.at(4).at(name))) << name;
  }
}

TEST(ParallelMoE, Errors) {
  const auto error = [](auto change) {
    MoEOptions options = options_of(4, 2);
    change(options);
    return value_error([&] { return MixtureOfExperts(kDim, options); });
  };
  EXPECT_THAT(error([](MoEOptions& o) { o.top_k = 5; }), HasSubstr("[MixtureOfExperts] top_k 5 of 4 experts"));
  EXPECT_THAT(error([](MoEOptions& o) { o.top_k = 0; }), HasSubstr("top_k 0 of 4 experts"));
  EXPECT_THAT(error([](MoEOptions& o) { o.ffn_dim = 0; }), HasSubstr("ffn_dim 0"));
  EXPECT_THAT(error([](MoEOptions& o) { o.aux_loss_weight = -1; }), HasSubstr("aux_loss_weight -1"));
  run_ranks(2, [&] {
    MoEOptions options = options_of(4, 2);
    options.tp_mesh = init_device_mesh("cpu", {2}, {"tp"});
    options.split_tokens = true;
    MixtureOfExperts shared(kDim, options);
    EXPECT_THAT(value_error([&] {
                  return shared(wave({2, kDim}, 1)).output;
                }),
                HasSubstr("x has shape [2, 6], want tokens along sequence_dim 1 to share out"));
  });
  MixtureOfExperts moe(kDim, options_of(4, 2));
  EXPECT_THAT(value_error([&] { return moe(wave({2, 5}, 1)).output; }), HasSubstr("x has shape [2, 5], want (..., 6)"));
  const Tensor x = wave({3, 2}, 1), weight = wave({2, 4, 2}, 1);
  EXPECT_THAT(value_error([&] { return grouped_linear(x, weight, {1, 1}); }), HasSubstr("2 groups with 2 rows, want 2 with 3"));
  EXPECT_THAT(value_error([&] { return grouped_linear(x, weight, {4, -1}); }), HasSubstr("a group has -1 rows"));
  EXPECT_THAT(value_error([&] { return grouped_linear(x, weight[0], {3}); }), HasSubstr("want (rows, in) and (groups, out, in)"));
  EXPECT_THAT(value_error([&] { return grouped_linear(x.to(torch::kDouble), weight, {3, 0}); }), HasSubstr("want equal dtypes"));
}

}  // namespace
}  // namespace hyper_parallel::testing
