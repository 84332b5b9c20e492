// HSDPModule::call: methods other than forward, inside the phases of their unit.
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

using ::testing::HasSubstr;
using torch::Tensor;

/// Two ways in, of which one is called forward.
struct CoderImpl : torch::nn::Module {
  CoderImpl() {
    in = register_module("in", Mlp(6, 5));
    out = register_module("out", torch::nn::Linear(6, 6));
  }
  Tensor forward(const Tensor& x) { return torch::tanh(out(in(x))); }
  std::vector<Tensor> encode(const Tensor& x, double factor) {
    seen = x.scalar_type();
    return {torch::sin(out(x)) * factor, in(x)};
  }
  Mlp in = nullptr;
  torch::nn::Linear out = nullptr;
  at::ScalarType seen = torch::kFloat;
};
HP_MODULE(Coder);

struct Sharded {
  explicit Sharded(const FullyShardOptions& options) {
    seed_parameters(*coder, 4);
    fully_shard(coder->in, options);
    root = fully_shard(coder, options);
  }
  Coder coder;
  HSDPModule root;
};

FullyShardOptions freed() { return on_all(ShardLayout::kPerParameter, /*reshard=*/true); }

TEST(Call, AnotherMethodAsForward) {
  for (const int world : {1, 2, 4}) {
    run_ranks(world, [&] {
      Sharded sharded(freed());
      Coder plain;
      seed_parameters(*plain, 4);
      if (world > 1) {
        EXPECT_ANY_THROW((void)sharded.coder->encode(wave({2, 6}, 0), 2.0)) << "the guard";
      }
      const auto loss = [&](Coder& m, int rank) {
        const auto encode = [&](const Tensor& x, double factor) { return m->encode(x, factor); };
        const Tensor x = wave({2, 6}, rank);
        const auto parts = m.ptr() == plain.ptr() ? encode(x, 2.0) : sharded.root.call(encode, x, 2.0);
        EXPECT_FALSE(world > 1 && sharded.root.is_unsharded());
        return (parts[0] * parts[1]).square().sum();
      };
      for (int step = 0; step < 3; ++step) {
        sharded.root.zero_grad(), plain->zero_grad();
        expect_same_gradients(sharded.coder, sharded.root, plain, loss);
      }
    });
  }
}

TEST(Call, PolicyOfTheUnit) {
  run_ranks(2, [] {
    FullyShardOptions options = freed();
    options.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat32};
    Sharded sharded(options);
    const auto parts = sharded.root.call([&](const Tensor& x) { return sharded.coder->encode(x, 1.0); }, wave({2, 6}, 0));
    EXPECT_EQ(sharded.coder->seen, torch::kBFloat16);
    EXPECT_EQ(parts[0].scalar_type(), torch::kFloat);
    int sum = 0;
    sharded.root.call([&](std::unique_ptr<int> moved) { sum += *moved; }, std::make_unique<int>(3));
    EXPECT_EQ(sum, 3) << "nothing returned, arguments that move";
    // This call did not run `in`, whose gather the order of the first one has started: no rank may leave before it is through.
    sharded.root.data_parallel_comm().barrier();
  });
}

/// fn may call forward of the same module, several times; the unit is gathered once and stays until fn is done.
TEST(Call, ForwardInside) {
  run_ranks(2, [](int rank) {
    Sharded sharded(freed());
    Coder plain;
    seed_parameters(*plain, 4);
    const Comm comm = sharded.root.data_parallel_comm();
    const auto both = [](Coder& m, const Tensor& x) { return m(m->encode(m(x), 0.5)[0]) + m->out->bias; };
    const auto loss = [&](Coder& m, int r) {
      const Tensor x = wave({2, 6}, r);
      return (m.ptr() == plain.ptr() ? both(m, x) : sharded.root.call([&] { return both(sharded.coder, x); })).square().sum();
    };
    expect_same_gradients(sharded.coder, sharded.root, plain, loss);
    (void)loss(sharded.coder, rank);
    sharded.root.zero_grad();
    const auto before = comm.flight_record().back().sequence;
    const Tensor value = loss(sharded.coder, rank);
    int gathers = 0;
    for (const FlightRecord& record : comm.flight_record())
      gathers += record.sequence > before && record.label == "Coder" && record.operation == "all_gather_single" ? 1 : 0;
    EXPECT_EQ(gathers, 1);
    EXPECT_FALSE(sharded.root.is_unsharded());
    EXPECT_THROW(sharded.root.call([&]() -> Tensor {
      (void)both(sharded.coder, wave({2, 6}, rank));
      throw std::runtime_error("in fn");
    }),
                 std::runtime_error);
    EXPECT_FALSE(sharded.root.is_unsharded());
    value.backward();
    EXPECT_EQ(full_gradients(sharded.root).size(), plain_gradients(*plain).size());
  });
}

TEST(Call, WithCheckpoints) {
  run_ranks(2, [](int rank) {
    std::vector<Tensors> results;
    for (int place = 0; place < 3; ++place) {
      Sharded sharded(freed());
      const auto encode = [&](const Tensor& x) { return sharded.coder->encode(x, 2.0); };
      const auto run = [&](const Tensor& x) {
        if (place == 0) return sharded.root.call(encode, x);
        if (place == 1) return sharded.root.call([&](const Tensor& h) { return checkpoint(encode, h); }, x);
        return checkpoint([&](const Tensor& h) { return sharded.root.call(encode, h); }, x);
      };
      for (int step = 0; step < 2; ++step) {
        sharded.root.zero_grad();
        const auto parts = run(wave({2, 6}, rank));
        (parts[0] * parts[1]).square().sum().backward();
      }
      results.push_back(full_gradients(sharded.root));
      EXPECT_EQ(relative_difference(results.back(), results.front()), 0) << place;
    }
  });
}

/// With a list of modules a call counts as the run of its member.
TEST(Call, MembersOfAList) {
  run_ranks(2, [](int rank) {
    struct PairImpl : torch::nn::Module {
      PairImpl() {
        a = register_module("a", Coder()), b = register_module("b", Coder());
        seed_parameters(*this, 5);
      }
      Tensor forward(const Tensor& x) { return b(run_a ? run_a(x) : a->encode(x, 2.0)[0]); }
      Coder a = nullptr, b = nullptr;
      std::function<Tensor(const Tensor&)> run_a;
    };
    nn::HookedHolder<PairImpl> pair, plain;
    const auto handles = fully_shard(std::vector<Coder>{pair->a, pair->b}, freed());
    const HSDPModule root = fully_shard(pair, freed());
    pair->run_a = [&](const Tensor& x) {
      return handles[0].call([&](const Tensor& h) { return pair->a->encode(h, 2.0)[0]; }, x);
    };
    for (int step = 0; step < 2; ++step) {
      root.zero_grad(), plain->zero_grad();
      expect_same_gradients(pair, root, plain, [](auto& m, int r) { return m(wave({2, 6}, r)).square().sum(); });
      (void)pair(wave({2, 6}, rank));
      EXPECT_FALSE(handles[0].is_unsharded()) << "both members have run";
    }
  });
}

TEST(Call, HandlesThatCannotCall) {
  run_ranks(1, [] {
    Nest nest(6);
    const auto handles = fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{nest.ptr(), nest->inner.ptr()}, freed());
    EXPECT_THAT(value_error([&] { return handles[1].call([] { return 1; }); }),
                HasSubstr("[call] module Mlp is inside of another module of the list that forms unit Nest"));
    EXPECT_THAT(value_error([] { return HSDPModule().call([] { return 1; }); }), HasSubstr("[call] this handle has no module"));
    EXPECT_EQ(handles[0].call([] { return 1; }), 1);
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
