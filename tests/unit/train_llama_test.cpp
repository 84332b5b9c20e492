// The decoder and the sampling of text, without sharding.
#include <hyper_parallel/train/llama.h>

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <hyper_parallel/train/generate.h>
#include <hyper_parallel/train/memory_plan.h>

namespace hyper_parallel::train {
namespace {

ModelConfig small() {
  return {.dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 48, .vocab_size = 256, .max_seq_len = 16};
}

torch::Tensor some_tokens(std::int64_t batch, std::int64_t length) {
  return (torch::arange(batch * length, torch::kLong) * 37 + 11).remainder(256).view({batch, length});
}

TEST(LlamaTest, ShapesNamesAndCounts) {
  Llama model(small(), 1);
  const torch::Tensor logits = model(some_tokens(3, 10));
  EXPECT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 10, 256}));
  std::set<std::string> names;
  std::int64_t count = 0;
  for (const auto& item : model->named_parameters()) {
    names.insert(item.key());
    count += item.value().numel();
  }
  for (const char* name : {"embed_tokens.weight", "layers.1.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
                           "layers.0.mlp.gate_proj.weight", "layers.1.mlp.down_proj.weight", "layers.0.input_layernorm.weight",
                           "layers.0.post_attention_layernorm.weight", "norm.weight", "lm_head.weight"})
    EXPECT_TRUE(names.contains(name)) << name;
  EXPECT_EQ(names.size(), 3U + 2 * 9);
  EXPECT_EQ(count, parameter_count(small()));
  EXPECT_EQ(model->named_buffers().size(), 0U);
}

TEST(LlamaTest, ATiedHeadHasNoWeightOfItsOwn) {
  ModelConfig config = small();
  config.tied = true;
  Llama model(config, 1);
  EXPECT_FALSE(model->named_parameters().contains("lm_head.weight"));
  std::int64_t count = 0;
  for (const auto& parameter : model->parameters()) count += parameter.numel();
  EXPECT_EQ(count, parameter_count(config));
  next_token_loss(model(some_tokens(1, 8)), some_tokens(1, 8)).backward();
  // Tokens that do not occur still get a gradient: from the projection.
  EXPECT_GT(model->embed_tokens->weight.grad()[0].abs().sum().item<float>(), 0);
}

TEST(LlamaTest, LaterTokensDoNotReachEarlierLogits) {
  Llama model(small(), 1);
  const torch::Tensor tokens = some_tokens(1, 12);
  torch::Tensor changed = tokens.clone();
  changed[0][7] = (changed[0][7].item<std::int64_t>() + 1) % 256;
  const torch::NoGradGuard no_grad;
  const torch::Tensor a = model(tokens), b = model(changed);
  EXPECT_TRUE(torch::allclose(a.narrow(1, 0, 7), b.narrow(1, 0, 7), 1e-6, 1e-7));
  EXPECT_FALSE(torch::allclose(a.select(1, 7), b.select(1, 7)));
  EXPECT_FALSE(torch::allclose(a.select(1, 11), b.select(1, 11)));
}

TEST(LlamaTest, PositionsMatter) {
  Llama model(small(), 1);
  const torch::NoGradGuard no_grad;
  const torch::Tensor one = torch::tensor({{5, 9, 7}}, torch::kLong), other = torch::tensor({{9, 5, 7}}, torch::kLong);
  EXPECT_FALSE(torch::allclose(model(one).select(1, 2), model(other).select(1, 2), 1e-5, 1e-7));
}

TEST(LlamaTest, GroupedHeadsEqualRepeatedHeads) {
  const ModelConfig grouped_config = small();
  ModelConfig full_config = small();
  full_config.n_kv_heads = 4;
  Llama grouped(grouped_config, 1), full(full_config, 2);
  const torch::NoGradGuard no_grad;
  const auto source = grouped->named_parameters();
  for (auto& item : full->named_parameters()) {
    torch::Tensor value = source[item.key()];
    if (item.key().find("k_proj") != std::string::npos || item.key().find("v_proj") != std::string::npos)
      value = value.view({2, 8, 32}).repeat_interleave(2, 0).reshape({32, 32});
    item.value().copy_(value);
  }
  EXPECT_TRUE(torch::allclose(grouped(some_tokens(2, 9)), full(some_tokens(2, 9)), 1e-5, 1e-6));
}

// The formulas of the header, one attention head by hand.
TEST(LlamaTest, AttentionFollowsTheDocumentedFormulas) {
  ModelConfig config = small();
  config.n_heads = config.n_kv_heads = 1;
  Llama model(config, 3);
  parallel::ParallelAttention& attention = model->layers[0]->self_attn;
  const torch::NoGradGuard no_grad;
  const std::int64_t length = 5, dim = 32;
  const torch::Tensor x = torch::randn({1, length, dim}, at::detail::createCPUGenerator(7));
  auto rotated = [&](torch::Tensor v) {
    torch::Tensor out = torch::empty_like(v);
    for (std::int64_t t = 0; t < length; ++t)
      for (std::int64_t i = 0; i < dim; ++i) {
        const double angle = static_cast<double>(t) * std::pow(10000.0, -2.0 * static_cast<double>(i % (dim / 2)) / dim);
        const double partner = i < dim / 2 ? -v[t][i + dim / 2].item<double>() : v[t][i - dim / 2].item<double>();
        out[t][i] = v[t][i].item<double>() * std::cos(angle) + partner * std::sin(angle);
      }
    return out;
  };
  const torch::Tensor q = rotated(attention->q_proj(x)[0]), k = rotated(attention->k_proj(x)[0]), v = attention->v_proj(x)[0];
  const torch::Tensor mask = torch::full({length, length}, -INFINITY).triu(1);
  const torch::Tensor scores = torch::softmax(q.matmul(k.t()) / std::sqrt(32.0) + mask, -1);
  const torch::Tensor expected = attention->o_proj(scores.matmul(v));
  const torch::Tensor got = attention(
      x, parallel::AttentionArguments{.cos = model->cos.narrow(0, 0, length), .sin = model->sin.narrow(0, 0, length)})[0];
  EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-6));
}

TEST(LlamaTest, NormAndLossFollowTheDocumentedFormulas) {
  parallel::ParallelRMSNorm norm(8, parallel::ParallelNormOptions{.eps = 1e-3});
  const torch::NoGradGuard no_grad;
  norm->weight.copy_(torch::arange(8, torch::kFloat));
  const torch::Tensor x = torch::randn({4, 8}, at::detail::createCPUGenerator(1));
  const torch::Tensor expected = x / (x.pow(2).mean(-1, true) + 1e-3).sqrt() * norm->weight;
  EXPECT_TRUE(torch::allclose(norm(x), expected, 1e-5, 1e-6));

  const torch::Tensor logits = torch::randn({2, 3, 5}, at::detail::createCPUGenerator(2)).to(torch::kBFloat16);
  const torch::Tensor targets = torch::tensor({{0, 1, 2}, {3, 4, 0}}, torch::kLong);
  const torch::Tensor loss = next_token_loss(logits, targets);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  const torch::Tensor log_p = torch::log_softmax(logits.to(torch::kFloat), -1).gather(-1, targets.unsqueeze(-1));
  EXPECT_TRUE(torch::allclose(loss, -log_p.mean(), 1e-6, 1e-6));
}

TEST(LlamaTest, WeightsComeFromTheSeedAlone) {
  torch::manual_seed(1);
  Llama a(small(), 5);
  torch::manual_seed(2);
  Llama b(small(), 5), c(small(), 6);
  const auto pa = a->parameters(), pb = b->parameters(), pc = c->parameters();
  bool differs = false;
  for (std::size_t i = 0; i < pa.size(); ++i) {
    EXPECT_TRUE(torch::equal(pa[i], pb[i]));
    differs = differs || !torch::equal(pa[i], pc[i]);
  }
  EXPECT_TRUE(differs);
  EXPECT_NEAR(a->embed_tokens->weight.std().item<double>(), 0.02, 0.002);
  EXPECT_NEAR(a->layers[0]->mlp->down_proj->weight.std().item<double>(), 0.01, 0.002);
}

/// The same loss and gradients, bit for bit; the blocks that are computed again keep one input each.
TEST(LlamaTest, CheckpointedBlocks) {
  ModelConfig config = small();
  config.n_layers = 5;
  std::vector<torch::Tensor> losses;
  std::vector<std::vector<torch::Tensor>> gradients;
  std::vector<std::size_t> checkpoints;
  for (const std::int64_t every : {0, 1, 2, 5}) {
    Llama model(config, 1);
    model->checkpoint_every = every;
    const torch::Tensor loss = next_token_loss(model(some_tokens(2, 10)), some_tokens(2, 10) + 0);
    std::size_t nodes = 0;
    std::set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> open = {loss.grad_fn().get()};
    while (!open.empty()) {
      torch::autograd::Node* node = open.back();
      open.pop_back();
      if (node == nullptr || !seen.insert(node).second) continue;
      nodes += node->name() == "HyperParallelCheckpoint" ? 1 : 0;
      for (const auto& edge : node->next_edges()) open.push_back(edge.function.get());
    }
    checkpoints.push_back(nodes);
    loss.backward();
    losses.push_back(loss.detach());
    gradients.emplace_back();
    for (const auto& parameter : model->parameters()) gradients.back().push_back(parameter.grad());
  }
  EXPECT_EQ(checkpoints, (std::vector<std::size_t>{0, 5, 3, 1}));
  for (std::size_t i = 1; i < losses.size(); ++i) {
    EXPECT_TRUE(torch::equal(losses[i], losses[0]));
    for (std::size_t p = 0; p < gradients[0].size(); ++p)
      EXPECT_TRUE(torch::equal(gradients[i][p], gradients[0][p])) << i << ' ' << p;
  }
}

TEST(LlamaTest, SizesThatDoNotFit) {
  ModelConfig config = small();
  config.n_heads = 5;
  EXPECT_THROW(Llama(config, 0), ValueError);
  config = small();
  config.n_kv_heads = 3;
  EXPECT_THROW(Llama(config, 0), ValueError);
  Llama model(small(), 0);
  EXPECT_THROW(model(some_tokens(1, 17)), ValueError);
}

TEST(DrawTest, FollowsTheDistribution) {
  std::mt19937_64 random(3);
  const std::vector<float> logits = {0.0F, 1.0F, 2.0F, -1.0F};
  EXPECT_EQ(draw(logits, 0, 0, random), 2);
  std::map<std::int64_t, int> counts;
  for (int i = 0; i < 20000; ++i) ++counts[draw(logits, 1.0, 0, random)];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit);
  for (std::size_t i = 0; i < logits.size(); ++i)
    EXPECT_NEAR(counts[static_cast<std::int64_t>(i)] / 20000.0, std::exp(logits[i]) / sum, 0.015);
  for (int i = 0; i < 200; ++i) {
    const std::int64_t drawn = draw(logits, 1.0, 2, random);
    EXPECT_TRUE(drawn == 1 || drawn == 2);
  }
}

TEST(GenerateTest, ContinuesThePromptTheSameWayEachTime) {
  Llama model(small(), 1);
  const SampleConfig config{.prompts = {}, .tokens = 30};
  const std::string text = generate(model, "Hello", config, 16, 9);
  EXPECT_EQ(text.size(), 35U);
  EXPECT_EQ(text.substr(0, 5), "Hello");
  EXPECT_EQ(generate(model, "Hello", config, 16, 9), text);
  EXPECT_NE(generate(model, "Hello", config, 16, 10), text);
  EXPECT_EQ(generate(model, "", config, 16, 9).size(), 31U);
}

}  // namespace
}  // namespace hyper_parallel::train
