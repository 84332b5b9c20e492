// Options of fully_shard beyond the common ones: equal to the plain run, with the traffic and the memory that they promise.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/net_on_ranks.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

void expect_trains(const FullyShardOptions& options, const char* what) {
  Net net = make_net(), plain = make_net();
  const HSDPModule root = shard_net(net, options);
  torch::optim::SGD sgd(net->parameters(), 0.1), plain_sgd(plain->parameters(), 0.1);
  for (uint64_t step = 0; step < 3; ++step) {
    sgd.zero_grad();
    plain_sgd.zero_grad();
    for (int rank = 0; rank < get_world_size(); ++rank) (loss_of(plain, rank, step) / get_world_size()).backward();
    loss_of(net, get_rank(), step).backward();
    Tensors want = plain_gradients(*plain);
    want.erase("head.weight");
    EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5) << what << " step " << step;
    sgd.step();
    plain_sgd.step();
  }
}

// ---- reshard_after_forward = k

TEST(IntegerReshard, EqualsPlainRunForEveryFactor) {
  for (const auto& mesh : {std::vector<int64_t>{4}, {2, 2}, {1}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      const int shards = static_cast<int>(mesh.back());
      for (const auto layout : kLayouts) {
        for (const bool fusion : {true, false}) {
          for (int k = 1; k <= shards; ++k) {
            if (shards % k != 0) continue;
            FullyShardOptions options = on_mesh(mesh, layout);
            options.reshard_after_forward = k;
            options.comm_fusion = fusion;
            options.shard_placement_fn = [&](const std::string&, const at::Tensor& p) {
              return p.dim() > 1 && layout == ShardLayout::kPerParameter ? std::optional<int64_t>(1) : std::nullopt;
            };
            expect_trains(options, concat("k=", k).c_str());
          }
        }
      }
    });
  }
}

TEST(IntegerReshard, GathersAmongKRanks) {
  run_ranks(4, {.allocator = counting_allocator()}, [](int) {
    FullyShardOptions options = on_all(ShardLayout::kRagged);
    options.reshard_after_forward = 2;
    Mlp mlp(12, 20);
    seed_parameters(*mlp, 1);
    const HSDPModule unit = fully_shard(mlp, options);
    const fsdp::MemoryUse plan = unit.plan_memory();
    const auto step = [&] {
      mlp(wave({3, 12}, get_rank())).sum().backward();
      unit.zero_grad();
    };
    for (int i = 0; i < 3; ++i) step();
    EXPECT_EQ(unit.memory_use().pool, plan.pool);
    const int64_t first = get_rank() / 2 * 2;
    const Comm all = unit.data_parallel_comm();
    const Comm pair = all.subgroup(std::vector<int>{static_cast<int>(first), static_cast<int>(first) + 1});
    const auto all_before = all.counters(), pair_before = pair.counters();
    step();
    const int64_t full = unit.groups().front().shard.numel() * 4 * 4;  // bytes of the gathered parameters
    EXPECT_EQ(pair.counters().bytes_received - pair_before.bytes_received, full / 2) << "backward: half is here";
    const int64_t presence = 3;  // a byte with bits from each peer
    EXPECT_EQ(all.counters().bytes_received - all_before.bytes_received, full * 3 / 4 + full * 3 / 4 + presence)
        << "forward gather and reduce-scatter";
    EXPECT_EQ(unit.memory_use().pool, plan.pool);
  });
}

TEST(IntegerReshard, ForwardWithoutBackwardLeavesNoStaleParts) {
  run_ranks(4, [](int) {
    FullyShardOptions options = on_all();
    options.reshard_after_forward = 2;
    Mlp mlp(6, 5), plain(6, 5);
    seed_parameters(*mlp, 1);
    seed_parameters(*plain, 1);
    fully_shard(mlp, options);
    const auto x = wave({3, 6}, 1);
    (void)mlp(x);  // with gradients, but no backward follows
    {
      torch::NoGradGuard no_grad;
      for (auto& p : mlp->parameters()) p.data().mul_(2);
      for (auto& p : plain->parameters()) p.data().mul_(2);
    }
    EXPECT_TRUE(torch::allclose(mlp(x), plain(x)));
  });
}

TEST(IntegerReshard, NonFactorsAreRefused) {
  run_ranks(4, [](int) {
    for (const int k : {0, -2, 3, 5, 8}) {
      FullyShardOptions options = on_all();
      options.reshard_after_forward = k;
      Mlp mlp(6, 5);
      EXPECT_EQ(
          value_error([&] { fully_shard(mlp, options); }),
          concat("[fully_shard] reshard_after_forward is ", k, ", want a factor of the 4 ranks of the shard axis (unit Mlp)"));
      EXPECT_NO_THROW(fully_shard(mlp, on_all())) << "the call that threw changed nothing";
    }
  });
}

// ---- memory budget

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int i = 0; i < 8; ++i) blocks.push_back(register_module(concat("block", i), Mlp(12, 20)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return x;
  }
  std::vector<Mlp> blocks;
};
HP_MODULE(Deep);

struct Residency {
  int64_t bytes = 0;
  std::vector<bool> kept;  ///< by block, between forward and backward
};

Residency train_deep(std::optional<ReshardAfterForward> choice) {
  Deep deep;
  FullyShardOptions options = on_all(ShardLayout::kRagged);
  options.reshard_after_forward = choice;
  for (auto& block : deep->blocks) fully_shard(block, options);
  const HSDPModule root = fully_shard(deep, options);
  const fsdp::MemoryUse plan = root.plan_memory();
  for (int step = 0; step < 3; ++step) {
    deep(wave({3, 12}, step)).sum().backward();
    root.zero_grad();
  }
  EXPECT_EQ(root.memory_use().total(), plan.total());
  Residency result;
  result.bytes = plan.total();
  const torch::Tensor loss = deep(wave({3, 12}, 1)).sum();
  for (auto& block : deep->blocks) result.kept.push_back(HSDPModule::of(block).is_unsharded());
  loss.backward();
  return result;
}

TEST(Budget, KeepsWhatFitsBeginningWithTheFirstBackward) {
  run_ranks(2, {.allocator = counting_allocator()}, [](int) {
    const int64_t least = train_deep(true).bytes, most = train_deep(false).bytes;
    ASSERT_LT(least, most);
    std::vector<std::ptrdiff_t> counts;
    for (int64_t quarter = 0; quarter <= 4; ++quarter) {
      const int64_t budget = least + (most - least) * quarter / 4;
      const Residency got = train_deep(MemoryBudget{budget});
      EXPECT_LE(got.bytes, budget);
      EXPECT_TRUE(std::is_sorted(got.kept.begin(), got.kept.end())) << "the last blocks are kept first";
      counts.push_back(std::count(got.kept.begin(), got.kept.end(), true));
    }
    EXPECT_TRUE(std::is_sorted(counts.begin(), counts.end()));
    EXPECT_LT(counts.front(), counts[2]);
    EXPECT_LT(counts[2], counts.back());
    EXPECT_EQ(counts.back(), 8);
    EXPECT_EQ(train_deep(MemoryBudget{1}).bytes, least) << "too little: everything is freed, with a warning";
  });
}

TEST(Budget, BadValueIsRefused) {
  run_ranks(1, [](int) {
    Mlp mlp(6, 5);
    FullyShardOptions options = on_all();
    options.reshard_after_forward = MemoryBudget{0};
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] memory budget is 0 bytes, want more than 0 (unit Mlp)");
  });
}

// ---- replicate_params, threshold, bucket_size

TEST(Replicated, ParametersStayWholeAndAreReducedOverAllRanks) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {1, 2}, {2, 1}, {1}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      for (const auto layout : kLayouts) {
        for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
          Net net = make_net(), plain = make_net();
          FullyShardOptions options = on_mesh(mesh, layout);
          if (dtype != torch::kFloat) options.mp_policy = {.param_dtype = dtype, .reduce_dtype = torch::kFloat};
          options.replicate_params = {net->u1->a->weight, net->u2->q->bias, net->table->weight};
          const HSDPModule root = shard_net(net, options);
          EXPECT_EQ(net->u1->a->named_parameters()["weight"].sizes(), plain->u1->a->weight.sizes());
          for (auto& [name, parameter] : root.named_dtensors()) {
            const bool whole = name == "u1.a.weight" || name == "u2.q.bias" || name == "table.weight";
            for (const Placement& placement : parameter.placements()) {
              if (whole) {
                EXPECT_EQ(placement, Placement(Replicate())) << name;
              }
            }
          }
          for (int rank = 0; rank < get_world_size(); ++rank) (loss_of(plain, rank) / get_world_size()).backward();
          loss_of(net, get_rank()).backward();
          Tensors want = plain_gradients(*plain);
          want.erase("head.weight");
          EXPECT_LT(relative_difference(full_gradients(root), want), dtype == torch::kFloat ? 1e-5 : 4e-2);
        }
      }
    });
  }
}

TEST(Replicated, BadListsAreRefusedAndIgnoredWins) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    FullyShardOptions options = on_all();
    options.replicate_params = {at::Tensor()};
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] replicate_params has an undefined tensor, want parameters (unit Mlp)");
    const at::Tensor weight = mlp->a->weight;
    options.replicate_params = {weight, torch::ones({2})};  // the second belongs to nobody
    options.ignored_params = {weight};
    const HSDPModule unit = fully_shard(mlp, options);
    for (auto& [name, parameter] : unit.named_dtensors()) EXPECT_NE(name, "a.weight");
    EXPECT_TRUE(mlp->a->named_parameters()["weight"].is_same(weight));
  });
}

TEST(Threshold, SmallParametersStayWhole) {
  run_ranks(2, [](int) {
    for (const auto layout : kLayouts) {
      FullyShardOptions options = on_all(layout);
      options.threshold = 200;
      Net net = make_net();
      const HSDPModule root = shard_net(net, options);
      int whole = 0;
      for (const auto& group : root.groups()) {
        for (const auto& parameter : group.parameters) {
          const int64_t bytes = c10::multiply_integers(parameter.full_shape) * 4;
          EXPECT_EQ(group.shard_comm.size(), bytes < 200 ? 1 : 2) << parameter.name;
          whole += bytes < 200 ? 1 : 0;
        }
      }
      EXPECT_GT(whole, 4);
      for (const auto& [name, parameter] : root.named_dtensors()) {
        EXPECT_EQ(parameter.full_tensor().sizes(), parameter.shape()) << name;
        if (name.ends_with("scale")) {
          EXPECT_EQ(parameter.to_local().dim(), 0) << "a scalar stays one";
        }
      }
      expect_trains(options, "threshold");
    }
    FullyShardOptions options = on_all();
    options.threshold = -1;
    Mlp mlp(6, 5);
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] threshold is -1, want a number of bytes (unit Mlp)");
  });
}

TEST(BucketSize, CutsTheUnitIntoSeveralCollectives) {
  run_ranks(2, [](int) {
    for (const auto layout : kLayouts) {
      FullyShardOptions options = on_all(layout);
      options.bucket_size = 600;
      Net net = make_net();
      const HSDPModule root = shard_net(net, options);
      std::size_t groups = 0;
      for (const auto& group : root.groups()) {
        ++groups;
        int64_t bytes = 0;
        for (const auto& parameter : group.parameters) bytes += c10::multiply_integers(parameter.full_shape) * 4;
        EXPECT_TRUE(bytes <= 600 || group.parameters.size() == 1);
      }
      Net whole = make_net();
      EXPECT_GT(groups, shard_net(whole, on_all(layout)).groups().size());
      expect_trains(options, "bucket_size");
    }
    FullyShardOptions options = on_all();
    options.bucket_size = 0;
    Mlp mlp(6, 5);
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] bucket_size is 0, want a number of bytes, or -1 for one bucket (unit Mlp)");
    options.bucket_size = 100;
    options.comm_fusion = false;
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] bucket_size is 100 without comm_fusion, which makes the buckets (unit Mlp)");
    options.bucket_size = -1;
    options.comm_fusion_zero_copy = true;
    EXPECT_EQ(value_error([&] { fully_shard(mlp, options); }),
              "[fully_shard] comm_fusion_zero_copy is true without comm_fusion, want comm_fusion too (unit Mlp)");
  });
}

// ---- communication of the user's own

TEST(CustomComm, GathersReducesAndHooks) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {1}}) {
    for (const auto& policy : {MixedPrecisionPolicy{}, {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}) {
      run_ranks(ranks_of(mesh), [&](int) {
        Mlp mlp(6, 5), ours(6, 5);
        seed_parameters(*mlp, 1);
        seed_parameters(*ours, 1);
        FullyShardOptions options = on_mesh(mesh, ShardLayout::kRagged, true);
        options.mp_policy = policy;
        const HSDPModule unit = fully_shard(mlp, options), reference = fully_shard(ours, options);
        int gathered = 0, reduced = 0, hooked = 0, waited = 0;
        unit.set_custom_all_gather([&](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
          ++gathered;
          auto work = std::make_shared<Work>(comm.all_gather_single(output, input));
          return CommWait([work, &waited] { work->wait(), ++waited; });
        });
        unit.set_custom_reduce_scatter([&](const Comm& comm, const at::Tensor& output, const at::Tensor& input) {
          ++reduced;
          EXPECT_EQ(output.scalar_type(), input.scalar_type());
          comm.reduce_scatter_single(output, input).wait();
          return CommWait();
        });
        unit.set_all_reduce_hook([&](const at::Tensor& gradient) {
          ++hooked;
          gradient.mul_(2);
        });
        const auto run = [&](Mlp& model, const HSDPModule& handle) {
          for (const bool last : {false, true}) {
            handle.set_requires_all_reduce(last);
            model(wave({3, 6}, get_rank() + (last ? 5 : 0))).to(torch::kFloat).square().mean().backward();
          }
        };
        run(mlp, unit);
        run(ours, reference);
        EXPECT_LT(relative_difference(full_gradients(unit), times(full_gradients(reference), 2)), 1e-5);
        EXPECT_EQ(hooked, 1);
        const bool shards = mesh.back() > 1;
        EXPECT_EQ(gathered, shards ? 4 : 0);
        EXPECT_EQ(waited, gathered);
        EXPECT_EQ(reduced, 2);
      });
    }
  }
}

TEST(CustomComm, CannotChangeWhileGradientsWait) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    const HSDPModule unit = fully_shard(mlp, on_all());
    unit.set_requires_gradient_sync(false);
    mlp(wave({3, 6}, 1)).sum().backward();
    EXPECT_EQ(value_error([&] { unit.set_all_reduce_hook([](const at::Tensor&) {}); }),
              "[set_all_reduce_hook] unit Mlp holds accumulated, parked or unfinished gradients, want it between steps");
    unit.reset_iter_state();
    EXPECT_NO_THROW(unit.set_all_reduce_hook([](const at::Tensor&) {}));
  });
}

// ---- field reports

/// B09: all frozen in the first forward, trained later: gradients in fp32 as asked.
TEST(FieldDtype, B09UnfrozenAfterTheFirstForward) {
  run_ranks(2, [](int) {
    FullyShardOptions options = on_all();
    options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
    Mlp mlp(6, 5), plain(6, 5);
    seed_parameters(*mlp, 1);
    seed_parameters(*plain, 1);
    const HSDPModule unit = fully_shard(mlp, options);
    for (auto& p : mlp->parameters()) p.set_requires_grad(false);
    (void)mlp(wave({3, 6}, 1));
    for (auto& p : mlp->parameters()) p.set_requires_grad(true);
    const auto loss = [](Mlp& m, int rank) { return m(wave({3, 6}, rank)).to(torch::kFloat).square().mean(); };
    for (int rank = 0; rank < 2; ++rank) (loss(plain, rank) / 2).backward();
    loss(mlp, get_rank()).backward();
    EXPECT_LT(relative_difference(full_gradients(unit), plain_gradients(*plain)), 4e-2);
    for (auto& p : mlp->parameters()) EXPECT_EQ(p.grad().scalar_type(), torch::kFloat);
  });
}

/// B11: dtypes mixed in one unit, first with a frozen base, then all of it trained.
TEST(FieldDtype, B11MixedDtypesInOneUnit) {
  run_ranks(2, [](int) {
    for (const bool train_base : {false, true}) {
      Mlp mlp(6, 5);
      seed_parameters(*mlp, 1);
      mlp->a->to(torch::kBFloat16);
      if (!train_base) {
        for (auto& p : mlp->a->parameters()) p.set_requires_grad(false);
      }
      FullyShardOptions options = on_all();
      options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      const HSDPModule unit = fully_shard(mlp, options);
      mlp(wave({3, 6}, get_rank())).to(torch::kFloat).square().mean().backward();
      EXPECT_EQ(mlp->a->parameters().front().grad().defined(), train_base);
      if (train_base) {
        EXPECT_EQ(mlp->a->parameters().front().grad().scalar_type(), torch::kBFloat16);
      }
      EXPECT_EQ(mlp->b->parameters().front().grad().scalar_type(), torch::kFloat);
    }
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
