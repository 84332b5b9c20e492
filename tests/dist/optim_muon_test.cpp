// Muon on sharded matrices gives the numbers of one process, the same bits on every mesh, and sends what its formula says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/counting_allocator.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kNotMatrices = {"table.weight"};

/// torch.optim.Muon for one whole matrix, in the words of its documentation.
struct ReferenceMuon {
  double lr = 0.02, weight_decay = 0.1, momentum = 0.95;
  bool nesterov = true, match_adamw = false;
  torch::Dtype dtype = torch::kFloat;
  std::map<std::string, torch::Tensor> buffers = {};

  [[nodiscard]] torch::Tensor orthogonalized(const torch::Tensor& matrix) const {
    const bool tall = matrix.size(0) > matrix.size(1);
    auto x = (tall ? matrix.t() : matrix).to(dtype);
    x = x / x.norm().clamp_min(1e-7);
    for (int i = 0; i < 5; ++i) {
      const auto gram = x.mm(x.t());
      x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram.mm(gram)).mm(x);
    }
    return (tall ? x.t() : x).to(matrix.dtype());
  }

  void step(const std::string& name, torch::Tensor& weight, const torch::Tensor& gradient) {
    torch::NoGradGuard no_grad;
    auto& buffer = buffers.try_emplace(name, torch::zeros_like(gradient)).first->second;
    buffer = buffer + (1 - momentum) * (gradient - buffer);
    const auto update = nesterov ? gradient + momentum * (buffer - gradient) : buffer;
    const auto rows = static_cast<double>(weight.size(0)), columns = static_cast<double>(weight.size(1));
    const double ratio = match_adamw ? 0.2 * std::sqrt(std::max(rows, columns)) : std::sqrt(std::max(1.0, rows / columns));
    weight.mul_(1 - lr * weight_decay).sub_(lr * ratio * orthogonalized(update));
  }
};

bool for_muon(const std::string& name, const torch::Tensor& tensor) { return tensor.dim() == 2 && name != "table.weight"; }

TEST(Muon, EqualsOneProcessAndEveryMeshHasTheSameBits) {
  for (const bool other_options : {false, true}) {
    Tensors first;
    on_every_mesh(kMeshes, [&](const HSDPModule& root, int rank, const std::string& where) {
      ReferenceMuon reference{.nesterov = !other_options, .match_adamw = other_options};
      optim::MuonOptions options{.lr = reference.lr, .nesterov = reference.nesterov, .not_matrices = kNotMatrices};
      if (other_options) options.adjust_lr_fn = optim::MuonLr::kMatchRmsAdamW;
      options.adamw = {.lr = 0.01, .weight_decay = 0.05};
      optim::Muon muon(root, options);
      Tensors whole = full_parameters(root), others;
      for (auto& [name, tensor] : whole) {
        if (!for_muon(name, tensor)) others[name] = tensor;
      }
      torch::optim::AdamW adamw(as_leaves(others), torch::optim::AdamWOptions(0.01).weight_decay(0.05));
      for (int step = 0; step < 4; ++step) {
        set_gradients(root, step), set_whole_gradients(others, step);
        muon.step(), adamw.step();
        for (auto& [name, tensor] : whole) {
          if (for_muon(name, tensor)) reference.step(name, tensor, whole_gradient(name, tensor.sizes().vec(), step));
        }
      }
      const Tensors got = full_parameters(root);
      EXPECT_LT(relative_difference(got, whole), 1e-5) << where;
      if (rank != 0) return;
      if (first.empty()) first = got;
      expect_same_bits(got, first, where);
    });
  }
}

/// The numbers of tools/muon_golden.py.
TEST(Muon, EqualsTorchs) {
  const std::vector<float> tall = {-0.5656892F, -0.2366548F, 0.7297263F,  0.3973346F,  -0.8135678F, 0.6843206F,
                                   0.1127145F,  -0.9211137F, -0.8388750F, -0.8291796F, -0.9261947F, 0.1337851F};
  const std::vector<float> wide = {-0.5255105F, -0.1804938F, 0.7694147F,  0.3519584F,  -0.7721810F,
                                   0.6575585F,  0.1887302F,  -0.9325082F, -0.8684118F, -0.8752685F,
                                   -0.9170786F, 0.2145224F,  0.6195220F,  -0.7431181F, 0.2783021F};
  const auto values = [](int64_t rows, int64_t columns, int step) {
    return torch::sin(torch::arange(rows * columns, torch::kDouble).square() * 0.37 + step)
        .to(torch::kFloat)
        .view({rows, columns});
  };
  run_ranks(2, [&] {
    const auto check = [&](int64_t rows, int64_t columns, optim::MuonOptions options, const std::vector<float>& want) {
      nn::Linear layer(torch::nn::LinearOptions(columns, rows).bias(false));
      {
        torch::NoGradGuard no_grad;
        layer->weight.copy_(values(rows, columns, 100));
      }
      const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kRagged));
      optim::Muon muon(root, std::move(options));
      for (int step = 0; step < 3; ++step) {
        const auto tensor = root.named_dtensors().front().second;
        layer->parameters()[0].mutable_grad() =
            distribute_tensor(values(rows, columns, step), tensor.device_mesh(), tensor.placements()).to_local();
        muon.step();
      }
      EXPECT_TRUE(torch::allclose(full_parameters(root).at("weight").view(-1), torch::tensor(want), 1e-5, 1e-6));
    };
    check(4, 3, {.lr = 0.05, .momentum = 0.9}, tall);
    check(3, 5, {.lr = 0.05, .momentum = 0.9, .nesterov = false, .adjust_lr_fn = optim::MuonLr::kMatchRmsAdamW}, wide);
  });
}

/// Matrices cut along their columns.
TEST(Muon, OtherDimensions) {
  run_ranks(3, [] {
    Net net = make_net();
    auto options = on_all();
    options.shard_placement_fn = [](const std::string&, const torch::Tensor& parameter) -> std::optional<int64_t> {
      return parameter.dim() == 2 ? 1 : 0;
    };
    const HSDPModule root = shard_net(net, options);
    optim::Muon muon(root, {.lr = 0.02, .not_matrices = kNotMatrices});
    ReferenceMuon reference;
    Tensors whole = full_parameters(root);
    for (int step = 0; step < 3; ++step) {
      set_gradients(root, step), muon.step();
      for (auto& [name, tensor] : whole) {
        if (for_muon(name, tensor)) reference.step(name, tensor, whole_gradient(name, tensor.sizes().vec(), step));
      }
    }
    for (auto& [name, tensor] : full_parameters(root)) {
      if (!for_muon(name, tensor)) continue;
      EXPECT_LT(relative_difference({{name, tensor}}, {{name, whole.at(name)}}), 1e-5) << name;
    }
  });
}

/// Counted bytes are the formula's, also when some matrices get no gradient.
TEST(Muon, SendsWhatTheFormulaSays) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    on_every_mesh({{2}, {3}, {4}, {2, 2}}, [&](const HSDPModule& root, int, const std::string& where) {
      optim::Muon muon(root, {.not_matrices = kNotMatrices, .ns_dtype = dtype});
      const Comm comm = root.groups().front().shard_comm;
      std::map<std::string, int> owner;
      for (auto& [name, rank] : muon.owners()) owner[name] = rank;
      int64_t elements = 0, unused = 0;
      for (auto& [name, tensor] : root.named_dtensors()) {
        if (!owner.contains(name)) continue;
        const int64_t local = tensor.to_local().numel();
        const int64_t mine = owner.at(name) == comm.rank() ? tensor.numel() - local : local;
        elements += mine;
        if (name.starts_with("u4.")) unused += mine;
      }
      const int64_t size = dtype == torch::kFloat ? 4 : 2;
      EXPECT_EQ(muon.bytes_per_step(), size * elements) << where;
      set_gradients(root, 0);
      comm.reset_counters();
      muon.step();
      EXPECT_EQ(comm.counters().bytes_sent, size * elements) << where;
      EXPECT_EQ(comm.counters().bytes_received, size * elements) << where;
      for (auto& group : root.groups()) {
        for (auto& parameter : group.parameters) {
          if (parameter.name.starts_with("u4.")) parameter.sharded.mutable_grad() = torch::Tensor();
        }
      }
      comm.reset_counters();
      muon.step();
      EXPECT_EQ(comm.counters().bytes_sent, size * (elements - unused)) << where;
      for (const auto& state : muon.state()) EXPECT_EQ(state.step, state.name.starts_with("u4.") ? 1 : 2) << state.name;
    });
  }
}

struct EqualMatricesImpl : torch::nn::Module {
  EqualMatricesImpl() {
    for (int i = 0; i < 12; ++i) register_module(std::to_string(i), torch::nn::Linear(8, 8));
  }
  torch::Tensor forward(torch::Tensor x) { return x; }
};
HP_MODULE(EqualMatrices);

TEST(Muon, SharesTheWorkEqually) {
  run_ranks(4, [] {
    EqualMatrices model;
    const HSDPModule root = fully_shard(model, on_all());
    std::map<int, int> matrices;
    for (auto& [name, rank] : optim::Muon(root).owners()) ++matrices[rank];
    EXPECT_EQ(matrices, (std::map<int, int>{{0, 3}, {1, 3}, {2, 3}, {3, 3}}));
  });
}

/// bf16 as torch computes: far from fp32 by bf16's noise, the same bits on every number of ranks, bf16 shards with a master.
TEST(Muon, LowPrecision) {
  Tensors first;
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](int rank) {
      for (const auto layout : kLayouts) {
        Net net = make_net();
        net->to(torch::kBFloat16);
        const HSDPModule root = shard_net(net, on_all(layout));
        optim::Muon muon(root, {.lr = 0.02, .not_matrices = kNotMatrices, .ns_dtype = torch::kBFloat16, .master_weights = true});
        ReferenceMuon reference{.dtype = torch::kBFloat16};
        Tensors whole;
        for (auto& [name, tensor] : full_parameters(root)) whole[name] = tensor.to(torch::kFloat);
        for (int step = 0; step < 3; ++step) {
          set_gradients(root, step), muon.step();
          for (auto& [name, tensor] : whole) {
            if (for_muon(name, tensor)) reference.step(name, tensor, whole_gradient(name, tensor.sizes().vec(), step));
          }
        }
        const Tensors got = full_parameters(root);
        for (auto& [name, tensor] : whole) {
          if (!for_muon(name, tensor)) continue;
          EXPECT_LT((got.at(name).to(torch::kFloat) - tensor).abs().max().item<float>(), 0.01) << name;
        }
        if (rank != 0) continue;
        if (first.empty()) first = got;
        expect_same_bits(got, first, concat(world, " ranks"));
      }
    });
  }
}

TEST(Muon, StateAndRates) {
  run_ranks(2, [] {
    const optim::MuonOptions options{.lr = 0.02,
                                     .not_matrices = kNotMatrices,
                                     .groups = {{.names = {"u1.a.weight"}, .lr = 0.01, .weight_decay = 0}},
                                     .adamw = {.lr = 0.003}};
    Net net = make_net(), other = make_net();
    const HSDPModule root = shard_net(net, on_all()), copy = shard_net(other, on_all(ShardLayout::kPerParameter));
    optim::Muon muon(root, options), resumed(copy, options);
    EXPECT_EQ(muon.lrs(), (std::vector<double>{0.01, 0.02, 0.003}));
    for (int step = 0; step < 2; ++step) set_gradients(root, step), muon.step();
    {
      torch::NoGradGuard no_grad;
      auto from = net->parameters(), to = other->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    resumed.load_state(muon.state());
    for (optim::Muon* each : {&muon, &resumed}) each->set_lrs({0.1, 0.05, 0.02});
    set_gradients(root, 2), muon.step();
    set_gradients(copy, 2), resumed.step();
    expect_same_bits(full_parameters(copy), full_parameters(root), "resumed");
    for (const auto& state : muon.state()) {
      const bool matrix = state.tensors.size() == 1;
      EXPECT_EQ(state.tensors[0].first, matrix ? "momentum_buffer" : "exp_avg") << state.name;
    }
    auto state = muon.state();
    state.pop_back();
    EXPECT_THAT(value_error([&] { resumed.load_state(state); }), HasSubstr("[AdamW] the state lacks"));
  });
}

TEST(Muon, StepsAllocateNothingOfSize) {
  run_ranks(1, [] {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all(ShardLayout::kRagged));
    optim::Muon muon(root, {.not_matrices = kNotMatrices});
    for (int step = 0; step < 2; ++step) set_gradients(root, step), muon.step();
    const CountCpuAllocations counting;
    reset_allocation_counts();
    muon.step();
    EXPECT_EQ(allocation_counts().allocations, 0);
  });
}

TEST(Muon, Errors) {
  run_ranks(1, [] {
    Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const auto muon = [&](optim::MuonOptions options) {
      return value_error([&] { return optim::Muon(root, std::move(options)); });
    };
    EXPECT_THAT(muon({.momentum = 1}), HasSubstr("[Muon] momentum is 1"));
    EXPECT_THAT(muon({.ns_steps = 100}), HasSubstr("ns_steps is 100"));
    EXPECT_THAT(muon({.eps = -1}), HasSubstr("eps is -1"));
    EXPECT_THAT(muon({.ns_dtype = torch::kHalf}), HasSubstr("ns_dtype is Half"));
    EXPECT_THAT(muon({.not_matrices = {"head"}}), HasSubstr("not_matrices lists head, want the name of a parameter"));
    EXPECT_THAT(muon({.matrices = [](const auto&, const auto&) { return true; }}), HasSubstr("dimensions, want a matrix"));
    EXPECT_THAT(muon({.groups = {{.names = {"u1.a.weight"}, .betas = {{0.9, 0.9}}}}}), HasSubstr("sets betas or eps"));
    EXPECT_THAT(muon({.lr = -1}), HasSubstr("[Muon] lr is -1"));
    EXPECT_THAT(muon({.adamw = {.lr = -1}}), HasSubstr("[AdamW] lr is -1"));
    optim::Muon fine(root);
    EXPECT_THAT(value_error([&] { fine.set_lrs({1}); }), HasSubstr("1 learning rates, want 2"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
