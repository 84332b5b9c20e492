// Averages of the parameters: the formula on whole tensors, swapped in and out, through files and loads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;

Tensors full_averages(const Ema& ema) {
  Tensors result;
  for (auto& [name, average] : ema.named_dtensors()) result[name] = average.full_tensor();
  return result;
}

Tensors clone(const Tensors& tensors) {
  Tensors result;
  for (auto& [name, tensor] : tensors) result[name] = tensor.clone();
  return result;
}

TEST(Ema, EqualsTheFormulaWithoutAnyGather) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{1}, {2}, {3}, {2, 2}})
      run_ranks(ranks_of(mesh), [&] {
        Net net = make_net();
        net->to(dtype);
        const HSDPModule root = shard_net(net, on_mesh(mesh));
        optim::SGD sgd(root, {.lr = 0.1});
        Ema ema(root, {.decay = 0.9, .ramp = true});
        Tensors want;
        for (auto& [name, tensor] : full_parameters(root)) want[name] = tensor.to(torch::kDouble);
        for (int step = 0; step < 4; ++step) {
          set_gradients(root, step), sgd.step();
          const Comm comm = root.groups().front().shard_comm;
          comm.reset_counters();
          ema.update(step);
          EXPECT_EQ(comm.counters().calls, 0);
          const double decay = std::min(0.9, (1.0 + step) / (10.0 + step));
          EXPECT_DOUBLE_EQ(ema.decay_at(step), decay);
          for (auto& [name, tensor] : full_parameters(root))
            want[name] = decay * want[name] + (1 - decay) * tensor.to(torch::kDouble);
        }
        Tensors got = full_averages(ema);
        for (auto& [name, tensor] : got) {
          EXPECT_EQ(tensor.scalar_type(), dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
          tensor = tensor.to(torch::kDouble);
        }
        EXPECT_LT(relative_difference(got, want), dtype == torch::kDouble ? 1e-14 : 1e-6);
      });
  }
}

/// Evaluation runs with the averages, training goes on as if nothing had been.
TEST(Ema, SwapAndRestore) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const int world : {1, 2, 3}) {
      run_ranks(world, [&] {
        for (const bool reshard : {true, false}) {
          Net net = make_net(), averaged = make_net();
          net->to(dtype), averaged->to(dtype);
          const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged, reshard));
          optim::SGD sgd(root, {.lr = 0.5});
          Ema ema(root, {.decay = 0.5});
          const Batch batch = make_batch(2, 1);
          net_loss(net(batch.tokens), batch.targets).backward();
          sgd.step(), ema.update(0);
          const Tensors trained = clone(full_parameters(root));
          Tensors averages;
          for (auto& [name, tensor] : full_averages(ema)) averages[name] = tensor.to(dtype);
          {
            torch::NoGradGuard no_grad;
            for (auto& entry : averaged->named_parameters()) {
              if (averages.contains(entry.key()))
                entry.value().copy_(averages.at(entry.key()));  // not the tied one's second name
            }
            const auto trained_output = net(batch.tokens);
            ema.swap();
            EXPECT_TRUE(ema.swapped());
            expect_same_bits(full_parameters(root), averages, "swapped");
            const auto output = net(batch.tokens);
            EXPECT_TRUE(torch::equal(output, averaged(batch.tokens)));
            EXPECT_FALSE(torch::equal(output, trained_output));
            ema.restore();
            EXPECT_FALSE(ema.swapped());
            EXPECT_TRUE(torch::equal(net(batch.tokens), trained_output));
          }
          expect_same_bits(full_parameters(root), trained, "restored");
          ema.copy_to();
          expect_same_bits(full_parameters(root), averages, "copied");
        }
      });
    }
  }
}

/// A load into the model leaves the averages alone; their own values travel through distributed tensors.
TEST(Ema, SurvivesALoad) {
  run_ranks(2, [] {
    Net net = make_net(), other = make_net({}, 2), fresh = make_net();
    const HSDPModule root = shard_net(net, on_all()), other_root = shard_net(other, on_all()), copy = shard_net(fresh, on_all());
    std::stringstream file;
    torch::serialize::OutputArchive out;
    other->save(out);
    out.save_to(file);
    Ema ema(root, {.decay = 0.75});
    const Tensors before = clone(full_averages(ema));
    torch::serialize::InputArchive in;
    in.load_from(file);
    net->load(in);
    expect_same_bits(full_averages(ema), before, "after the load");
    ema.update(0);
    const Tensors loaded = full_parameters(root);
    expect_same_bits(loaded, full_parameters(other_root), "the load");
    for (auto& [name, tensor] : full_averages(ema))
      EXPECT_TRUE(torch::allclose(tensor, 0.75 * before.at(name) + 0.25 * loaded.at(name), 1e-6, 1e-7)) << name;

    Ema resumed(copy, {.decay = 0.75});
    auto from = ema.named_dtensors(), to = resumed.named_dtensors();
    for (std::size_t i = 0; i < to.size(); ++i) {
      EXPECT_EQ(to[i].first, from[i].first);
      torch::Tensor local = to[i].second.to_local();
      local.copy_(from[i].second.to_local());
    }
    expect_same_bits(full_averages(resumed), full_averages(ema), "resumed");
    ema.reset();
    expect_same_bits(full_averages(ema), full_parameters(root), "reset");
  });
}

struct MaskedImpl : torch::nn::Module {
  MaskedImpl() {
    weight = register_parameter("weight", torch::ones({4}));
    order = register_parameter("order", torch::tensor({3, 1, 0, 2}), false);
  }
  torch::Tensor forward(const torch::Tensor& x) { return (x * weight).index_select(0, order); }
  torch::Tensor weight, order;
};
HP_MODULE(Masked);

/// Indices have no average.
TEST(Ema, PassesOverParametersThatAreNotFloatingPoint) {
  run_ranks(2, [] {
    Masked module;
    const HSDPModule root = fully_shard(module, on_all());
    Ema ema(root, {.decay = 0.5});
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : module->parameters()) parameter.mul_(2).remainder_(4);
    }
    ema.update(0);
    ema.swap();
    const Tensors averaged = full_parameters(root);
    EXPECT_TRUE(torch::equal(averaged.at("weight"), torch::full({4}, 1.5)));
    EXPECT_TRUE(torch::equal(averaged.at("order"), torch::tensor({2, 2, 0, 0})));
    EXPECT_TRUE(torch::equal(full_averages(ema).at("order"), torch::tensor({2, 2, 0, 0})));
    ema.restore();
    EXPECT_TRUE(torch::equal(full_parameters(root).at("weight"), torch::full({4}, 2.0)));
  });
}

TEST(Ema, Errors) {
  run_ranks(1, [] {
    nn::Linear layer(4, 4);
    const HSDPModule root = fully_shard(layer, on_all());
    EXPECT_THAT(value_error([&] { return Ema(fsdp::UnitHandle{}); }), HasSubstr("[Ema] root is empty"));
    EXPECT_THAT(value_error([&] { return Ema(root, {.decay = 1.5}); }), HasSubstr("decay is 1.5"));
    EXPECT_THAT(value_error([&] { return Ema(root, {.dtype = torch::kLong}); }), HasSubstr("dtype is Long"));
    Ema ema(root);
    EXPECT_THAT(value_error([&] { ema.update(-1); }), HasSubstr("step is -1"));
    EXPECT_THAT(message_of<Error>([&] { ema.restore(); }), HasSubstr("[Ema] restore without swap"));
    ema.swap();
    EXPECT_THAT(message_of<Error>([&] { ema.swap(); }), HasSubstr("swap while swapped"));
    EXPECT_THAT(message_of<Error>([&] { ema.update(0); }), HasSubstr("update while swapped"));
    EXPECT_THAT(message_of<Error>([&] { ema.reset(); }), HasSubstr("reset while swapped"));
    EXPECT_THAT(message_of<Error>([&] { ema.copy_to(); }), HasSubstr("copy_to while swapped"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
