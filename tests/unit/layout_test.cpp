#include <hyper_parallel/dtensor/layout.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <unordered_set>

#include <gtest/gtest.h>

#include "support/message_of.h"

namespace hyper_parallel {
namespace {

using hyper_parallel::testing::value_error;
using Sizes = std::vector<std::int64_t>;

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

Sizes coordinate_of(std::int64_t index, const Sizes& mesh) {
  Sizes coordinate(mesh.size());
  for (std::size_t i = mesh.size(); i-- > 0;) {
    coordinate[i] = index % mesh[i];
    index /= mesh[i];
  }
  return coordinate;
}

// Row-major element numbers of a box.
Sizes elements(const Box& box, const Sizes& shape) {
  Sizes result;
  for (std::int64_t e = 0; e < box.numel(); ++e) {
    const Sizes inside = coordinate_of(e, box.size);
    std::int64_t number = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) number = number * shape[d] + box.offset[d] + inside[d];
    result.push_back(number);
  }
  return result;
}

Sizes elements(const std::vector<Box>& boxes, const Sizes& shape) {
  Sizes result;
  for (const auto& box : boxes) {
    EXPECT_GT(box.numel(), 0);
    const Sizes part = elements(box, shape);
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

// Element numbers of the product of index lists, row-major.
Sizes elements(const std::vector<Sizes>& indices, const Sizes& shape) {
  Sizes result = {0};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    Sizes next;
    for (const std::int64_t number : result) {
      for (const std::int64_t index : indices[d]) next.push_back(number * shape[d] + index);
    }
    result = std::move(next);
  }
  return result;
}

Sizes iota(std::int64_t n) {
  Sizes result(static_cast<std::size_t>(n));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

Sizes ceil_chunk(const Sizes& list, std::int64_t ranks, std::int64_t rank) {
  const auto n = static_cast<std::int64_t>(list.size());
  const std::int64_t chunk = (n + ranks - 1) / ranks;
  Sizes result;
  for (std::int64_t i = rank * chunk; i < std::min((rank + 1) * chunk, n); ++i)
    result.push_back(list[static_cast<std::size_t>(i)]);
  return result;
}

struct Case {
  Sizes mesh;
  Sizes shape;
  std::vector<Layout::Axes> axes_of_dim;
  std::vector<std::pair<std::int64_t, Placement>> others;
  [[nodiscard]] Layout layout() const { return Layout::from_axes(mesh, axes_of_dim, others); }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::int64_t pick(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(engine_);
  }
  std::mt19937& engine() { return engine_; }

  // A random mesh whose axes cut a random tensor in random order; `min_axis` 2 leaves out axes that cut nothing.
  Case shards(std::int64_t min_axis, std::int64_t max_axes) {
    Case c;
    const std::int64_t axes = pick(1, max_axes);
    const std::int64_t ndim = pick(0, 3);
    for (std::int64_t a = 0; a < axes; ++a) c.mesh.push_back(pick(min_axis, 4));
    for (std::int64_t d = 0; d < ndim; ++d) c.shape.push_back(pick(0, 11));
    c.axes_of_dim.resize(static_cast<std::size_t>(ndim));
    Sizes order = iota(axes);
    std::shuffle(order.begin(), order.end(), engine_);
    for (const std::int64_t axis : order) {
      const std::int64_t dim = pick(0, ndim);
      if (dim < ndim) {
        c.axes_of_dim[static_cast<std::size_t>(dim)].push_back(axis);
      } else if (pick(0, 3) == 0) {
        c.others.emplace_back(axis, Partial(ReduceOp::kMax));
      } else {
        free_axes_.push_back(axis);
      }
    }
    return c;
  }

  // Lets a free axis of a random case cut ragged; false when there is none.
  bool add_ragged(Case& c) {
    if (free_axes_.empty()) return false;
    const std::int64_t axis = free_axes_.back();
    const std::int64_t dims = pick(0, static_cast<std::int64_t>(c.shape.size()));
    for (std::int64_t d = 0; d < dims; ++d)
      c.axes_of_dim[static_cast<std::size_t>(d)].clear();  // one block, so that any units may fit
    std::int64_t left = std::max<std::int64_t>(1, product({c.shape.begin(), c.shape.begin() + dims}));
    const std::int64_t per_unit = left % 2 == 0 ? pick(1, 2) : 1;
    left /= per_unit;
    Sizes units;
    for (std::int64_t i = 0; i + 1 < c.mesh[static_cast<std::size_t>(axis)]; ++i) {
      units.push_back(pick(0, left));
      left -= units.back();
    }
    units.push_back(left);
    std::shuffle(units.begin(), units.end(), engine_);
    c.others.emplace_back(axis, RaggedShard(dims, units));
    return true;
  }

  void reset() { free_axes_.clear(); }

 private:
  std::mt19937 engine_;
  Sizes free_axes_;
};

TEST(Layout, BoxesAreTheNestedCeilChunks) {
  Random random(1);
  for (int round = 0; round < 3000 && !::testing::Test::HasFailure(); ++round) {
    const Case c = random.shards(1, 4);
    const Layout layout = c.layout();
    SCOPED_TRACE(layout.to_string());
    layout.validate(c.shape);
    for (std::int64_t rank = 0; rank < product(c.mesh); ++rank) {
      const Sizes coordinate = coordinate_of(rank, c.mesh);
      std::vector<Sizes> indices;
      Sizes local;
      for (std::size_t d = 0; d < c.shape.size(); ++d) {
        Sizes list = iota(c.shape[d]);
        for (const std::int64_t axis : c.axes_of_dim[d]) {
          list = ceil_chunk(list, c.mesh[static_cast<std::size_t>(axis)], coordinate[static_cast<std::size_t>(axis)]);
        }
        local.push_back(static_cast<std::int64_t>(list.size()));
        indices.push_back(std::move(list));
      }
      EXPECT_EQ(layout.local_shape(c.shape, coordinate), local);
      EXPECT_EQ(elements(layout.boxes(c.shape, coordinate), c.shape), elements(indices, c.shape));
      EXPECT_LE(layout.boxes(c.shape, coordinate).size(), 1U);
    }
  }
}

TEST(Layout, OrderOfCutsSurvivesPlacements) {
  Random random(2);
  for (int round = 0; round < 3000; ++round) {
    const Case c = random.shards(2, 5);
    const Layout layout = c.layout();
    for (std::size_t d = 0; d < c.shape.size(); ++d) {
      ASSERT_EQ(layout.axes(static_cast<std::int64_t>(d)), c.axes_of_dim[d]) << layout.to_string();
    }
    ASSERT_EQ(Layout::from_placements(c.mesh, layout.placements(), layout.ndim()), layout) << layout.to_string();
    random.reset();
  }
}

// PyTorch applies placements from left to right; a strided shard takes every size-th of size * split_factor chunks. That
// definition is for even sizes.
TEST(Layout, SplitFactorsMeanWhatPyTorchMeans) {
  Random random(3);
  for (int round = 0; round < 1000; ++round) {
    Case c = random.shards(1, 4);
    random.reset();
    for (auto& size : c.shape) size = product(c.mesh) * random.pick(1, 2);
    if (product(c.shape) > 20000) continue;
    const Layout layout = c.layout();
    for (std::int64_t rank = 0; rank < product(c.mesh); ++rank) {
      const Sizes coordinate = coordinate_of(rank, c.mesh);
      std::vector<Sizes> indices;
      for (const std::int64_t size : c.shape) indices.push_back(iota(size));
      for (std::size_t axis = 0; axis < c.mesh.size(); ++axis) {
        const Placement& placement = layout.placements()[axis];
        if (!placement.is_shard()) continue;
        auto& list = indices[static_cast<std::size_t>(placement.dim())];
        const std::int64_t chunks = c.mesh[axis] * placement.split_factor();
        ASSERT_EQ(static_cast<std::int64_t>(list.size()) % chunks, 0);
        Sizes kept;
        for (std::int64_t f = 0; f < placement.split_factor(); ++f) {
          const Sizes chunk = ceil_chunk(list, chunks, f * c.mesh[axis] + coordinate[axis]);
          kept.insert(kept.end(), chunk.begin(), chunk.end());
        }
        list = std::move(kept);
      }
      ASSERT_EQ(elements(layout.boxes(c.shape, coordinate), c.shape), elements(indices, c.shape)) << layout.to_string();
    }
  }
}

TEST(Layout, RanksPartitionTheTensor) {
  Random random(4);
  int ragged = 0;
  for (int round = 0; round < 3000 && !::testing::Test::HasFailure(); ++round) {
    Case c = random.shards(1, 4);
    ragged += random.add_ragged(c) ? 1 : 0;
    random.reset();
    const Layout layout = c.layout();
    SCOPED_TRACE(layout.to_string());
    layout.validate(c.shape);
    std::int64_t copies = 1;
    for (std::size_t axis = 0; axis < c.mesh.size(); ++axis) {
      const auto& placement = layout.placements()[axis];
      if (placement.is_replicate() || placement.is_partial()) copies *= c.mesh[axis];
    }
    Sizes owners(static_cast<std::size_t>(product(c.shape)), 0);
    for (std::int64_t rank = 0; rank < product(c.mesh); ++rank) {
      const Sizes coordinate = coordinate_of(rank, c.mesh);
      const Sizes mine = elements(layout.boxes(c.shape, coordinate), c.shape);
      EXPECT_EQ(static_cast<std::int64_t>(mine.size()), product(layout.local_shape(c.shape, coordinate)));
      for (const std::int64_t e : mine) ++owners[static_cast<std::size_t>(e)];
    }
    EXPECT_EQ(std::count(owners.begin(), owners.end(), copies), static_cast<std::int64_t>(owners.size()));
  }
  EXPECT_GT(ragged, 500);
}

TEST(Layout, RaggedRanksFollowEachOtherInFlattenedOrder) {
  Random random(5);
  for (int round = 0; round < 1000 && !::testing::Test::HasFailure(); ++round) {
    Case c = {.mesh = {random.pick(1, 5)}, .shape = {}, .axes_of_dim = {}, .others = {}};
    const std::int64_t ndim = random.pick(1, 4);
    for (std::int64_t d = 0; d < ndim; ++d) c.shape.push_back(random.pick(1, 6));
    c.axes_of_dim.resize(c.shape.size());
    const std::int64_t dims = random.pick(1, ndim);
    const std::int64_t positions = product({c.shape.begin(), c.shape.begin() + dims});
    Sizes units(static_cast<std::size_t>(c.mesh[0]), 0);
    for (std::int64_t p = 0; p < positions; ++p) ++units[static_cast<std::size_t>(random.pick(0, c.mesh[0] - 1))];
    c.others = {{0, RaggedShard(dims, units)}};
    const Layout layout = c.layout();
    Sizes all;
    for (std::int64_t rank = 0; rank < c.mesh[0]; ++rank) {
      const Sizes coordinate = {rank};
      const auto boxes = layout.boxes(c.shape, coordinate);
      EXPECT_LE(static_cast<std::int64_t>(boxes.size()), 2 * dims - 1);
      const Sizes mine = elements(boxes, c.shape);
      all.insert(all.end(), mine.begin(), mine.end());
      Sizes local(c.shape.begin() + dims, c.shape.end());
      local.insert(local.begin(), units[static_cast<std::size_t>(rank)]);
      EXPECT_EQ(layout.local_shape(c.shape, coordinate), local);
    }
    EXPECT_EQ(all, iota(product(c.shape)));
  }
}

// Logical 10x3, tp=2 on dim 0, then fsdp=2: rank (f, t) owns rows [5t+3f, min(5t+3f+3, 5t+5)).
TEST(Layout, FsdpCutsWhatTensorParallelismLeft) {
  const Layout source = Layout::from_placements({2, 2}, {Replicate(), Shard(0)}, 2);
  const Layout layout = source.shard_innermost(0, -2);
  EXPECT_EQ(layout.placements(), (std::vector<Placement>{StridedShard(0, 2), Shard(0)}));
  EXPECT_EQ(layout.axes(0), (Layout::Axes{1, 0}));
  const Sizes shape = {10, 3};
  for (std::int64_t f = 0; f < 2; ++f) {
    for (std::int64_t t = 0; t < 2; ++t) {
      const std::int64_t begin = 5 * t + 3 * f;
      const std::int64_t end = std::min(begin + 3, 5 * t + 5);
      const Sizes coordinate = {f, t};
      EXPECT_EQ(layout.boxes(shape, coordinate), (std::vector<Box>{{{begin, 0}, {end - begin, 3}}}));
    }
  }
  // Read in mesh order instead, fsdp would cut first.
  const Sizes coordinate = {1, 0};
  EXPECT_EQ(Layout::from_placements({2, 2}, {Shard(0), Shard(0)}, 2).boxes(shape, coordinate),
            (std::vector<Box>{{{5, 0}, {3, 3}}}));
}

TEST(Layout, SourceLayoutsOfThreeAxes) {
  const Layout layout = Layout::from_placements({2, 4, 2}, {Replicate(), Replicate(), Shard(0)}, 1).shard_innermost(1, 0);
  EXPECT_EQ(layout.placements(), (std::vector<Placement>{Replicate(), StridedShard(0, 2), Shard(0)}));
  const Layout between = Layout::from_placements({2, 2, 2}, {StridedShard(0, 2), Shard(0), Shard(0)}, 1);
  EXPECT_EQ(between.axes(0), (Layout::Axes{1, 0, 2}));
  const Layout hsdp = Layout::from_placements({2, 3}, {Replicate(), RaggedShard(1, {1, 2, 0})}, 2);
  const Sizes shape = {6, 5};
  const Sizes coordinate = {1, 1};
  EXPECT_EQ(hsdp.boxes(shape, coordinate), (std::vector<Box>{{{2, 0}, {4, 5}}}));
  EXPECT_EQ(hsdp.ragged_axis(), 1);
}

TEST(Layout, InternsEqualValues) {
  const Layout a = Layout::from_placements({2, 2}, {StridedShard(0, 1), Shard(-1)}, 2);
  const Layout b = Layout::from_placements({2, 2}, {Shard(0), Shard(1)}, 2);
  EXPECT_EQ(a, b);
  EXPECT_EQ(&a.placements(), &b.placements());
  EXPECT_EQ(a.hash(), b.hash());
  EXPECT_NE(a, Layout::from_placements({2, 2}, {Shard(0), Shard(1)}, 3));
  EXPECT_NE(a, Layout::from_placements({2, 4}, {Shard(0), Shard(1)}, 2));
  EXPECT_NE(a, Layout());
  const std::unordered_set<Layout> set = {a, b, Layout::from_placements({2, 2}, {Shard(1), Shard(0)}, 2)};
  EXPECT_EQ(set.size(), 2U);
}

TEST(Layout, PrintsWithAndWithoutNames) {
  const Layout layout = Layout::from_placements({2, 4}, {Partial(ReduceOp::kAvg), Shard(0)}, 1);
  const std::vector<std::string> names = {"dp", "tp"};
  EXPECT_EQ(layout.to_string(names), "Layout(dp=2: Partial(avg), tp=4: Shard(dim=0))");
  EXPECT_EQ(layout.to_string(), "Layout(0=2: Partial(avg), 1=4: Shard(dim=0))");
  EXPECT_EQ(Layout().to_string(), "Layout()");
  EXPECT_TRUE(layout.has_partial());
  EXPECT_FALSE(layout.is_replicated());
  EXPECT_TRUE(Layout::from_axes({2}, {{}}).is_replicated());
  EXPECT_EQ((Box{{2, 0}, {3, 3}}).to_string(), "[2:5, 0:3]");
}

TEST(Box, IntersectsAsSetsOfElements) {
  Random random(6);
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t ndim = random.pick(0, 3);
    Box a, b;
    Sizes shape;
    for (std::int64_t d = 0; d < ndim; ++d) {
      for (Box* box : {&a, &b}) {
        box->offset.push_back(random.pick(0, 4));
        box->size.push_back(random.pick(0, 4));
      }
      shape.push_back(9);
    }
    Sizes in_a = elements(a, shape), in_b = elements(b, shape), want;
    std::set_intersection(in_a.begin(), in_a.end(), in_b.begin(), in_b.end(), std::back_inserter(want));
    const auto both = intersect(a, b);
    ASSERT_EQ(both ? elements(*both, shape) : Sizes{}, want);
  }
}

TEST(Layout, RejectsPlacementsThatDoNotFit) {
  const auto error = [](Sizes mesh, std::vector<Placement> placements, std::int64_t ndim) {
    return value_error([&] { return Layout::from_placements(mesh, std::move(placements), ndim); });
  };
  EXPECT_EQ(error({2}, {Shard(0)}, -1), "[Layout] ndim is -1, want at least 0");
  EXPECT_EQ(error({2, 2}, {Shard(0)}, 1), "[Layout] 1 placements [Shard(dim=0)], want one for each of 2 mesh axes");
  EXPECT_EQ(error({0}, {Shard(0)}, 1), "[Layout] mesh axis 0 has size 0, want at least 1");
  EXPECT_EQ(error({2}, {Shard(2)}, 2), "[Layout] Shard(dim=2) on mesh axis 0, want a dimension of a tensor with 2");
  EXPECT_EQ(error({2}, {Shard(-3)}, 2), "[Layout] Shard(dim=-3) on mesh axis 0, want a dimension of a tensor with 2");
  EXPECT_EQ(error({2}, {Shard(0)}, 0), "[Layout] Shard(dim=0) on mesh axis 0, want a dimension of a tensor with 0");
  EXPECT_EQ(error({2, 2}, {RaggedShard(1, {1, 1}), RaggedShard(1, {1, 1})}, 1),
            "[Layout] two ragged axes, 0 and 1, want at most one");
  EXPECT_EQ(error({2}, {RaggedShard(2, {1, 1})}, 1),
            "[Layout] RaggedShard(dims=(0, 1), local_units=(1, 1)) flattens 2 dimensions of a tensor with 1");
  EXPECT_EQ(error({3}, {RaggedShard(1, {1, 1})}, 1),
            "[Layout] RaggedShard(dims=(0,), local_units=(1, 1)) on mesh axis 0, want one entry of local_units for each of its 3 "
            "ranks");
}

TEST(Layout, RejectsWrongSplitFactors) {
  const auto error = [](std::int64_t factor) {
    return value_error([&] { return Layout::from_placements({2, 3, 4}, {StridedShard(0, factor), Shard(0), Shard(0)}, 1); });
  };
  EXPECT_EQ(error(1), "no ValueError");
  EXPECT_EQ(error(3), "no ValueError");
  EXPECT_EQ(error(12), "no ValueError");
  for (const std::int64_t wrong : {2, 4, 6, 24}) {
    EXPECT_EQ(error(wrong),
              concat("[Layout] split factor of _StridedShard(dim=0, sf=", wrong, ") on mesh axis 0 is ", wrong,
                     ", want a product of the sizes of the first cuts that later axes make on this dimension: 1, 3, 12"));
  }
  EXPECT_NE(value_error([] { return Layout::from_placements({2, 2}, {Shard(0), StridedShard(0, 2)}, 1); }), "no ValueError");
  EXPECT_NE(value_error([] { return Layout::from_placements({2, 2}, {StridedShard(0, 2), Shard(1)}, 2); }), "no ValueError");
}

TEST(Layout, RejectsBadAxesAndArguments) {
  EXPECT_EQ(value_error([] { return Layout::from_axes({2}, {{1}}); }), "[Layout] mesh axis 1, want 0 <= axis < 1");
  EXPECT_EQ(value_error([] { return Layout::from_axes({2}, {{0}, {0}}); }), "[Layout] mesh axis 0 is used twice");
  EXPECT_EQ(value_error([] {
              return Layout::from_axes({2}, {{}}, {{0, Shard(0)}});
            }),
            "[Layout] Shard(dim=0) among the other axes, want it in axes_of_dim");
  const Layout layout = Layout::from_placements({2}, {Shard(0)}, 2);
  EXPECT_EQ(value_error([&] { return layout.axes(2); }), "[Layout::axes] dim is 2, want 0 <= dim < 2");
  EXPECT_EQ(value_error([&] { return layout.shard_innermost(0, 1); }),
            "[Layout::shard_innermost] mesh axis 0 is Shard(dim=0), want Replicate()");
  EXPECT_EQ(value_error([&] {
              return Layout::from_axes({2, 3}, {{1}, {}}, {{0, Partial()}}).shard_innermost(0, 1);
            }),
            "[Layout::shard_innermost] mesh axis 0 is Partial(sum), want Replicate()");
  EXPECT_EQ(value_error([&] { return layout.shard_innermost(1, 1); }),
            "[Layout::shard_innermost] mesh axis 1, want 0 <= axis < 1");
  EXPECT_EQ(value_error([&] { return Layout::from_axes({2}, {{}}).shard_innermost(0, 1); }),
            "[Layout::shard_innermost] dim is 1, want a dimension of a tensor with 1");
  const Sizes vector = {4}, matrix = {4, 4}, negative = {4, -1}, none = {}, high = {2}, zero = {0};
  const auto validate = [&](const Layout& value, const Sizes& shape) {
    return value_error([&] {
      value.validate(shape);
      return 0;
    });
  };
  EXPECT_EQ(validate(layout, vector), "[Layout::validate] tensor has 1 dimensions, want 2 for Layout(0=2: Shard(dim=0))");
  EXPECT_EQ(validate(layout, negative), "[Layout::validate] tensor has a dimension of size -1");
  EXPECT_EQ(value_error([&] { return layout.boxes(matrix, none); }), "[Layout::boxes] coordinate has 0 entries, want 1");
  EXPECT_EQ(value_error([&] { return layout.local_shape(matrix, high); }),
            "[Layout::local_shape] coordinate is 2 on mesh axis 0, want 0 <= coordinate < 2");
  EXPECT_EQ(value_error([&] { return layout.boxes(vector, zero); }),
            "[Layout::boxes] tensor has 1 dimensions, want 2 for Layout(0=2: Shard(dim=0))");
  const Layout ragged = Layout::from_placements({2, 2}, {RaggedShard(1, {1, 2}), Shard(0)}, 1);
  EXPECT_EQ(validate(ragged, {6}), "no ValueError");
  EXPECT_EQ(validate(ragged, {5}),
            "[Layout] RaggedShard(dims=(0,), local_units=(1, 2)) on a block with 2 flattened positions, want a multiple of "
            "the 3 units");
  const Box box = {{0, 0}, {2, 3}};
  EXPECT_EQ(value_error([&] { return boxes_of_range(box, 3, 0, 1); }), "[boxes_of_range] dims is 3, want 0 to 2");
  EXPECT_EQ(value_error([&] { return boxes_of_range(box, 2, 0, 7); }), "[boxes_of_range] range is 0:7, want it within 0:6");
}

}  // namespace
}  // namespace hyper_parallel
