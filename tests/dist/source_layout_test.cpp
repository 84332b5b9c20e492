// Parameters that source axes have cut before fully_shard: layouts, boxes and whole tensors against brute force, values that go
// in and out, and every error of the source layout.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <random>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/source_support.h"
#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/rank_threads.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A parameter of a random model: what every rank draws alike.
struct Drawn {
  std::vector<int64_t> shape;
  std::vector<Placement> placements;  ///< on the source axes
  int64_t shard_dim = 0;
  bool trainable = true;
};

std::vector<Drawn> draw(std::mt19937& random, std::size_t source_axes, bool ragged) {
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  std::vector<Drawn> parameters(static_cast<std::size_t>(pick(1, 5)));
  for (Drawn& parameter : parameters) {
    const int64_t ndim = pick(0, 3);
    for (int64_t d = 0; d < ndim; ++d) parameter.shape.push_back(pick(1, 7));
    for (std::size_t axis = 0; axis < source_axes; ++axis)
      parameter.placements.push_back(ndim == 0 || pick(0, 2) == 0 ? Replicate() : Shard(pick(-ndim, ndim - 1)));
    parameter.shard_dim = ragged || ndim == 0 ? 0 : pick(0, ndim - 1);
    parameter.trainable = pick(0, 3) > 0;
  }
  return parameters;
}

/// The interval of [0, n) that a chain of (index, ranks) cuts leaves.
std::pair<int64_t, int64_t> chunk(int64_t n, const std::vector<std::pair<int64_t, int64_t>>& cuts) {
  int64_t begin = 0;
  for (const auto& [index, ranks] : cuts) {
    const int64_t each = (n + ranks - 1) / ranks;
    const int64_t start = std::min(index * each, n);
    begin += start;
    n = std::min(each, n - start);
  }
  return {begin, n};
}

/// What this rank holds of a whole tensor: source axes in mesh order (plain Shard), FSDP last.
torch::Tensor brute_force_part(const torch::Tensor& whole, const Drawn& parameter, const DeviceMesh& source,
                               const DeviceMesh& fsdp, bool fsdp_cuts) {
  torch::Tensor part = whole;
  for (int64_t d = 0; d < whole.dim(); ++d) {
    std::vector<std::pair<int64_t, int64_t>> cuts;
    for (std::size_t axis = 0; axis < parameter.placements.size(); ++axis) {
      const Placement& placement = parameter.placements[axis];
      if (placement.is_shard() && (placement.dim() + whole.dim()) % whole.dim() == d)
        cuts.emplace_back(source.get_local_rank(static_cast<int64_t>(axis)), source.size(static_cast<int64_t>(axis)));
    }
    if (fsdp_cuts && d == parameter.shard_dim) cuts.emplace_back(fsdp.get_local_rank(-1), fsdp.size(-1));
    const auto [begin, size] = chunk(whole.size(d), cuts);
    part = part.narrow(d, begin, size);
  }
  return part;
}

/// Every element lies in the boxes of equally many ranks, and the boxes hold the local elements in their order.
void expect_boxes(const DTensor& tensor, const torch::Tensor& whole, const Comm& ranks, const std::string& what) {
  const torch::Tensor count = torch::zeros(whole.sizes());
  std::vector<torch::Tensor> values;
  for (const Box& box : tensor.boxes()) {
    torch::Tensor seen = count, part = whole;
    for (std::size_t d = 0; d < box.size.size(); ++d) {
      seen = seen.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
      part = part.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
    }
    seen.add_(1);
    values.push_back(part.reshape({-1}));
  }
  const torch::Tensor mine = values.empty() ? torch::zeros({0}) : torch::cat(values);
  EXPECT_TRUE(torch::equal(tensor.to_local().reshape({-1}), mine)) << what;
  ranks.all_reduce(count).wait();
  EXPECT_GE(count.min().item<float>(), 1) << what;
  EXPECT_EQ(count.min().item<float>(), count.max().item<float>()) << what;
}

struct MeshCase {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  std::size_t fsdp_axes = 1;
};

const std::vector<MeshCase> kMeshCases = {
    {{2, 2}, {"dp_shard", "tp"}, 1},
    {{1, 3}, {"dp_shard", "tp"}, 1},
    {{3, 2}, {"dp_shard", "tp"}, 1},
    {{2, 2, 2}, {"dp_replicate", "dp_shard", "tp"}, 2},
    {{2, 1, 2}, {"dp_replicate", "dp_shard", "tp"}, 2},
    {{2, 2, 2}, {"edp_shard", "ep", "tp"}, 1},
};

DeviceMesh fsdp_mesh(const DeviceMesh& mesh, const MeshCase& c) {
  return mesh[std::vector<std::string>(c.names.begin(), c.names.begin() + static_cast<std::ptrdiff_t>(c.fsdp_axes))];
}
DeviceMesh source_mesh(const DeviceMesh& mesh, const MeshCase& c) {
  return mesh[std::vector<std::string>(c.names.begin() + static_cast<std::ptrdiff_t>(c.fsdp_axes), c.names.end())];
}

void check_random_model(const MeshCase& c, uint32_t seed) {
  std::mt19937 random(seed);
  const bool ragged = seed % 3 == 0;
  const DeviceMesh mesh = init_device_mesh("cpu", c.shape, c.names);
  const DeviceMesh fsdp = fsdp_mesh(mesh, c), source = source_mesh(mesh, c);
  const std::vector<Drawn> drawn = draw(random, c.names.size() - c.fsdp_axes, ragged);
  const std::string where = concat("seed ", seed, " on ", mesh.to_string());

  Bag bag;
  FullyShardOptions options{.mesh = fsdp};
  options.shard_layout = ragged ? ShardLayout::kRagged : ShardLayout::kPerParameter;
  options.comm_fusion = seed % 3 != 1;
  if (!ragged)
    options.shard_placement_fn = [&](const std::string& name, const at::Tensor&) {
      return drawn[static_cast<std::size_t>(std::stoi(name.substr(1)))].shard_dim;
    };
  std::vector<torch::Tensor> wholes;
  SourceShardInfos infos;
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const int64_t numel = c10::multiply_integers(drawn[i].shape);
    wholes.push_back((torch::arange(numel, torch::kFloat) + 100.0 * static_cast<double>(i)).view(drawn[i].shape));
    const DTensor block = distribute_tensor(wholes[i], source, drawn[i].placements);
    const torch::Tensor parameter = bag->add(drawn[i].shape.empty() ? wholes[i].clone() : block.to_local(), drawn[i].trainable);
    infos.set(parameter, {.mesh = source, .placements = drawn[i].placements, .shape = drawn[i].shape});
    if (i == 0 && seed % 5 == 0) options.replicate_params = {parameter};
  }
  options.source_shard_infos = infos;
  const HSDPModule root = fully_shard(bag, options);
  std::size_t seen = 0;
  for (const auto& [name, tensor] : root.named_dtensors()) {
    const auto i = static_cast<std::size_t>(std::stoi(name.substr(1)));
    const std::string what = concat(where, ", ", name, ' ', tensor.to_string());
    EXPECT_EQ(tensor.shape(), drawn[i].shape) << what;
    EXPECT_TRUE(torch::equal(tensor.full_tensor(), wholes[i])) << what;
    expect_boxes(tensor, wholes[i], root.unit_comm(), what);
    const bool cut = !(i == 0 && seed % 5 == 0);
    const bool scalar = drawn[i].shape.empty();
    if (ragged && cut) {
      // Even cuts share one ragged plan; the others are laid out per parameter.
      int64_t product = 1;
      bool even = true;
      for (std::size_t d = 0; d < drawn[i].shape.size(); ++d) {
        product = 1;
        for (const int64_t axis : tensor.layout().axes(static_cast<int64_t>(d)))
          product *= axis < static_cast<int64_t>(c.fsdp_axes) ? 1 : mesh.size(axis);
        even = even && drawn[i].shape[d] % product == 0;
      }
      EXPECT_EQ(tensor.layout().ragged_axis().has_value(), even || scalar) << what;
    } else if (!scalar) {
      const torch::Tensor want = brute_force_part(wholes[i], drawn[i], source, fsdp, cut);
      EXPECT_TRUE(torch::equal(tensor.to_local(), want)) << what;
    }
    ++seen;
  }
  EXPECT_EQ(seen, drawn.size()) << where;
  // A gathered parameter is the block that the model's code computes with.
  root.unshard();
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    if (drawn[i].shape.empty()) continue;
    const torch::Tensor block = distribute_tensor(wholes[i], source, drawn[i].placements).to_local();
    EXPECT_TRUE(torch::equal(bag->handles[i].detach(), block)) << where << " p" << i;
  }
}

TEST(SourceLayout, RandomModelsEqualBruteForce) {
  for (const MeshCase& c : kMeshCases) {
    run_ranks(ranks_of(c.shape), [&] {
      for (uint32_t seed = 0; seed < 30; ++seed) check_random_model(c, seed);
    });
  }
}

/// The worked case: 10 x 3, tp 2 on dim 0, fsdp 2. Rank (f, t) owns rows [5t + 3f, min(5t + 3f + 3, 5t + 5)).
TEST(SourceLayout, WorkedCaseOfTenRows) {
  run_ranks(4, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"fsdp", "tp"});
    const int64_t f = mesh.get_local_rank("fsdp"), t = mesh.get_local_rank("tp");
    const torch::Tensor whole = torch::arange(30, torch::kFloat).view({10, 3});
    Bag bag;
    SourceShardInfos infos;
    infos.set(bag->add(whole.narrow(0, 5 * t, 5).clone()), {.mesh = mesh["tp"], .placements = {Shard(0)}});
    const HSDPModule root = fully_shard(bag, {.mesh = mesh["fsdp"], .source_shard_infos = infos});
    const DTensor tensor = root.named_dtensors().front().second;
    EXPECT_EQ(tensor.shape(), (std::vector<int64_t>{10, 3}));
    EXPECT_EQ(tensor.placements(), (std::vector<Placement>{StridedShard(0, 2), Shard(0)}));
    EXPECT_EQ(tensor.device_mesh().mesh_dim_names(), (std::vector<std::string>{"fsdp", "tp"}));
    const int64_t begin = 5 * t + 3 * f, end = std::min(5 * t + 3 * f + 3, 5 * t + 5);
    EXPECT_TRUE(torch::equal(tensor.to_local(), whole.narrow(0, begin, end - begin)));
    EXPECT_TRUE(torch::equal(tensor.full_tensor(), whole));
  });
}

/// Placements [R, R, Shard(0)] on (2, 4, 2) with FSDP on axis 1 become [R, StridedShard(0, 2), Shard(0)].
TEST(SourceLayout, WorkedCaseOfThreeAxes) {
  run_ranks(16, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 4, 2}, {"dp_replicate", "dp_shard", "tp"});
    Bag bag;
    SourceShardInfos infos;
    infos.set(bag->add(torch::ones({8, 2})), {.mesh = mesh["tp"], .placements = {Shard(0)}});
    const HSDPModule root =
        fully_shard(bag, {.mesh = mesh[std::vector<std::string>{"dp_replicate", "dp_shard"}], .source_shard_infos = infos});
    EXPECT_EQ(root.named_dtensors().front().second.placements(),
              (std::vector<Placement>{Replicate(), StridedShard(0, 2), Shard(0)}));
  });
}

/// Whole values go in and come out by every way, whatever has cut the parameters.
TEST(SourceLayout, WholeValuesGoIn) {
  for (const auto layout : kLayouts) {
    run_ranks(4, [&](int rank) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
      const DeviceMesh tp = mesh["tp"];
      const std::vector<std::vector<int64_t>> shapes = {{5, 3}, {4, 6}, {7}, {3, 2}};
      const std::vector<Placement> placements = {Shard(0), Shard(1), Replicate(), Shard(0)};
      Bag bag;
      SourceShardInfos infos;
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        const torch::Tensor block = distribute_tensor(torch::empty(shapes[i]), tp, {placements[i]}).to_local();
        const bool on_meta = i == 3;
        infos.set(bag->add(on_meta ? torch::empty(block.sizes(), torch::kMeta) : block),
                  {.mesh = tp, .placements = {placements[i]}, .shape = shapes[i]});
      }
      const HSDPModule root = fully_shard(bag, {.mesh = mesh["dp_shard"], .shard_layout = layout, .source_shard_infos = infos});
      const auto expect_values = [&](const fsdp::NamedTensors& values, const char* what) {
        const Tensors whole = full_parameters(root);
        for (const auto& [name, value] : values) EXPECT_TRUE(torch::equal(whole.at(name), value)) << what << ' ' << name;
      };
      const auto values = [&](float base) {
        fsdp::NamedTensors all;
        for (std::size_t i = 0; i < shapes.size(); ++i)
          all.emplace_back(concat('p', i),
                           torch::arange(c10::multiply_integers(shapes[i]), torch::kFloat).view(shapes[i]) + base);
        return all;
      };
      root.load_full(values(1));
      expect_values(values(1), "load_full");
      root.load_from_rank0(rank == 0 ? values(2) : fsdp::NamedTensors());
      expect_values(values(2), "load_from_rank0");
      fsdp::NamedTensors drawn;
      root.reset_parameters(7, [&](const std::string& name, at::Tensor& whole, at::Generator& generator) {
        whole.uniform_(-1, 1, generator);
        drawn.emplace_back(name, whole.clone());
      });
      expect_values(drawn, "reset_parameters");
      for (std::size_t i = 0; i < shapes.size(); ++i)
        EXPECT_EQ(drawn[i].second.sizes(),
                  at::IntArrayRef(shapes.at(static_cast<std::size_t>(std::stoi(drawn[i].first.substr(1))))));
      // What torch::load may put in place of a leaf: the whole tensor.
      bag->parameters()[0].set_data(values(3)[0].second.clone());
      expect_values({values(3)[0]}, "replaced");
      EXPECT_THAT(value_error([&] {
                    return root.load_full({{"p0", torch::zeros({3, 3})}}, false);
                  }),
                  HasSubstr("p0 has shape [3, 3], want [5, 3]"));
    });
  }
}

/// The map holds nothing: wrapping frees the originals, as measured, and the end of the model its entries.
TEST(SourceLayout, OriginalsAreFreed) {
  constexpr int64_t kRows = 1024, kColumns = 256, kBytes = kRows * kColumns * 4;
  const CountCpuAllocations count;
  std::barrier meet(4);  // of the threads: a barrier of the group would allocate
  run_ranks(4, {.allocator = counting_allocator()}, [&](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
    SourceShardInfos infos;
    {
      Bag bag;
      infos.set(bag->add(torch::ones({kRows, kColumns})), {.mesh = mesh["tp"], .placements = {Shard(0)}});
      const auto original = bag->handles[0].storage().getWeakStorageImpl();
      meet.arrive_and_wait();
      const int64_t before = allocation_counts().live;
      meet.arrive_and_wait();
      const HSDPModule root = fully_shard(bag, {.mesh = mesh["dp_shard"], .source_shard_infos = infos});
      EXPECT_TRUE(original.expired()) << "the storage of the original";
      EXPECT_EQ(infos.size(), 1U);
      meet.arrive_and_wait();
      if (rank == 0) {
        EXPECT_NEAR(static_cast<double>(before - allocation_counts().live), 4.0 * kBytes / 2, 64e3) << "half of each is left";
      }
      meet.arrive_and_wait();
    }
    EXPECT_EQ(infos.size(), 0U) << "the model is gone";
    EXPECT_EQ(infos.entries().size(), 1U);
  });
}

class Errors : public ::testing::Test {
 protected:
  /// What fully_shard says about a bag of two 4 x 4 parameters.
  static void expect(const std::function<void(const DeviceMesh&, const Bag&, FullyShardOptions&, SourceShardInfos&)>& change,
                     const ::testing::Matcher<std::string>& message) {
    run_ranks(4, [&] {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp_shard", "tp"});
      Bag bag;
      bag->add(torch::ones({4, 4}));
      bag->add(torch::ones({4, 4}));
      SourceShardInfos infos;
      for (const torch::Tensor& handle : bag->handles) infos.set(handle, {.mesh = mesh["tp"], .placements = {Shard(0)}});
      FullyShardOptions options{.mesh = mesh["dp_shard"]};
      change(mesh, bag, options, infos);
      options.source_shard_infos = infos;
      EXPECT_THAT(value_error([&] { return fully_shard(bag, options); }), message);
      EXPECT_EQ(bag->handles[0].sizes(), (std::vector<int64_t>{4, 4}));
      EXPECT_TRUE(bag->handles[0].is_same(bag->parameters()[0])) << "the module is unchanged";
    });
  }
};

TEST_F(Errors, EntryMissing) {
  expect(
      [](auto&, auto& bag, auto&, auto& infos) {
        SourceShardInfos fewer;
        fewer.set(bag->handles[0], infos.find(bag->handles[0])->info);
        infos = fewer;
      },
      HasSubstr(
          "[fully_shard] source_shard_infos has no entry, want one for every parameter of the unit (parameter p1 of unit Bag"));
}

TEST_F(Errors, EntryTooMany) {
  const torch::Tensor stranger = torch::ones({3});
  expect([&](auto& mesh, auto&, auto&,
             auto& infos) { infos.set(stranger, {.mesh = mesh["tp"], .placements = {Shard(0)}}, "other.weight"); },
         HasSubstr("has an entry for parameter other.weight, which is none of the parameters of this unit"));
  expect([&](auto&, auto& bag, auto& options, auto&) { options.ignored_params = {bag->handles[1]}; },
         HasSubstr("has an entry for a tensor of shape [4, 4], which is none"));
}

TEST_F(Errors, OriginFlag) {
  expect(
      [](auto& mesh, auto& bag, auto&, auto& infos) {
        infos.set(bag->handles[1], {.mesh = mesh["tp"], .placements = {Shard(0)}, .origin_is_dtensor = true});
      },
      HasSubstr("origin_is_dtensor is true, want false: the parameter is a plain tensor (parameter p1"));
}

TEST_F(Errors, Placements) {
  const auto with = [](std::vector<Placement> placements) {
    return [placements](auto& mesh, auto& bag, auto&, auto& infos) {
      infos.set(bag->handles[1], {.mesh = mesh["tp"], .placements = placements});
    };
  };
  expect(with({}), HasSubstr("source layout has 0 placements [], want one for each of the 1 axes"));
  expect(with({Partial()}), HasSubstr("source layout is Partial(sum) on axis tp, want Shard, StridedShard or Replicate"));
  expect(with({RaggedShard(1, {1, 3})}), HasSubstr("on axis tp, want Shard, StridedShard or Replicate"));
  expect(with({Shard(2)}), AllOf(HasSubstr("want a dimension of a tensor with 2"), HasSubstr("(parameter p1 of unit Bag")));
  expect(with({Shard(-3)}), HasSubstr("want a dimension of a tensor with 2"));
  expect(with({StridedShard(0, 2)}), HasSubstr("split factor"));
}

TEST_F(Errors, Shapes) {
  const auto with = [](std::vector<int64_t> shape) {
    return [shape](auto& mesh, auto& bag, auto&, auto& infos) {
      infos.set(bag->handles[0], {.mesh = mesh["tp"], .placements = {Shard(0)}, .shape = shape});
    };
  };
  expect(with({4, 4}),
         AllOf(HasSubstr("parameter has shape [4, 4], want [2, 4], this rank's block of [4, 4] in"), HasSubstr("p0")));
  expect(with({8}), HasSubstr("whole parameter has shape [8], want 2 dimensions as in its block [4, 4]"));
  expect(
      [](auto& mesh, auto& bag, auto&, auto& infos) {
        infos.set(bag->handles[0],
                  {.mesh = mesh["tp"], .placements = {Shard(0)}, .copy_gradients = std::vector<CopyGradient>(2)});
      },
      HasSubstr("source layout has 2 copy_gradients, want none, or one for each of the 1 axes"));
}

TEST_F(Errors, Meshes) {
  expect(
      [](auto&, auto& bag, auto&, auto& infos) {
        const DeviceMesh other = init_device_mesh("cpu", {2, 2}, {"dp_shard", "ep"});
        infos.set(bag->handles[1], {.mesh = other["ep"], .placements = {Shard(0)}});
      },
      HasSubstr("source mesh is DeviceMesh(cpu, ep=2)"));
  expect(
      [](auto& mesh, auto&, auto& options, auto&) {
        options.mesh = init_device_mesh("cpu", {4}, {"dp"});
        static_cast<void>(mesh);
      },
      AllOf(HasSubstr("do not join the unit's mesh DeviceMesh(cpu, dp=4)"), HasSubstr("different root meshes")));
  expect(
      [](auto&, auto& bag, auto& options, auto& infos) {
        const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"tp", "dp_shard"});
        options.mesh = mesh["dp_shard"];
        for (const torch::Tensor& handle : bag->handles) infos.set(handle, {.mesh = mesh["tp"], .placements = {Shard(0)}});
      },
      AllOf(HasSubstr("those of FSDP before the others"), HasSubstr("out of order")));
  expect([](auto& mesh, auto&, auto& options, auto&) { options.mesh = mesh; }, HasSubstr("do not join the unit's mesh"));
}

/// Without the whole shape an uneven cut looks even on each rank for itself; the first forward finds out.
TEST(SourceLayout, UnevenCutWithoutShapeIsFoundAtTheFirstForward) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp_shard", "tp"});
    Bag bag;
    SourceShardInfos infos;
    infos.set(bag->add(torch::ones({rank == 0 ? 3 : 2, 2})), {.mesh = mesh["tp"], .placements = {Shard(0)}});
    const HSDPModule root = fully_shard(bag, {.mesh = mesh["dp_shard"], .source_shard_infos = infos});
    EXPECT_THAT(message_of<ValueError>([&] { return bag->forward(torch::ones({1})); }),
                AllOf(HasSubstr("[6, 2]"), HasSubstr("[4, 2]")));
  });
}

/// None is none, and an empty layout is no source axis at all.
TEST(SourceLayout, NoSourceAxes) {
  run_ranks(2, [] {
    Bag bag;
    bag->add(torch::ones({4, 4}));
    FullyShardOptions options = on_all();
    SourceShardInfos infos;
    infos.set(bag->handles[0], {});
    options.source_shard_infos = infos;
    const HSDPModule root = fully_shard(bag, options);
    EXPECT_EQ(root.named_dtensors().front().second.device_mesh(), options.mesh);
    EXPECT_EQ(root.unit_comm().size(), 2);
    EXPECT_THAT(value_error([&] { return infos.set(torch::Tensor(), {}, "x"); }), HasSubstr("parameter x is undefined"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
