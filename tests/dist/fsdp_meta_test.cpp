// Models that begin without memory: what is known before it exists, how values come, and that nothing runs without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <sstream>
#include <thread>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Mesh = std::vector<int64_t>;
const std::vector<Mesh> kMeshes = {{1}, {2}, {4}, {1, 2}, {2, 1}, {2, 2}, {1, 1}};

/// Library modules, a parameter of its own, buffers.
struct StageImpl : torch::nn::Module {
  explicit StageImpl(int64_t dim) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})));
    up = register_module("up", torch::nn::Linear(dim, 2 * dim + 1));
    down = register_module("down", torch::nn::Linear(2 * dim + 1, dim));
    gain = register_parameter("gain", torch::empty({dim}));
    reset_parameters();
  }
  /// Reaches into a child, as initialisers of whole blocks do.
  void reset_parameters() {
    torch::NoGradGuard no_grad;
    torch::nn::init::normal_(gain, 1.0, 0.1);
    torch::nn::init::zeros_(down->bias);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + gain * down(torch::silu(up(norm(x)))); }
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;
  torch::Tensor gain;
};
HP_MODULE(Stage);

struct TowerImpl : torch::nn::Module {
  static constexpr int64_t kDim = 6;
  explicit TowerImpl(int64_t dim = kDim) {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(NetImpl::kVocab, dim).padding_idx(0)));
    first = register_module("first", Stage(dim));
    second = register_module("second", Stage(dim));
    batch_norm = register_module("batch_norm", torch::nn::BatchNorm1d(dim));
    head = register_module("head", torch::nn::Linear(dim, NetImpl::kVocab));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    const torch::Tensor x = second(first(table(tokens)));
    return head(batch_norm(x.flatten(0, 1)).view_as(x));
  }
  torch::nn::Embedding table = nullptr;
  Stage first = nullptr, second = nullptr;
  torch::nn::BatchNorm1d batch_norm = nullptr;
  torch::nn::Linear head = nullptr;
};
HP_MODULE(Tower);

template <class Holder, class... Args>
Holder without_memory(Args&&... args) {
  const MetaInit meta;
  return Holder(std::forward<Args>(args)...);
}

HSDPModule shard_tower(const Tower& tower, const FullyShardOptions& options, bool stages = true) {
  if (stages) fully_shard(tower->first, options);
  if (stages) fully_shard(tower->second, options);
  return fully_shard(tower, options);
}

/// The values of seed_parameters, whatever the order.
void fill_by_name(const std::string& name, at::Tensor& whole, at::Generator& generator) {
  EXPECT_EQ(whole.dim() == 0, name.ends_with("scale")) << name;
  whole.normal_(0.0, 0.3, generator);
}

// --- the guard ---

TEST(MetaInit, FactoriesWithoutADeviceOfThisThreadOnly) {
  const torch::Tensor before = torch::ones({2});
  {
    const MetaInit meta;
    {
      const MetaInit nested;
      EXPECT_TRUE(torch::empty({2}).is_meta());
    }
    EXPECT_TRUE(torch::zeros({2}, torch::kDouble).is_meta());
    EXPECT_TRUE(torch::tensor(0.5F).is_meta());
    EXPECT_TRUE(torch::randn({3}).is_meta());
    EXPECT_TRUE(torch::arange(4).is_meta());
    EXPECT_FALSE(torch::zeros({2}, torch::kCPU).is_meta());
    EXPECT_FALSE(torch::tensor({1.0F, 2.0F}).is_meta());
    EXPECT_FALSE(torch::zeros_like(before).is_meta());
    EXPECT_FALSE((before + 1).is_meta());
    std::thread([] { EXPECT_FALSE(torch::ones({2}).is_meta()); }).join();
    const torch::nn::LSTM lstm(3, 4);
    const torch::nn::MultiheadAttention attention(8, 2);
    const torch::nn::Conv2d convolution(3, 4, 5);
    const Tower tower;
    for (const auto& module :
         std::vector<std::shared_ptr<torch::nn::Module>>{lstm.ptr(), attention.ptr(), convolution.ptr(), tower.ptr()}) {
      for (const auto& parameter : module->parameters()) EXPECT_TRUE(parameter.is_meta() && parameter.requires_grad());
      for (const auto& buffer : module->buffers()) EXPECT_TRUE(buffer.is_meta());
    }
  }
  EXPECT_FALSE(torch::ones({2}).is_meta());
}

TEST(MetaInit, TakesNoMemoryNorDoesWrapping) {
  run_ranks(1, [] {
    const FullyShardOptions options = on_all();
    const CountCpuAllocations count;
    reset_allocation_counts();
    // 640 GB of parameters
    const Stage stage = without_memory<Stage>(200'000);
    const HSDPModule root = fully_shard(stage, options);
    EXPECT_LT(allocation_counts().peak, 100'000);
    EXPECT_EQ(root.memory_use().total(), 0);
    EXPECT_GT(root.plan_memory().shards, int64_t{640'000'000'000});
  });
}

TEST(Meta, ShapesNamesAndPlanAreKnownBeforeMemory) {
  for (const Mesh& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(ranks_of(mesh), [&] {
        Tower real, meta = without_memory<Tower>();
        const HSDPModule with = shard_tower(real, on_mesh(mesh, layout)), root = shard_tower(meta, on_mesh(mesh, layout));
        const auto want = with.groups(), got = root.groups();
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t g = 0; g < got.size(); ++g) {
          EXPECT_EQ(got[g].shard.sizes(), want[g].shard.sizes());
          ASSERT_EQ(got[g].parameters.size(), want[g].parameters.size());
          for (std::size_t i = 0; i < got[g].parameters.size(); ++i) {
            EXPECT_EQ(got[g].parameters[i].name, want[g].parameters[i].name);
            EXPECT_EQ(got[g].parameters[i].offset, want[g].parameters[i].offset);
            EXPECT_EQ(got[g].parameters[i].sharded.sizes(), want[g].parameters[i].sharded.sizes());
            EXPECT_TRUE(got[g].parameters[i].sharded.is_meta());
          }
        }
        EXPECT_EQ(root.plan_memory({.local = true}).total(), with.plan_memory({.local = true}).total());
      });
    }
  }
}

// --- no values ---

TEST(Meta, AForwardWithoutValuesNamesThemOnAllRanks) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      const Tower tower = without_memory<Tower>();
      const HSDPModule root = shard_tower(tower, on_all());
      const Batch batch = make_batch(2, 1);
      const auto forward = [&] { (void)tower(batch.tokens); };
      const auto all = AllOf(HasSubstr("[fully_shard] no values: parameter first.gain"), HasSubstr("second.up.bias and 10 more."),
                             HasSubstr("reset_parameters, load_full or load_from_rank0"));
      EXPECT_THAT(message_of<ValueError>(forward), all);
      EXPECT_THAT(message_of<ValueError>([&] { HSDPModule::of(tower->first).unshard(); }),
                  AllOf(HasSubstr("[unshard] parameters gain, norm.weight"), HasSubstr("of unit first are on the meta device")));
      EXPECT_THAT(message_of<c10::Error>([&] {
                    (void)torch::nn::Linear(tower->head)(torch::ones({1, TowerImpl::kDim}));
                  }),
                  AnyOf(HasSubstr("resharded"), HasSubstr("no memory yet")));
      root.to_empty();
      EXPECT_THAT(message_of<ValueError>(forward), all);
      root.reset_parameters(1);
      EXPECT_NO_THROW(forward());
    });
  }
}

TEST(Meta, ValuesWrittenByHandCountAndPartsOfThemDoNot) {
  for (const ShardLayout layout : kLayouts) {
    run_ranks(3, [&](int rank) {
      const Mlp mlp = without_memory<Mlp>(4, 5);
      const HSDPModule root = fully_shard(mlp, on_all(layout));
      root.to_empty();
      torch::NoGradGuard no_grad;
      const auto write = [&](auto&& wanted) {
        for (const auto& [name, parameter] : root.named_dtensors()) {
          if (wanted(name)) parameter.to_local().fill_(0.5);
        }
      };
      const auto forward = [&] { (void)mlp(torch::ones({2, 4})); };
      write([](const std::string& name) { return name != "b.weight"; });
      EXPECT_THAT(message_of<ValueError>(forward),
                  AllOf(HasSubstr("no values: parameter b.weight."), Not(HasSubstr("a.weight")), Not(HasSubstr("scale"))));
      // One rank has written its part: all of them hear of the others'.
      write([&](const std::string&) { return rank == 0; });
      EXPECT_THAT(message_of<ValueError>(forward), HasSubstr("no values: parameter b.weight."));
      write([](const std::string&) { return true; });
      EXPECT_NO_THROW(forward());
      for (const auto& [name, value] : full_parameters(root)) EXPECT_EQ(value.min().item<float>(), 0.5) << name;
    });
  }
}

TEST(Meta, RanksThatBeganDifferentlyAreTold) {
  run_ranks(2, [](int rank) {
    const Mlp mlp = rank == 0 ? Mlp(4, 5) : without_memory<Mlp>(4, 5);
    fully_shard(mlp, on_all());
    EXPECT_THAT(message_of<ValueError>([&] {
                  (void)mlp(torch::ones({2, 4}));
                }),
                AllOf(HasSubstr("ranks disagree"), HasSubstr("began on the meta device")));
  });
}

// --- values from a seed ---

TEST(Reset, ValuesDependOnSeedAndNamesOnly) {
  std::mutex mutex;
  Tensors want;
  const auto compare = [&](const HSDPModule& root, const std::string& what) {
    const Tensors got = full_parameters(root);
    const std::lock_guard lock(mutex);
    if (want.empty()) want = got;
    EXPECT_EQ(relative_difference(got, want), 0.0) << what;
  };
  for (const Mesh& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      for (const bool stages : {true, false}) {
        run_ranks(ranks_of(mesh), [&] {
          Tower meta = without_memory<Tower>(), real;
          FullyShardOptions options = on_mesh(mesh, layout);
          options.comm_fusion = stages;
          options.mp_policy.param_dtype = stages ? torch::kFloat : torch::kBFloat16;
          for (const Tower& tower : {meta, real}) {
            const HSDPModule root = shard_tower(tower, options, stages);
            const std::vector<torch::Tensor> leaves = tower->parameters();
            root.reset_parameters(7);
            compare(root, concat("mesh ", options.mesh.to_string(), " stages ", stages));
            const std::vector<torch::Tensor> after = tower->parameters();
            for (std::size_t i = 0; i < leaves.size(); ++i) {
              EXPECT_TRUE(after[i].is_same(leaves[i]));
              EXPECT_TRUE(leaves[i].is_leaf() && leaves[i].requires_grad() && leaves[i].device().is_cpu());
            }
          }
        });
      }
    }
  }
  // Torch's own distributions, and what the modules around make of them.
  EXPECT_EQ(want.at("table.weight")[0].abs().max().item<float>(), 0.0F);
  EXPECT_GT(want.at("table.weight")[1].abs().max().item<float>(), 0.0F);
  EXPECT_EQ(want.at("first.norm.weight").min().item<float>(), 1.0F);
  EXPECT_EQ(want.at("first.down.bias").abs().max().item<float>(), 0.0F);
  const double bound = 1 / std::sqrt(static_cast<double>(TowerImpl::kDim));
  for (const char* name : {"first.up.weight", "first.up.bias", "head.weight"}) {
    EXPECT_LE(want.at(name).abs().max().item<double>(), bound) << name;
    EXPECT_GT(want.at(name).abs().max().item<double>(), 0.7 * bound) << name;
  }
  EXPECT_FALSE(torch::equal(want.at("first.up.weight"), want.at("second.up.weight")));
  EXPECT_NEAR(want.at("first.gain").mean().item<double>(), 1.0, 0.2);
}

TEST(Reset, EveryLibraryModuleIsKnown) {
  struct ZooImpl : torch::nn::Module {
    ZooImpl() {
      namespace n = torch::nn;
      const auto add = [&](const char* name, auto holder) { register_module(name, holder); };
      add("bilinear", n::Bilinear(2, 3, 4));
      add("bag", n::EmbeddingBag(5, 3));
      add("group_norm", n::GroupNorm(2, 4));
      add("instance_norm", n::InstanceNorm1d(n::InstanceNorm1dOptions(3).affine(true).track_running_stats(true)));
      add("batch_norm", n::BatchNorm2d(n::BatchNorm2dOptions(3).affine(false)));
      add("conv", n::Conv1d(2, 3, 2));
      add("transposed", n::ConvTranspose2d(2, 3, 2));
      add("lstm", n::LSTM(2, 3));
      add("gru_cell", n::GRUCell(2, 3));
      add("attention", n::MultiheadAttention(4, 2));
      add("prelu", n::PReLU(n::PReLUOptions().init(0.125)));
      add("transformer", n::TransformerEncoderLayer(4, 2));
    }
    torch::Tensor forward(torch::Tensor x) { return x; }
  };
  class Zoo : public nn::HookedHolder<ZooImpl> {
   public:
    using nn::HookedHolder<ZooImpl>::HookedHolder;
  };
  run_ranks(2, [] {
    const Zoo zoo = without_memory<Zoo>();
    const HSDPModule root = fully_shard(zoo, on_all());
    root.reset_parameters(3);
    const Tensors values = full_parameters(root);
    EXPECT_EQ(values.size(), zoo->named_parameters().size());
    for (const auto& [name, value] : values) EXPECT_TRUE(value.isfinite().all().item<bool>()) << name;
    EXPECT_EQ(values.at("prelu.weight").item<float>(), 0.125F);
    EXPECT_EQ(values.at("attention.out_proj.bias").abs().max().item<float>(), 0.0F);
    EXPECT_EQ(values.at("group_norm.weight").min().item<float>(), 1.0F);
    EXPECT_GT(values.at("lstm.weight_hh_l0").abs().max().item<float>(), 0.2F);
    EXPECT_EQ(zoo->named_buffers()["batch_norm.running_var"].min().item<float>(), 1.0F);
    EXPECT_EQ(zoo->named_buffers()["batch_norm.num_batches_tracked"].item<int64_t>(), 0);
    EXPECT_NO_THROW((void)zoo(torch::ones({2})));
  });
}

TEST(Reset, WhatNobodyInitialisesIsNamed) {
  run_ranks(2, [] {
    const Mlp mlp = without_memory<Mlp>(4, 5);
    const HSDPModule root = fully_shard(mlp, on_all());
    EXPECT_THAT(value_error([&] { root.reset_parameters(1); }),
                AllOf(HasSubstr("[reset_parameters] nothing initialises parameter scale"), HasSubstr("reset_parameters()")));
    EXPECT_THAT(value_error([&] { root.reset_parameters(1, [](const std::string&, at::Tensor&, at::Generator&) {}); }),
                HasSubstr("[reset_parameters] init left values of parameter scale unwritten"));
    EXPECT_THAT(value_error([&] { root.reset_parameters(1, fsdp::InitParameter()); }), HasSubstr("init is empty"));
    // A function of the user's knows the type.
    root.reset_parameters(1, [](torch::nn::Module& module) {
      auto* known = module.as<MlpImpl>();
      if (known != nullptr) known->scale.fill_(0.25);
      return known != nullptr;
    });
    EXPECT_EQ(full_parameters(root).at("scale").item<float>(), 0.25F);
    EXPECT_NO_THROW((void)mlp(torch::ones({2, 4})));
    EXPECT_THAT(value_error([] { HSDPModule().reset_parameters(1); }), HasSubstr("handle is empty"));
  });
}

TEST(Reset, AnExceptionLeavesTheModelWhole) {
  run_ranks(2, [] {
    const Mlp mlp(4, 5);
    const HSDPModule root = fully_shard(mlp, on_all());
    const Tensors before = full_parameters(root);
    EXPECT_THROW(root.reset_parameters(1, [](torch::nn::Module&) -> bool { throw std::runtime_error("no"); }),
                 std::runtime_error);
    EXPECT_EQ(relative_difference(full_parameters(root), before), 0.0);
    for (int i = 0; i < 2; ++i) mlp(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(full_gradients(root).size(), 5U);
  });
}

TEST(Reset, RefusedInTheMiddleOfAStep) {
  run_ranks(2, [] {
    const Mlp mlp(4, 5);
    const HSDPModule root = fully_shard(mlp, on_all());
    const auto reset = [&] { root.reset_parameters(1, fill_by_name); };
    const torch::Tensor loss = mlp(torch::ones({2, 4})).sum();
    EXPECT_THAT(value_error(reset), HasSubstr("[reset_parameters] unit Mlp is in the middle of a step"));
    loss.backward();
    EXPECT_NO_THROW(reset());
    root.set_requires_gradient_sync(false);
    mlp(torch::ones({2, 4})).sum().backward();
    EXPECT_THAT(value_error(reset), HasSubstr("in the middle of a step"));
    root.reset_iter_state();
    EXPECT_NO_THROW(reset());
  });
}

/// Shards and one parameter, on every rank.
TEST(Reset, PeakIsShardsAndOneParameter) {
  constexpr int64_t kDim = 300;
  const int64_t largest = kDim * (2 * kDim + 1) * 4;
  for (const ShardLayout layout : kLayouts) {
    for (const int world : {1, 4}) {
      std::mutex mutex;
      int64_t shards = 0;
      const CountCpuAllocations count;
      const int64_t before = allocation_counts().live;
      reset_allocation_counts();
      run_ranks(world, {.allocator = counting_allocator()}, [&] {
        const Tower tower = without_memory<Tower>(kDim);
        const HSDPModule root = shard_tower(tower, on_all(layout));
        root.reset_parameters(1);
        {
          const std::lock_guard lock(mutex);
          shards += root.memory_use().shards;
        }
        root.data_parallel_comm().barrier();  // all models are there at once
      });
      const int64_t taken = allocation_counts().peak - before;
      EXPECT_GE(taken, shards);
      EXPECT_LE(taken, shards + world * (largest + 100'000)) << "world " << world;
    }
  }
}

// --- training ---

TEST(Meta, TrainsLikeAModelThatWasBuiltWithItsValues) {
  for (const Mesh& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        const Net plain;
        {
          torch::NoGradGuard no_grad;
          for (auto& entry : plain->named_parameters()) {
            at::Generator generator = fsdp::named_generator(5, entry.key());
            if (entry.key() != "head.weight") fill_by_name(entry.key(), entry.value(), generator);
          }
        }
        torch::optim::Adam plain_optimizer(plain->parameters(), torch::optim::AdamOptions(1e-2));
        const Net net = without_memory<Net>();
        const HSDPModule root = shard_net(net, on_mesh(mesh, layout));
        // The optimizer is there before the memory is.
        torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-2));
        root.to_empty();
        root.reset_parameters(5, fill_by_name);
        const int world = get_world_size();
        for (int step = 0; step < 3; ++step) {
          plain_optimizer.zero_grad();
          optimizer.zero_grad();
          const Batch batch = make_batch(4 * world, 20 + static_cast<uint64_t>(step));
          const torch::Tensor loss = net_loss(plain(batch.tokens), batch.targets);
          loss.backward();
          const Batch mine = batch.part(rank, world);
          torch::Tensor own = net_loss(net(mine.tokens), mine.targets);
          own.backward();
          own = own.detach() / world;
          root.data_parallel_comm().all_reduce(own).wait();
          EXPECT_NEAR(own.item<double>(), loss.item<double>(), 1e-5) << "step " << step;
          optimizer.step();
          plain_optimizer.step();
        }
        Tensors want;
        for (const auto& entry : plain->named_parameters()) want[entry.key()] = entry.value();
        want.erase("head.weight");  // tied: table.weight
        EXPECT_LT(relative_difference(full_parameters(root), want), 2e-4);
        EXPECT_EQ(root.memory_use().pool, root.plan_memory().pool);
      });
    }
  }
}

TEST(Meta, AdamWBuiltBeforeTheMemory) {
  run_ranks(2, [] {
    const auto train = [](bool early) {
      const Mlp mlp = without_memory<Mlp>(4, 5);
      const HSDPModule root = fully_shard(mlp, on_all());
      std::optional<optim::AdamW> optimizer;
      if (early) optimizer.emplace(root, optim::AdamWOptions{.lr = 1e-2});
      root.reset_parameters(1, fill_by_name);
      if (!early) optimizer.emplace(root, optim::AdamWOptions{.lr = 1e-2});
      for (int i = 0; i < 3; ++i) {
        mlp(wave({2, 4}, i)).square().sum().backward();
        optimizer->step();
        optimizer->zero_grad();
      }
      return full_parameters(root);
    };
    EXPECT_EQ(relative_difference(train(true), train(false)), 0.0);
  });
}

TEST(Meta, FrozenAndMixedWithRealParameters) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Mlp mlp = without_memory<Mlp>(4, 5);
      mlp->a->weight.set_requires_grad(false);
      Mlp real(4, 5);
      seed_parameters(*real, 3);
      torch::Tensor kept = real->b->weight.detach().clone();
      mlp->b->weight = mlp->b->register_parameter("other", real->b->weight);
      const HSDPModule root = fully_shard(mlp, on_all());
      EXPECT_THAT(message_of<ValueError>([&] {
                    (void)mlp(torch::ones({2, 4}));
                  }),
                  AllOf(HasSubstr("parameter a.weight"), HasSubstr("parameter scale"), Not(HasSubstr("b.other"))));
      for (const auto& [name, parameter] : root.named_dtensors()) {
        if (name != "b.other") continue;
        EXPECT_TRUE(torch::equal(parameter.full_tensor(), kept));
      }
      fsdp::NamedTensors values;
      for (const auto& [name, parameter] : root.named_dtensors()) {
        if (name != "b.other") values.emplace_back(name, wave(parameter.shape(), 1));
      }
      root.load_full(values, /*strict=*/false);
      EXPECT_TRUE(torch::equal(full_parameters(root).at("b.other"), kept));
      mlp(torch::ones({2, 4})).sum().backward();
      const Tensors gradients = full_gradients(root);
      EXPECT_FALSE(gradients.contains("a.weight"));
      EXPECT_TRUE(gradients.contains("b.other"));
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
