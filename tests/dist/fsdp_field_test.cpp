// Cases from public bug reports of sharded-training systems: each kind of report as a small test with the right value.
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

Tensors plain_parameters(torch::nn::Module& module) {
  Tensors result;
  for (auto& entry : module.named_parameters()) result[entry.key()] = entry.value().detach().clone();
  return result;
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl(int64_t in, int64_t out) {
    scale = register_parameter("scale", torch::full({1}, 1.5F));
    layer = register_module("layer", torch::nn::Linear(in, out));
  }
  torch::Tensor forward(const torch::Tensor& x) { return scale * layer(x); }
  torch::Tensor scale;
  torch::nn::Linear layer = nullptr;
};
HP_MODULE(Scaled);

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(const std::vector<int64_t>& widths) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Scaled(widths[i], widths[i + 1])));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<Scaled> layers;
};
HP_MODULE(Chain);

Chain make_chain(const std::vector<int64_t>& widths) {
  Chain chain(widths);
  seed_parameters(*chain, 11);
  return chain;
}

HSDPModule shard_chain(const Chain& chain, const FullyShardOptions& options) {
  for (auto& layer : chain->layers) fully_shard(layer, options);
  return fully_shard(chain, options);
}

torch::Tensor rows(int64_t count, int64_t width, int step) { return wave({count, width}, step); }

/// Trains plain and sharded side by side; `make` builds an optimizer over a module's parameters.
template <class MakeOptimizer>
void expect_parity(const std::vector<int64_t>& widths, const FullyShardOptions& options, MakeOptimizer make, double tolerance) {
  const int64_t world = get_world_size();
  Chain plain = make_chain(widths), sharded = make_chain(widths);
  const HSDPModule root = shard_chain(sharded, options);
  auto plain_optimizer = make(plain->parameters());
  auto optimizer = make(sharded->parameters());
  for (int step = 0; step < 3; ++step) {
    const torch::Tensor x = rows(4 * world, widths.front(), step);
    plain_optimizer.zero_grad(), optimizer.zero_grad();
    plain(x).square().mean().backward();
    sharded(x.narrow(0, 4 * get_rank(), 4)).square().mean().backward();
    EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5);
    plain_optimizer.step(), optimizer.step();
  }
  EXPECT_LT(relative_difference(full_parameters(root), plain_parameters(*plain)), tolerance);
}

// B01: the gradient of a one-element parameter stayed zero for a whole run.
TEST(Field, B01OneElementParameter) {
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [] {
      for (const auto layout : kLayouts) {
        expect_parity(
            {6, 5}, on_all(layout), [](auto p) { return torch::optim::Adam(p, torch::optim::AdamOptions(0.01)); }, 1e-4);
      }
    });
  }
}

// B03: optimizers meet shards of size zero.
TEST(Field, B03EmptyShards) {
  run_ranks(4, [] {
    for (const auto layout : kLayouts) {
      const auto options = on_all(layout);
      expect_parity(
          {6, 3, 2}, options, [](auto p) { return torch::optim::AdamW(p, torch::optim::AdamWOptions(0.01)); }, 1e-4);
      expect_parity(
          {6, 3, 2}, options, [](auto p) { return torch::optim::SGD(p, torch::optim::SGDOptions(0.1).momentum(0.9)); }, 1e-5);
      expect_parity(
          {6, 3, 2}, options, [](auto p) { return torch::optim::Adagrad(p, torch::optim::AdagradOptions(0.01)); }, 1e-4);
    }
  });
}

// B04, B34: true sizes are visible, padding is in no norm and in no shard; one norm in FSDP, HSDP and DDP.
TEST(Field, B04B34UnevenSizesAndNorms) {
  Chain plain = make_chain({7, 5, 3, 1});
  plain(rows(8, 7, 0)).square().mean().backward();
  double squares = 0;
  int64_t elements = 0;
  for (auto& parameter : plain->parameters()) {
    squares += parameter.grad().to(torch::kDouble).square().sum().item<double>();
    elements += parameter.numel();
  }
  for (const auto layout : kLayouts) {
    for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{2}, {4}, {4, 1}, {2, 2}, {1, 4}}) {
      const int world = ranks_of(mesh);
      run_ranks(world, [&](int rank) {
        Chain chain = make_chain({7, 5, 3, 1});
        const HSDPModule root = shard_chain(chain, on_mesh(mesh, layout));
        chain(rows(8, 7, 0).narrow(0, rank * 8 / world, 8 / world)).square().mean().backward();
        EXPECT_NEAR(clip_grad_norm_(root, 1e9), std::sqrt(squares), 1e-5 * std::sqrt(squares));
        auto mine = torch::zeros({1}, torch::kLong);
        for (const auto& parameter : chain->parameters()) mine += parameter.numel();
        root.data_parallel_comm().all_reduce(mine).wait();
        EXPECT_EQ(mine.item<int64_t>(), elements * (mesh.size() == 2 ? mesh[0] : 1));
      });
    }
  }
}

struct LanguageImpl : torch::nn::Module {
  explicit LanguageImpl(bool tied) {
    table = register_module("table", torch::nn::Embedding(101, 8));
    head = register_module("head", TiedHead(tied ? table->weight : torch::zeros({101, 8}), 101));
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return head(table(tokens)); }
  torch::nn::Embedding table = nullptr;
  TiedHead head = nullptr;
};
HP_MODULE(Language);

// B05: a vocabulary that no number of ranks divides.
TEST(Field, B05OddVocabulary) {
  for (const int world : {2, 4}) {
    for (const bool tied : {true, false}) {
      run_ranks(world, [&] {
        for (const auto layout : kLayouts) {
          Language model(tied);
          seed_parameters(*model, 5);
          const HSDPModule root = fully_shard(model, on_all(layout));
          const Tensors before = full_parameters(root);
          EXPECT_EQ(before.at("table.weight").size(0), 101);
          EXPECT_EQ(before.size(), tied ? 2U : 3U);
          torch::optim::SGD sgd(model->parameters(), 1.0);
          const auto tokens = torch::arange(101);
          net_loss(model(tokens), (tokens + 1) % 101).backward();
          sgd.step();
          const auto moved = (full_parameters(root).at("table.weight") - before.at("table.weight")).abs().amax(1);
          EXPECT_TRUE((moved > 0).all().item<bool>()) << "every row learns";
        }
      });
    }
  }
}

/// Table and head are units of their own.
struct SplitImpl : torch::nn::Module {
  SplitImpl() {
    table = register_module("table", nn::Embedding(11, 6));
    head = register_module("head", nn::Linear(torch::nn::LinearOptions(6, 11).bias(false)));
    head->weight = head->register_parameter("tied", table->weight);
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return head(table(tokens)); }
  nn::Embedding table = nullptr;
  nn::Linear head = nullptr;
};
HP_MODULE(Split);

// B15: a weight that two units share stopped learning in one of them.
TEST(Field, B15TiedAcrossUnits) {
  run_ranks(2, [] {
    Split apart;
    fully_shard(apart->table, on_all());
    const auto before = apart->head->parameters();
    EXPECT_THAT([&] { fully_shard(apart->head, on_all()); },
                ThrowsMessage<ValueError>(::testing::AllOf(HasSubstr("parameter is already managed by unit Embedding as weight"),
                                                           HasSubstr("keep modules that share a parameter in one unit"),
                                                           HasSubstr("(parameter tied of unit Linear)"))));
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(apart->head->parameters()[i].is_same(before[i])) << "unchanged";

    // The ways out that the message names: one unit for both, or the root.
    for (const bool listed : {true, false}) {
      Split model;
      seed_parameters(*model, 5);
      if (listed) fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{model->table.ptr(), model->head.ptr()}, on_all());
      const HSDPModule root = fully_shard(model, on_all());
      const Tensors values = full_parameters(root);
      torch::optim::SGD sgd(model->parameters(), 1.0);
      const auto tokens = torch::arange(11);
      net_loss(model(tokens), (tokens + 1) % 11).backward();
      sgd.step();
      const auto moved = (full_parameters(root).at("table.weight") - values.at("table.weight")).abs().amax(1);
      EXPECT_TRUE((moved > 0).all().item<bool>()) << "every row learns";
    }
  });
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    a = register_module("a", torch::nn::Linear(6, 5));
    b = register_module("b", torch::nn::Linear(6, 5));
    unused = register_module("unused", torch::nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x, bool use_a) { return use_a ? a(x) : b(x); }
  torch::nn::Linear a = nullptr, b = nullptr, unused = nullptr;
};
HP_MODULE(Branches);

struct DivergentImpl : torch::nn::Module {
  DivergentImpl() {
    first = register_module("first", Scaled(6, 6));
    branches = register_module("branches", Branches());
    tail = register_module("tail", Scaled(5, 5));
  }
  /// `use_tail` false: the tail runs, but its result is not part of this rank's loss.
  torch::Tensor forward(const torch::Tensor& x, bool use_a, bool use_tail) {
    const auto h = branches(first(x), use_a);
    const auto t = tail(h);
    return use_tail ? t : h;
  }
  Scaled first = nullptr, tail = nullptr;
  Branches branches = nullptr;
};
HP_MODULE(Divergent);

// B17: ranks use different parameters of a unit, or not every unit's result: as one process with the summed graphs.
TEST(Field, B17DivergentUse) {
  for (const bool tail_differs : {false, true}) {
    for (const int world : {2, 3}) {
      const auto loss_of = [&](Divergent& model, int rank) {
        return model(rows(4, 6, rank), rank % 2 == 0, !tail_differs || rank == 0).square().mean();
      };
      Divergent plain;
      seed_parameters(*plain, 8);
      for (int rank = 0; rank < world; ++rank) (loss_of(plain, rank) / world).backward();
      const Tensors want = plain_gradients(*plain);
      run_ranks(world, {.timeout = std::chrono::seconds(10)}, [&](int rank) {
        for (const auto layout : kLayouts) {
          Divergent model;
          seed_parameters(*model, 8);
          const auto options = on_all(layout);
          fully_shard(model->first, options), fully_shard(model->branches, options), fully_shard(model->tail, options);
          const HSDPModule root = fully_shard(model, options);
          for (int step = 0; step < 3; ++step) {
            root.zero_grad();
            loss_of(model, rank).backward();
            EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5) << "step " << step;
          }
          EXPECT_FALSE(model->branches->unused->named_parameters()["weight"].grad().defined()) << "no rank had a gradient for it";
        }
      });
    }
  }
}

struct OrderedImpl : torch::nn::Module {
  explicit OrderedImpl(bool swap) {
    const char* names[] = {swap ? "second" : "first", swap ? "first" : "second"};
    for (const char* name : names) layers.push_back(register_module(name, torch::nn::Linear(4, 4)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers[1](layers[0](x)); }
  std::vector<torch::nn::Linear> layers;
};
HP_MODULE(Ordered);

// B19: parameters registered in another order on one rank.
TEST(Field, B19RegistrationOrder) {
  run_ranks(2, [](int rank) {
    Ordered model(rank == 1);
    fully_shard(model, on_all());
    EXPECT_THAT(
        [&] {
          (void)model(torch::ones({1, 4}));
        },
        ThrowsMessage<ValueError>(::testing::AllOf(HasSubstr("first.weight"), HasSubstr("second.weight"))));
  });
}

struct KeeperImpl : torch::nn::Module {
  KeeperImpl() {
    layer = register_module("layer", torch::nn::Linear(4, 4)), last = register_module("last", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    kept = torch::tanh(last(torch::tanh(layer(x))));
    return kept.detach() + last(x);
  }
  torch::nn::Linear layer = nullptr, last = nullptr;
  torch::Tensor kept;
};
HP_MODULE(Keeper);

// B20: a loss on a tensor that the unit kept as an attribute: right, or an error that names the unit and the way out.
TEST(Field, B20LossOnKeptTensor) {
  run_ranks(2, [] {
    Keeper keeper;
    seed_parameters(*keeper, 2);
    const HSDPModule unit = fully_shard(keeper, {.mesh = on_all().mesh, .reshard_after_forward = true});
    (void)keeper(rows(2, 4, 0));
    EXPECT_THAT([&] { keeper->kept.sum().backward(); },
                ThrowsMessage<std::exception>(
                    ::testing::AllOf(HasSubstr("unit Keeper"), HasSubstr("return every tensor that the loss depends on"))));
    unit.reset_iter_state();
    (void)keeper(rows(2, 4, 0));
    unit.unshard();  // the way out that the message names
    keeper->kept.sum().backward();
    EXPECT_TRUE(keeper->layer->named_parameters()["weight"].grad().defined());
    EXPECT_FALSE(unit.is_unsharded());
  });
}

// B22: two backwards over one retained graph.
TEST(Field, B22RetainedGraph) {
  run_ranks(2, [](int rank) {
    for (const auto layout : kLayouts) {
      Chain chain = make_chain({6, 5, 4}), plain = make_chain({6, 5, 4});
      const HSDPModule root = shard_chain(chain, on_all(layout));
      const auto both = [](Chain& model, const torch::Tensor& x) {
        const auto y = model(x);
        y.square().mean().backward({}, /*retain_graph=*/true);
        y.mean().backward();
      };
      both(chain, rows(8, 6, 0).narrow(0, rank * 4, 4));
      both(plain, rows(8, 6, 0));
      EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5);
    }
  });
}

// B26: an optimizer built after a forward, while the root is still gathered.
TEST(Field, B26OptimizerAfterForward) {
  run_ranks(2, [] {
    Chain chain = make_chain({6, 5});
    const HSDPModule root = fully_shard(chain, on_all());
    const auto y = chain(rows(4, 6, 0));
    EXPECT_TRUE(root.is_unsharded());
    torch::optim::SGD sgd(chain->parameters(), 0.5);
    y.square().mean().backward();
    const Tensors before = full_parameters(root);
    sgd.step();
    EXPECT_GT(relative_difference(full_parameters(root), before), 1e-3);
    EXPECT_GT((chain(rows(4, 6, 0)) - y).abs().max().item<float>(), 1e-4F) << "the next forward computes with the new weights";
  });
}

struct IdentityImpl : torch::nn::Module {
  IdentityImpl() { layer = register_module("layer", torch::nn::Linear(3, 3)); }
  torch::Tensor forward(const torch::Tensor& x) { return x; }
  torch::nn::Linear layer = nullptr;
};
HP_MODULE(Identity);

struct WithIdentityImpl : torch::nn::Module {
  WithIdentityImpl() { identity = register_module("identity", Identity()), scaled = register_module("scaled", Scaled(6, 5)); }
  torch::Tensor forward(const torch::Tensor& x) { return scaled(identity(x)); }
  Identity identity = nullptr;
  Scaled scaled = nullptr;
};
HP_MODULE(WithIdentity);

// B28: a unit whose parameters are all unused.
TEST(Field, B28UnusedParameters) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      WithIdentity model;
      const auto options = on_all();
      fully_shard(model->identity, options), fully_shard(model->scaled, options);
      const HSDPModule root = fully_shard(model, options);
      for (int step = 0; step < 3; ++step) {
        auto x = rows(4, 6, step).requires_grad_();
        model(x).sum().backward();
        EXPECT_FALSE(model->identity->layer->named_parameters()["weight"].grad().defined());
        EXPECT_TRUE(model->scaled->layer->named_parameters()["weight"].grad().defined());
        EXPECT_TRUE(x.grad().defined());
        root.zero_grad();
      }
    });
  }
}

// B29: an explicit true frees the root after forward; only the unset default keeps it.
TEST(Field, B29RootIsFreedOnRequest) {
  run_ranks(2, [] {
    for (const auto& [flag, kept] : {std::pair<std::optional<bool>, bool>{true, false}, {false, true}, {std::nullopt, true}}) {
      Chain chain = make_chain({6, 5});
      const HSDPModule root = fully_shard(chain, {.mesh = on_all().mesh, .reshard_after_forward = flag});
      const auto y = chain(rows(4, 6, 0));
      EXPECT_EQ(root.is_unsharded(), kept);
      y.sum().backward();
      EXPECT_FALSE(root.is_unsharded());
    }
  });
}

// B30: averaged, not summed.
TEST(Field, B30GradientsAreAveraged) {
  run_ranks(2, [](int rank) {
    nn::Linear layer(torch::nn::LinearOptions(3, 2).bias(false));
    const HSDPModule root = fully_shard(layer, on_all());
    layer(torch::full({1, 3}, rank == 0 ? 1.0F : 3.0F)).sum().backward();
    EXPECT_TRUE((full_gradients(root).at("weight") == 2.0F).all().item<bool>());
  });
}

// B31: accumulation without synchronisation drifts after the first step.
TEST(Field, B31AccumulationOverManySteps) {
  constexpr int kSteps = 10, kMicro = 3;
  std::vector<double> want;
  Net plain = make_net();
  std::vector<torch::Tensor> once;  // Module::parameters lists the tied weight twice
  for (auto& entry : plain->named_parameters()) {
    if (entry.key() != "head.weight") once.push_back(entry.value());
  }
  torch::optim::AdamW reference(once, torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = make_batch(12, static_cast<uint64_t>(step));
    reference.zero_grad();
    const auto loss = net_loss(plain(batch.tokens), batch.targets);
    loss.backward();
    reference.step();
    want.push_back(loss.item<double>());
  }
  for (const int world : {2, 4}) {
    run_ranks(world, [&](int rank) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
      optim::AdamW adamw(root, {.lr = 0.01});
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = make_batch(12, static_cast<uint64_t>(step));
        double loss = 0;
        for (int micro = 0; micro < kMicro; ++micro) {
          root.set_requires_gradient_sync(micro + 1 == kMicro);
          const Batch mine = batch.part(micro, kMicro).part(rank, world);
          const auto value = net_loss(net(mine.tokens), mine.targets) / kMicro;
          value.backward();
          loss += value.item<double>();
        }
        auto total = torch::tensor({loss}, torch::kDouble);
        root.data_parallel_comm().all_reduce(total, {.op = ReduceOp::kAvg}).wait();
        EXPECT_NEAR(total.item<double>(), want[static_cast<std::size_t>(step)], 2e-4) << "step " << step;
        adamw.step();
        adamw.zero_grad();
      }
    });
  }
}

// B14: requires_grad flips are honoured from the next forward on.
TEST(Field, B14FreezingAfterWrapping) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Chain chain = make_chain({6, 5, 4}), plain = make_chain({6, 5, 4});
      const HSDPModule root = shard_chain(chain, on_all());
      for (const int pattern : {0, 1, 2, 0}) {
        for (auto* model : {&chain, &plain}) {
          int i = 0;
          for (auto& parameter : (*model)->parameters())
            parameter.set_requires_grad(pattern == 0 || (i++ % 2 == 0) == (pattern == 1));
          (*model)->zero_grad();
        }
        const int64_t each = 4, first = get_rank() * each;
        chain(rows(each * get_world_size(), 6, pattern).narrow(0, first, each)).square().mean().backward();
        plain(rows(each * get_world_size(), 6, pattern)).square().mean().backward();
        EXPECT_LT(relative_difference(full_gradients(root), plain_gradients(*plain)), 1e-5) << pattern;
        for (auto& layer : chain->layers) EXPECT_EQ(HSDPModule::of(layer).is_unsharded(), false);
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
