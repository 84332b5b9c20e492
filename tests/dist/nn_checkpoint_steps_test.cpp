// Checkpoints in training steps that are not the usual one: reuse, accumulation, frozen units, exceptions, gradients by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_gradients.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using torch::Tensor;

/// An embedding and two blocks, each a unit; `body` is what the forward does.
struct LabImpl : torch::nn::Module {
  using Body = std::function<Tensor(LabImpl&, const Tensor&)>;
  LabImpl() {
    table = register_module("table", nn::Embedding(torch::nn::EmbeddingOptions(11, 6)));
    p = register_module("p", Mlp(6, 5));
    q = register_module("q", Nest(6));
    weight = register_parameter("weight", torch::ones({6}));
  }
  Tensor forward(const Tensor& tokens) { return body(*this, tokens); }
  Body body;
  nn::Embedding table = nullptr;
  Mlp p = nullptr;
  Nest q = nullptr;
  Tensor weight;
};
HP_MODULE(Lab);

Lab make_lab(const LabImpl::Body& body) {
  Lab lab;
  seed_parameters(*lab, 8);
  lab->body = body;
  return lab;
}

HSDPModule shard_lab(const Lab& lab, const FullyShardOptions& options) {
  fully_shard(lab->table, options);
  fully_shard(lab->p, options);
  fully_shard(lab->q->inner, options);
  fully_shard(lab->q, options);
  return fully_shard(lab, options);
}

Tensor tokens_of(int rank) { return torch::arange(8).view({2, 4}).add(rank).remainder(11); }
Tensor lab_loss(Lab& lab, int rank) { return lab(tokens_of(rank)).square().mean(); }

const LabImpl::Body kPlain = [](LabImpl& m, const Tensor& tokens) { return m.q(m.p(m.table(tokens))) * m.weight; };
const LabImpl::Body kCheckpointed = [](LabImpl& m, const Tensor& tokens) {
  return checkpoint([&m](const Tensor& t) { return m.q(m.p(m.table(t))) * m.weight; }, tokens);
};

/// Sharded with `body` over W ranks against unsharded with `plain`, three steps.
void expect_like_plain(
    const LabImpl::Body& body, const LabImpl::Body& plain, const char* what,
    const std::function<void(Lab&)>& prepare = [](Lab&) {}) {
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&] {
      Lab lab = make_lab(body), reference = make_lab(plain);
      prepare(lab), prepare(reference);
      const HSDPModule root = shard_lab(lab, on_all(ShardLayout::kPerParameter, /*reshard=*/true));
      for (int step = 0; step < 3; ++step) {
        root.zero_grad(), reference->zero_grad();
        expect_same_gradients(lab, root, reference, lab_loss, what);
      }
    });
  }
}

/// B24: two forwards of a checkpointed parent with a unit inside, one backward.
TEST(CheckpointSteps, TwoForwardsBeforeOneBackward) {
  const LabImpl::Body twice = [](LabImpl& m, const Tensor& tokens) { return kPlain(m, tokens) * kPlain(m, tokens + 0); };
  expect_like_plain([](LabImpl& m, const Tensor& tokens) { return kCheckpointed(m, tokens) * kCheckpointed(m, tokens); }, twice,
                    "inside of one forward");
  run_ranks(2, [&](int rank) {
    Lab lab = make_lab(kCheckpointed), reference = make_lab(kPlain);
    const HSDPModule root = shard_lab(lab, on_all());
    expect_same_gradients(
        lab, root, reference, [](Lab& m, int r) { return lab_loss(m, r) * lab_loss(m, r + 1); }, "two forwards of the root");
    Tensor first = lab_loss(lab, rank), second = lab_loss(lab, rank + 1);
    root.zero_grad();
    first.backward(), second.backward();
    const Tensors got = full_gradients(root);
    root.zero_grad();
    (lab_loss(lab, rank) + lab_loss(lab, rank + 1)).backward();
    EXPECT_LT(relative_difference(got, full_gradients(root)), 1e-5) << "two forwards, two backwards";
  });
}

/// An embedding in the segment is gathered again for its second look-up, which its backward alone would not need.
TEST(CheckpointSteps, WholeForwardWithAnEmbedding) { expect_like_plain(kCheckpointed, kPlain, "embedding"); }

/// Handles of parameters as inputs: their storage has come and gone between the two runs.
TEST(CheckpointSteps, ParametersAsInputs) {
  const auto body = [](bool checkpointed) {
    return [checkpointed](LabImpl& m, const Tensor& tokens) {
      const auto fn = [](const Tensor& x, const Tensor& w, const Tensor& b) { return torch::tanh(x * w + b) * w; };
      const Tensor h = m.p(m.table(tokens));
      return m.q(checkpointed ? checkpoint(fn, h, m.weight, h.detach()) : fn(h, m.weight, h.detach())) * m.weight;
    };
  };
  expect_like_plain(body(true), body(false), "parameters as inputs");
}

TEST(CheckpointSteps, SharedWeights) {
  expect_like_plain(
      [](LabImpl& m, const Tensor& tokens) {
        Tensor h = m.table(tokens);
        for (int i = 0; i < 2; ++i) h = checkpoint(m.p, h);
        return checkpoint([&m](const Tensor& x) { return m.p(m.q(x)) * m.weight; }, m.p(h)) * m.weight;
      },
      [](LabImpl& m, const Tensor& tokens) { return m.p(m.q(m.p(m.p(m.p(m.table(tokens)))))) * m.weight * m.weight; }, "shared");
}

TEST(CheckpointSteps, PartOfTheResultsUsed) {
  const auto body = [](bool checkpointed) {
    return [checkpointed](LabImpl& m, const Tensor& tokens) {
      const auto both = [&m](const Tensor& x) { return std::vector<Tensor>{m.p(x), m.q(x)}; };
      const Tensor h = m.table(tokens);
      return (checkpointed ? checkpoint(both, h) : both(h))[0] * m.weight;
    };
  };
  run_ranks(2, [&] {
    Lab lab = make_lab(body(true)), reference = make_lab(body(false));
    const HSDPModule root = shard_lab(lab, on_all()), want = shard_lab(reference, on_all());
    for (int step = 0; step < 3; ++step) {
      root.zero_grad(), want.zero_grad();
      lab_loss(lab, get_rank()).backward(), lab_loss(reference, get_rank()).backward();
      EXPECT_EQ(relative_difference(full_gradients(root), full_gradients(want)), 0);
      EXPECT_FALSE(lab->q->p->named_parameters()["weight"].grad().defined());
    }
  });
}

TEST(CheckpointSteps, FrozenUnitsAndParameters) {
  expect_like_plain(kCheckpointed, kPlain, "frozen unit", [](Lab& lab) {
    for (auto& parameter : lab->p->parameters()) parameter.set_requires_grad(false);
  });
  expect_like_plain(kCheckpointed, kPlain, "frozen biases, frozen table", [](Lab& lab) {
    for (auto& entry : lab->named_parameters())
      if (entry.key().ends_with("bias") || entry.key().starts_with("table")) entry.value().set_requires_grad(false);
  });
}

TEST(CheckpointSteps, AccumulationWithoutSynchronisation) {
  run_ranks(2, [](int rank) {
    Tensors results[2];
    for (const bool checkpointed : {false, true}) {
      Lab lab = make_lab(checkpointed ? kCheckpointed : kPlain);
      const HSDPModule root = shard_lab(lab, on_all());
      for (int micro = 0; micro < 4; ++micro) {
        root.set_requires_gradient_sync(micro % 2 == 1);
        lab_loss(lab, rank + 2 * micro).backward();
      }
      results[checkpointed] = full_gradients(root);
    }
    EXPECT_EQ(relative_difference(results[1], results[0]), 0);
  });
}

/// What the user hangs on the model's handles runs once, with the whole gradient.
TEST(CheckpointSteps, HooksOnHandlesRunOnce) {
  run_ranks(2, [](int rank) {
    Lab lab = make_lab(kCheckpointed), reference = make_lab(kPlain);
    int calls = 0;
    Tensor seen, plain;
    lab->p->a->weight.register_hook([&](const Tensor& gradient) { ++calls, seen = gradient.clone(); });
    reference->p->a->weight.register_hook([&](const Tensor& gradient) { plain = gradient.clone(); });
    const HSDPModule root = shard_lab(lab, on_all());
    lab_loss(lab, rank).backward(), lab_loss(reference, rank).backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(torch::equal(seen, plain));
  });
}

TEST(CheckpointSteps, GradientsOfInputsByHand) {
  run_ranks(2, [](int rank) {
    for (const bool inside : {false, true}) {
      const auto body = [inside](bool checkpointed) {
        return [inside, checkpointed](LabImpl& m, const Tensor& x) {
          const auto run = [&](const Tensor& h) { return checkpointed ? checkpoint(m.p, h) : m.p(h); };
          if (!inside) return run(x);
          const Tensor position = x.detach().requires_grad_();  // a force inside of the forward
          return run(x + torch::autograd::grad({run(position).square().sum()}, {position})[0]);
        };
      };
      Lab lab = make_lab(body(true)), reference = make_lab(body(false));
      const HSDPModule root = shard_lab(lab, on_all(ShardLayout::kPerParameter, true));
      for (int step = 0; step < 3; ++step) {
        auto x = wave({2, 6}, rank + step).requires_grad_();
        const Tensor got = torch::autograd::grad({lab(x).square().sum()}, {x})[0];
        EXPECT_TRUE(torch::allclose(got, torch::autograd::grad({reference(x).square().sum()}, {x})[0]));
        EXPECT_FALSE(lab->p->a->named_parameters()["weight"].grad().defined());
      }
      root.zero_grad(), reference->zero_grad();
      expect_same_gradients(
          lab, root, reference,
          [](Lab& m, int r) {
            return m(wave({2, 6}, r)).square().sum();
          },
          "and goes on");
    }
  });
}

/// B56 with checkpoints: thrown in the forward, in the recomputation, and in the backward of the recomputation.
TEST(CheckpointSteps, ExceptionsThenTheNextStep) {
  enum class Where { kNowhere, kForward, kRecomputation, kNestedBackward };
  struct Planned : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (const Where where : {Where::kForward, Where::kRecomputation, Where::kNestedBackward}) {
    run_ranks(2, [&](int rank) {
      Where now = Where::kNowhere;
      int runs = 0;
      const auto body = [&](LabImpl& m, const Tensor& tokens) {
        const auto fn = [&](const Tensor& x) {
          ++runs;
          Tensor y = m.p(x);
          if (now == Where::kForward || (now == Where::kRecomputation && runs == 2)) throw Planned("planned");
          if (now == Where::kNestedBackward) y.register_hook([&](const Tensor&) { throw Planned("planned"); });
          return m.q(y);
        };
        return checkpoint(fn, m.table(tokens)) * m.weight;
      };
      Lab lab = make_lab(body), reference = make_lab(kPlain);
      const HSDPModule root = shard_lab(lab, on_all());
      for (int round = 0; round < 2; ++round) {
        now = where, runs = 0;
        EXPECT_THROW(lab_loss(lab, rank).backward(), Planned) << static_cast<int>(where);
        now = Where::kNowhere;
        for (int step = 0; step < 2; ++step) {
          root.zero_grad(), reference->zero_grad();
          expect_same_gradients(lab, root, reference, lab_loss, "after the exception");
        }
        for (const HSDPModule& unit : {HSDPModule::of(lab->p), HSDPModule::of(lab->q)}) EXPECT_FALSE(unit.is_unsharded());
      }
    });
  }
}

/// Two trees and a plain layer in one segment, and no unit around it that would have begun the backward before.
TEST(CheckpointSteps, TreesWithoutACommonRoot) {
  run_ranks(2, [](int rank) {
    const auto make = [] {
      struct Parts {
        Mlp a{6, 5}, b{6, 7};
        torch::nn::Linear head{6, 6};
      } parts;
      seed_parameters(*parts.a, 1), seed_parameters(*parts.b, 2), seed_parameters(*parts.head, 3);
      return parts;
    };
    const auto run = [](auto& parts, const Tensor& x) { return torch::tanh(parts.head(parts.b(parts.a(x)))); };
    auto sharded = make(), plain = make();
    const HSDPModule a = fully_shard(sharded.a, on_all()), b = fully_shard(sharded.b, on_all(ShardLayout::kRagged, true));
    a.set_reshard_after_forward(true);
    for (int step = 0; step < 3; ++step) {
      a.zero_grad(), b.zero_grad();
      for (auto* module : {&sharded.head, &plain.head}) (*module)->zero_grad();
      plain.a->zero_grad(), plain.b->zero_grad();
      const Tensor x = wave({2, 6}, rank + step);
      checkpoint([&](const Tensor& h) { return run(sharded, h); }, x).square().sum().backward();
      run(plain, x).square().sum().backward();
      EXPECT_TRUE(torch::equal(sharded.head->weight.grad(), plain.head->weight.grad())) << "not averaged: this rank's own";
      const Comm all = a.data_parallel_comm();
      for (const auto& [unit, reference] : {std::pair(a, plain.a), std::pair(b, plain.b)}) {
        EXPECT_FALSE(unit.is_unsharded());
        Tensors want = plain_gradients(*reference.ptr());
        for (auto& entry : want) all.all_reduce(entry.second, {.scale = 0.5}).wait();
        EXPECT_LT(relative_difference(full_gradients(unit), want), 1e-6);
      }
    }
  });
}

/// What a checkpoint in the model's code keeps alive goes with the graph, also when no backward runs.
TEST(CheckpointSteps, DroppedGraphsAndDyingModels) {
  run_ranks(2, [](int rank) {
    Tensor loss;
    std::weak_ptr<torch::nn::Module> watched;
    {
      Lab lab = make_lab(kPlain);
      lab->body = [](LabImpl& m, const Tensor& tokens) { return checkpoint(m.q, checkpoint(m.p, m.table(tokens))) * m.weight; };
      const HSDPModule root = shard_lab(lab, on_all());
      (void)lab_loss(lab, rank);
      loss = lab_loss(lab, rank);
      watched = lab->p.ptr();
    }
    EXPECT_FALSE(watched.expired()) << "the graph needs it";
    loss.reset();
    EXPECT_TRUE(watched.expired());
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
