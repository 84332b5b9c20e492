// Units with frozen parameters: their gradients are those of the plain run, bit for bit, and in backward they are freed as soon
// as the gradients of their inputs are there.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/adapter_net.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using Kinds = std::vector<BlockKind>;
using torch::Tensor;

constexpr BlockKind kA = BlockKind::kAdapted, kF = BlockKind::kFrozen, kT = BlockKind::kTrained;
const std::vector<Kinds> kStacks = {{kA, kA, kA, kA}, {kA, kF, kF, kA}, {kT, kF, kA, kF}, {kF, kA, kF, kT}};

Tensor loss_of(AdaptedNet& net, uint64_t seed = 3) {
  const Batch batch = make_batch(4, seed);  // the same on all ranks, so that their mean is exactly one rank's gradient
  return net_loss(net(batch.tokens), batch.targets);
}

void expect_same_bits(const HSDPModule& root, const Tensors& want) {
  const Tensors got = full_gradients(root);
  EXPECT_EQ(got.size(), want.size());
  for (const auto& [name, gradient] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_TRUE(torch::equal(got.at(name), gradient)) << name;
  }
}

/// Which blocks are gathered when the gradient of the input of block i is there, "" for none.
class Watcher {
 public:
  explicit Watcher(AdaptedNet net) : net_(std::move(net)) {
    net_->before_block = [this](std::size_t i, const Tensor& h) {
      if (torch::GradMode::is_enabled() && h.requires_grad()) h.register_hook([this, i](const Tensor&) { seen[i] = gathered(); });
    };
  }
  std::string gathered() const {
    std::string names;
    for (std::size_t i = 0; i < net_->blocks.size(); ++i) {
      if (HSDPModule::of(net_->blocks[i]).is_unsharded()) names += std::to_string(i);
    }
    return names;
  }
  /// Nothing but the block whose backward has ended or begins here, and the one before it, which is on its way.
  void expect_freed_in_time() {
    EXPECT_FALSE(seen.empty());
    for (const auto& [i, names] : seen) {
      for (const char name : names) EXPECT_LT(name - '0', static_cast<int>(i)) << "at the input of block " << i << ": " << names;
    }
    seen.clear();
  }
  std::map<std::size_t, std::string> seen;

 private:
  AdaptedNet net_;
};

class Frozen : public ::testing::TestWithParam<std::tuple<std::vector<int64_t>, ShardLayout, std::size_t>> {};

TEST_P(Frozen, SameBitsAndFreedInTime) {
  const auto& [mesh, layout, stack] = GetParam();
  for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
    AdaptedNet plain = make_adapted(kStacks[stack]);
    loss_of(plain).backward();
    const Tensors want = plain_gradients(*plain);
    run_ranks(ranks_of(mesh), [&] {
      AdaptedNet net = make_adapted(kStacks[stack]);
      const HSDPModule root = shard_adapted(net, on_mesh(mesh, layout, reshard));
      Watcher watcher(net);
      for (int step = 0; step < 3; ++step) {
        loss_of(net).backward();
        expect_same_bits(root, want);
        if (mesh.back() > 1) watcher.expect_freed_in_time();
        EXPECT_TRUE(mesh.back() == 1 || watcher.gathered().empty());
        root.zero_grad();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Frozen,
                         ::testing::Combine(::testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{2},
                                                              std::vector<int64_t>{4}, std::vector<int64_t>{2, 2}),
                                            ::testing::ValuesIn(kLayouts), ::testing::Values(0U, 1U, 2U, 3U)));

/// Runs `step` on a plain and on a sharded model: same bits in three steps.
template <class Step>
void expect_like_plain(
    const Kinds& kinds, const FullyShardOptions& options, Step step,
    const std::function<void(AdaptedNet&)>& prepare = [](AdaptedNet&) {}, bool in_time = true) {
  AdaptedNet plain = make_adapted(kinds), net = make_adapted(kinds);
  prepare(plain), prepare(net);
  step(plain);
  const HSDPModule root = shard_adapted(net, options);
  Watcher watcher(net);
  for (int i = 0; i < 3; ++i) {
    step(net);
    expect_same_bits(root, plain_gradients(*plain));
    if (in_time) watcher.expect_freed_in_time();
    EXPECT_TRUE(watcher.gathered().empty());
    root.zero_grad();
  }
}

const auto backward = [](AdaptedNet& net) { loss_of(net).backward(); };

// ---- forwards that are not one plain pass

TEST(FrozenPasses, AUnitThatRunsTwice) {
  run_ranks(2, [] {
    for (const auto& kinds : kStacks) {
      // 0 1 0 2 3 2: the gradients of block 0 are complete after its first pass.
      const auto twice = [](AdaptedNet& net) {
        net->run_block = [&blocks = net->blocks](AdaptedBlock& block, const Tensor& h) {
          const Tensor first = block(h);
          if (block.ptr() == blocks[1].ptr()) return blocks[0](torch::relu(first));
          if (block.ptr() == blocks[3].ptr()) return blocks[2](torch::relu(first));
          return first;
        };
      };
      AdaptedNet plain = make_adapted(kinds), net = make_adapted(kinds);
      twice(plain), twice(net);
      loss_of(plain).backward();
      const HSDPModule root = shard_adapted(net, on_all());
      Watcher watcher(net);
      for (int step = 0; step < 3; ++step) {
        loss_of(net).backward();
        expect_same_bits(root, plain_gradients(*plain));
        ASSERT_TRUE(watcher.seen.contains(2));
        EXPECT_EQ(watcher.seen.at(2).find_first_of("23"), std::string::npos) << watcher.seen.at(2);
        root.zero_grad();
      }
      net->run_block = nullptr;
    }
  });
}

TEST(FrozenPasses, Checkpoints) {
  run_ranks(2, [] {
    for (const auto& kinds : kStacks) {
      for (const std::optional<bool> reshard : {std::optional<bool>(), std::optional<bool>(false)}) {
        const auto around = [](AdaptedNet& net) {
          net->run_block = [](AdaptedBlock& block, const Tensor& h) { return checkpoint(block, h); };
        };
        expect_like_plain(kinds, on_all(ShardLayout::kRagged, reshard), backward, around);
      }
      const auto inside = [](AdaptedNet& net) {
        net->run_block = [](AdaptedBlock& block, const Tensor& h) {
          const HSDPModule unit = HSDPModule::of(block);
          return unit.call([&](const Tensor& x) { return x + checkpoint(block->down, torch::silu(block->up(x * block->scale))); },
                           h);
        };
      };
      AdaptedNet plain = make_adapted(kinds), net = make_adapted(kinds);
      loss_of(plain).backward();
      const HSDPModule root = shard_adapted(net, on_all());
      inside(net);
      Watcher watcher(net);
      for (int step = 0; step < 3; ++step) {
        loss_of(net).backward();
        expect_same_bits(root, plain_gradients(*plain));
        watcher.expect_freed_in_time();
        root.zero_grad();
      }
    }
  });
}

TEST(FrozenPasses, ACheckpointAroundSeveralUnits) {
  run_ranks(2, [] {
    for (const auto& kinds : kStacks) {
      AdaptedNet plain = make_adapted(kinds), net = make_adapted(kinds);
      const HSDPModule root = shard_adapted(net, on_all());
      std::string after_both = "unseen";
      const auto run = [&](AdaptedNet& model, bool watch) {
        const Batch batch = make_batch(4, 3);
        Tensor h = model->table(batch.tokens);
        const auto pair = [&](std::size_t i, const Tensor& x) {
          return checkpoint(
              [first = model->blocks[i], second = model->blocks[i + 1]](const Tensor& y) mutable { return second(first(y)); }, x);
        };
        h = pair(0, h);
        if (watch && h.requires_grad()) {
          h.register_hook([&](const Tensor&) {
            after_both.clear();
            for (const std::size_t i : {2, 3}) after_both += HSDPModule::of(net->blocks[i]).is_unsharded() ? "x" : "";
          });
        }
        return pair(2, h).square().sum();
      };
      run(plain, false).backward();
      for (int step = 0; step < 3; ++step) {
        root.call([&] { return run(net, true); }).backward();
        expect_same_bits(root, plain_gradients(*plain));
        EXPECT_EQ(after_both, "");
        root.zero_grad();
      }
    }
  });
}

TEST(FrozenPasses, RetainedGraphsAndSeveralForwardsBeforeABackward) {
  run_ranks(2, [] {
    for (const auto& kinds : kStacks) {
      expect_like_plain(kinds, on_all(), [](AdaptedNet& net) {
        const Tensor loss = loss_of(net);
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
      });
      expect_like_plain(kinds, on_all(), [](AdaptedNet& net) {
        const Tensor first = loss_of(net, 3), second = loss_of(net, 4);
        first.backward();
        second.backward();
      });
      expect_like_plain(
          kinds, on_all(),
          [](AdaptedNet& net) {
            const Tensor first = loss_of(net, 3), second = loss_of(net, 4);
            (first + second).backward();
          },
          {[](AdaptedNet&) {}}, /*in_time=*/false);
      // Graphs of old steps that somebody keeps do not count.
      for (const bool reshard : {true, false}) {
        std::vector<Tensor> history;
        expect_like_plain(kinds, on_all(ShardLayout::kPerParameter, reshard), [&](AdaptedNet& net) {
          history.push_back(loss_of(net));
          history.back().backward();
        });
      }
    }
  });
}

TEST(FrozenPasses, Switches) {
  run_ranks(4, [] {
    for (const auto& kinds : kStacks) {
      for (const int mode : {0, 1, 2}) {
        AdaptedNet plain = make_adapted(kinds), net = make_adapted(kinds);
        FullyShardOptions options = on_all(ShardLayout::kRagged);
        if (mode == 2) options.reshard_after_forward = 2;
        const HSDPModule root = shard_adapted(net, options);
        Watcher watcher(net);
        for (int step = 0; step < 3; ++step) {
          plain->zero_grad();
          for (int micro = 0; micro < 2; ++micro) {
            if (mode == 0) root.set_requires_gradient_sync(micro == 1);
            if (mode == 1) root.set_reshard_after_backward(micro == 1);
            loss_of(plain).backward(), loss_of(net).backward();
            if (mode != 1 || micro == 1) watcher.expect_freed_in_time();
          }
          expect_same_bits(root, plain_gradients(*plain));
          root.zero_grad();
        }
      }
    }
  });
}

// ---- what a rule about inputs alone would free too early

struct OddImpl : torch::nn::Module {
  enum class Way { kCaptured, kIgnored, kHidden, kPartOfOutputs, kHandedThrough, kKept };
  explicit OddImpl(Way which) : way(which) {
    first = register_module("first", torch::nn::Linear(6, 6));
    second = register_module("second", torch::nn::Linear(6, 6));
    for (auto& parameter : parameters()) parameter.set_requires_grad(false);
    own = register_parameter("own", torch::zeros({6}));
  }
  struct Hidden {
    Tensor x;  // no walk_tensors: the engine does not see it
  };
  std::tuple<Tensor, Tensor> forward(const Hidden& hidden, const Tensor& seen) {
    // The trained `own` comes last, so its gradient is there first; `first` is wanted for what comes before it.
    switch (way) {
      case Way::kCaptured:
        return {second(torch::tanh(first(captured))) * own + seen, seen * 2};
      case Way::kIgnored:
        return {second(torch::tanh(first(ignored))) * own + seen, seen * 2};
      case Way::kHidden:
        return {second(torch::tanh(first(hidden.x))) * own + seen, seen * 2};
      case Way::kPartOfOutputs:
        return {second(seen) * own, torch::tanh(first(hidden.x))};
      case Way::kHandedThrough:
        return {second(torch::tanh(first(seen))) * own, seen};
      case Way::kKept:
        kept = torch::tanh(first(hidden.x));
        return {second(seen) * own, seen * 2};
    }
    return {};
  }
  Way way;
  torch::nn::Linear first = nullptr, second = nullptr;
  Tensor own, ignored, captured, kept;
};
HP_MODULE(Odd);

TEST(FrozenInputs, AreWaitedForWhereverTheyComeFrom) {
  using Way = OddImpl::Way;
  for (const Way way : {Way::kCaptured, Way::kIgnored, Way::kHidden, Way::kPartOfOutputs, Way::kHandedThrough, Way::kKept}) {
    for (const std::optional<bool> reshard : {std::optional<bool>(true), std::optional<bool>(false)}) {
      if (way == Way::kKept && reshard.value_or(false)) continue;  // refused: the loss depends on what forward does not return
      const auto gradients = [&](bool sharded) {
        Odd odd(way);
        seed_parameters(*odd, 5);
        const Tensor source = wave({3, 6}, 1).requires_grad_();
        odd->ignored = odd->register_parameter("ignored", wave({3, 6}, 2));
        odd->captured = source.sin();
        HSDPModule unit;
        if (sharded) {
          FullyShardOptions options = on_all(ShardLayout::kPerParameter, reshard);
          options.ignored_params = {odd->ignored};
          unit = fully_shard(odd, options);
        }
        std::vector<Tensor> all;
        for (int step = 0; step < 3; ++step) {
          const Tensor hidden = source.cos(), seen = (source * 0.5).exp();
          odd->captured = source.sin();
          const auto [y, z] = odd(OddImpl::Hidden{hidden}, seen);
          // The other branches come late: their gradients are asked for after the one through `seen`.
          Tensor loss = y.square().sum() + (z * 3).sum();
          if (way == Way::kPartOfOutputs && step == 1) loss = y.square().sum();
          if (way == Way::kKept) loss = loss + odd->kept.square().sum();
          loss.backward();
          all.push_back(source.grad().clone());
          if (odd->ignored.grad().defined()) all.push_back(odd->ignored.grad().clone());
          source.mutable_grad().reset(), odd->ignored.mutable_grad().reset();
        }
        const Tensor own = sharded ? full_gradients(unit).at("own") : odd->own.grad();
        all.push_back(own.clone());
        return all;
      };
      const std::vector<Tensor> want = gradients(false);
      run_ranks(2, [&] {
        const std::vector<Tensor> got = gradients(true);
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t i = 0; i < want.size(); ++i)
          EXPECT_TRUE(torch::equal(got[i], want[i])) << "way " << static_cast<int>(way) << ", tensor " << i;
      });
    }
  }
}

/// A trained unit inside of a frozen one: the outer's weights are wanted for the inner's gradients.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int64_t dim) {
    p = register_module("p", torch::nn::Linear(dim, dim)), q = register_module("q", torch::nn::Linear(dim, dim));
    for (auto& parameter : parameters()) parameter.set_requires_grad(false);
    inner = register_module("inner", Mlp(dim, 7));
  }
  Tensor forward(const Tensor& x) { return q(torch::tanh(inner(torch::tanh(p(x))))); }
  torch::nn::Linear p = nullptr, q = nullptr;
  Mlp inner = nullptr;
};
HP_MODULE(Outer);

/// Returns the root of the graph.
struct LossHeadImpl : torch::nn::Module {
  explicit LossHeadImpl(int64_t dim) {
    p = register_module("p", torch::nn::Linear(dim, dim));
    for (auto& parameter : parameters()) parameter.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x) { return p(x).square().sum(); }
  torch::nn::Linear p = nullptr;
};
HP_MODULE(LossHead);

TEST(FrozenInputs, InnerUnitsTheRootOfTheGraphAndInputsByHand) {
  const auto make_head = [] {
    LossHead head(6);
    seed_parameters(*head, 9);
    return head;
  };
  const auto make = [] {
    std::vector<Outer> stack = {Outer(6), Outer(6)};
    for (std::size_t i = 0; i < 2; ++i) seed_parameters(*stack[i], i + 1);
    return stack;
  };
  std::vector<Outer> plain = make();
  const Tensor x = wave({3, 6}, 1).requires_grad_();
  LossHead plain_head = make_head();
  const auto run = [](std::vector<Outer>& stack, LossHead& head, const Tensor& input) { return head(stack[1](stack[0](input))); };
  run(plain, plain_head, x).backward();
  const Tensor by_hand = torch::autograd::grad({run(plain, plain_head, x)}, {x})[0];
  run_ranks(2, [&] {
    std::vector<Outer> stack = make();
    std::vector<HSDPModule> units;
    for (Outer& outer : stack) {
      const FullyShardOptions options = on_all(ShardLayout::kPerParameter, true);
      fully_shard(outer->inner, options);
      units.push_back(fully_shard(outer, options));
    }
    LossHead head = make_head();
    units.push_back(fully_shard(head, on_all(ShardLayout::kPerParameter, true)));
    for (int step = 0; step < 3; ++step) {
      const Tensor input = x.detach().requires_grad_();
      // Only some inputs: nobody tells what will run, so the units stay until the end.
      EXPECT_TRUE(torch::equal(torch::autograd::grad({run(stack, head, input)}, {input})[0], by_hand));
      for (const HSDPModule& unit : units) EXPECT_FALSE(unit.is_unsharded());
      const Tensor first = stack[0](input), second = stack[1](first);
      bool gathered[2] = {true, true};
      first.register_hook([&](const Tensor&) { gathered[0] = units[1].is_unsharded(); });
      second.register_hook([&](const Tensor&) { gathered[1] = units[2].is_unsharded(); });
      head(second).backward();
      EXPECT_FALSE(gathered[0]);
      EXPECT_FALSE(gathered[1]);
      EXPECT_TRUE(torch::equal(input.grad(), x.grad()));
      for (std::size_t i = 0; i < 2; ++i) expect_same_bits(units[i], plain_gradients(*plain[i]));
      for (const HSDPModule& unit : units) unit.zero_grad();
    }
  });
}

/// Gathered by hand, its parameters may have been used anywhere.
TEST(FrozenInputs, UsedByHandBeforeTheForward) {
  run_ranks(2, [] {
    Mlp mlp(6, 5), plain(6, 5);
    for (auto* m : {&mlp, &plain}) {
      seed_parameters(**m, 3);
      for (auto& parameter : (*m)->a->parameters()) parameter.set_requires_grad(false);
    }
    const HSDPModule unit = fully_shard(mlp, on_all(ShardLayout::kPerParameter, true));
    const Tensor x = wave({3, 6}, 1).requires_grad_();
    const auto run = [&](Mlp& m) {
      const Tensor before = torch::linear(x, m->a->weight);  // [3, 5]
      return m(torch::linear(torch::tanh(before), m->a->weight.t())).square().sum();
    };
    const Tensor want = (run(plain).backward(), x.grad().clone());
    for (int step = 0; step < 3; ++step) {
      x.mutable_grad().reset();
      unit.unshard();
      run(mlp).backward();
      EXPECT_TRUE(torch::equal(x.grad(), want));
      EXPECT_FALSE(unit.is_unsharded());
    }
  });
}

/// A frozen unit whose result some ranks do not use.
TEST(FrozenInputs, RanksThatDiverge) {
  for (const std::size_t dropped : {1U, 3U}) {
    const Kinds kinds = {kA, kF, kA, kF};
    const auto run = [&](AdaptedNet& net, bool drop) {
      net->run_block = [&, drop](AdaptedBlock& block, const Tensor& h) {
        const Tensor y = block(h);
        return drop && block.ptr() == net->blocks[dropped].ptr() ? h : y;
      };
      loss_of(net).backward();
      net->run_block = nullptr;
    };
    AdaptedNet plain = make_adapted(kinds);
    for (const bool drop : {false, true}) run(plain, drop);
    run_ranks(2, {.timeout = std::chrono::seconds(10)}, [&](int rank) {
      AdaptedNet net = make_adapted(kinds);
      const HSDPModule root = shard_adapted(net, on_all());
      for (int step = 0; step < 3; ++step) {
        run(net, rank == 1);
        EXPECT_LT(relative_difference(times(full_gradients(root), 2), plain_gradients(*plain)), 1e-5);
        root.zero_grad();
      }
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
