// Attention and SwiGLU cut by heads, hidden features and sequence, against the plain mathematics on one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/parallel_layers.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using namespace parallel;  // NOLINT: the layers under test
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int kWorlds[] = {1, 2, 3, 4};
constexpr SequenceOrder kOrders[] = {SequenceOrder::kZigZag, SequenceOrder::kContiguous};

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + torch::cat({-halves[1], halves[0]}, -1) * sin;
}

/// softmax(q k^T / sqrt(D) + mask) v, written out.
Tensor plain_attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const int64_t group = q.size(1) / k.size(1), length = q.size(2);
  const Tensor keys = k.repeat_interleave(group, 1), values = v.repeat_interleave(group, 1);
  Tensor scores = torch::matmul(q, keys.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(3)));
  if (causal) scores = scores.masked_fill(torch::ones({length, length}, torch::kBool).triu(1), -INFINITY);
  return torch::matmul(torch::softmax(scores, -1), values);
}

TEST(ParallelContext, SplitsEveryPositionOnce) {
  for (const SequenceOrder order : kOrders) {
    for (const int ranks : kWorlds) {
      for (const int64_t length : {0, 1, 3, 8, 13, 24}) {
        const SequenceSplit split(length, ranks, order);
        std::vector<Tensor> parts;
        for (int r = 0; r < ranks; ++r) {
          parts.push_back(split.part(torch::arange(length), 0, r));
          EXPECT_TRUE(parts.back().equal(split.positions(r)));
          EXPECT_EQ(parts.back().numel(), split.lengths()[static_cast<std::size_t>(r)]);
        }
        EXPECT_TRUE(split.restore(torch::cat(parts), 0).equal(torch::arange(length))) << ranks << ' ' << length;
      }
    }
  }
  EXPECT_TRUE(SequenceSplit(12, 3).positions(0).equal(torch::tensor({0, 1, 10, 11}, torch::kLong)));
  EXPECT_TRUE(SequenceSplit(12, 3).positions(2).equal(torch::tensor({4, 5, 6, 7}, torch::kLong)));
}

TEST(ParallelContext, ZigZagGivesEveryRankTheSameWork) {
  const auto work = [](const SequenceSplit& split, int rank) { return (split.positions(rank) + 1).sum().item<int64_t>(); };
  const SequenceSplit zigzag(64, 4), contiguous(64, 4, SequenceOrder::kContiguous);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(work(zigzag, r), 64 * 65 / 2 / 4);
  EXPECT_GT(work(contiguous, 3), 6 * work(contiguous, 0));
}

TEST(ParallelContext, AttentionEqualsOneRank) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const Comm comm = current_world().comm();
      for (const SequenceOrder order : kOrders) {
        for (const bool causal : {true, false}) {
          for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
            for (const int64_t length : {16, 13, 3, 1}) {  // uneven; ranks without positions
              const auto leaf = [&](int64_t heads, int salt) {
                return wave({2, heads, length, 4}, salt).to(dtype).requires_grad_();
              };
              const Tensor q = leaf(4, 1), k = leaf(2, 2), v = leaf(2, 3);
              const auto exact = [](const Tensor& t) { return t.to(torch::kFloat); };
              const Tensor want = plain_attention(exact(q), exact(k), exact(v), causal);
              const Tensor cotangent = wave(want.sizes(), 5);
              want.backward(cotangent);
              const SequenceSplit split(length, world, order);
              const auto mine = [&](const Tensor& t) { return split.part(t, 2, rank); };
              const auto part = [&](const Tensor& t) { return mine(t.detach()).clone().requires_grad_(); };
              const Tensor ql = part(q), kl = part(k), vl = part(v);
              const Tensor got = context_parallel_attention(ql, kl, vl, comm, split, {.causal = causal});
              got.backward(mine(cotangent).to(dtype));
              const std::string what = concat("W=", world, " T=", length, " causal ", causal, ' ', dtype);
              const double tolerance = dtype == torch::kFloat ? 1e-5 : 4e-2;
              const auto same = [&](const char* name, const Tensor& a, const Tensor& b) {
                EXPECT_LT(relative_difference({{name, a.to(torch::kFloat)}}, {{name, b.to(torch::kFloat)}}), tolerance)
                    << what << ' ' << name;
              };
              same("y", got.detach(), mine(want.detach()));
              // Per rank, so that a rank with small gradients is held to its own scale loosely: compare with the whole scale.
              const auto whole_same = [&](const char* name, const Tensor& a, const Tensor& b) {
                const double scale = b.abs().max().item<double>() + 1e-6;
                if (a.numel() == 0) return;
                EXPECT_LT((exact(a) - mine(exact(b))).abs().max().item<double>() / scale, tolerance) << what << ' ' << name;
              };
              whole_same("dq", ql.grad(), q.grad());
              whole_same("dk", kl.grad(), k.grad());
              whole_same("dv", vl.grad(), v.grad());
            }
          }
        }
      }
    });
  }
}

TEST(ParallelContext, BytesAndErrors) {
  run_ranks(3, [](int rank) {
    const Comm comm = current_world().comm();
    const SequenceSplit split(14, 3);
    const int64_t own = split.lengths()[static_cast<std::size_t>(rank)],
                  position = 2 * 2 * (4 + 6) * 4;  // B H_kv (D + D_v) floats
    const Tensor q = wave({2, 4, own, 4}, 1).requires_grad_(), k = wave({2, 2, own, 4}, 2).requires_grad_();
    const Tensor v = wave({2, 2, own, 6}, 3).requires_grad_();
    comm.reset_counters();
    const Tensor y = context_parallel_attention(q, k, v, comm, split);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 4, own, 6}));
    EXPECT_EQ(comm.counters().bytes_sent, 2 * own * position);
    comm.reset_counters();
    y.sum().backward();
    EXPECT_EQ(comm.counters().bytes_sent, (14 - own) * position);

    const auto error = [&](const Tensor& a, const Tensor& b, const Tensor& c, const SequenceSplit& s) {
      return value_error([&] { return context_parallel_attention(a, b, c, comm, s); });
    };
    EXPECT_THAT(error(q, k, v, SequenceSplit(14, 2)), HasSubstr("split over 2 ranks, want the size of the group, 3"));
    EXPECT_THAT(error(q, k, v, SequenceSplit(60, 3)), HasSubstr("want this rank's part of the sequence, 20"));
    EXPECT_THAT(error(q[0], k, v, split), HasSubstr("q has 3 dimensions"));
    EXPECT_THAT(error(q.narrow(1, 0, 3), k, v, split), HasSubstr("query heads a multiple of key heads"));
    EXPECT_THAT(value_error([] { return SequenceSplit(-1, 2); }), HasSubstr("[SequenceSplit] length -1 over 2"));
    EXPECT_THAT(value_error([&] { return split.part(q, 2, 0); }), HasSubstr("want length 14 along dim 2"));
  });
}

struct AttentionCase {
  int world, tp;  ///< cp = world / tp
  int64_t heads, kv_heads;
  bool sequence;
  int64_t length;
  bool qk_norm = false;
};

/// The layer without meshes, on its formula.
Tensor layer_formula(ParallelAttentionImpl& layer, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const auto heads = [&](const Tensor& t) { return t.view({x.size(0), x.size(1), -1, 4}).transpose(1, 2); };
  const auto normal = [&](const Tensor& t, const ParallelRMSNorm& norm) {
    if (norm.is_empty()) return t;
    return t / (t.pow(2).mean(-1, true) + layer.options.norm_eps).sqrt() * norm->weight;
  };
  const Tensor q = rotated(normal(heads(layer.q_proj(x)), layer.q_norm), cos, sin);
  const Tensor k = rotated(normal(heads(layer.k_proj(x)), layer.k_norm), cos, sin);
  const Tensor mixed = plain_attention(q, k, heads(layer.v_proj(x)), true);
  return layer.o_proj(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
}

void expect_same_attention(const AttentionCase& c, torch::Dtype dtype, bool checkpointed) {
  run_ranks(c.world, [&](int) {
    const std::string what = concat("W=", c.world, " tp=", c.tp, " heads ", c.heads, '/', c.kv_heads, " seq=", c.sequence,
                                    " T=", c.length, ' ', dtype);
    constexpr int64_t kDim = 10;
    const int cp = c.world / c.tp;
    const DeviceMesh mesh = init_device_mesh("cpu", {cp, c.tp}, {"cp", "tp"});
    ParallelAttentionOptions options{
        .n_heads = c.heads, .n_kv_heads = c.kv_heads, .head_dim = 4, .bias = true, .qk_norm = c.qk_norm, .norm_eps = 1e-3};
    ParallelAttention whole(kDim, options);
    options.mesh = mesh["tp"];
    options.sequence_parallel = c.sequence;
    options.cp_mesh = mesh["cp"];
    ParallelAttention cut(kDim, options);
    seed_parameters(*whole, 3);
    load_whole(cut, parameters_of(*whole));
    if (dtype != torch::kFloat) {
      whole->to(dtype);
      cut->to(dtype);
    }
    const Tensor angle = torch::outer(torch::arange(c.length, torch::kFloat), torch::tensor({1.0, 0.1, 1.0, 0.1}));
    const Tensor cos = angle.cos().to(dtype), sin = angle.sin().to(dtype);
    const Tensor values = wave({2, c.length, kDim}, 1).to(dtype), x = values.clone().requires_grad_();
    const Tensor want = layer_formula(*whole, x, cos, sin);
    const Tensor cotangent = wave(want.sizes(), 2).to(dtype);
    want.backward(cotangent);

    const SequenceSplit split(c.length, cp);
    const int cp_rank = mesh.get_local_rank("cp"), tp_rank = mesh.get_local_rank("tp");
    const int64_t shared = split.lengths()[static_cast<std::size_t>(cp_rank)];
    const auto mine = [&](const Tensor& t) {
      const Tensor part = split.part(t, 1, cp_rank);
      return c.sequence ? part.split_with_sizes(ceil_chunks(shared, c.tp), 1)[static_cast<std::size_t>(tp_rank)] : part;
    };
    const Tensor local = mine(values).clone().requires_grad_();
    const AttentionArguments arguments{split.part(cos, 0, cp_rank), split.part(sin, 0, cp_rank), c.sequence ? shared : 0,
                                       c.length};
    const Tensor got = checkpointed ? checkpoint(cut, local, arguments) : cut(local, arguments);
    got.backward(mine(cotangent).contiguous());
    sum_partial_gradients(cut);
    for (auto& item : cut->named_parameters()) mesh.get_group("cp").all_reduce(item.value().grad()).wait();
    const double tolerance = dtype == torch::kFloat ? 2e-5 : 5e-2;
    const auto close = [&](const Tensor& a, const Tensor& b, const char* name) {
      const double scale = b.detach().abs().max().item<double>() + 1e-6;
      ASSERT_EQ(a.sizes(), mine(b).sizes()) << what << ' ' << name;
      if (a.numel() == 0) return;
      EXPECT_LT((a - mine(b)).abs().max().item<double>() / scale, tolerance) << what << ' ' << name;
    };
    close(got.detach(), want.detach(), "y");
    close(local.grad(), x.grad(), "dx");
    expect_same_whole_gradients(cut, plain_gradients(*whole), tolerance, what);
  });
}

TEST(ParallelAttention, EqualsOneRank) {
  const AttentionCase cases[] = {
      {1, 1, 4, 4, false, 5},       {2, 2, 4, 4, false, 5},       {2, 2, 4, 2, true, 5},
      {4, 4, 4, 2, false, 5},  // fewer key heads than ranks
      {4, 4, 8, 2, true, 5},        {2, 2, 3, 3, false, 5},       {2, 2, 3, 1, true, 5},
      {3, 3, 4, 2, false, 5},                                                             // uneven heads
      {4, 4, 6, 3, true, 6},        {4, 4, 2, 1, false, 4},       {4, 4, 3, 3, true, 4},  // ranks without heads
      {2, 1, 4, 2, false, 9},       {4, 1, 2, 2, false, 3},       {4, 2, 4, 2, false, 9},
      {4, 2, 3, 1, true, 10},  // with context parallelism
      {1, 1, 4, 2, false, 5, true}, {2, 2, 4, 2, true, 5, true},  {4, 4, 2, 1, false, 4, true},
      {4, 4, 8, 2, true, 5, true},  {4, 2, 3, 1, true, 10, true},  // queries and keys are normalized
  };
  for (const AttentionCase& c : cases) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) expect_same_attention(c, dtype, false);
    expect_same_attention(c, torch::kFloat, true);
  }
}

TEST(ParallelAttention, CutsAreWhatTheHeadsAllow) {
  run_ranks(4, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {4}, {"tp"});
    const auto cut = [&](int64_t heads, int64_t kv_heads, const char* name) {
      ParallelAttention layer(8, ParallelAttentionOptions{.n_heads = heads, .n_kv_heads = kv_heads, .head_dim = 2, .mesh = mesh});
      return parameter_cuts(layer).at(name).axes.at(0);
    };
    EXPECT_EQ(cut(8, 4, "q_proj.weight").placement, Shard(0));
    EXPECT_EQ(cut(8, 4, "k_proj.weight").placement, Shard(0));
    EXPECT_EQ(cut(8, 4, "o_proj.weight").placement, Shard(1));
    EXPECT_EQ(cut(8, 2, "q_proj.weight").placement, Shard(0));
    EXPECT_EQ(cut(8, 2, "v_proj.weight").placement, Replicate());
    EXPECT_TRUE(cut(8, 2, "v_proj.weight").partial_gradient);
    EXPECT_EQ(cut(6, 6, "o_proj.weight").placement, Replicate());
    EXPECT_TRUE(cut(6, 6, "o_proj.weight").partial_gradient);
  });
}

TEST(ParallelAttention, SwiGLUEqualsOneRank) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world}, {"tp"});
      for (const int64_t hidden : {8, 7, 2}) {
        for (const bool bias : {false, true}) {
          for (const bool sequence : {false, true}) {
            ParallelSwiGLU whole(6, hidden, ParallelSwiGLUOptions{.bias = bias});
            ParallelSwiGLU cut(6, hidden, ParallelSwiGLUOptions{mesh, bias, sequence});
            seed_parameters(*whole, 3);
            load_whole(cut, parameters_of(*whole));
            const Tensor values = wave({2, 5, 6}, 1), x = values.clone().requires_grad_(), cotangent = wave({2, 5, 6}, 2);
            const Tensor want = whole->down_proj(torch::silu(whole->gate_proj(x)) * whole->up_proj(x));
            want.backward(cotangent);
            const auto mine = [&](const Tensor& t) {
              return sequence ? t.split_with_sizes(ceil_chunks(5, world), 1)[static_cast<std::size_t>(rank)] : t;
            };
            const Tensor local = mine(values).clone().requires_grad_();
            mesh.get_group().reset_counters();
            const Tensor got = cut(local, sequence ? 5 : 0);
            // One boundary in, one out, however many projections read x.
            const int64_t row = 2 * 6 * 4, own = sequence ? local.size(1) : 5;
            const int64_t in = sequence ? (world - 1) * own * row : 0, out = sequence ? (5 - own) * row : (world - 1) * 5 * row;
            EXPECT_EQ(mesh.get_group().counters().bytes_sent, in + out);
            got.backward(mine(cotangent).contiguous());
            sum_partial_gradients(cut);
            const std::string what = concat("W=", world, " hidden ", hidden, ' ', bias, sequence);
            EXPECT_TRUE(got.allclose(mine(want), 1e-5, 1e-5)) << what;
            EXPECT_TRUE(local.grad().allclose(mine(x.grad()), 1e-5, 1e-5)) << what;
            expect_same_whole_gradients(cut, plain_gradients(*whole), 1e-5, what);
          }
        }
      }
    });
  }
}

TEST(ParallelAttention, Errors) {
  const auto error = [](const ParallelAttentionOptions& options) {
    return value_error([&] { return ParallelAttention(8, options); });
  };
  EXPECT_THAT(error({.n_heads = 4, .n_kv_heads = 3}), HasSubstr("[ParallelAttention] 4 heads and 3 key heads"));
  EXPECT_THAT(error({.n_heads = 3}), HasSubstr("dim 8 over 3 heads, want a multiple, or head_dim"));
  EXPECT_THAT(error({.n_heads = 2, .sequence_parallel = true, .sequence_dim = 0}), HasSubstr("sequence_dim 0, want 1"));
}

TEST(ParallelRandom, StreamsDifferAlongTheirAxesOnly) {
  std::map<std::pair<std::string, int>, Tensor> drawn;
  std::mutex mutex;
  run_ranks(4, [&](int rank) {
    RandomStates random(5, init_device_mesh("cpu", {2, 2}, {"dp", "tp"}));
    const auto draw = [&](const std::string& name, const std::vector<std::string>& axes) {
      Tensor mask;
      {
        const auto scope = random.fork(axes);
        mask = torch::dropout(torch::ones({64}), 0.5, true);
      }
      const std::lock_guard lock(mutex);
      drawn[{name, rank}] = mask;
    };
    draw("none", {});
    draw("dp", {"dp"});
    draw("both", {"tp", "dp"});
    draw("dp again", {"dp"});
    EXPECT_EQ(random.state().size(), 3U);
  });
  const auto same = [&](const char* name, int a, int b) { return drawn.at({name, a}).equal(drawn.at({name, b})); };
  for (int r = 1; r < 4; ++r) EXPECT_TRUE(same("none", 0, r));
  EXPECT_TRUE(same("dp", 0, 1) && same("dp", 2, 3));
  EXPECT_FALSE(same("dp", 0, 2));
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < a; ++b) EXPECT_FALSE(same("both", a, b));
    EXPECT_FALSE(drawn.at({"dp", a}).equal(drawn.at({"dp again", a})));
  }
}

TEST(ParallelRandom, StateAndErrors) {
  RandomStates random(5, init_device_mesh("cpu", {1}, {"tp"}));
  const auto draw = [&] {
    const auto scope = random.fork({"tp"});
    return torch::rand({8});
  };
  (void)draw();
  const auto state = random.state();
  const Tensor first = draw();
  random.set_state(state);
  EXPECT_TRUE(draw().equal(first));
  // An inner scope counts; the outer one goes on where it was. Generators that are named are left alone.
  random.set_state(state);
  {
    const auto outer = random.fork({"tp"});
    {
      const auto inner = random.fork({});
      EXPECT_FALSE(torch::rand({8}).equal(first));
    }
    EXPECT_TRUE(torch::rand({8}).equal(first));
    auto own = at::detail::createCPUGenerator(1), again = at::detail::createCPUGenerator(1);
    EXPECT_TRUE(at::rand({8}, own).equal(at::rand({8}, again)));
  }
  EXPECT_THAT(value_error([&] { return random.fork({"pp"}); }), HasSubstr("pp"));
  EXPECT_THAT(value_error([&] { return random.fork({"tp", "tp"}); }), HasSubstr("[RandomStates] an axis is named twice"));
  EXPECT_THAT(value_error([] { return RandomStates(1, {}); }), HasSubstr("[RandomStates] no mesh"));
}

TEST(ParallelRandom, RecomputationDrawsTheSameNumbers) {
  RandomStates random(5, init_device_mesh("cpu", {1}, {"tp"}));
  (void)random.generator({"tp"});
  const auto layer = [&](const Tensor& x) {
    const auto scope = random.fork({"tp"});
    return torch::dropout(x * x, 0.5, true);
  };
  const Tensor x = wave({64}, 1).requires_grad_();
  const Tensor y = checkpoint({.preserve_rng_state = false, .generators = random.generators()}, layer, x);
  y.sum().backward();
  EXPECT_TRUE(x.grad().allclose(4 * x.detach() * y.detach().ne(0)));
}

}  // namespace
}  // namespace hyper_parallel::testing
