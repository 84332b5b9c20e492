// Switches of a unit's handle: what they do to gradients, gathers and memory.
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

/// Collectives by operation name that `f` starts on `comm`, from the flight recorder.
template <class F>
std::map<std::string, int> operations(const Comm& comm, F&& f) {
  const auto last = [&] {
    const auto records = comm.flight_record();
    return records.empty() ? std::uint64_t{0} : records.back().sequence;
  };
  const std::uint64_t before = last();
  f();
  std::map<std::string, int> counts;
  for (const FlightRecord& record : comm.flight_record()) {
    if (record.sequence > before && record.label != "gradients present") ++counts[record.operation];
  }
  EXPECT_LE(last() - before, 64U) << "more than the recorder holds";
  return counts;
}

// ---- reductions

TEST(ReduceOpType, SumAndAverage) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {1}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_mesh(mesh));
      const Tensors want = mean_gradients({3});
      root.set_reduce_op_type(" S u M ");
      loss_of(net, get_rank()).backward();
      EXPECT_LT(relative_difference(full_gradients(root), times(want, get_world_size())), 1e-5);
      root.zero_grad();
      root.set_reduce_op_type("AVG");
      loss_of(net, get_rank()).backward();
      EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5);
      root.zero_grad();
      root.set_reduce_op_type("sum", /*recurse=*/false);
      loss_of(net, get_rank()).backward();
      const Tensors mixed = full_gradients(root);
      EXPECT_LT(relative_difference({{"", mixed.at("table.weight")}}, {{"", want.at("table.weight") * get_world_size()}}), 1e-5);
      EXPECT_LT(relative_difference({{"", mixed.at("u1.a.weight")}}, {{"", want.at("u1.a.weight")}}), 1e-5);
      EXPECT_EQ(value_error([&] { root.set_reduce_op_type("mean"); }), "[set_reduce_op_type] \"mean\", want \"avg\" or \"sum\"");
    });
  }
}

TEST(Factors, DivideAndScale) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {1}}) {
    for (const auto reduce_dtype : {torch::kFloat, torch::kHalf}) {
      run_ranks(ranks_of(mesh), [&](int) {
        const double tolerance = reduce_dtype == torch::kFloat ? 1e-5 : 3e-3;
        Net net = make_net();
        FullyShardOptions options = on_mesh(mesh);
        options.mp_policy.reduce_dtype = reduce_dtype;
        const HSDPModule root = shard_net(net, options);
        const Tensors want = mean_gradients({3});
        root.set_gradient_divide_factor(2.0);
        loss_of(net, get_rank()).backward();
        EXPECT_LT(relative_difference(full_gradients(root), times(want, get_world_size() / 2.0)), tolerance);
        root.zero_grad();
        root.set_gradient_divide_factor({});
        root.set_gradient_scaling_factor(torch::tensor({3.0}));
        loss_of(net, get_rank()).backward();
        const Tensors got = full_gradients(root);
        EXPECT_LT(relative_difference({{"", got.at("table.weight")}}, {{"", want.at("table.weight") * 3}}), tolerance);
        EXPECT_LT(relative_difference({{"", got.at("u1.a.weight")}}, {{"", want.at("u1.a.weight")}}), tolerance)
            << "not recursive";
      });
    }
  }
  run_ranks(1, [](int) {
    Mlp mlp(6, 5);
    const HSDPModule unit = fully_shard(mlp, on_all());
    EXPECT_EQ(value_error([&] { unit.set_gradient_scaling_factor(std::nan("")); }),
              "[set_gradient_scaling_factor] factor is nan, want a finite number (unit Mlp)");
    EXPECT_EQ(value_error([&] { unit.set_gradient_scaling_factor(torch::ones({2})); }),
              "[set_gradient_scaling_factor] factor has 2 elements, want 1 (unit Mlp)");
    EXPECT_EQ(value_error([&] { unit.set_gradient_divide_factor(0.0); }),
              "[set_gradient_divide_factor] factor is 0, want a finite number other than 0 (unit Mlp)");
  });
}

/// What was reduced before is not scaled again, whatever is accumulated how.
TEST(Factors, ApplyOncePerReduction) {
  for (const auto& mesh : {std::vector<int64_t>{1}, {2}, {2, 2}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      Mlp mlp(6, 5);
      seed_parameters(*mlp, 1);
      const HSDPModule unit = fully_shard(mlp, on_mesh(mesh));
      const auto backward = [&] { mlp(wave({3, 6}, get_rank())).square().mean().backward(); };
      backward();
      const Tensors once = full_gradients(unit);
      unit.set_gradient_scaling_factor(2.0);
      backward();  // once + 2
      EXPECT_LT(relative_difference(full_gradients(unit), times(once, 3)), 1e-5);
      unit.set_requires_gradient_sync(false);
      backward();
      unit.set_requires_gradient_sync(true);
      backward();  // + 2 * (1 + 1)
      EXPECT_LT(relative_difference(full_gradients(unit), times(once, 7)), 1e-5);
      unit.set_requires_all_reduce(false);
      backward();
      unit.set_requires_all_reduce(true);
      unit.set_gradient_scaling_factor();
      backward();  // + 2 + 1
      // Alone, what waits for the reduction is scaled with it.
      const double want = get_world_size() == 1 ? 9 : 10;
      EXPECT_LT(relative_difference(full_gradients(unit), times(once, want)), 1e-5);
    });
  }
}

TEST(AllReduce, DeferredToTheLastMicroBatch) {
  for (const auto& mesh : {std::vector<int64_t>{2, 2}, {1, 2}, {2, 1}, {2}, {1}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      Net net = make_net();
      const FullyShardOptions options = on_mesh(mesh, ShardLayout::kRagged);
      const HSDPModule root = shard_net(net, options);
      loss_of(net, get_rank(), 1).backward();  // learn the order and compare the ranks
      root.zero_grad();
      const auto run = [&](uint64_t seed, bool last) {
        root.set_requires_all_reduce(last);
        loss_of(net, get_rank(), seed).backward();
      };
      const Comm replicas = mesh.size() == 2 ? options.mesh.get_group(0) : root.data_parallel_comm();
      const auto first = operations(replicas, [&] { run(4, false); });
      if (mesh.size() == 2) {
        EXPECT_EQ(first.count("all_reduce"), 0U);
      }
      EXPECT_TRUE(root.named_grad_dtensors().empty()) << "parked";
      run(5, false);
      const auto final = operations(replicas, [&] { run(6, true); });
      if (mesh.size() == 2 && mesh[0] > 1) {
        EXPECT_EQ(final.at("all_reduce"), 6) << "one for each unit";
      }
      EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({4, 5, 6})), 1e-5);
    });
  }
}

/// A unit that does not run in the last micro-batch still gets what was parked for it.
TEST(AllReduce, ParkedGradientsOfAUnitThatDoesNotRunAgain) {
  run_ranks(4, [](int) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_mesh({2, 2}));
    root.set_requires_all_reduce(false);
    loss_of(net, get_rank(), 4).backward();
    root.set_requires_all_reduce(true);
    net->options.skip_last = true;
    loss_of(net, get_rank(), 5).backward();
    Net plain = make_net();
    for (int rank = 0; rank < 4; ++rank) (loss_of(plain, rank, 4) / 4).backward();
    plain->options.skip_last = true;
    for (int rank = 0; rank < 4; ++rank) (loss_of(plain, rank, 5) / 4).backward();
    Tensors want = plain_gradients(*plain);
    want.erase("head.weight");
    EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5);
  });
}

// ---- the last backward

TEST(LastBackward, GradientsWaitForIt) {
  for (const auto& mesh : {std::vector<int64_t>{2}, {2, 2}, {1}}) {
    run_ranks(ranks_of(mesh), [&](int) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_mesh(mesh));
      for (int step = 0; step < 3; ++step) {
        root.set_is_last_backward(false);
        loss_of(net, get_rank(), 4).backward();
        loss_of(net, get_rank(), 5).backward();
        EXPECT_TRUE(root.named_grad_dtensors().empty());
        root.set_is_last_backward(true);
        loss_of(net, get_rank(), 6).backward();
        EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({4, 5, 6})), 1e-5);
        root.zero_grad();
      }
      root.set_is_last_backward(false);
      loss_of(net, get_rank(), 7).backward();
      hsdp_sync_stream();
      EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({7})), 1e-5);
      loss_of(net, get_rank(), 8).backward();
      root.wait_for_gradients();
      EXPECT_LT(relative_difference(full_gradients(root), mean_gradients({7, 8})), 1e-5);
      hsdp_sync_stream();  // nothing left: local
    });
  }
}

TEST(LastBackward, LeavesReductionsInFlight) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    const HSDPModule unit = fully_shard(mlp, on_all());
    const auto step = [&] { mlp(wave({3, 6}, get_rank())).sum().backward(); };
    step();
    unit.set_is_last_backward(false);
    step();
    const auto records = unit.data_parallel_comm().flight_record();
    EXPECT_EQ(records.back().operation, "reduce_scatter_single");
    EXPECT_EQ(records.back().state, FlightRecord::State::kStarted);
    unit.wait_for_gradients();
    const auto after = unit.data_parallel_comm().flight_record();
    EXPECT_EQ(after[after.size() - 2].state, FlightRecord::State::kDone);
  });
}

// ---- residency

/// Gathers of the whole tree in one step of several micro-batches.
int gathers(const HSDPModule& root, Net& net, ZeroLevel level, int micro_batches) {
  int total = 0;
  for (int micro = 0; micro < micro_batches; ++micro) {
    set_zero_level(root, level, micro + 1 == micro_batches);
    const auto counts = operations(root.data_parallel_comm(), [&] { loss_of(net, get_rank(), 4 + micro).backward(); });
    if (const auto entry = counts.find("all_gather_single"); entry != counts.end()) total += entry->second;
  }
  return total;
}

TEST(ZeroLevels, GatherAndReduceAsOftenAsTheTableSays) {
  run_ranks(2, [](int) {
    for (const auto level : {ZeroLevel::k1, ZeroLevel::k2, ZeroLevel::k3}) {
      Net net = make_net();
      const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
      torch::optim::SGD sgd(net->parameters(), 0.1);
      Net plain = make_net();
      torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        const int count = gathers(root, net, level, 3);
        // Six units; at level 3 the root stays for its own backward.
        if (step > 0) {
          EXPECT_EQ(count, level == ZeroLevel::k3 ? 3 * (5 * 2 + 1) : 6) << static_cast<int>(level);
        }
        for (const int seed : {4, 5, 6}) {
          for (int rank = 0; rank < 2; ++rank) (loss_of(plain, rank, static_cast<uint64_t>(seed)) / 2).backward();
        }
        Tensors want = plain_gradients(*plain);
        want.erase("head.weight");
        EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5) << static_cast<int>(level) << " step " << step;
        sgd.step();
        plain_sgd.step();
        sgd.zero_grad();
        plain_sgd.zero_grad();
      }
    }
    EXPECT_EQ(value_error([] { set_zero_level({}, ZeroLevel::k1); }),
              "[set_zero_level] the handle has no unit, want that of a sharded module");
  });
}

/// B13: a frozen base is gathered once, until it is written.
TEST(Residency, FrozenUnitsStayAcrossSteps) {
  run_ranks(2, [](int) {
    Net net = make_net();
    for (auto& p : net->u1->parameters()) p.set_requires_grad(false);
    const FullyShardOptions options = on_all();
    const HSDPModule root = shard_net(net, options);
    const HSDPModule frozen = HSDPModule::of(net->u1);
    frozen.set_reshard_after_forward(false);
    frozen.set_reshard_after_backward(false);
    loss_of(net, get_rank()).backward();
    const auto gathers_of_u1 = [&] {
      int count = 0;
      const auto before = root.data_parallel_comm().flight_record().back().sequence;
      loss_of(net, get_rank()).backward();
      for (const auto& record : root.data_parallel_comm().flight_record()) {
        if (record.sequence > before && record.label == "u1" && record.operation == "all_gather_single") ++count;
      }
      return count;
    };
    for (int step = 0; step < 4; ++step) EXPECT_EQ(gathers_of_u1(), 0);
    {
      torch::NoGradGuard no_grad;
      net->u1->parameters().front().mul_(2);
    }
    EXPECT_EQ(gathers_of_u1(), 1) << "the shards were written";
    EXPECT_EQ(gathers_of_u1(), 0);
    frozen.reshard();
    EXPECT_EQ(gathers_of_u1(), 1);
  });
}

TEST(Residency, ScopeGathersTheTreeOnce) {
  run_ranks(2, [](int) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const Batch batch = make_batch(4, 1);
    torch::NoGradGuard no_grad;
    const torch::Tensor want = net(batch.tokens);
    {
      const UnshardScope scope(root);
      EXPECT_TRUE(HSDPModule::of(net->u4).is_unsharded());
      const auto counts = operations(root.data_parallel_comm(), [&] {
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(torch::equal(net(batch.tokens), want));
      });
      EXPECT_TRUE(counts.empty());
    }
    EXPECT_FALSE(HSDPModule::of(net->u4).is_unsharded());
    EXPECT_FALSE(root.is_unsharded());
  });
}

TEST(Residency, KeptParametersAreNeverStaleAfterAReduction) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5), plain(6, 5);
    seed_parameters(*mlp, 1);
    seed_parameters(*plain, 1);
    const HSDPModule unit = fully_shard(mlp, on_all());
    unit.set_reshard_after_forward(false);
    unit.set_reshard_after_backward(false);
    torch::optim::SGD sgd(mlp->parameters(), 0.5), plain_sgd(plain->parameters(), 0.5);
    const auto x = wave({3, 6}, 1);
    for (int step = 0; step < 3; ++step) {
      mlp(x).square().mean().backward();
      EXPECT_TRUE(unit.is_unsharded());
      plain(x).square().mean().backward();
      sgd.step();
      plain_sgd.step();
      sgd.zero_grad();
      plain_sgd.zero_grad();
      EXPECT_TRUE(torch::allclose(mlp(x), plain(x))) << step;
    }
  });
}

// ---- prefetch lists

TEST(Prefetch, ListsReplaceTheLearnedOrder) {
  run_ranks(2, [](int) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const HSDPModule u1 = HSDPModule::of(net->u1), u3 = HSDPModule::of(net->u3), u4 = HSDPModule::of(net->u4);
    const Tensors want = mean_gradients({3});
    u1.set_modules_to_forward_prefetch(std::vector<fsdp::UnitHandle>{u4, u3});
    u4.set_modules_to_backward_prefetch(std::vector<fsdp::UnitHandle>{u1});
    root.set_modules_to_forward_prefetch(std::vector<fsdp::UnitHandle>{});
    for (int step = 0; step < 3; ++step) {
      std::vector<std::string> order;
      const auto before = step == 0 ? 0 : root.data_parallel_comm().flight_record().back().sequence;
      loss_of(net, get_rank()).backward();
      for (const auto& record : root.data_parallel_comm().flight_record()) {
        if (record.sequence > before && record.operation == "all_gather_single" && record.label != "gradients present" &&
            record.label != "order of units" && record.label != "agreement of units")
          order.push_back(record.label);
      }
      const auto place = [&](const std::string& label) { return std::find(order.begin(), order.end(), label) - order.begin(); };
      if (step > 0) {
        EXPECT_LT(place("u4"), place("u3"));
        EXPECT_LT(place("u3"), place("u2"));
        EXPECT_EQ(place("u4"), place("u1") + 1);
      }
      EXPECT_LT(relative_difference(full_gradients(root), want), 1e-5);
      root.zero_grad();
    }
    u1.set_modules_to_forward_prefetch({});
    EXPECT_EQ(value_error([&] {
                u1.set_modules_to_forward_prefetch(std::vector<fsdp::UnitHandle>{u3, {}});
              }),
              "[set_modules_to_forward_prefetch] element 1 is no unit, want the handle of a sharded module");
  });
}

// ---- main gradients, zero_grad, reset

TEST(MainGrad, LivesBesideTheLeaf) {
  run_ranks(2, [](int) {
    Mlp mlp(6, 5);
    mlp->to(torch::kBFloat16);
    FullyShardOptions options = on_all();
    options.mp_policy.apply_grad_on_fp32_main_grad = true;
    const HSDPModule unit = fully_shard(mlp, options);
    const at::Tensor leaf = mlp->a->named_parameters()["weight"];
    EXPECT_FALSE(unit.main_grad(leaf).defined());
    mlp(wave({3, 6}, 1).to(torch::kBFloat16)).sum().backward();
    EXPECT_FALSE(leaf.grad().defined());
    ASSERT_TRUE(unit.main_grad(leaf).defined());
    EXPECT_EQ(unit.main_grad(leaf).scalar_type(), torch::kFloat);
    EXPECT_EQ(unit.main_grad(leaf).sizes(), leaf.sizes());
    unit.zero_grad(/*set_to_none=*/false);
    EXPECT_EQ(unit.main_grad(leaf).abs().max().item<float>(), 0);
    unit.zero_grad();
    EXPECT_FALSE(unit.main_grad(leaf).defined());
    EXPECT_EQ(value_error([&] { (void)unit.main_grad(torch::ones({1})); }),
              "[main_grad] the tensor is no sharded parameter below unit Mlp");
  });
}

TEST(Reset, OneUnitOrTheTree) {
  run_ranks(2, [](int) {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    root.set_requires_gradient_sync(false);
    loss_of(net, get_rank(), 4).backward();
    HSDPModule::of(net->u1).reset_iter_state(/*recursive=*/false);
    root.set_requires_gradient_sync(true);
    loss_of(net, get_rank(), 5).backward();
    const Tensors got = full_gradients(root), both = mean_gradients({4, 5}), last = mean_gradients({5});
    for (const auto& [name, gradient] : got)
      EXPECT_LT(relative_difference({{"", gradient}}, {{"", (name.starts_with("u1.") ? last : both).at(name)}}), 1e-5) << name;
  });
}

TEST(UnusedParams, LeftOutOnRequest) {
  run_ranks(2, [](int) {
    Net net = make_net({.drop_last = true});
    const HSDPModule root = shard_net(net, on_all());
    const auto reductions = [&] {
      return operations(root.data_parallel_comm(), [&] { loss_of(net, get_rank()).backward(); }).at("reduce_scatter_single");
    };
    (void)reductions();
    EXPECT_EQ(reductions(), 6);
    root.set_reduce_scatter_unused_params(false);
    EXPECT_EQ(reductions(), 5);
    EXPECT_FALSE(net->u4->a->named_parameters()["weight"].grad().defined());
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
