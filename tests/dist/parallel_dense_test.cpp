// Layers of tensor and sequence parallelism against the same layers on one rank: outputs, input gradients, weight gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/parallel_layers.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

namespace F = torch::nn::functional;
using namespace parallel;  // NOLINT: the layers under test
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int kWorlds[] = {1, 2, 3, 4};

DeviceMesh tp_mesh() { return init_device_mesh("cpu", {get_world_size()}, {"tp"}); }

/// Two linear layers with something element by element in between, around an embedding, norms and a loss: a small decoder without
/// attention. Without mesh the plain model.
struct StackImpl : torch::nn::Module {
  static constexpr int64_t kVocab = 11, kDim = 6, kHidden = 10;
  StackImpl(const DeviceMesh& on, bool cut_sequence) : mesh(on), sequence(cut_sequence) {
    table = register_module("table", VocabParallelEmbedding(kVocab, kDim, ParallelEmbeddingOptions{mesh, sequence}));
    norm = register_module("norm", ParallelRMSNorm(kDim, ParallelNormOptions{.mesh = mesh, .sequence_parallel = sequence}));
    last = register_module("last", ParallelLayerNorm(kDim, ParallelNormOptions{.mesh = mesh, .sequence_parallel = sequence}));
    up = register_module("up", ColumnParallelLinear(kDim, kHidden, linear()));
    down = register_module("down", RowParallelLinear(kHidden, kDim, linear()));
    auto head_options = linear();
    head_options.bias = false;
    head = register_module("head", ColumnParallelLinear(kDim, kVocab, head_options));
  }
  [[nodiscard]] ParallelLinearOptions linear() const { return {.mesh = mesh, .sequence_parallel = sequence}; }
  /// \return the loss
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    const int64_t length = sequence && mesh.defined() ? tokens.size(1) : 0;
    Tensor x = table(tokens);
    x = x + down(torch::silu(up(norm(x), length)));
    return parallel_cross_entropy(head(last(x), length), targets, {.mesh = mesh, .vocab_size = kVocab});
  }
  DeviceMesh mesh;
  bool sequence;
  VocabParallelEmbedding table{nullptr};
  ParallelRMSNorm norm{nullptr};
  ParallelLayerNorm last{nullptr};
  ColumnParallelLinear up{nullptr}, head{nullptr};
  RowParallelLinear down{nullptr};
};
HP_MODULE(Stack);

TEST(ParallelDense, StackEqualsOneRank) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const int world : kWorlds) {
      for (const bool sequence : {false, true}) {
        run_ranks(world, [&] {
          const std::string what = concat("W=", world, " sequence ", sequence, ' ', dtype);
          Stack whole(DeviceMesh(), sequence), cut(tp_mesh(), sequence);
          seed_parameters(*whole, 3);
          load_whole(cut, parameters_of(*whole));
          whole->to(dtype);
          cut->to(dtype);
          auto generator = at::detail::createCPUGenerator(5);
          const Tensor tokens = torch::randint(0, StackImpl::kVocab, {2, 5}, generator, torch::kLong);
          const Tensor targets = torch::randint(0, StackImpl::kVocab, {2, 5}, generator, torch::kLong);
          const Tensor want = whole(tokens, targets), got = cut(tokens, targets);
          const double tolerance = dtype == torch::kFloat ? 2e-6 : 3e-2;
          EXPECT_NEAR(got.item<double>(), want.item<double>(), tolerance * 4) << what;
          want.backward();
          got.backward();
          sum_partial_gradients(cut);
          expect_same_whole_gradients(cut, plain_gradients(*whole), tolerance, what);
        });
      }
    }
  }
}

/// y and the gradients of x and of the parameters for one layer, with a loss that weighs every output differently.
template <class Layer, class Whole>
void expect_same_layer(Layer& layer, Whole& whole, const Tensor& x, const std::function<Tensor(const Tensor&)>& part_in,
                       const std::function<Tensor(const Tensor&)>& part_out, const std::function<Tensor(const Tensor&)>& run,
                       const std::string& what) {
  const Tensor reference = x.clone().requires_grad_();
  const Tensor want = whole(reference);
  const Tensor cotangent = wave(want.sizes(), 9);
  want.backward(cotangent);
  const Tensor mine = part_in(x).clone().requires_grad_();
  const Tensor got = run(mine);
  ASSERT_EQ(got.sizes(), part_out(want).sizes()) << what;
  EXPECT_TRUE(got.allclose(part_out(want), 1e-5, 1e-5)) << what;
  got.backward(part_out(cotangent).contiguous());
  EXPECT_TRUE(mine.grad().allclose(part_in(reference.grad()), 1e-5, 1e-5)) << what;
  sum_partial_gradients(layer);
  expect_same_whole_gradients(layer, plain_gradients(*whole), 1e-5, what);
}

TEST(ParallelDense, LinearsInAllTheirForms) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = tp_mesh();
      const auto same = [](const Tensor& t) { return t; };
      for (const auto& [in, out] : {std::pair<int64_t, int64_t>{6, 8}, {5, 7}, {3, 2}, {1, 1}}) {
        for (const bool bias : {false, true}) {
          torch::nn::Linear whole(torch::nn::LinearOptions(in, out).bias(bias));
          seed_parameters(*whole, 2);
          const Tensor x = wave({2, 5, in}, 1);
          const std::string what = concat("W=", world, ' ', in, "->", out, " bias ", bias);
          const auto features = [&](int64_t n) {
            return [=](const Tensor& t) { return t.split_with_sizes(ceil_chunks(n, world), -1)[static_cast<std::size_t>(rank)]; };
          };
          const auto rows = [&](const Tensor& t) {
            return t.split_with_sizes(ceil_chunks(5, world), 1)[static_cast<std::size_t>(rank)];
          };
          for (const bool gather : {false, true}) {
            for (const bool sequence : {false, true}) {
              ColumnParallelLinear layer(
                  in, out,
                  ParallelLinearOptions{.mesh = mesh, .bias = bias, .gather_output = gather, .sequence_parallel = sequence});
              load_whole(layer, parameters_of(*whole));
              whole->zero_grad();
              expect_same_layer(
                  layer, whole, x, sequence ? std::function<Tensor(const Tensor&)>(rows) : same,
                  gather ? std::function<Tensor(const Tensor&)>(same) : features(out),
                  [&](const Tensor& t) { return layer(t, sequence ? 5 : 0); }, concat("column ", what, gather, sequence));
            }
          }
          for (const bool parallel : {false, true}) {
            for (const bool sequence : {false, true}) {
              RowParallelLinear layer(
                  in, out,
                  ParallelLinearOptions{
                      .mesh = mesh, .bias = bias, .input_is_parallel = parallel, .sequence_parallel = sequence});
              load_whole(layer, parameters_of(*whole));
              whole->zero_grad();
              expect_same_layer(
                  layer, whole, x, parallel ? features(in) : std::function<Tensor(const Tensor&)>(same),
                  sequence ? std::function<Tensor(const Tensor&)>(rows) : same, [&](const Tensor& t) { return layer(t); },
                  concat("row ", what, parallel, sequence));
            }
          }
        }
      }
    });
  }
}

TEST(ParallelDense, UnevenRangesKeepTheWholeWeight) {
  for (const int world : {2, 3, 4}) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = tp_mesh();
      const auto ranges = balanced_ranges(5, 2, world);  // five units of two features
      const FeatureRange mine = ranges[static_cast<std::size_t>(rank)];
      torch::nn::Linear whole(10, 10);
      seed_parameters(*whole, 2);
      const auto same = [](const Tensor& t) { return t; };
      const auto own = [&](const Tensor& t) { return t.narrow(-1, mine.begin, mine.size()); };
      ColumnParallelLinear column(10, 10, ParallelLinearOptions{.mesh = mesh, .ranges = ranges});
      RowParallelLinear row(10, 10, ParallelLinearOptions{.mesh = mesh, .ranges = ranges});
      const bool even = world == 3;  // 4, 4, 2 are the ceil chunks as well
      EXPECT_EQ(column->own_cuts().at("weight").axes[0].partial_gradient, !even);
      EXPECT_EQ(column->weight.size(0), even ? mine.size() : 10);
      load_whole(column, parameters_of(*whole));
      expect_same_layer(
          column, whole, wave({2, 5, 10}, 1), same, own, [&](const Tensor& t) { return column(t); }, "column");
      whole->zero_grad();
      load_whole(row, parameters_of(*whole));
      expect_same_layer(
          row, whole, wave({2, 5, 10}, 1), own, same, [&](const Tensor& t) { return row(t); }, "row");
    });
  }
}

TEST(ParallelDense, ValuesDependOnTheSeedOnly) {
  // Drawn from the process's generator: one rank after the other, as processes would.
  const auto draw = [](const DeviceMesh& mesh) {
    torch::manual_seed(7);
    return Stack(mesh, false);
  };
  const Stack plain = draw({});
  torch::manual_seed(7);
  const torch::nn::Embedding table(StackImpl::kVocab, StackImpl::kDim);
  const torch::nn::Linear up(StackImpl::kDim, StackImpl::kHidden), down(StackImpl::kHidden, StackImpl::kDim);
  EXPECT_TRUE(plain->table->weight.equal(table->weight));
  EXPECT_TRUE(plain->up->weight.equal(up->weight) && plain->up->bias.equal(up->bias));
  EXPECT_TRUE(plain->down->weight.equal(down->weight) && plain->down->bias.equal(down->bias));
  for (const int world : {2, 3, 4}) {
    std::mutex one_at_a_time;
    run_ranks(world, [&] {
      const DeviceMesh mesh = tp_mesh();
      (void)mesh.get_group();
      std::unique_lock lock(one_at_a_time);
      const Stack cut = draw(mesh);
      lock.unlock();
      const auto want = parameters_of(*plain);
      for (const auto& [name, value] : whole_parameters(cut)) EXPECT_TRUE(value.equal(want.at(name))) << name;
    });
  }
}

TEST(ParallelDense, ResetParametersOfUnitsGivesTheSameModelForEveryWorld) {
  std::map<int, std::map<std::string, Tensor>> values;
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {1, world}, {"dp", "tp"});
      Stack model{nullptr};
      {
        const MetaInit no_memory;
        model = Stack(mesh["tp"], false);
      }
      const auto cuts = parameter_cuts(model);
      HSDPModule root = fully_shard(model, {.mesh = mesh["dp"]});
      root.reset_parameters(3);
      std::map<std::string, Tensor> whole;
      for (auto& [name, parameter] : root.named_dtensors()) whole[name] = full_tensor(cuts.at(name), parameter.full_tensor());
      if (rank == 0) values[world] = whole;
    });
  }
  for (const auto& [name, value] : values.at(1)) {
    EXPECT_TRUE(value.equal(values.at(2).at(name))) << name;
    EXPECT_TRUE(value.equal(values.at(4).at(name))) << name;
  }
}

TEST(ParallelDense, TheLossIsThatOfWholeLogits) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      for (const int64_t vocab : {11, 3, 1}) {    // 3 and 1: ranks without any column
        for (const double size : {1.0, 300.0}) {  // exp(300) overflows
          for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
            for (const auto reduction : {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone}) {
              const Tensor whole = (wave({2, 7, vocab}, 3) * size).to(dtype).requires_grad_();
              Tensor targets = torch::arange(14, torch::kLong).remainder(vocab).view({2, 7});
              targets[0][3] = -100;
              targets[1][6] = -100;
              const auto exact = dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
              const auto torchs = reduction == LossReduction::kMean  ? F::CrossEntropyFuncOptions().reduction(torch::kMean)
                                  : reduction == LossReduction::kSum ? F::CrossEntropyFuncOptions().reduction(torch::kSum)
                                                                     : F::CrossEntropyFuncOptions().reduction(torch::kNone);
              const Tensor want = F::cross_entropy(whole.to(exact).view({-1, vocab}), targets.view({-1}), torchs);
              const auto mine = [&](const Tensor& t) {
                return t.split_with_sizes(ceil_chunks(vocab, world), -1)[static_cast<std::size_t>(rank)];
              };
              const Tensor local = mine(whole.detach()).contiguous().requires_grad_();
              const Tensor got =
                  parallel_cross_entropy(local, targets, {.mesh = tp_mesh(), .vocab_size = vocab, .reduction = reduction});
              const std::string what = concat("W=", world, " V=", vocab, " x", size, ' ', dtype);
              EXPECT_EQ(got.scalar_type(), exact) << what;
              EXPECT_TRUE(got.flatten().allclose(want.flatten(), 1e-5, 1e-5)) << what << got << want;
              const Tensor cotangent = wave(want.sizes(), 4).to(exact);
              want.backward(cotangent);
              got.backward(cotangent.view(got.sizes()));
              const double tolerance = dtype == torch::kBFloat16 ? 1e-2 : 1e-5;
              EXPECT_TRUE(local.grad().allclose(mine(whole.grad()), tolerance, tolerance * 1e-1)) << what;
            }
          }
        }
      }
    });
  }
}

TEST(ParallelDense, LossOfNothing) {
  run_ranks(2, [] {
    const DeviceMesh mesh = tp_mesh();
    const Tensor logits = wave({3, 2}, 1).requires_grad_();
    const Tensor ignored = torch::full({3}, -100, torch::kLong);
    EXPECT_TRUE(parallel_cross_entropy(logits, ignored, {.mesh = mesh, .vocab_size = 4}).isnan().item<bool>());
    const Tensor sum = parallel_cross_entropy(logits, ignored, {.mesh = mesh, .vocab_size = 4, .reduction = LossReduction::kSum});
    EXPECT_EQ(sum.item<float>(), 0);
    sum.backward();
    EXPECT_TRUE(logits.grad().equal(torch::zeros({3, 2})));
    // An ignored row may hold anything.
    Tensor broken = wave({3, 2}, 1);
    broken[1].fill_(NAN);
    broken.requires_grad_();
    Tensor targets = torch::tensor({0, -100, 3}, torch::kLong);
    parallel_cross_entropy(broken, targets, {.mesh = mesh, .vocab_size = 4}).backward();
    EXPECT_TRUE(broken.grad().isfinite().all().item<bool>());
    const Tensor none = parallel_cross_entropy(wave({0, 2}, 1), torch::empty({0}, torch::kLong),
                                               {.mesh = mesh, .vocab_size = 4, .reduction = LossReduction::kSum});
    EXPECT_EQ(none.item<float>(), 0);
  });
}

TEST(ParallelDense, TheLossMakesNoCopyOfTheLogits) {
  constexpr int64_t kTokens = 512, kVocab = 8192;
  const CountCpuAllocations count;
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = tp_mesh();
    const Comm comm = mesh.get_group();
    Tensor logits = torch::zeros({kTokens, kVocab / 2}, torch::kBFloat16).requires_grad_();
    const Tensor targets = torch::arange(kTokens, torch::kLong);
    parallel_cross_entropy(logits.narrow(0, 0, 4), targets.narrow(0, 0, 4), {.mesh = mesh, .vocab_size = kVocab}).backward();
    logits.mutable_grad() = Tensor();
    const int64_t bytes_before = comm.counters().bytes_sent;
    comm.barrier();
    if (rank == 0) reset_allocation_counts();
    comm.barrier();
    const int64_t before = allocation_counts().live;
    const Tensor loss = parallel_cross_entropy(logits, targets, {.mesh = mesh, .vocab_size = kVocab});
    comm.barrier();
    // Both ranks: blocks in fp32, a few numbers for each token; the fp32 copy of one rank's logits would take 8 MiB.
    EXPECT_LT(allocation_counts().peak - before, 2 * (2 << 20));
    // Three fp32 numbers for each token to the one peer; barriers send one byte.
    EXPECT_EQ(comm.counters().bytes_sent - bytes_before, 3 * 4 * kTokens + 3);
    comm.barrier();
    if (rank == 0) reset_allocation_counts();
    comm.barrier();
    loss.backward();
    comm.barrier();
    const int64_t gradients = 2 * kTokens * (kVocab / 2) * 2;  // of both ranks, in bf16
    EXPECT_LT(allocation_counts().peak - before, gradients + 2 * (2 << 20));
    EXPECT_NEAR(loss.item<double>(), std::log(kVocab), 1e-4);
  });
}

TEST(ParallelDense, EmbeddingIsExact) {
  for (const int world : kWorlds) {
    run_ranks(world, [&](int rank) {
      for (const int64_t vocab : {11, 2, 1}) {
        for (const bool sequence : {false, true}) {
          const DeviceMesh mesh = tp_mesh();
          torch::nn::Embedding whole(vocab, 3);
          seed_parameters(*whole, 4);
          VocabParallelEmbedding cut(vocab, 3, ParallelEmbeddingOptions{mesh, sequence});
          load_whole(cut, parameters_of(*whole));
          const Tensor tokens = torch::arange(10, torch::kLong).remainder(vocab).view({2, 5});
          const auto mine = [&](const Tensor& t) {
            return sequence ? t.split_with_sizes(ceil_chunks(5, world), 1)[static_cast<std::size_t>(rank)] : t;
          };
          const Tensor want = whole(tokens), got = cut(tokens);
          EXPECT_TRUE(got.equal(mine(want)));
          const Tensor cotangent = wave(want.sizes(), 2);
          want.backward(cotangent);
          got.backward(mine(cotangent).contiguous());
          expect_same_whole_gradients(cut, plain_gradients(*whole), 1e-6, concat("W=", world, " V=", vocab, sequence));
        }
      }
    });
  }
}

TEST(ParallelDense, UnderCheckpointAndInUnits) {
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    Stack whole(DeviceMesh(), false), cut(mesh["tp"], true);
    seed_parameters(*whole, 3);
    load_whole(cut, parameters_of(*whole));
    auto generator = at::detail::createCPUGenerator(5);
    const Tensor tokens = torch::randint(0, StackImpl::kVocab, {2, 5}, generator, torch::kLong);
    const Tensor targets = torch::randint(0, StackImpl::kVocab, {2, 5}, generator, torch::kLong);
    whole(tokens, targets).backward();
    const auto cuts = parameter_cuts(cut);
    // A unit over the data-parallel ranks, which hold one sample each; the loss is the mean over them.
    const HSDPModule root = fully_shard(cut, {.mesh = mesh["dp"]});
    const int64_t sample = rank / 2;
    checkpoint(cut, tokens.narrow(0, sample, 1), targets.narrow(0, sample, 1)).backward();
    for (auto& [name, gradient] : root.named_grad_dtensors()) {
      Tensor local = gradient.full_tensor();
      if (!cuts.at(name).axes.empty() && cuts.at(name).axes[0].partial_gradient) {
        local = all_reduce_identity(local, mesh.get_group("tp"));
      }
      const Tensor got = full_tensor(cuts.at(name), local);
      EXPECT_LT(relative_difference({{name, got}}, {{name, plain_gradients(*whole).at(name)}}), 1e-5) << name;
    }
  });
}

TEST(ParallelDense, Errors) {
  run_ranks(2, [] {
    const DeviceMesh mesh = tp_mesh(), two = init_device_mesh("cpu", {1, 2}, {"dp", "tp"});
    EXPECT_THAT(value_error([&] { return ColumnParallelLinear(2, 2, ParallelLinearOptions{.mesh = two}); }),
                HasSubstr("has 2 axes, want one: pass mesh[\"tp\"]"));
    EXPECT_THAT(value_error([&] { return RowParallelLinear(-1, 2, ParallelLinearOptions{.mesh = mesh}); }),
                HasSubstr("[RowParallelLinear] -1 input and 2 output features"));
    EXPECT_THAT(value_error([&] {
                  return ColumnParallelLinear(2, 2, ParallelLinearOptions{.mesh = mesh, .ranges = {{0, 2}}});
                }),
                HasSubstr("1 ranges, want one for each of 2 ranks"));
    EXPECT_THAT(value_error([&] {
                  return ColumnParallelLinear(2, 2, ParallelLinearOptions{.mesh = mesh, .ranges = {{0, 2}, {1, 3}}});
                }),
                HasSubstr("range [1, 3), want it within 2 features"));
    EXPECT_THAT(value_error([&] {
                  return ColumnParallelLinear(
                      3, 3, ParallelLinearOptions{.mesh = mesh, .gather_output = true, .ranges = {{0, 2}, {1, 3}}});
                }),
                HasSubstr("gather_output with ranges that overlap"));
    EXPECT_THAT(value_error([&] {
                  return RowParallelLinear(3, 3, ParallelLinearOptions{.mesh = mesh, .ranges = {{0, 1}, {2, 3}}});
                }),
                HasSubstr("ranges overlap or leave gaps"));
    VocabParallelEmbedding table(4, 2, ParallelEmbeddingOptions{mesh});
    EXPECT_THAT(value_error([&] {
                  return table(torch::tensor({1, 4}, torch::kLong));
                }),
                HasSubstr("tokens from 1 to 4, want 0 to 3"));
    EXPECT_THAT(value_error([&] { return VocabParallelEmbedding(-1, 2); }), HasSubstr("-1 embeddings of 2 elements"));
    const Tensor logits = wave({3, 2}, 0), targets = torch::zeros({3}, torch::kLong);
    const auto loss = [&](const Tensor& l, const Tensor& t, int64_t vocab) {
      return value_error([&] { return parallel_cross_entropy(l, t, {.mesh = mesh, .vocab_size = vocab}); });
    };
    EXPECT_THAT(loss(logits, targets, 0), HasSubstr("vocab_size 0"));
    EXPECT_THAT(loss(logits, targets, 6), HasSubstr("logits have 2 columns, want 3"));
    EXPECT_THAT(loss(logits, targets.view({1, 3}), 4), HasSubstr("of shape [1, 3], want int64 of shape [3]"));
    EXPECT_THAT(loss(logits, targets + 4, 4), HasSubstr("a target is out of range, want 0 to 3 or ignore_index -100"));
    EXPECT_THAT(loss(targets, targets, 4), HasSubstr("want floats"));
    EXPECT_THAT(value_error([&] { load_whole(table, {}); }), HasSubstr("no value for parameter weight"));
    EXPECT_THAT(value_error([&] {
                  load_whole(table, {{"weight", wave({2, 2}, 0)}});
                }),
                HasSubstr("has shape [2, 2], want [4, 2]"));
    EXPECT_THAT(value_error([&] {
                  return full_tensor(table->own_cuts().at("weight"), wave({4, 2}, 0));
                }),
                HasSubstr("want this rank's part, [2, 2]"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
