// Another dtype after wrapping, and what happens to memory when models are converted or dropped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

using Mesh = std::vector<int64_t>;
const std::vector<Mesh> kMeshes = {{1}, {2}, {4}, {1, 2}, {2, 1}, {2, 2}};

torch::Tensor loss_of(const Net& net, int rank) {
  const Batch batch = make_batch(4, 30 + static_cast<uint64_t>(rank));
  return net_loss(net(batch.tokens), batch.targets);
}

Tensors without_tied(Tensors values) {
  values.erase("head.weight");  // is table.weight
  return values;
}

/// What the sharded model does, on a plain one: parameters and gradients.
void convert_plain(Net& net, at::ScalarType dtype) {
  const Tensors gradients = plain_gradients(*net);
  for (const auto& parameter : net->parameters()) parameter.mutable_grad() = torch::Tensor();
  net->to(dtype);
  for (const auto& [name, gradient] : gradients) net->named_parameters()[name].mutable_grad() = gradient.to(dtype);
}

enum class Way { kHandle, kModule };

TEST(Convert, TrainsOnInTheNewDtype) {
  for (const Mesh& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      for (const Way way : {Way::kHandle, Way::kModule}) {
        run_ranks(ranks_of(mesh), [&] {
          Net plain = make_net({}, 2), net = make_net({}, 2);
          plain->u3->a->bias.set_requires_grad(false);
          net->u3->a->bias.set_requires_grad(false);
          FullyShardOptions options = on_mesh(mesh, layout);
          options.comm_fusion = way == Way::kHandle;
          const HSDPModule root = shard_net(net, options);
          torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
          torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1));
          const std::vector<torch::Tensor> leaves = net->parameters();
          for (const at::ScalarType dtype : {torch::kFloat, torch::kDouble, torch::kFloat, torch::kBFloat16}) {
            if (way == Way::kHandle) {
              root.to(dtype);
            } else {
              net->to(dtype);
            }
            convert_plain(plain, dtype);
            // The optimizer's leaves, converted with their gradients.
            for (const auto& [name, gradient] : root.named_grad_dtensors()) EXPECT_EQ(gradient.to_local().scalar_type(), dtype);
            for (const torch::Tensor& leaf : leaves) EXPECT_EQ(leaf.scalar_type(), dtype);
            EXPECT_LT(relative_difference(full_gradients(root), without_tied(plain_gradients(*plain))), 5e-2) << dtype;
            optimizer.zero_grad();
            plain_optimizer.zero_grad();
            for (int step = 0; step < 2; ++step) {
              const int world = get_world_size();
              for (int rank = 0; rank < world; ++rank) (loss_of(plain, rank) / world).backward();
              loss_of(net, get_rank()).backward();
            }
            const double tolerance = dtype == torch::kBFloat16 ? 5e-2 : 2e-5;
            EXPECT_LT(relative_difference(full_gradients(root), without_tied(plain_gradients(*plain))), tolerance) << dtype;
            EXPECT_EQ(net(make_batch(1, 1).tokens).scalar_type(), dtype);
            root.reset_iter_state();
            optimizer.step();
            plain_optimizer.step();
            EXPECT_EQ(root.memory_use().pool, root.plan_memory().pool) << dtype;
          }
          const std::vector<torch::Tensor> after = net->parameters();
          for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(after[i].is_same(leaves[i]));
        });
      }
    }
  }
}

TEST(Convert, KeepsValuesAndBuffersFollow) {
  run_ranks(2, [] {
    struct OneImpl : torch::nn::Module {
      OneImpl() { inner = register_module("inner", torch::nn::BatchNorm1d(4)); }
      torch::Tensor forward(const torch::Tensor& x) { return inner(x); }
      torch::nn::BatchNorm1d inner = nullptr;
    };
    class One : public nn::HookedHolder<OneImpl> {
     public:
      using nn::HookedHolder<OneImpl>::HookedHolder;
    };
    One one;
    const HSDPModule root = fully_shard(one, on_all());
    const Tensors before = full_parameters(root);
    const torch::Tensor mean = one->inner->running_mean;
    root.to(torch::kDouble);
    EXPECT_EQ(mean.scalar_type(), torch::kDouble);
    EXPECT_EQ(one->inner->num_batches_tracked.scalar_type(), torch::kLong);
    EXPECT_EQ(one(torch::ones({3, 4}, torch::kDouble)).scalar_type(), torch::kDouble);
    EXPECT_GT(mean.abs().max().item<double>(), 0.0);
    root.reset_iter_state();
    root.half();
    EXPECT_EQ(mean.scalar_type(), torch::kHalf);
    root.bfloat16();
    EXPECT_EQ(one->parameters()[0].scalar_type(), torch::kBFloat16);
    for (const auto& [name, value] : full_parameters(root)) EXPECT_TRUE(torch::equal(value.to(torch::kFloat), before.at(name)));
  });
}

/// With a policy only the master copy changes.
TEST(Convert, ThePolicyStays) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      Net net = make_net();
      FullyShardOptions options = on_all();
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      const HSDPModule root = shard_net(net, options);
      root.to(torch::kDouble);
      const Batch batch = make_batch(2, 1);
      for (int i = 0; i < 3; ++i) {
        const torch::Tensor logits = net(batch.tokens);
        EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
        net_loss(logits, batch.targets).backward();
      }
      EXPECT_EQ(full_gradients(root).begin()->second.scalar_type(), torch::kDouble);
      EXPECT_EQ(root.memory_use().pool, root.plan_memory().pool);
    });
  }
}

TEST(Convert, AdamWOfBeforeGoesOn) {
  run_ranks(2, [] {
    const auto train = [](at::ScalarType second_half) {
      Mlp mlp(4, 5);
      seed_parameters(*mlp, 3);
      const HSDPModule root = fully_shard(mlp, on_all(ShardLayout::kRagged));
      optim::AdamW optimizer(root, {.lr = 1e-2});
      for (int i = 0; i < 6; ++i) {
        if (i == 3) root.to(second_half);
        mlp(wave({2, 4}, i).to(i < 3 ? torch::kFloat : second_half)).square().sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      Tensors values = full_parameters(root);
      for (auto& [name, value] : values) value = value.to(torch::kFloat);
      return values;
    };
    EXPECT_LT(relative_difference(train(torch::kDouble), train(torch::kFloat)), 1e-5);
  });
}

TEST(Convert, BeforeTheMemory) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      const MetaInit meta;
      const nn::Linear linear(4, 6);
      const HSDPModule root = fully_shard(linear, on_all());
      root.to(torch::kDouble);
      EXPECT_TRUE(linear->parameters()[0].is_meta());
      root.to_empty();
      root.to(torch::kFloat);
      EXPECT_THAT(message_of<ValueError>([&] {
                    (void)linear(torch::ones({1, 4}, torch::kCPU));
                  }),
                  HasSubstr("no values: parameter weight, parameter bias."));
      root.to(torch::kDouble);
      root.reset_parameters(1);
      EXPECT_EQ(linear(torch::ones({1, 4}, at::device(torch::kCPU).dtype(torch::kDouble))).scalar_type(), torch::kDouble);
    });
  }
}

TEST(Convert, Refusals) {
  run_ranks(2, [] {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    EXPECT_THAT(value_error([&] { root.to(torch::kInt); }), HasSubstr("[to] dtype is Int, want a floating type"));
    EXPECT_THAT(value_error([&] { root.to(at::Device("cuda:0")); }),
                AllOf(HasSubstr("[to] device is cuda:0, want cpu"), HasSubstr("mesh")));
    EXPECT_THAT(value_error([&] { root.to_empty(at::Device("meta")); }), HasSubstr("[to_empty] device is meta, want cpu"));
    EXPECT_NO_THROW(root.to(torch::kCPU));
    EXPECT_THAT(value_error([] { HSDPModule().to(torch::kDouble); }), HasSubstr("handle is empty"));

    const torch::Tensor loss = loss_of(net, 0);
    EXPECT_THAT(value_error([&] { root.to(torch::kDouble); }), HasSubstr("[to] unit u1 is in the middle of a step"));
    EXPECT_EQ(net->parameters()[0].scalar_type(), torch::kFloat);
    root.reset_iter_state();
    root.to(torch::kDouble);
    root.reset_iter_state();
    loss_of(net, 0).backward();
    EXPECT_EQ(full_gradients(root).size(), root.named_dtensors().size());
  });
}

/// Either the old storages are gone, or, in a world of one, the graph still has them and ends at a node that is retired.
TEST(Convert, AGraphOfBeforeIsRefused) {
  for (const int world : {1, 2}) {
    run_ranks(world, [&] {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all());
      const torch::Tensor loss = loss_of(net, 0);
      root.reset_iter_state();
      root.to(torch::kDouble);
      const auto backward = [&] { loss.backward(); };
      if (world == 1) {
        EXPECT_THAT(message_of<ValueError>(backward),
                    HasSubstr("backward of a forward from before the parameters were converted"));
      } else {
        EXPECT_THAT(message_of<c10::Error>(backward), HasSubstr("are resharded"));
      }
      root.reset_iter_state();
      root.zero_grad();
      loss_of(net, 0).backward();
      EXPECT_EQ(full_gradients(root).size(), root.named_dtensors().size());
    });
  }
}

TEST(Convert, OneRankAloneIsNoticed) {
  run_ranks(2, {.timeout = std::chrono::seconds(5)}, [](int rank) {
    const nn::Linear linear(4, 6);
    const HSDPModule root = fully_shard(linear, on_all());
    if (rank == 1) root.to(torch::kDouble);
    EXPECT_THAT(message_of<ValueError>([&] {
                  (void)linear(torch::ones({1, 4}));
                }),
                AllOf(HasSubstr("parameter weight"), HasSubstr("Float"), HasSubstr("Double")));
  });
}

// --- memory ---

TEST(Memory, OldShardsAreReleased) {
  static constexpr int64_t kDim = 256;
  run_ranks(1, {.allocator = counting_allocator()}, [] {
    const CountCpuAllocations count;
    const int64_t before = allocation_counts().live;
    {
      const nn::Linear linear(kDim, kDim);
      const HSDPModule root = fully_shard(linear, on_all());
      const int64_t numel = root.groups()[0].shard.numel();
      EXPECT_LT(allocation_counts().live - before, numel * 4 + 20'000) << "the module's own tensors are gone";
      linear(torch::ones({1, kDim})).sum().backward();
      EXPECT_LT(allocation_counts().live - before, 2 * numel * 4 + 20'000);
      root.to(torch::kDouble);
      EXPECT_LT(allocation_counts().live - before, 2 * numel * 8 + 20'000) << "shard and gradient";
      root.to(torch::kBFloat16);
      EXPECT_LT(allocation_counts().live - before, 2 * numel * 2 + 20'000);
    }
    EXPECT_LT(allocation_counts().live - before, 5'000) << "everything goes with the model";
  });
}

/// Everything that the engine holds dies with the last user reference, whatever was done before.
TEST(Memory, NothingOutlivesTheModel) {
  for (const int world : {1, 2}) {
    for (const bool meta : {false, true}) {
      run_ranks(world, [&] {
        std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
        const auto remember = [&](const torch::Tensor& tensor) {
          storages.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
        };
        const auto remember_all = [&](const HSDPModule& root) {
          for (const auto& group : root.groups()) {
            EXPECT_EQ(group.shard.grad_fn(), nullptr);
            EXPECT_FALSE(group.shard.requires_grad());
            remember(group.shard);
            if (group.grad.defined()) remember(group.grad);
          }
        };
        {
          std::optional<MetaInit> guard;
          if (meta) guard.emplace();
          Net net;
          guard.reset();
          const HSDPModule root = shard_net(net, on_all());
          root.reset_parameters(
              1, [](const std::string&, at::Tensor& whole, at::Generator& generator) { whole.normal_(0.0, 0.3, generator); });
          remember_all(root);
          loss_of(net, 0).backward();
          remember_all(root);
          (void)full_parameters(root);
          root.to(torch::kDouble);
          loss_of(net, 0).backward();
          remember_all(root);
          net->to(torch::kFloat);
          (void)root.named_grad_dtensors();
          remember_all(root);
        }
        EXPECT_GT(storages.size(), 20U);
        for (const auto& storage : storages) EXPECT_EQ(storage.lock().get(), nullptr);
      });
    }
  }
}

/// B26: parameters() are the shards in every state.
TEST(Memory, AnOptimizerBuiltWhileTheRootIsGathered) {
  run_ranks(2, [] {
    Net late = make_net({}, 2), early = make_net({}, 2);
    const HSDPModule late_root = shard_net(late, on_all()), early_root = shard_net(early, on_all());
    torch::optim::SGD early_optimizer(early->parameters(), torch::optim::SGDOptions(0.1));
    const torch::Tensor early_loss = loss_of(early, 0), late_loss = loss_of(late, 0);
    EXPECT_TRUE(late_root.is_unsharded());
    torch::optim::SGD late_optimizer(late->parameters(), torch::optim::SGDOptions(0.1));
    early_loss.backward();
    late_loss.backward();
    early_optimizer.step();
    late_optimizer.step();
    EXPECT_EQ(relative_difference(full_parameters(late_root), full_parameters(early_root)), 0.0);
    EXPECT_GT(relative_difference(full_parameters(late_root), full_parameters(shard_net(make_net({}, 2), on_all()))), 1e-3);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
