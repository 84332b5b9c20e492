// Unusual models: library modules, parameters of every kind, deep, shared and interleaved trees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/same_gradients.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    namespace tn = torch::nn;
    conv = register_module("conv", tn::Conv2d(tn::Conv2dOptions(3, 5, 3).padding(1).bias(false)));
    norm = register_module("norm", tn::BatchNorm2d(5));
    lstm = register_module("lstm", tn::LSTM(tn::LSTMOptions(20, 8).num_layers(2).batch_first(true).bidirectional(true)));
    gru = register_module("gru", tn::GRU(tn::GRUOptions(16, 8).batch_first(true)));
    attention = register_module("attention", tn::MultiheadAttention(8, 2));
    encoder = register_module("encoder", tn::TransformerEncoder(tn::TransformerEncoderOptions(
                                             tn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(11).dropout(0.0), 2)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::relu(norm(conv(x.contiguous(at::MemoryFormat::ChannelsLast))));
    h = std::get<0>(lstm(h.permute({0, 2, 3, 1}).reshape({h.size(0), -1, 20})));
    h = std::get<0>(gru(h)).transpose(0, 1);
    h = std::get<0>(attention(h, h, h));
    return encoder(h);
  }
  torch::nn::Conv2d conv = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::LSTM lstm = nullptr;
  torch::nn::GRU gru = nullptr;
  torch::nn::MultiheadAttention attention = nullptr;
  torch::nn::TransformerEncoder encoder = nullptr;
};
HP_MODULE(Zoo);

TEST(Models, LibraryModulesInsideAUnit) {
  for (const int world : {1, 3}) {
    run_ranks(world, [] {
      for (const auto layout : kLayouts) {
        Zoo sharded, plain;
        seed_parameters(*sharded, 1), seed_parameters(*plain, 1);
        const HSDPModule root = fully_shard(sharded, on_all(layout, true));
        const auto loss = [](Zoo& m, int rank) { return m(wave({2, 3, 4, 4}, rank)).square().mean(); };
        expect_same_gradients(sharded, root, plain, loss);
        expect_same_gradients(sharded, root, plain, loss, "accumulated");
      }
    });
  }
}

struct HollowImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x * 2; }
};
HP_MODULE(Hollow);

struct VoidImpl : torch::nn::Module {
  VoidImpl() { none = register_parameter("none", torch::zeros({0, 3})); }
  torch::Tensor forward(const torch::Tensor& x) { return x + none.sum(); }
  torch::Tensor none;
};
HP_MODULE(Void);

struct OddImpl : torch::nn::Module {
  OddImpl() {
    hollow = register_module("hollow", Hollow());
    empty = register_module("empty", Void());
    weight = register_parameter("weight", torch::zeros({4, 3}));
    turned = register_parameter("turned", torch::zeros({3, 5}).t());
    scalar = register_parameter("scalar", torch::zeros({}));
    rows = register_parameter("rows", torch::zeros({0, 3}));
    columns = register_parameter("columns", torch::zeros({3, 0}));
    ids = register_parameter("ids", torch::tensor({2, 0, 1}), false);
    mask = register_parameter("mask", torch::tensor({true, false, true}), false);
    wide = register_parameter("wide", torch::zeros({3}, torch::kDouble));
    half = register_parameter("half", torch::zeros({2, 3}, torch::kBFloat16));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = empty(hollow(x)).matmul(weight).matmul(turned.t().narrow(1, 0, 3)) + turned.sum() * 0.1;
    h = h.index_select(1, ids) * (scalar + rows.sum() + columns.sum()) * (1 + mask.to(torch::kFloat));
    return h + wide.to(torch::kFloat) + half.to(torch::kFloat).sum(0);
  }
  Hollow hollow = nullptr;
  Void empty = nullptr;
  torch::Tensor weight, turned, scalar, rows, columns, ids, mask, wide, half;
};
HP_MODULE(Odd);

TEST(Models, ParametersOfEveryKind) {
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {2}, {5}, {8}, {3, 2}, {2, 3}}) {
    const int world = ranks_of(mesh);
    run_ranks(world, [&] {
      for (const int variant : {0, 1, 2}) {
        Odd sharded, plain;
        seed_parameters(*sharded, 2), seed_parameters(*plain, 2);
        FullyShardOptions options = on_mesh(mesh, variant == 1 ? ShardLayout::kRagged : ShardLayout::kPerParameter, true);
        options.comm_fusion = variant != 2;
        if (variant != 1) {
          options.shard_placement_fn = [](const std::string&, const at::Tensor&) { return std::optional<int64_t>(-1); };
        }
        fully_shard(sharded->hollow, options), fully_shard(sharded->empty, options);
        const HSDPModule root = fully_shard(sharded, options);
        const auto loss = [](Odd& m, int rank) { return m(wave({2, 4}, rank)).square().mean(); };
        optim::AdamW adamw(root);
        for (const char* what : {"first", "accumulated"}) expect_same_gradients(sharded, root, plain, loss, what);
        EXPECT_GT(clip_grad_norm_(root, 1.0), 0.0);
        adamw.step();
        for (const auto& [name, value] : full_parameters(root)) {
          EXPECT_TRUE(torch::isfinite(value).all().item<bool>()) << name;
        }
        EXPECT_EQ(full_parameters(root).size(), 10U);
      }
    });
  }
}

TEST(Models, DoublePrecision) {
  run_ranks(3, [](int rank) {
    for (const auto layout : kLayouts) {
      Net net = make_net(), plain = make_net();
      net->to(torch::kDouble), plain->to(torch::kDouble);
      const HSDPModule root = shard_net(net, on_all(layout));
      const auto loss = [](Net& m, const Batch& b) {
        return torch::nn::functional::cross_entropy(m(b.tokens).view({-1, NetImpl::kVocab}), b.targets.reshape({-1}));
      };
      const Batch batch = make_batch(6, 1);
      loss(plain, batch).backward();
      loss(net, batch.part(rank, 3)).backward();
      Tensors want = plain_gradients(*plain);
      want.erase("head.weight");
      EXPECT_LT(relative_difference(full_gradients(root), want), 1e-12);
      optim::AdamW(root).step();
    }
  });
}

TEST(Models, SparseGradientIsRefusedByName) {
  run_ranks(2, [] {
    nn::Embedding table(torch::nn::EmbeddingOptions(7, 3).sparse(true));
    fully_shard(table, on_all());
    EXPECT_THAT(
        [&] {
          table(torch::tensor({1, 2})).sum().backward();
        },
        ThrowsMessage<std::exception>(AllOf(HasSubstr("parameter weight of unit Embedding"), HasSubstr("sparse(false)"))));
  });
}

struct ScoringEmbeddingImpl : torch::nn::EmbeddingImpl {
  using torch::nn::EmbeddingImpl::EmbeddingImpl;
  torch::Tensor forward(const torch::Tensor& ids) { return torch::matmul(EmbeddingImpl::forward(ids), weight.t()); }
};
HP_MODULE(ScoringEmbedding);

struct LookupImpl : torch::nn::Module {
  LookupImpl() {
    table = register_module("table", nn::Embedding(7, 3)), scoring = register_module("scoring", ScoringEmbedding(7, 3));
  }
  torch::Tensor forward(const torch::Tensor& ids) { return table(ids).sum() + torch::log_softmax(scoring(ids), -1).sum(); }
  nn::Embedding table = nullptr;
  ScoringEmbedding scoring = nullptr;
};
HP_MODULE(Lookup);

/// A plain table is not gathered in backward; a subclass that computes with its weight is.
TEST(Models, EmbeddingsAsUnits) {
  run_ranks(2, [] {
    Lookup sharded, plain;
    seed_parameters(*sharded, 8), seed_parameters(*plain, 8);
    fully_shard(sharded->table, on_all()), fully_shard(sharded->scoring, on_all());
    const HSDPModule root = fully_shard(sharded, on_all());
    for (int i = 0; i < 3; ++i) {
      expect_same_gradients(sharded, root, plain, [](Lookup& m, int rank) { return m(torch::tensor({1, 2 + rank, 6})); });
    }
  });
}

struct DeepImpl : torch::nn::Module {
  explicit DeepImpl(int depth) {
    layer = register_module("layer", torch::nn::Linear(5, 5));
    if (depth > 0) inner = register_module("inner", std::make_shared<nn::Hooked<DeepImpl>>(depth - 1));
    after = register_module("after", torch::nn::Linear(5, 5));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto h = torch::tanh(layer(x));
    if (inner) h = inner->as<nn::Hooked<DeepImpl>>()->forward(h);
    return torch::sin(after(h) + layer(h));
  }
  torch::nn::Linear layer = nullptr, after = nullptr;
  std::shared_ptr<torch::nn::Module> inner;
};
HP_MODULE(Deep);

TEST(Trees, UnitsFourDeepWithMixedFlags) {
  run_ranks(3, [] {
    for (const int pattern : {0, 5, 10, 15}) {
      Deep sharded(3), plain(3);
      seed_parameters(*sharded, 3), seed_parameters(*plain, 3);
      std::vector<std::shared_ptr<torch::nn::Module>> chain{sharded.ptr()};
      while (chain.back()->as<DeepImpl>()->inner) chain.push_back(chain.back()->as<DeepImpl>()->inner);
      HSDPModule root;
      for (std::size_t i = chain.size(); i-- > 0;)
        root = fully_shard(chain[i], on_all(kLayouts[i % 2], ((pattern >> i) & 1) != 0));
      for (int step = 0; step < 3; ++step) {
        expect_same_gradients(sharded, root, plain, [&](Deep& m, int rank) { return m(wave({2, 5}, rank + step)).sum(); });
      }
      for (const auto& module : chain) EXPECT_FALSE(HSDPModule::of(module).is_unsharded());
    }
  });
}

struct SharedImpl : torch::nn::Module {
  explicit SharedImpl(Mlp block = nullptr) {
    one = register_module("one", block.is_empty() ? Mlp(6, 5) : block);
    two = register_module("two", one);
    last = register_module("last", torch::nn::Linear(6, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor target;
    {
      torch::NoGradGuard no_grad;
      target = two(one(x));
    }
    return last(two(torch::tanh(one(x))) - target);
  }
  Mlp one = nullptr, two = nullptr;
  torch::nn::Linear last = nullptr;
};
HP_MODULE(Shared);

Tensors without(Tensors tensors, const std::string& prefix) {
  std::erase_if(tensors, [&](const auto& entry) { return entry.first.starts_with(prefix); });
  return tensors;
}

TEST(Trees, OneBlockRegisteredTwiceAndRunWithoutGradientsInBetween) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      for (const bool unit : {true, false}) {
        Shared sharded, plain;
        seed_parameters(*sharded, 4), seed_parameters(*plain, 4);
        if (unit) fully_shard(sharded->one, on_all(ShardLayout::kPerParameter, false));
        const HSDPModule root = fully_shard(sharded, on_all());
        for (int step = 0; step < 3; ++step) {
          const auto x = wave({4, 6}, step);
          for (int rank = 0; rank < get_world_size(); ++rank) (plain(x + rank).sum() / get_world_size()).backward();
          sharded(x + get_rank()).sum().backward();
          EXPECT_LT(relative_difference(full_gradients(root), without(plain_gradients(*plain), "two.")), 1e-5) << step;
        }
      }
    });
  }
}

/// A sharded block moves on into another model after its first model is gone.
TEST(Trees, BlockOutlivesItsRoot) {
  run_ranks(2, [] {
    Mlp block(6, 5);
    fully_shard(block, on_all());
    {
      Shared first(block);
      fully_shard(first, on_all());
      first(wave({2, 6}, 0)).sum().backward();
    }
    Shared second(block);
    const HSDPModule root = fully_shard(second, on_all());
    EXPECT_EQ(root.named_dtensors().size(), 7U);
    root.zero_grad();
    second(wave({2, 6}, 0)).sum().backward();
    EXPECT_EQ(full_gradients(root).size(), 7U);
  });
}

TEST(Trees, WrappingDuringAnAbortedStepChangesNothing) {
  run_ranks(2, [] {
    Shared model;
    const HSDPModule child = fully_shard(model->one, on_all());
    auto h = model->one(wave({2, 6}, 0));
    auto bad = h * 2;
    model->one->a->weight.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("user"); });
    EXPECT_THROW(bad.sum().backward(), std::runtime_error);
    const torch::Tensor before = model->last->named_parameters()["weight"];
    EXPECT_THAT([&] { fully_shard(model, on_all()); }, ThrowsMessage<ValueError>(HasSubstr("in the middle of a step")));
    EXPECT_TRUE(model->last->named_parameters()["weight"].is_same(before));
    child.reset_iter_state();
    EXPECT_EQ(fully_shard(model, on_all()).named_dtensors().size(), 7U);
  });
}

TEST(Trees, TwoRootsInterleavedAndTwoMeshesInOneTree) {
  run_ranks(4, [](int rank) {
    Mlp a(6, 5), b(6, 3), plain_a(6, 5), plain_b(6, 3);
    seed_parameters(*a, 5), seed_parameters(*b, 6), seed_parameters(*plain_a, 5), seed_parameters(*plain_b, 6);
    const HSDPModule root_a = fully_shard(a, on_all()), root_b = fully_shard(b, on_mesh({2, 2}, ShardLayout::kRagged, true));
    for (int step = 0; step < 3; ++step) {
      const auto run = [&](Mlp& first, Mlp& second, int r) {
        auto y = first(wave({2, 6}, step + r));
        auto z = second(y.detach());
        z = z + first(z) + second(torch::tanh(y));
        return z.square().mean();
      };
      for (int r = 0; r < 4; ++r) (run(plain_a, plain_b, r) / 4).backward();
      run(a, b, rank).backward();
      EXPECT_LT(relative_difference(full_gradients(root_a), plain_gradients(*plain_a)), 1e-5);
      EXPECT_LT(relative_difference(full_gradients(root_b), plain_gradients(*plain_b)), 1e-5);
    }
    Shared tree, plain;
    seed_parameters(*tree, 7), seed_parameters(*plain, 7);
    fully_shard(tree->one, on_mesh({2, 2}));
    const HSDPModule root = fully_shard(tree, on_all());
    double squares = 0;
    for (int r = 0; r < 4; ++r) (plain(wave({2, 6}, r)).sum() / 4).backward();
    for (const auto& [name, grad] : without(plain_gradients(*plain), "two.")) squares += grad.square().sum().item<double>();
    tree(wave({2, 6}, rank)).sum().backward();
    EXPECT_NEAR(clip_grad_norm_(root, 1e9), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
