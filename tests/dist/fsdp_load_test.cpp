// Values from outside: whole tensors of every rank or of rank 0, buffers, replicas.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <sstream>

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

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {4}, {1, 2}, {2, 1}, {2, 2}};

/// Convolution with a kernel that is no parameter, and running statistics.
struct FilterImpl : torch::nn::Module {
  FilterImpl() {
    mix = register_module("mix", torch::nn::Linear(8, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    kernel = register_buffer("kernel", torch::full({1, 1, 3}, 1.0 / 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = mix(x);
    return norm(torch::conv1d(y.unsqueeze(1), kernel, {}, 1, 1).squeeze(1));
  }
  torch::nn::Linear mix = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::Tensor kernel;
};
HP_MODULE(Filter);

template <class Holder, class... Args>
Holder without_memory(Args&&... args) {
  const MetaInit meta;
  return Holder(std::forward<Args>(args)...);
}

fsdp::NamedTensors values_of(const torch::nn::Module& module) {
  fsdp::NamedTensors values;
  for (const auto& entry : module.named_parameters()) values.emplace_back(entry.key(), entry.value().detach().clone());
  for (const auto& entry : module.named_buffers()) values.emplace_back(entry.key(), entry.value().detach().clone());
  std::erase_if(values, [](const auto& entry) { return entry.first == "head.weight"; });  // tied to table.weight
  return values;
}

Tensors as_map(const fsdp::NamedTensors& values) { return {values.begin(), values.end()}; }

TEST(Load, WholeTensorsOfEveryRankOrOfRankZero) {
  const fsdp::NamedTensors values = values_of(*make_net({}, 9));
  for (const auto& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      for (const bool meta : {true, false}) {
        for (const bool fused : {true, false}) {
          if (meta && !fused) continue;
          run_ranks(ranks_of(mesh), [&](int rank) {
            FullyShardOptions options = on_mesh(mesh, layout);
            options.comm_fusion = fused;
            if (layout == ShardLayout::kPerParameter) {
              options.shard_placement_fn = [](const std::string&, const at::Tensor& p) {
                return std::optional<int64_t>(p.dim() - 1);
              };
            }
            const Net local = meta ? without_memory<Net>() : Net(), from_zero = meta ? without_memory<Net>() : Net();
            const HSDPModule a = shard_net(local, options), b = shard_net(from_zero, options);
            const std::vector<torch::Tensor> leaves = from_zero->parameters();
            a.load_full(values);
            b.load_from_rank0(rank == 0 ? values : fsdp::NamedTensors());
            EXPECT_EQ(relative_difference(full_parameters(a), as_map(values)), 0.0);
            EXPECT_EQ(relative_difference(full_parameters(b), as_map(values)), 0.0);
            const std::vector<torch::Tensor> after = from_zero->parameters();
            for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(after[i].is_same(leaves[i]));
            const Batch batch = make_batch(2, 1);
            EXPECT_TRUE(torch::equal(local(batch.tokens), from_zero(batch.tokens)));
          });
        }
      }
    }
  }
}

TEST(Load, CastsAndTakesViews) {
  run_ranks(2, [](int rank) {
    const torch::nn::Linear plain(4, 6);
    const nn::Linear linear(4, 6);
    const HSDPModule root = fully_shard(linear, on_all());
    const torch::Tensor weight = torch::arange(24, torch::kDouble).view({4, 6}).t();
    const fsdp::NamedTensors values = {{"weight", weight}, {"bias", torch::ones({6}, torch::kHalf)}};
    root.load_from_rank0(rank == 0 ? values : fsdp::NamedTensors());
    EXPECT_TRUE(torch::equal(full_parameters(root).at("weight"), weight.to(torch::kFloat)));
    root.load_full({{"bias", torch::full({6}, 2.0)}}, /*strict=*/false);
    EXPECT_EQ(full_parameters(root).at("bias").sum().item<float>(), 12.0F);
  });
}

/// The gathered copy that a held unit has must not outlive the load.
TEST(Load, AHeldCopyIsDropped) {
  run_ranks(2, [] {
    const nn::Linear linear(4, 6);
    const HSDPModule root = fully_shard(linear, on_all());
    root.unshard();
    root.load_full({{"weight", torch::ones({6, 4})}, {"bias", torch::zeros({6})}});
    EXPECT_EQ(linear(torch::ones({1, 4})).sum().item<float>(), 24.0F);
  });
}

TEST(Load, MistakesAreToldToAllRanksAndChangeNothing) {
  for (const int world : {1, 3}) {
    run_ranks(world, [](int rank) {
      const nn::Linear linear(4, 6);
      const HSDPModule root = fully_shard(linear, on_all());
      const Tensors before = full_parameters(root);
      const torch::Tensor weight = torch::ones({6, 4}), bias = torch::ones({6});
      const std::vector<std::pair<fsdp::NamedTensors, std::string>> cases = {
          {{{"weight", weight}}, "missing: bias"},
          {{{"weight", weight}, {"bias", bias}, {"scale", bias}}, "unexpected: scale"},
          {{{"weight", weight.t()}, {"bias", bias}}, "weight has shape [4, 6], want [6, 4]"},
          {{{"weight", weight}, {"bias", bias}, {"bias", bias}}, "bias is there twice"},
          {{{"weight", weight}, {"bias", bias.to(torch::kMeta)}}, "bias has no values"},
          {{{"weight", weight}, {"bias", torch::Tensor()}}, "bias has no values"},
      };
      for (const auto& [values, text] : cases) {
        EXPECT_THAT(value_error([&, &given = values] { root.load_full(given); }),
                    AllOf(HasSubstr("[load_full]"), HasSubstr(text)));
        EXPECT_THAT(value_error([&, &given = values] { root.load_from_rank0(rank == 0 ? given : fsdp::NamedTensors()); }),
                    AllOf(HasSubstr("[load_from_rank0]"), HasSubstr(text)));
      }
      // Shapes count where names do not.
      EXPECT_THAT(value_error([&] {
                    root.load_full({{"weight", bias}, {"other", bias}}, false);
                  }),
                  AllOf(HasSubstr("weight has shape"), Not(HasSubstr("other"))));
      if (get_world_size() > 1) {
        EXPECT_THAT(value_error([&] {
                      root.load_from_rank0({{"weight", weight}, {"bias", bias}});
                    }),
                    HasSubstr("rank 1 passed 2 tensor(s), want values on rank 0 only"));
        EXPECT_THAT(value_error([&] { root.load_from_rank0({}, /*strict=*/rank == 0); }), HasSubstr("ranks disagree"));
      }
      EXPECT_EQ(relative_difference(full_parameters(root), before), 0.0);
      root.load_from_rank0(rank == 0 ? fsdp::NamedTensors{{"bias", bias}, {"other", bias}} : fsdp::NamedTensors(), false);
      EXPECT_TRUE(torch::equal(full_parameters(root).at("bias"), bias));
      EXPECT_TRUE(torch::equal(full_parameters(root).at("weight"), before.at("weight")));
    });
  }
}

/// Beside the shards, and beside what rank 0 was given: one parameter, where it has to be packed.
TEST(Load, PeakIsShardsAndOneParameter) {
  constexpr int64_t kDim = 256;
  constexpr int64_t kOne = kDim * kDim * 4;
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{4}, {2, 2}}) {
    for (const ShardLayout layout : kLayouts) {
      const CountCpuAllocations count;
      const fsdp::NamedTensors values = values_of(*Nest(kDim));
      std::mutex mutex;
      int64_t shards = 0;
      const int64_t before = allocation_counts().live;
      reset_allocation_counts();
      run_ranks(ranks_of(mesh), {.allocator = counting_allocator()}, [&](int rank) {
        const Nest nest = without_memory<Nest>(kDim);
        FullyShardOptions options = on_mesh(mesh, layout);
        if (layout == ShardLayout::kPerParameter) {
          options.shard_placement_fn = [](const std::string&, const at::Tensor& p) {
            return std::optional<int64_t>(p.dim() - 1);
          };
        }
        const HSDPModule root = fully_shard(nest, options);
        root.load_from_rank0(rank == 0 ? values : fsdp::NamedTensors());
        {
          const std::lock_guard lock(mutex);
          shards += root.memory_use().shards;
        }
        root.data_parallel_comm().barrier();  // all models are there at once
      });
      EXPECT_GE(allocation_counts().peak - before, shards);
      EXPECT_LE(allocation_counts().peak - before, shards + kOne + 100'000);
    }
  }
}

TEST(Load, TorchLoadAfterToEmpty) {
  const Mlp saved(4, 5);
  std::stringstream archive;
  torch::save(saved, archive);
  for (const int world : {1, 2}) {
    run_ranks(world, [&] {
      const Mlp mlp = without_memory<Mlp>(4, 5);
      const HSDPModule root = fully_shard(mlp, on_all());
      root.to_empty();
      std::stringstream in(archive.str());
      Mlp target = mlp;
      torch::load(target, in);
      EXPECT_NO_THROW((void)mlp(torch::ones({1, 4})));
      EXPECT_EQ(relative_difference(full_parameters(root), as_map(values_of(*saved))), 0.0);
    });
  }
}

// --- buffers ---

TEST(Buffers, WithoutValuesAreNamedUntilSomebodyWritesThem) {
  for (const int world : {1, 2}) {
    run_ranks(world, [] {
      const Filter filter = without_memory<Filter>();
      const HSDPModule root = fully_shard(filter, on_all());
      EXPECT_TRUE(filter->kernel.is_meta());
      root.reset_parameters(1);  // knows the running statistics, not the kernel
      const auto forward = [&] { return filter(torch::ones({3, 8})); };
      EXPECT_THAT(message_of<ValueError>(forward), HasSubstr("no values: buffer kernel. They began on the meta device"));
      {
        torch::NoGradGuard no_grad;
        filter->kernel.select(2, 0).fill_(1.0);
        EXPECT_THAT(message_of<ValueError>(forward), HasSubstr("no values: buffer kernel."));
        filter->kernel.fill_(1.0 / 3);
      }
      EXPECT_TRUE(forward().isfinite().all().item<bool>());
      EXPECT_EQ(filter->norm->num_batches_tracked.item<int64_t>(), 1);
    });
  }
}

TEST(Buffers, OfIntegersAndOfInnerUnits) {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() {
      inner = register_module("inner", Filter());
      positions = register_buffer("positions", torch::arange(8));
    }
    torch::Tensor forward(const torch::Tensor& x) { return inner(x) + positions; }
    Filter inner = nullptr;
    torch::Tensor positions;
  };
  class Outer : public nn::HookedHolder<OuterImpl> {
   public:
    using nn::HookedHolder<OuterImpl>::HookedHolder;
  };
  run_ranks(2, [](int rank) {
    const Outer outer = without_memory<Outer>();
    fully_shard(outer->inner, on_all());
    const HSDPModule root = fully_shard(outer, on_all());
    const auto forward = [&] { (void)outer(torch::ones({3, 8})); };
    fsdp::NamedTensors values;
    for (const auto& [name, parameter] : root.named_dtensors()) values.emplace_back(name, torch::ones(parameter.shape()));
    root.load_full(values, /*strict=*/false);
    EXPECT_THAT(
        message_of<ValueError>(forward),
        AllOf(HasSubstr("buffer inner.kernel"), HasSubstr("buffer inner.norm.running_mean"),
              HasSubstr("buffer inner.norm.num_batches_tracked"), HasSubstr("buffer positions"), Not(HasSubstr(": parameter"))));
    const fsdp::NamedTensors buffers = values_of(*Outer());
    root.load_from_rank0(rank == 0 ? buffers : fsdp::NamedTensors());
    EXPECT_NO_THROW(forward());
    EXPECT_TRUE(torch::equal(outer->positions, torch::arange(8)));
    EXPECT_EQ(outer->inner->kernel.sum().item<float>(), 1.0F);
  });
}

/// A policy leaves buffers alone; the error is torch's, the remedy one call.
TEST(Buffers, KeepTheirDtypeUntilCast) {
  run_ranks(2, [] {
    const Filter filter;
    FullyShardOptions options = on_all();
    options.mp_policy = {.param_dtype = torch::kBFloat16};
    const HSDPModule root = fully_shard(filter, options);
    const auto forward = [&] { return filter(torch::ones({3, 8})); };
    EXPECT_THAT(message_of<c10::Error>(forward),
                HasSubstr("Input type (CPUBFloat16Type) and weight type (CPUFloatType) should be the same"));
    EXPECT_EQ(filter->kernel.scalar_type(), torch::kFloat);
    EXPECT_THAT(value_error([&] { root.cast_buffers(torch::kLong); }),
                HasSubstr("[cast_buffers] dtype is Long, want a floating type"));
    const torch::Tensor same = filter->kernel;
    root.cast_buffers(torch::kBFloat16);
    EXPECT_TRUE(same.is_same(filter->named_buffers()["kernel"]));
    EXPECT_EQ(same.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(filter->norm->num_batches_tracked.scalar_type(), torch::kLong);
    EXPECT_EQ(forward().scalar_type(), torch::kBFloat16);
    for (const auto& group : root.groups()) EXPECT_EQ(group.shard.scalar_type(), torch::kFloat);
  });
}

// --- replicas ---

TEST(Replicas, DifferentValuesAreFoundOrReplaced) {
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{2, 2}, {2, 1}, {3, 1}, {1, 2}}) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        const bool replicas = mesh[0] > 1;
        const bool last = rank >= (mesh[0] - 1) * mesh[1];
        const auto net = [&](ReplicaInit init) {
          Net made = make_net({}, 1);
          torch::NoGradGuard no_grad;
          if (replicas && last) made->u2->q->bias.add_(1e-3);
          FullyShardOptions options = on_mesh(mesh, layout);
          options.replica_init = init;
          shard_net(made, options);
          return made;
        };
        torch::NoGradGuard no_grad;
        const Batch batch = make_batch(2, 1);
        const Net checked = net(ReplicaInit::kCheck), sent = net(ReplicaInit::kBroadcast), unchecked = net(ReplicaInit::kNone);
        EXPECT_NO_THROW((void)unchecked(batch.tokens));
        if (replicas) {
          EXPECT_THAT(message_of<ValueError>([&] { (void)checked(batch.tokens); }),
                      AllOf(HasSubstr("[fully_shard] replicas differ in parameter u2.q.bias: rank "), HasSubstr("kBroadcast")));
        } else {
          EXPECT_NO_THROW((void)checked(batch.tokens));
        }
        const Net want = make_net({}, 1);
        EXPECT_TRUE(torch::allclose(sent(batch.tokens), want(batch.tokens), 1e-5, 1e-6));
        // Loading makes them equal, and the check runs again.
        HSDPModule::of(checked).load_full(values_of(*want));
        EXPECT_NO_THROW((void)checked(batch.tokens));
      });
    }
  }
}

TEST(Replicas, RanksMustAskForTheSame) {
  run_ranks(2, [](int rank) {
    const Mlp mlp(4, 5);
    FullyShardOptions options = on_mesh({2, 1});
    options.replica_init = rank == 0 ? ReplicaInit::kCheck : ReplicaInit::kBroadcast;
    fully_shard(mlp, options);
    EXPECT_THAT(message_of<ValueError>([&] {
                  (void)mlp(torch::ones({1, 4}));
                }),
                AllOf(HasSubstr("replicas compared"), HasSubstr("replicas broadcast")));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
