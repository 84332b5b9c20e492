#include <hyper_parallel/dtensor/dtensor.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>

#include "support/message_of.h"
#include "support/rank_threads.h"

namespace hyper_parallel {
namespace {

using testing::run_ranks;
using testing::value_error;
using Sizes = std::vector<std::int64_t>;
using Placements = std::vector<Placement>;

const std::vector<Sizes> kMeshes = {{1}, {1, 1}, {2}, {2, 1}, {3}, {1, 3}, {4}, {2, 2}, {2, 1, 2}, {8}, {2, 4}, {2, 2, 2}};

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

DeviceMesh make_mesh(const Sizes& shape) {
  const std::vector<std::string> names = {"a", "b", "c"};
  return init_device_mesh("cpu", shape, {names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shape.size())});
}

Comm group_of(const DeviceMesh& mesh) { return mesh.ndim() == 1 ? mesh.get_group(0) : mesh.flatten().get_group(0); }

std::int64_t position_of(const DeviceMesh& mesh) {
  std::int64_t position = 0;
  const auto coordinate = mesh.get_coordinate();
  for (std::size_t axis = 0; axis < coordinate->size(); ++axis) position = position * mesh.shape()[axis] + (*coordinate)[axis];
  return position;
}

Sizes coordinate_at(std::int64_t position, const Sizes& mesh) {
  Sizes coordinate(mesh.size());
  for (std::size_t axis = mesh.size(); axis-- > 0;) {
    coordinate[axis] = position % mesh[axis];
    position /= mesh[axis];
  }
  return coordinate;
}

torch::Tensor view_box(const torch::Tensor& full, const Box& box) {
  torch::Tensor part = full;
  for (std::size_t d = 0; d < box.size.size(); ++d) part = part.narrow(static_cast<std::int64_t>(d), box.offset[d], box.size[d]);
  return part;
}

// The local tensor that a layout gives a rank, cut out of the whole one.
torch::Tensor cut(const torch::Tensor& full, const Layout& layout, const Sizes& coordinate) {
  std::vector<torch::Tensor> parts = {torch::empty({0}, full.options())};
  const Sizes shape = full.sizes().vec();
  for (const auto& box : layout.boxes(shape, coordinate)) parts.push_back(view_box(full, box).reshape(-1));
  return torch::cat(parts).view(layout.local_shape(shape, coordinate));
}

std::set<std::int64_t> element_set(const Sizes& shape, const Layout& layout, const Sizes& coordinate) {
  const auto numbers = cut(torch::arange(product(shape)).view(shape), layout, coordinate).reshape(-1);
  const auto* data = numbers.data_ptr<std::int64_t>();
  return {data, data + numbers.numel()};
}

// Same random cases on every rank.
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }

  Sizes shape() {
    Sizes result(static_cast<std::size_t>(pick(0, 3)));
    for (auto& size : result) size = pick(0, 9) == 0 ? 0 : pick(1, 9);
    return result;
  }

  // Integers, so that sums are exact in every dtype; no zeros, so that products see all ranks.
  torch::Tensor tensor(const Sizes& shape, torch::ScalarType dtype) {
    torch::Tensor values = torch::empty({product(shape)}, torch::kLong);
    for (std::int64_t i = 0; i < values.numel(); ++i) values[i] = pick(1, 99);
    return values.view(shape).to(dtype);
  }

  Layout layout(const Sizes& mesh, const Sizes& shape, bool partial) {
    std::vector<Layout::Axes> cuts(shape.size());
    std::vector<std::pair<std::int64_t, Placement>> others;
    Sizes axes(mesh.size());
    std::iota(axes.begin(), axes.end(), 0);
    std::shuffle(axes.begin(), axes.end(), engine_);
    bool ragged = pick(0, 3) == 0;
    std::int64_t first_dim = 0;
    for (const std::int64_t axis : axes) {
      if (ragged) {
        others.emplace_back(axis, ragged_for(shape, mesh[static_cast<std::size_t>(axis)]));
        ragged = false;
        first_dim = others.back().second.ragged_dims();  // the units fit uncut dimensions
        continue;
      }
      const std::int64_t choice = pick(first_dim, static_cast<std::int64_t>(shape.size()) + 1);
      if (choice < static_cast<std::int64_t>(shape.size())) {
        cuts[static_cast<std::size_t>(choice)].push_back(axis);
      } else if (partial && pick(0, 1) == 0) {
        const std::array ops = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax};
        others.emplace_back(axis, Partial(ops[static_cast<std::size_t>(pick(0, 3))]));
      }
    }
    return Layout::from_axes(mesh, cuts, others);
  }

 private:
  Placement ragged_for(const Sizes& shape, std::int64_t ranks) {
    const std::int64_t dims = pick(0, static_cast<std::int64_t>(shape.size()));
    Sizes units(static_cast<std::size_t>(ranks), 0);
    const std::int64_t positions = std::max<std::int64_t>(1, product({shape.begin(), shape.begin() + dims}));
    for (std::int64_t i = 0; i < positions; ++i) ++units[static_cast<std::size_t>(pick(0, ranks - 1))];
    return RaggedShard(dims, units);
  }

  std::mt19937 engine_;
};

#define EXPECT_TENSOR(got, want)                                                                                         \
  EXPECT_TRUE((got).sizes() == (want).sizes() && (got).scalar_type() == (want).scalar_type() && torch::equal(got, want)) \
      << "got " << (got) << "\nwant " << (want)

constexpr std::array kDtypes = {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16,
                                torch::kLong,  torch::kInt,    torch::kByte, torch::kBool};

class DTensorOnMesh : public ::testing::TestWithParam<Sizes> {};

TEST_P(DTensorOnMesh, RedistributesBetweenAnyTwoLayouts) {
  run_ranks(static_cast<int>(product(GetParam())), [&] {
    const DeviceMesh mesh = make_mesh(GetParam());
    const Sizes coordinate = *mesh.get_coordinate();
    const Comm group = group_of(mesh);
    Random random(17);
    for (int round = 0; round < 40 && !::testing::Test::HasFailure(); ++round) {
      const Sizes shape = random.shape();
      const auto full = random.tensor(shape, kDtypes[static_cast<std::size_t>(random.pick(0, 7))]);
      const Layout from = random.layout(mesh.shape(), shape, false);
      const Layout to = random.layout(mesh.shape(), shape, false);
      SCOPED_TRACE(concat(from.to_string(), " -> ", to.to_string(), ' ', full.sizes(), " rank ", position_of(mesh)));
      DistributeOptions options;
      if (random.pick(0, 1) == 0) options.src_data_rank = random.pick(0, mesh.size() - 1);
      const bool has_data = options.src_data_rank.value_or(position_of(mesh)) == position_of(mesh);
      const DTensor source = distribute_tensor(has_data ? full : torch::zeros_like(full), mesh, from.placements(), options);
      EXPECT_TENSOR(source.to_local(), cut(full, from, coordinate));
      EXPECT_EQ(source.shape(), shape);

      const CommCounters before = group.counters();
      const DTensor target = source.redistribute(to.placements());
      const CommCounters after = group.counters();
      EXPECT_EQ(target.layout(), to);
      EXPECT_EQ(target.shape(), shape);
      EXPECT_TENSOR(target.to_local(), cut(full, to, coordinate));
      // Exactly the elements that this rank wants and does not hold have come in.
      std::set<std::int64_t> missing = element_set(shape, to, coordinate);
      for (const std::int64_t element : element_set(shape, from, coordinate)) missing.erase(element);
      EXPECT_EQ(after.bytes_received - before.bytes_received,
                static_cast<std::int64_t>(missing.size()) * static_cast<std::int64_t>(full.element_size()));
      EXPECT_TENSOR(target.full_tensor(), full);
    }
  });
}

// Reduces all ranks' contributions to the whole tensor, later axes first.
torch::Tensor reduce_contributions(const std::vector<torch::Tensor>& by_position, const Sizes& mesh, const Layout& layout) {
  std::vector<torch::Tensor> values = by_position;
  for (std::size_t axis = mesh.size(); axis-- > 0;) {
    std::vector<torch::Tensor> next;
    const auto count = static_cast<std::size_t>(mesh[axis]);
    for (std::size_t first = 0; first < values.size(); first += count) {
      torch::Tensor value = values[first];
      for (std::size_t i = 1; i < count && layout.placements()[axis].is_partial(); ++i) {
        switch (layout.placements()[axis].reduce_op()) {
          case ReduceOp::kSum:
          case ReduceOp::kAvg:
            value = value + values[first + i];
            break;
          case ReduceOp::kProduct:
            value = value * values[first + i];
            break;
          case ReduceOp::kMin:
            value = torch::minimum(value, values[first + i]);
            break;
          case ReduceOp::kMax:
            value = torch::maximum(value, values[first + i]);
            break;
        }
      }
      next.push_back(value);
    }
    values = std::move(next);
  }
  return values.front();
}

TEST_P(DTensorOnMesh, ReducesPartialValues) {
  run_ranks(static_cast<int>(product(GetParam())), [&] {
    const DeviceMesh mesh = make_mesh(GetParam());
    const Sizes coordinate = *mesh.get_coordinate();
    Random random(18);
    int partial = 0;
    for (int round = 0; round < 40 && !::testing::Test::HasFailure(); ++round) {
      const Sizes shape = random.shape();
      const Layout from = random.layout(mesh.shape(), shape, true);
      const Layout to = random.layout(mesh.shape(), shape, true);
      partial += from.has_partial() ? 1 : 0;
      SCOPED_TRACE(concat(from.to_string(), " -> ", to.to_string(), " rank ", position_of(mesh)));
      // Ranks that differ only along axes that are not partial contribute the same values.
      std::map<Sizes, torch::Tensor> contribution_of;
      std::vector<torch::Tensor> by_position;
      for (std::int64_t position = 0; position < mesh.size(); ++position) {
        Sizes key = coordinate_at(position, mesh.shape());
        for (std::size_t axis = 0; axis < key.size(); ++axis) key[axis] = from.placements()[axis].is_partial() ? key[axis] : 0;
        if (contribution_of.count(key) == 0) contribution_of[key] = random.tensor(shape, torch::kDouble);
        by_position.push_back(contribution_of[key]);
      }
      const auto want = reduce_contributions(by_position, mesh.shape(), from);
      const auto local = cut(by_position[static_cast<std::size_t>(position_of(mesh))], from, coordinate);
      const DTensor source = DTensor::from_local(local, mesh, from.placements(), {.shape = shape});
      const DTensor target = source.redistribute(to.placements());
      if (!to.has_partial()) {
        EXPECT_TENSOR(target.to_local(), cut(want, to, coordinate));
      }
      EXPECT_TENSOR(target.full_tensor(), want);
      EXPECT_TENSOR(source.full_tensor(), want);
      EXPECT_TENSOR(source.to_local(), local);
    }
    EXPECT_GT(partial, 5);
  });
}

TEST_P(DTensorOnMesh, FromLocalAgreesOnTheShape) {
  run_ranks(static_cast<int>(product(GetParam())), [&] {
    const DeviceMesh mesh = make_mesh(GetParam());
    Random random(19);
    for (int round = 0; round < 25 && !::testing::Test::HasFailure(); ++round) {
      const Sizes shape = random.shape();
      const auto full = random.tensor(shape, torch::kFloat);
      const Layout layout = random.layout(mesh.shape(), shape, false);
      if (layout.ragged_axis() && layout.placements()[static_cast<std::size_t>(*layout.ragged_axis())].ragged_dims() > 1)
        continue;
      SCOPED_TRACE(concat(layout.to_string(), ' ', full.sizes()));
      const auto local = cut(full, layout, *mesh.get_coordinate());
      const DTensor tensor = DTensor::from_local(local, mesh, layout.placements());
      EXPECT_EQ(tensor.shape(), shape);
      EXPECT_EQ(tensor.layout(), layout);
      EXPECT_TENSOR(tensor.full_tensor(), full);
    }
  });
}

std::string mesh_name(const ::testing::TestParamInfo<Sizes>& mesh) {
  std::string name;
  for (const std::int64_t size : mesh.param) name += concat(name.empty() ? "" : "x", size);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Meshes, DTensorOnMesh, ::testing::ValuesIn(kMeshes), mesh_name);

// Bytes that this rank receives and sends in redistribute.
std::pair<std::int64_t, std::int64_t> traffic(const DTensor& source, const Placements& to) {
  const Comm group = group_of(source.device_mesh());
  const CommCounters before = group.counters();
  static_cast<void>(source.redistribute(to));
  const CommCounters after = group.counters();
  return {after.bytes_received - before.bytes_received, after.bytes_sent - before.bytes_sent};
}

TEST(DTensorTraffic, ReplicasShareTheSending) {
  run_ranks(4, [] {
    const DeviceMesh mesh = make_mesh({2, 2});
    const auto full = torch::arange(48, torch::kFloat).view({8, 6});
    const DTensor hsdp = distribute_tensor(full, mesh, {Replicate(), Shard(0)});
    EXPECT_EQ(traffic(hsdp, {Replicate(), Replicate()}), std::pair(24L * 4, 24L * 4));
    EXPECT_EQ(traffic(hsdp, {Replicate(), Shard(1)}), std::pair(12L * 4, 12L * 4));
  });
}

TEST(DTensorTraffic, PartialToShardIsAReduceScatter) {
  run_ranks(4, [] {
    const DeviceMesh mesh = make_mesh({4});
    const DTensor partial = DTensor::from_local(torch::ones({8, 8}), mesh, {Partial()}, {.shape = Sizes{8, 8}});
    EXPECT_EQ(traffic(partial, {Shard(0)}), std::pair(3L * 16 * 4, 3L * 16 * 4));
    EXPECT_EQ(traffic(partial, {Shard(1)}), std::pair(3L * 16 * 4, 3L * 16 * 4));
    // Reduce-scatter, then gather: 2 (W - 1) / W of the tensor.
    EXPECT_EQ(traffic(partial, {Replicate()}), std::pair(2 * 3L * 16 * 4, 2 * 3L * 16 * 4));
  });
}

TEST(DTensorTraffic, NothingIsSentWhenEveryRankHasItsPart) {
  run_ranks(3, [] {
    const DeviceMesh mesh = make_mesh({3});
    const auto full = torch::arange(10, torch::kFloat);
    const DTensor replicated = distribute_tensor(full, mesh, {Replicate()});
    const Comm group = group_of(mesh);
    const auto calls = group.counters().calls;
    EXPECT_TENSOR(replicated.redistribute({Shard(0)}).to_local(), full.narrow(0, 4 * group.rank(), group.rank() == 2 ? 2 : 4));
    const DTensor sharded = replicated.redistribute({Shard(0)});
    static_cast<void>(sharded.redistribute({RaggedShard(1, {2, 2, 1})}));
    EXPECT_EQ(sharded.redistribute({Shard(-1)}).to_local().data_ptr(), sharded.to_local().data_ptr())
        << "equal layouts share memory";
    EXPECT_EQ(group.counters().calls, calls);
  });
}

// Logical 10x3, tp=2 on dim 0, then fsdp=2: rank (f, t) owns rows [5t+3f, min(5t+3f+3, 5t+5)).
TEST(DTensor, WorkedCaseOfTwoAxesOnOneDimension) {
  run_ranks(4, [] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"fsdp", "tp"});
    const auto full = torch::arange(30, torch::kFloat).view({10, 3});
    const DTensor tensor = distribute_tensor(full, mesh, {StridedShard(0, 2), Shard(0)});
    const std::int64_t f = mesh.get_local_rank("fsdp"), t = mesh.get_local_rank("tp");
    const std::int64_t begin = 5 * t + 3 * f;
    EXPECT_TENSOR(tensor.to_local(), full.slice(0, begin, std::min(begin + 3, 5 * t + 5)));
    EXPECT_EQ(tensor.boxes(), (std::vector<Box>{{{begin, 0}, {f == 0 ? 3 : 2, 3}}}));
    EXPECT_EQ(tensor.to_string(), "DTensor([10, 3], Layout(fsdp=2: _StridedShard(dim=0, sf=2), tp=2: Shard(dim=0)))");
    EXPECT_TENSOR(tensor.full_tensor(), full);
    EXPECT_TENSOR(tensor.redistribute({Shard(0), Shard(0)}).full_tensor(), full);
  });
}

TEST(DTensor, LowPrecisionSumsInFp32AndInRankOrder) {
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = make_mesh({4});
    // In bf16, 256 + 1 is 256: only an fp32 sum of 256, 1, 1, 1 rounds to 260.
    const auto local = torch::full({5}, rank == 0 ? 256.0 : 1.0, torch::kBFloat16);
    const DTensor sum = DTensor::from_local(local, mesh, {Partial()}, {.shape = Sizes{5}});
    EXPECT_TENSOR(sum.full_tensor(), torch::full({5}, 260.0, torch::kBFloat16));
    // In fp32, 1e8 - 1e8 + 1 is 1 in rank order and 0 in others.
    const std::array values = {1e8, -1e8, 1.0, 0.0};
    const auto ordered = torch::full({5}, values[static_cast<std::size_t>(rank)], torch::kFloat);
    EXPECT_TENSOR(DTensor::from_local(ordered, mesh, {Partial()}, {.shape = Sizes{5}}).full_tensor(), torch::ones({5}));
    const DTensor average = DTensor::from_local(torch::full({}, rank * 2.0), mesh, {Partial(ReduceOp::kAvg)}, {.shape = Sizes{}});
    EXPECT_TENSOR(average.full_tensor(), torch::full({}, 3.0));
  });
}

TEST(DTensor, BecomesPartialWithNeutralElements) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = make_mesh({2});
    const auto full = torch::arange(1, 4, torch::kFloat);
    const auto local_of = [&](ReduceOp op) { return distribute_tensor(full, mesh, {Partial(op)}).to_local(); };
    EXPECT_TENSOR(local_of(ReduceOp::kSum), rank == 0 ? full : torch::zeros({3}));
    EXPECT_TENSOR(local_of(ReduceOp::kProduct), rank == 0 ? full : torch::ones({3}));
    EXPECT_TENSOR(local_of(ReduceOp::kAvg), full);
    EXPECT_TENSOR(local_of(ReduceOp::kMax), full);
    const DTensor sum = distribute_tensor(full, mesh, {Partial()});
    EXPECT_TENSOR(sum.redistribute({Partial(ReduceOp::kMin)}).to_local(), full);
  });
}

TEST(DTensor, TakesNonContiguousAndGradientTrackedTensors) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = make_mesh({2});
    const auto full = torch::arange(24, torch::kFloat).view({4, 6});
    const auto local = full.t().narrow(0, 3 * rank, 3).set_requires_grad(true);
    const DTensor tensor = DTensor::from_local(local, mesh, {Shard(0)});
    EXPECT_TENSOR(tensor.redistribute({Shard(1)}).to_local(), full.t().narrow(1, 2 * rank, 2));
    EXPECT_FALSE(tensor.full_tensor().requires_grad());
    EXPECT_TENSOR(distribute_tensor(full.t(), mesh, {Shard(1)}).full_tensor(), full.t());
    // The part of a scalar that rank 0 owns may be a scalar itself.
    const auto part = rank == 0 ? torch::full({}, 7.0) : torch::empty({0});
    EXPECT_TENSOR(DTensor::from_local(part, mesh, {RaggedShard(0, {1, 0})}, {.shape = Sizes{}}).full_tensor(),
                  torch::full({}, 7.0));
  });
}

TEST(DTensor, PartialAxesOfSeveralOperationsKeepTheirOrder) {
  run_ranks(4, [](int rank) {
    const DeviceMesh mesh = make_mesh({2, 2});
    // The largest of the sums of rows: of {1, 2} and {8, 4}.
    const std::array values = {1.0, 2.0, 8.0, 4.0};
    const auto local = torch::full({3}, values[static_cast<std::size_t>(rank)]);
    const DTensor source = DTensor::from_local(local, mesh, {Partial(ReduceOp::kMax), Partial()}, {.shape = Sizes{3}});
    const auto want = torch::full({3}, 12.0);
    EXPECT_TENSOR(source.full_tensor(), want);
    EXPECT_TENSOR(source.redistribute({Replicate(), Partial()}).full_tensor(), want);
    EXPECT_TENSOR(source.redistribute({Partial(ReduceOp::kProduct), Partial()}).full_tensor(), want);
    EXPECT_TENSOR(source.redistribute({Partial(ReduceOp::kMax), Shard(0)}).full_tensor(), want);
    EXPECT_TENSOR(source.redistribute({Partial(), Partial(ReduceOp::kProduct)}).full_tensor(), want);
    // Equal operations commute: the second axis stays as it is.
    const DTensor sums = DTensor::from_local(local, mesh, {Partial(), Partial()}, {.shape = Sizes{3}});
    EXPECT_TENSOR(sums.redistribute({Replicate(), Partial()}).to_local(), torch::full({3}, rank % 2 == 0 ? 9.0 : 6.0));
    // A new outer axis around a kept one: its second coordinate must give 1 after the sum.
    const DTensor kept = DTensor::from_local(local, mesh, {Replicate(), Partial()}, {.shape = Sizes{3}});
    EXPECT_TENSOR(kept.redistribute({Partial(ReduceOp::kProduct), Partial()}).to_local(),
                  rank < 2 ? local : torch::full({3}, rank == 2 ? 1.0 : 0.0));
  });
}

TEST(DTensor, RejectsBadArguments) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = make_mesh({2});
    const auto local = torch::zeros({2, 3});
    const auto from_local = [&](const Placements& placements, const Sizes& shape) {
      return value_error([&] { return DTensor::from_local(local, mesh, placements, {.shape = shape}); });
    };
    EXPECT_EQ(from_local({Shard(0)}, {7, 3}), concat("[DTensor::from_local] local tensor has shape [2, 3], want [", 4 - rank,
                                                     ", 3] of a tensor of shape [7, 3] in Layout(a=2: Shard(dim=0))"));
    EXPECT_EQ(from_local({Shard(0)}, {4}),
              "[DTensor::from_local] local tensor has shape [2, 3], want [2] of a tensor of shape [4] in "
              "Layout(a=2: Shard(dim=0))");
    EXPECT_EQ(from_local({Shard(2)}, {4, 3}), "[Layout] Shard(dim=2) on mesh axis 0, want a dimension of a tensor with 2");
    EXPECT_EQ(from_local({}, {4, 3}), "[Layout] 0 placements [], want one for each of 1 mesh axes");
    EXPECT_EQ(value_error([&] { return DTensor::from_local({}, mesh, {Shard(0)}); }),
              "[DTensor::from_local] the local tensor is undefined");
    EXPECT_EQ(value_error([&] { return DTensor::from_local(local, {}, {Shard(0)}); }),
              "[DTensor::from_local] the mesh is undefined");
    EXPECT_EQ(value_error([&] {
                return DTensor::from_local(local, mesh, Layout::from_axes({3}, {{0}, {}}), {4, 3});
              }),
              "[DTensor::from_local] Layout(0=3: Shard(dim=0)) on DeviceMesh(cpu, a=2), want a layout for a mesh of this shape");
    EXPECT_EQ(value_error([&] {
                return DTensor::from_local(local, mesh, {RaggedShard(2, {1, 1})});
              }),
              "[DTensor::from_local] RaggedShard(dims=(0, 1), local_units=(1, 1)) leaves the shape open, want it in the options");

    EXPECT_EQ(value_error([&] { return distribute_tensor({}, mesh, {Shard(0)}); }),
              "[distribute_tensor] the tensor is undefined");
    EXPECT_EQ(value_error([&] { return distribute_tensor(local, {}, {Shard(0)}); }), "[distribute_tensor] the mesh is undefined");
    EXPECT_EQ(value_error([&] { return distribute_tensor(local, mesh, {Shard(0)}, {.src_data_rank = 2}); }),
              "[distribute_tensor] src_data_rank is 2, want 0 <= src_data_rank < 2");
    EXPECT_NE(value_error([&] { return distribute_tensor(local, mesh, {RaggedShard(1, {2, 1})}); }), "no ValueError");

    const DTensor integers =
        DTensor::from_local(torch::ones({2}, torch::kLong), mesh, {Partial(ReduceOp::kAvg)}, {.shape = Sizes{2}});
    EXPECT_EQ(value_error([&] { return integers.full_tensor(); }),
              "[DTensor::redistribute] average of Long, want a floating dtype");
    EXPECT_EQ(
        value_error([&] { return integers.redistribute(Layout::from_axes({1}, {{0}})); }),
        "[DTensor::redistribute] Layout(0=1: Shard(dim=0)) on DeviceMesh(cpu, a=2), want a layout for a mesh of this shape");
    EXPECT_EQ(value_error([] { return DTensor().redistribute({Shard(0)}); }), "[DTensor::redistribute] the tensor is undefined");
    EXPECT_EQ(value_error([] { return DTensor().full_tensor(); }), "[DTensor::full_tensor] the tensor is undefined");
    EXPECT_EQ(DTensor().to_string(), "DTensor()");
  });
}

TEST(DTensor, RanksThatDisagreeGetTheSameError) {
  run_ranks(2, [](int rank) {
    const DeviceMesh mesh = make_mesh({2});
    const auto infer = [&](const torch::Tensor& local) {
      return value_error([&] { return DTensor::from_local(local, mesh, {Shard(0)}); });
    };
    EXPECT_EQ(infer(torch::zeros({rank == 0 ? 1 : 2, 3})),
              "[DTensor::from_local] rank 0 has a local tensor of shape [1, 3], want [2, 3] of a tensor of shape [3, 3] in "
              "Layout(a=2: Shard(dim=0)) "
              "(pass the shape if that is another one)");
    EXPECT_EQ(infer(torch::zeros({2, rank == 0 ? 3 : 4})),
              "[DTensor::from_local] rank 1 has a local tensor of shape [2, 4], want [2, 3] of a tensor of shape [4, 3] in "
              "Layout(a=2: Shard(dim=0)) "
              "(pass the shape if that is another one)");
    EXPECT_EQ(infer(rank == 0 ? torch::zeros({2}) : torch::zeros({2, 1})),
              "[DTensor::from_local] rank 1 has a local tensor of shape [2, 1], want as many dimensions as [2] on rank 0");
    EXPECT_EQ(infer(torch::zeros({2}, rank == 0 ? torch::kFloat : torch::kDouble)),
              "[DTensor::from_local] rank 1 has dtype Double, want Float as rank 0");
    const std::string scatter =
        value_error([&] { return distribute_tensor(torch::zeros({2 + rank}), mesh, {Shard(0)}, {.src_data_rank = 0}); });
    EXPECT_NE(scatter.find("tensor Float [2]"), std::string::npos) << scatter;
    EXPECT_NE(scatter.find("tensor Float [3]"), std::string::npos) << scatter;
  });
}

}  // namespace
}  // namespace hyper_parallel
