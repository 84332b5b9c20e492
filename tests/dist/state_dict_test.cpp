// State dictionaries of models: what they hold, and every form that can be loaded.
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dist/source_support.h"
#include "dist/tp_net.h"
#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/net_on_ranks.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {3}, {2, 2}, {1, 2}};

/// Net with buffers, one of integers, and a parameter that no unit manages.
struct WithExtrasImpl : torch::nn::Module {
  WithExtrasImpl() {
    net = register_module("net", make_net());
    norm = register_module("norm", torch::nn::BatchNorm1d(NetImpl::kVocab));
    free = register_parameter("free", torch::arange(3, torch::kFloat));
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return net(tokens) + free.sum() * 0; }
  Net net = nullptr;
  torch::nn::BatchNorm1d norm = nullptr;
  torch::Tensor free;
};
HP_MODULE(WithExtras);

HSDPModule shard_extras(const WithExtras& model, FullyShardOptions options) {
  shard_net(model->net, options);
  options.ignored_params = {model->free};
  return fully_shard(model, options);
}

/// Names of the module, tied ones included, and its values.
ModelStateDict values_of(const torch::nn::Module& module) {
  ModelStateDict values;
  for (const auto& entry : module.named_parameters()) values.emplace(entry.key(), entry.value().detach().clone());
  for (const auto& entry : module.named_buffers()) values.emplace(entry.key(), entry.value().detach().clone());
  return values;
}

std::vector<std::string> names_of(const ModelStateDict& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

const torch::Tensor& whole(const StateValue& value) { return std::get<torch::Tensor>(value); }

void expect_same(const ModelStateDict& got, const ModelStateDict& want, const std::string& what = {}) {
  EXPECT_EQ(names_of(got), names_of(want)) << what;
  for (const auto& [name, value] : want) {
    if (!got.contains(name)) continue;
    EXPECT_TRUE(torch::equal(whole(got.at(name)), whole(value))) << what << ' ' << name;
  }
}

std::string text_of(const std::vector<int64_t>& mesh, ShardLayout layout) {
  return concat(at::IntArrayRef(mesh), layout == ShardLayout::kRagged ? " ragged" : " per parameter");
}

TEST(ModelStateDict, ShardedFullAndOnTheFirstRank) {
  for (const auto& mesh : kMeshes) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(ranks_of(mesh), [&](int rank) {
        WithExtras model;
        const ModelStateDict want = values_of(*model);
        const HSDPModule root = shard_extras(model, on_mesh(mesh, layout));
        const auto calls = current_world().comm().counters().calls;
        const ModelStateDict parts = get_model_state_dict(root);
        EXPECT_EQ(current_world().comm().counters().calls, calls);
        EXPECT_EQ(names_of(parts), names_of(want));
        EXPECT_TRUE(parts.contains("net.head.weight") && parts.contains("net.table.weight")) << "tied: both names";
        for (const auto& [name, value] : parts) {
          const bool managed = name.starts_with("net.") || name == "norm.weight" || name == "norm.bias";
          ASSERT_EQ(std::holds_alternative<DTensor>(value), managed) << name;
          if (!managed) continue;
          EXPECT_EQ(at::IntArrayRef(std::get<DTensor>(value).shape()), whole(want.at(name)).sizes()) << name;
        }
        const torch::Tensor leaf = model->net->u1->a->bias;
        expect_same(get_model_state_dict(root, {.full_state_dict = true}), want, text_of(mesh, layout));
        const ModelStateDict first = get_model_state_dict(model, {.full_state_dict = true, .cpu_offload = true});
        if (rank == 0) {
          expect_same(first, want);
        } else {
          EXPECT_THAT(first, IsEmpty());
        }
        // Values in parts share memory with the model, whole ones are copies.
        const ModelStateDict copies = get_model_state_dict(root, {.full_state_dict = true});
        {
          torch::NoGradGuard no_grad;
          for (auto& parameter : model->parameters()) parameter.zero_();
        }
        EXPECT_EQ(std::get<DTensor>(parts.at("net.u1.a.weight")).to_local().abs().sum().item<double>(), 0.0);
        EXPECT_EQ(whole(parts.at("free")).abs().sum().item<double>(), 0.0);
        expect_same(copies, want);
      });
    }
  }
}

/// Brings the model into a state, and tells whether a forward is still to be followed by a backward.
enum class State { kSharded, kHeld, kAfterEvaluation, kMeta };

TEST(ModelStateDict, EveryFormIntoEveryState) {
  const ModelStateDict wanted = values_of(*make_net({}, 9));
  struct Case {
    std::vector<int64_t> from, to;
    ShardLayout from_layout, to_layout;
  };
  const std::vector<Case> cases = {
      {{2}, {2}, ShardLayout::kPerParameter, ShardLayout::kPerParameter},
      {{2}, {2}, ShardLayout::kRagged, ShardLayout::kPerParameter},
      {{3}, {3}, ShardLayout::kPerParameter, ShardLayout::kRagged},
      {{4}, {2, 2}, ShardLayout::kRagged, ShardLayout::kPerParameter},
      {{2, 2}, {4}, ShardLayout::kPerParameter, ShardLayout::kRagged},
      {{1}, {1}, ShardLayout::kPerParameter, ShardLayout::kRagged},
  };
  for (const Case& c : cases) {
    run_ranks(ranks_of(c.to), [&](int rank) {
      const Net source = make_net({}, 9);
      const HSDPModule from = shard_net(source, on_mesh(c.from, c.from_layout));
      for (const State state : {State::kSharded, State::kHeld, State::kAfterEvaluation, State::kMeta}) {
        for (const char* form : {"parts", "full", "rank0", "local"}) {
          Net net{nullptr};
          if (state == State::kMeta) {
            const MetaInit no_memory;
            net = Net();
          } else {
            net = make_net({}, 5);
          }
          const HSDPModule root = shard_net(net, on_mesh(c.to, c.to_layout, false));
          const std::vector<torch::Tensor> leaves = net->parameters();
          if (state == State::kHeld) root.unshard();
          if (state == State::kAfterEvaluation) {
            torch::NoGradGuard no_grad;
            (void)net(make_batch(2, 1).tokens);
          }
          const std::string what = concat(form, " in state ", static_cast<int>(state), ' ', text_of(c.to, c.to_layout));
          IncompatibleKeys keys;
          if (std::string(form) == "parts") {
            keys = set_model_state_dict(root, get_model_state_dict(from));
          } else if (std::string(form) == "full") {
            keys = set_model_state_dict(root, get_model_state_dict(from, {.full_state_dict = true}), {.full_state_dict = true});
          } else if (std::string(form) == "rank0") {
            const ModelStateDict values = get_model_state_dict(from, {.full_state_dict = true, .cpu_offload = true});
            EXPECT_EQ(values.empty(), rank != 0);
            keys = set_model_state_dict(root, values, {.full_state_dict = true, .broadcast_from_rank0 = true});
          } else {
            const Net like = make_net({}, 9);
            ModelStateDict local;
            for (const auto& [name, value] : get_model_state_dict(shard_net(like, on_mesh(c.to, c.to_layout))))
              local.emplace(name, std::get<DTensor>(value).to_local().clone());
            keys = set_model_state_dict(root, local);
          }
          EXPECT_THAT(keys.missing_keys, IsEmpty()) << what;
          expect_same(get_model_state_dict(root, {.full_state_dict = true}), wanted, what);
          const std::vector<torch::Tensor> after = net->parameters();
          for (std::size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(after[i].is_same(leaves[i])) << what;
          // The next forward computes with what was loaded.
          const Batch batch = make_batch(2, 1);
          EXPECT_TRUE(torch::equal(net(batch.tokens), source(batch.tokens))) << what;
        }
      }
    });
  }
}

/// B42: names match by name, whatever else the dictionary has.
TEST(ModelStateDict, StrictAndNot) {
  run_ranks(2, [](int rank) {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const ModelStateDict before = get_model_state_dict(root, {.full_state_dict = true});
    for (const bool rank0 : {false, true}) {
      ModelStateDict values = values_of(*make_net({}, 9));
      values.erase("u1.a.bias");
      values.erase("head.weight");  // its other name is there
      values.emplace("aaa", torch::ones({3}));
      values.emplace("zzz", torch::ones({3}));
      StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = rank0};
      const ModelStateDict& mine = rank0 && rank != 0 ? ModelStateDict() : values;
      EXPECT_THAT(value_error([&] {
                    set_model_state_dict(root, mine, options);
                    return 0;
                  }),
                  HasSubstr("[set_model_state_dict] missing: u1.a.bias; unexpected: aaa, zzz"));
      expect_same(get_model_state_dict(root, {.full_state_dict = true}), before, "nothing changed");
      options.strict = false;
      const IncompatibleKeys keys = set_model_state_dict(root, mine, options);
      EXPECT_THAT(keys.missing_keys, ElementsAre("u1.a.bias"));
      EXPECT_THAT(keys.unexpected_keys, ElementsAre("aaa", "zzz"));
      const ModelStateDict after = get_model_state_dict(root, {.full_state_dict = true});
      for (const auto& [name, value] : after) {
        const StateValue& want = name == "u1.a.bias" ? before.at(name) : values.at(name == "head.weight" ? "table.weight" : name);
        EXPECT_TRUE(torch::equal(whole(value), whole(want))) << name;
      }
      set_model_state_dict(root, before);
    }
  });
}

TEST(ModelStateDict, FrozenParametersAreFiltered) {
  run_ranks(2, [](int rank) {
    const Net net = make_net();
    net->table->weight.set_requires_grad(false);
    net->u3->a->weight.set_requires_grad(false);
    const HSDPModule root = shard_net(net, on_all());
    const ModelStateDict values = get_model_state_dict(root, {.full_state_dict = true, .ignore_frozen_params = true});
    EXPECT_FALSE(values.contains("u3.a.weight") || values.contains("table.weight") || values.contains("head.weight"));
    EXPECT_TRUE(values.contains("u3.a.bias"));
    ModelStateDict zeros;
    for (const auto& [name, value] : values) zeros.emplace(name, torch::zeros_like(whole(value)));
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, zeros);
                  return 0;
                }),
                HasSubstr("missing: table.weight, u3.a.weight"));
    zeros.emplace("u3.a.weight", torch::ones({3, NetImpl::kDim}));
    for (const bool rank0 : {false, true}) {
      set_model_state_dict(root, rank0 && rank > 0 ? ModelStateDict() : zeros,
                           {.full_state_dict = rank0, .ignore_frozen_params = true, .broadcast_from_rank0 = rank0});
      const ModelStateDict after = get_model_state_dict(root, {.full_state_dict = true});
      EXPECT_NE(whole(after.at("u3.a.weight")).sum().item<float>(), 3.0F * NetImpl::kDim) << "frozen: left alone";
      EXPECT_NE(whole(after.at("table.weight")).abs().sum().item<float>(), 0.0F);
      EXPECT_EQ(whole(after.at("u1.a.weight")).abs().sum().item<float>(), 0.0F);
    }
  });
}

TEST(ModelStateDict, MistakesAreToldToAllRanksAndChangeNothing) {
  run_ranks(3, [](int rank) {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    const ModelStateDict before = get_model_state_dict(root, {.full_state_dict = true});
    const auto with = [&](const std::string& name, const StateValue& value) {
      ModelStateDict values = values_of(*make_net({}, 9));
      values[name] = value;
      return values;
    };
    const DTensor other = distribute_tensor(torch::ones({4, 4}), init_device_mesh("cpu", {3}), {Shard(0)});
    const std::vector<std::pair<ModelStateDict, std::string>> cases = {
        {with("u1.a.bias", torch::ones({19})), "u1.a.bias has shape [19], want [20] or this rank's part of it, [6]"},
        {with("u1.a.bias", torch::Tensor()), "u1.a.bias has no values"},
        {with("u1.a.bias", torch::ones({20}, torch::kMeta)), "u1.a.bias has no values (it is on meta)"},
        {with("u1.a.bias", torch::ones({20}).to_sparse()), "u1.a.bias is sparse, want a dense tensor"},
        {with("u1.a.bias", torch::ones({20}, torch::kComplexFloat)), "u1.a.bias is ComplexFloat, want Float"},
        {with("u2.p.weight", other), "u2.p.weight is DTensor([4, 4]"},
    };
    for (const auto& [values, text] : cases) {
      // Wrong on the last rank only: told to all.
      const ModelStateDict good = values_of(*make_net({}, 9));
      const std::string message = value_error([&, &bad = values] {
        set_model_state_dict(root, rank == 2 ? bad : good);
        return 0;
      });
      EXPECT_THAT(message, AllOf(HasSubstr("[set_model_state_dict]"), HasSubstr(text), HasSubstr("(rank 2/3)")));
    }
    const StateDictOptions rank0{.full_state_dict = true, .broadcast_from_rank0 = true};
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, get_model_state_dict(root), rank0);
                  return 0;
                }),
                HasSubstr("is a DTensor, want a whole tensor with broadcast_from_rank0"));
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, {}, {.broadcast_from_rank0 = true});
                  return 0;
                }),
                HasSubstr("broadcast_from_rank0 without full_state_dict"));
    EXPECT_THAT(value_error([&] { return get_model_state_dict(root, {.keep_submodule_prefixes = false}); }),
                HasSubstr("keep_submodule_prefixes is false"));
    // Other layouts on different ranks would communicate differently.
    ModelStateDict mixed = get_model_state_dict(root);
    if (rank == 1) mixed["u1.a.weight"] = whole(before.at("u1.a.weight"));
    set_model_state_dict(root, mixed);  // both local: fine
    const Net ragged = make_net();
    ModelStateDict parts = get_model_state_dict(shard_net(ragged, on_all(ShardLayout::kRagged)));
    if (rank == 1) parts["u1.a.weight"] = whole(before.at("u1.a.weight"));
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, parts);
                  return 0;
                }),
                HasSubstr("ranks disagree"));
    expect_same(get_model_state_dict(root, {.full_state_dict = true}), before, "nothing changed");
  });
}

TEST(ModelStateDict, InTheMiddleOfAStepAndBelowAUnit) {
  run_ranks(2, [](int rank) {
    const Net net = make_net();
    const HSDPModule root = shard_net(net, on_all());
    torch::Tensor loss = loss_of(const_cast<Net&>(net), rank);
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, values_of(*make_net()));
                  return 0;
                }),
                HasSubstr("in the middle of a step"));
    EXPECT_EQ(get_model_state_dict(root).size(), net->named_parameters().size()) << "looking is allowed";
    loss.backward();
    // The embedding belongs to the root, which is above it.
    EXPECT_THAT(value_error([&] { return get_model_state_dict(net->table); }), HasSubstr("parameter weight is managed by unit"));
    EXPECT_EQ(names_of(get_model_state_dict(net->u3)),
              (std::vector<std::string>{"a.bias", "a.weight", "b.bias", "b.weight", "scale"}));
    ModelStateDict part = get_model_state_dict(net->u2, {.full_state_dict = true});
    part["inner.scale"] = torch::tensor(3.0);
    set_model_state_dict(net->u2, part);
    EXPECT_EQ(full_parameters(root).at("u2.inner.scale").item<float>(), 3.0F);
    EXPECT_THAT(value_error([&] { return get_model_state_dict(std::shared_ptr<torch::nn::Module>()); }),
                HasSubstr("the model is null"));
  });
}

/// B50: beside the shards, and beside what rank 0 was given, one tensor.
TEST(ModelStateDict, PeakOfALoadFromTheFirstRankIsOneTensor) {
  constexpr int64_t kDim = 256, kOne = kDim * kDim * 4;
  for (const auto& mesh : std::vector<std::vector<int64_t>>{{4}, {2, 2}}) {
    for (const ShardLayout layout : kLayouts) {
      const CountCpuAllocations count;
      const ModelStateDict values = values_of(*Nest(kDim));
      int64_t before = 0;
      std::mutex mutex;
      int64_t rank0 = 0;
      run_ranks(ranks_of(mesh), {.allocator = counting_allocator()}, [&](int rank) {
        const Nest nest(kDim);
        FullyShardOptions options = on_mesh(mesh, layout);
        if (layout == ShardLayout::kPerParameter)
          options.shard_placement_fn = [](const std::string&, const at::Tensor& p) {
            return std::optional<int64_t>(p.dim() - 1);
          };
        const HSDPModule root = fully_shard(nest, options);
        const auto load = [&] {
          set_model_state_dict(root, rank == 0 ? values : ModelStateDict(),
                               {.full_state_dict = true, .broadcast_from_rank0 = true});
        };
        load();  // groups are made, buffers of the transport are there
        root.data_parallel_comm().barrier();
        if (rank == 0) {
          before = allocation_counts().live;
          reset_allocation_counts();
        }
        root.data_parallel_comm().barrier();
        load();
        root.data_parallel_comm().barrier();
        if (rank == 0) rank0 = allocation_counts().peak - before;
        root.data_parallel_comm().barrier();
      });
      EXPECT_LE(rank0, kOne + 100'000) << text_of(mesh, layout) << ": all ranks together";
      EXPECT_GT(rank0, 0);
    }
  }
}

/// FSDP over tensor parallelism: whole names and shapes out of blocks of blocks, and B44: sizes that local ones do not tell.
TEST(ModelStateDict, SourceLayouts) {
  TpNet plain(std::vector<int64_t>{8, 7});
  seed_parameters(*plain, 3);
  const ModelStateDict want = values_of(*plain);
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {1, 3}, {2, 1}}) {
    for (const ShardLayout layout : kLayouts) {
      run_ranks(ranks_of(shape), [&](int rank) {
        const DeviceMesh mesh = init_device_mesh("cpu", shape, {"dp_shard", "tp"});
        const auto make = [&](uint64_t seed, ShardLayout how) {
          TpNet net(std::vector<int64_t>{8, 7});
          seed_parameters(*net, seed);
          FullyShardOptions options{.mesh = mesh["dp_shard"]};
          options.shard_layout = how;
          const SourceShardInfos infos = cut_net(net, mesh["tp"], Convention::kWhole);
          return shard_tp_net(net, options, infos);
        };
        const HSDPModule source = make(3, layout);
        expect_same(get_model_state_dict(source, {.full_state_dict = true}), want, text_of(shape, layout));
        const ModelStateDict first = get_model_state_dict(source, {.full_state_dict = true, .cpu_offload = true});
        const HSDPModule full = make(5, layout), parts = make(5, layout), rank0 = make(5, layout);
        const HSDPModule other = make(3, layout == ShardLayout::kRagged ? ShardLayout::kPerParameter : ShardLayout::kRagged);
        set_model_state_dict(full, want);
        set_model_state_dict(parts, get_model_state_dict(other));
        set_model_state_dict(rank0, first, {.full_state_dict = true, .broadcast_from_rank0 = true});
        for (const HSDPModule& got : {full, parts, rank0})
          expect_same(get_model_state_dict(got, {.full_state_dict = true}), want, text_of(shape, layout));
        EXPECT_EQ(first.empty(), rank != 0);
      });
    }
  }
}

/// B44: sizes are carried, never told from the parts: rows and columns that leave ranks without elements.
TEST(ModelStateDict, SmallMatricesOverTwoAxes) {
  for (const ShardLayout layout : kLayouts) {
    run_ranks(4, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
      const std::vector<std::pair<std::vector<int64_t>, Placement>> parts = {
          {{1, 17}, Shard(1)}, {{1, 17}, Shard(0)}, {{5, 3}, Shard(0)}, {{5, 3}, Shard(1)}, {{5, 1}, Replicate()}};
      const auto make = [&](int first) {
        Bag bag;
        SourceShardInfos infos;
        for (std::size_t i = 0; i < parts.size(); ++i) {
          const auto& [shape, placement] = parts[i];
          const torch::Tensor value = wave(shape, first + static_cast<int>(i));
          const torch::Tensor parameter = bag->add(distribute_tensor(value, mesh["tp"], {placement}).to_local().clone());
          infos.set(parameter, {.mesh = mesh["tp"], .placements = {placement}, .shape = shape}, concat('p', i));
        }
        FullyShardOptions options{.mesh = mesh["dp"], .source_shard_infos = infos};
        options.shard_layout = layout;
        fully_shard(bag, options);
        return bag;
      };
      const Bag source = make(1), full = make(10), sent = make(20);
      const ModelStateDict whole_values = get_model_state_dict(source, {.full_state_dict = true});
      for (std::size_t i = 0; i < parts.size(); ++i)
        EXPECT_TRUE(torch::equal(whole(whole_values.at(concat('p', i))), wave(parts[i].first, 1 + static_cast<int>(i)))) << i;
      set_model_state_dict(full, whole_values);
      set_model_state_dict(sent, rank == 0 ? whole_values : ModelStateDict(),
                           {.full_state_dict = true, .broadcast_from_rank0 = true});
      expect_same(get_model_state_dict(full, {.full_state_dict = true}), whole_values);
      expect_same(get_model_state_dict(sent, {.full_state_dict = true}), whole_values);
    });
  }
}

/// B51: a dictionary that is gone keeps nothing alive.
TEST(ModelStateDict, NothingOutlivesTheModel) {
  run_ranks(2, [] {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    {
      const Net net = make_net();
      const HSDPModule root = shard_net(net, on_all());
      const ModelStateDict parts = get_model_state_dict(root);
      set_model_state_dict(root, get_model_state_dict(root, {.full_state_dict = true}));
      for (const auto& [name, value] : parts)
        storages.emplace_back(std::get<DTensor>(value).to_local().storage().getWeakStorageImpl());
    }
    for (const auto& storage : storages) EXPECT_TRUE(storage.expired());
  });
}

/// Units on meshes of their own in one model, one that does not have rank 0.
TEST(ModelStateDict, MixedMeshes) {
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    const auto make = [&](uint64_t seed) {
      Net net = make_net({}, seed);
      fully_shard(net->u1, {.mesh = mesh["a"]});
      fully_shard(net->u2->inner, {.mesh = mesh["b"], .shard_layout = ShardLayout::kRagged});
      fully_shard(net->u2, {.mesh = mesh});
      return std::pair(net, fully_shard(net, {.mesh = mesh.flatten()}));
    };
    const auto [net, root] = make(3);
    const ModelStateDict want = values_of(*make_net({}, 9));
    set_model_state_dict(root, want);
    expect_same(get_model_state_dict(root, {.full_state_dict = true}), want);
    EXPECT_THAT(value_error([&] {
                  set_model_state_dict(root, rank == 0 ? want : ModelStateDict(),
                                       {.full_state_dict = true, .broadcast_from_rank0 = true});
                  return 0;
                }),
                Not(HasSubstr("no ValueError")));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
