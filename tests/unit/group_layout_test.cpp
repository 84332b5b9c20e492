#include <hyper_parallel/fsdp/group_layout.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include <hyper_parallel/dtensor/layout.h>

#include "support/message_of.h"

namespace hyper_parallel::fsdp {
namespace {

using hyper_parallel::testing::value_error;
using Shape = std::vector<std::int64_t>;
using Parameters = std::vector<ParameterShape>;

constexpr std::int64_t kNothing = -1;

std::int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Parameters random_parameters(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  Parameters parameters;
  const int count = pick(1, 7);
  for (int i = 0; i < count; ++i) {
    ParameterShape parameter{.name = concat("p", i), .shape = {}};
    const int ndim = pick(0, 4);
    for (int d = 0; d < ndim; ++d) parameter.shape.push_back(pick(0, 12) == 0 ? 0 : pick(1, ndim < 3 ? 40 : 9));
    if (ndim > 0) parameter.shard_dim = pick(0, ndim - 1);
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

// Buffers whose elements say which element of which parameter lies there: (parameter * 2^32 + element), or kNothing.
std::vector<std::int64_t> full_buffer(const GroupLayout& layout) {
  std::vector<std::int64_t> buffer(static_cast<std::size_t>(layout.full_numel()), kNothing);
  for (std::size_t i = 0; i < layout.size(); ++i) {
    for (std::int64_t e = 0; e < layout.numel(i); ++e) {
      auto& slot = buffer.at(static_cast<std::size_t>(layout.full_offset(i) + e));
      EXPECT_EQ(slot, kNothing) << "parameters overlap in the full buffer";
      slot = (static_cast<std::int64_t>(i) << 32) + e;
    }
  }
  return buffer;
}

// Elements of the flattened parameter in [start, start + size) of dimension `dim`, in row-major order of that block.
std::vector<std::int64_t> block_elements(const Shape& shape, std::size_t dim, std::int64_t start, std::int64_t size) {
  std::vector<std::int64_t> elements;
  const std::int64_t total = product(shape);
  for (std::int64_t e = 0; e < total; ++e) {
    std::int64_t inner = 1;
    for (std::size_t d = shape.size() - 1; d > dim; --d) inner *= shape[d];
    const std::int64_t index = e / inner % shape[dim];
    if (index >= start && index < start + size) elements.push_back(e);
  }
  return elements;
}

void put(std::vector<std::int64_t>& buffer, std::int64_t at, std::size_t parameter, const std::vector<std::int64_t>& elements) {
  for (const std::int64_t e : elements) {
    auto& slot = buffer.at(static_cast<std::size_t>(at++));
    EXPECT_EQ(slot, kNothing) << "slices overlap";
    slot = (static_cast<std::int64_t>(parameter) << 32) + e;
  }
}

// Compares the layout's padding and in_place with rank-major shards that a test has filled on its own.
void check_derived(const GroupLayout& layout, const std::vector<std::int64_t>& shards, const std::vector<std::int64_t>& full) {
  std::vector<std::int64_t> marked = shards;
  std::int64_t padding = 0;
  std::int64_t last_end = -1;
  for (const auto& range : layout.padding()) {
    EXPECT_GT(range.numel, 0);
    EXPECT_GT(range.offset, last_end) << "ranges are in order and joined where they touch";
    last_end = range.offset + range.numel;
    for (std::int64_t e = range.offset; e < last_end; ++e) {
      EXPECT_EQ(marked.at(static_cast<std::size_t>(e)), kNothing) << "padding covers a parameter";
      marked[static_cast<std::size_t>(e)] = 0;
      ++padding;
    }
  }
  EXPECT_EQ(std::count(marked.begin(), marked.end(), kNothing), 0) << "padding misses elements";
  EXPECT_EQ(layout.padding_numel(), padding);
  EXPECT_EQ(layout.in_place(), shards == full);
}

void check_per_parameter(const Parameters& parameters, int world, std::int64_t alignment) {
  const auto layout = GroupLayout::per_parameter(parameters, world, alignment);
  ASSERT_EQ(layout.size(), parameters.size());
  ASSERT_EQ(layout.world(), world);
  std::vector<std::int64_t> shards(static_cast<std::size_t>(world * layout.shard_numel()), kNothing);
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const bool scalar = parameters[i].shape.empty();
    const Shape shape = scalar ? Shape{1} : parameters[i].shape;
    const auto dim = static_cast<std::size_t>(parameters[i].shard_dim);
    const std::int64_t chunk = ceil_div(shape[dim], world);
    Shape padded = shape;
    padded[dim] = chunk;
    EXPECT_EQ(layout.numel(i), product(shape));
    for (int rank = 0; rank < world; ++rank) {
      const auto& slice = layout.slice(i, rank);
      const std::int64_t start = std::min(chunk * rank, shape[dim]);
      Shape local = shape;
      local[dim] = std::min(chunk, shape[dim] - start);
      EXPECT_EQ(slice.shape, scalar && rank == 0 ? Shape{} : local);
      EXPECT_EQ(slice.numel, product(local));
      EXPECT_EQ(slice.start, start);
      EXPECT_EQ(slice.shard_offset, offset) << "blocks are packed, at the same offset on every rank";
      put(shards, rank * layout.shard_numel() + slice.shard_offset, i, block_elements(shape, dim, start, local[dim]));
    }
    offset += product(padded);
    if (dim == 0) {
      const std::int64_t next = i + 1 < layout.size() ? layout.full_offset(i + 1) : layout.full_numel();
      EXPECT_GE(next - layout.full_offset(i), world * product(padded)) << "a gather of dim 0 must fit in place";
    }
    if (world == 1) {
      EXPECT_EQ(layout.full_offset(i), layout.slice(i, 0).shard_offset);
    }
  }
  EXPECT_EQ(layout.shard_numel(), ceil_div(offset, alignment) * alignment);
  if (world == 1) {
    EXPECT_EQ(layout.full_numel(), layout.shard_numel());
  }
  check_derived(layout, shards, full_buffer(layout));
}

void check_ragged(const Parameters& parameters, int world, std::int64_t alignment, std::int64_t parameter_alignment) {
  const auto layout = GroupLayout::ragged(parameters, world, alignment, parameter_alignment);
  ASSERT_EQ(layout.size(), parameters.size());
  EXPECT_EQ(layout.shard_numel() % alignment, 0);
  EXPECT_EQ(layout.full_numel(), layout.shard_numel() * world);
  EXPECT_TRUE(layout.in_place());
  std::vector<std::int64_t> shards(static_cast<std::size_t>(world * layout.shard_numel()), kNothing);
  std::int64_t aligned = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& shape = parameters[i].shape;
    const auto dims = static_cast<std::size_t>(layout.ragged_dims(i));
    ASSERT_LE(dims, shape.size());
    const Shape rest(shape.begin() + static_cast<std::ptrdiff_t>(dims), shape.end());
    const std::int64_t total_units = product({shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(dims)});
    const std::int64_t numel = product(shape);
    std::int64_t at = 0;
    Shape units;
    for (int rank = 0; rank < world; ++rank) {
      const auto& slice = layout.slice(i, rank);
      ASSERT_EQ(slice.shape.size(), rest.size() + 1);
      EXPECT_EQ(Shape(slice.shape.begin() + 1, slice.shape.end()), rest);
      EXPECT_EQ(product(slice.shape), slice.numel) << "a slice is a whole number of units";
      EXPECT_EQ(slice.start, at) << "slices follow each other in rank order";
      EXPECT_LE(slice.shard_offset + slice.numel, layout.shard_numel());
      std::vector<std::int64_t> elements(static_cast<std::size_t>(slice.numel));
      std::iota(elements.begin(), elements.end(), at);
      put(shards, rank * layout.shard_numel() + slice.shard_offset, i, elements);
      at += slice.numel;
      units.push_back(slice.shape[0]);
    }
    EXPECT_EQ(at, numel);
    EXPECT_EQ(std::accumulate(units.begin(), units.end(), std::int64_t{0}), total_units);
    if (total_units > 0) {
      EXPECT_EQ(layout.ragged_units(i), units);
    } else {
      EXPECT_EQ(layout.ragged_units(i)[0], 1) << "proportions have a positive sum";
    }
    aligned += ceil_div(numel, parameter_alignment) * parameter_alignment;
  }
  check_derived(layout, shards, full_buffer(layout));
  const std::int64_t smallest = ceil_div(ceil_div(aligned, world), alignment) * alignment;
  EXPECT_LE(layout.full_numel(), std::max(smallest * world, aligned + aligned / 100)) << "more than 1 % padding";
}

TEST(GroupLayout, PerParameterHoldsForRandomShapes) {
  std::mt19937 random(1);
  for (int round = 0; round < 1500 && !HasFailure(); ++round) {
    const int world = std::uniform_int_distribution<int>(1, 9)(random);
    const std::int64_t alignment = std::array{1, 4, 16}[random() % 3];
    SCOPED_TRACE(concat("round ", round, " world ", world));
    check_per_parameter(random_parameters(random), world, alignment);
  }
}

TEST(GroupLayout, RaggedHoldsForRandomShapes) {
  std::mt19937 random(2);
  for (int round = 0; round < 3000 && !HasFailure(); ++round) {
    const int world = std::uniform_int_distribution<int>(1, 9)(random);
    const std::int64_t alignment = std::array{1, 4, 16, 64}[random() % 4];
    const std::int64_t parameter_alignment = std::array{1, 16, 48}[random() % 3];
    SCOPED_TRACE(concat("round ", round, " world ", world, " alignment ", alignment, "/", parameter_alignment));
    check_ragged(random_parameters(random), world, alignment, parameter_alignment);
  }
}

// Slices are what the placements Shard(dim) and RaggedShard say; a scalar in the per-parameter layout is RaggedShard(0, {1, 0,
// ...}).
TEST(GroupLayout, SlicesAgreeWithPlacements) {
  std::mt19937 random(3);
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    const int world = std::uniform_int_distribution<int>(1, 6)(random);
    const Parameters parameters = random_parameters(random);
    const auto chunks = GroupLayout::per_parameter(parameters, world);
    const auto ragged = GroupLayout::ragged(parameters, world);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& shape = parameters[i].shape;
      const auto ndim = static_cast<std::int64_t>(shape.size());
      const auto cut = Layout::from_placements({world}, {RaggedShard(ragged.ragged_dims(i), ragged.ragged_units(i))}, ndim);
      cut.validate(shape);
      for (int rank = 0; rank < world; ++rank) {
        const Shape coordinate = {rank};
        EXPECT_EQ(cut.local_shape(shape, coordinate), ragged.slice(i, rank).shape);
        if (ndim == 0) continue;
        const auto shard = Layout::from_placements({world}, {Shard(parameters[i].shard_dim)}, ndim);
        EXPECT_EQ(shard.local_shape(shape, coordinate), chunks.slice(i, rank).shape);
      }
    }
  }
}

TEST(GroupLayout, CeilChunksOfTheSpecification) {
  const auto rows = [](Shape shape, int world) {
    const auto layout = GroupLayout::per_parameter({{.name = "w", .shape = std::move(shape)}}, world, 1);
    Shape result;
    for (int rank = 0; rank < world; ++rank) result.push_back(layout.slice(0, rank).shape[0]);
    return result;
  };
  EXPECT_EQ(rows({5, 3}, 2), (Shape{3, 2}));
  EXPECT_EQ(rows({2, 3}, 4), (Shape{1, 1, 0, 0}));
  EXPECT_EQ(rows({5, 3}, 4), (Shape{2, 2, 1, 0}));
  const auto layout = GroupLayout::per_parameter({{.name = "w", .shape = {5, 3}}}, 4, 1);
  EXPECT_EQ(layout.shard_numel(), 6);
  EXPECT_EQ(layout.full_numel(), 24);
  EXPECT_TRUE(layout.in_place());
  EXPECT_EQ(layout.padding(), (std::vector<GroupLayout::Range>{{15, 9}}));
}

TEST(GroupLayout, ScalarsBelongToRankZero) {
  const auto layout = GroupLayout::per_parameter({{.name = "scale", .shape = {}}, {.name = "w", .shape = {4}}}, 2, 1);
  EXPECT_EQ(layout.slice(0, 0).shape, Shape{});
  EXPECT_EQ(layout.slice(0, 0).numel, 1);
  EXPECT_EQ(layout.slice(0, 1).shape, Shape{0});
  EXPECT_EQ(layout.slice(0, 1).numel, 0);
  const auto ragged = GroupLayout::ragged({{.name = "scale", .shape = {}}}, 2);
  EXPECT_EQ(ragged.slice(0, 0).shape, Shape{1});
  EXPECT_EQ(ragged.slice(0, 1).shape, Shape{0});
  EXPECT_EQ(ragged.ragged_dims(0), 0);
  EXPECT_EQ(ragged.ragged_units(0), (Shape{1, 0}));
}

Parameters llama_block(std::int64_t dim, std::int64_t ffn) {
  return {
      {.name = "attention_norm", .shape = {dim}}, {.name = "wq", .shape = {dim, dim}}, {.name = "wk", .shape = {dim / 4, dim}},
      {.name = "wv", .shape = {dim / 4, dim}},    {.name = "wo", .shape = {dim, dim}}, {.name = "ffn_norm", .shape = {dim}},
      {.name = "gate", .shape = {ffn, dim}},      {.name = "up", .shape = {ffn, dim}}, {.name = "down", .shape = {dim, ffn}}};
}

TEST(GroupLayout, RaggedCutsALlamaBlockBetweenRows) {
  for (const int world : {2, 3, 4}) {
    const auto layout = GroupLayout::ragged(llama_block(512, 1376), world);
    for (std::size_t i = 0; i < layout.size(); ++i)
      EXPECT_EQ(layout.ragged_dims(i), 1) << world << ' ' << layout.parameter(i).name;
    for (std::size_t i = 0; i < layout.size(); ++i) EXPECT_EQ(layout.full_offset(i) % 16, 0);
    EXPECT_LE(layout.padding_numel() * 100, layout.full_numel());
  }
}

TEST(GroupLayout, RaggedKeepsTheOrderWhereNothingIsGained) {
  const auto layout =
      GroupLayout::ragged({{.name = "a", .shape = {8, 16}}, {.name = "b", .shape = {8, 16}}, {.name = "c", .shape = {16}}}, 1);
  EXPECT_EQ(layout.full_offset(0), 0);
  EXPECT_EQ(layout.full_offset(1), 128);
  EXPECT_EQ(layout.full_offset(2), 256);
  EXPECT_EQ(layout.padding_numel(), 0);
}

TEST(GroupLayout, RaggedSplitsRowsThatWouldWasteTooMuch) {
  // One row is longer than a slice: only smaller units can be cut four ways.
  const auto layout = GroupLayout::ragged({{.name = "w", .shape = {2, 8, 100}}}, 4, 1, 1);
  EXPECT_EQ(layout.ragged_dims(0), 2);
  EXPECT_EQ(layout.ragged_units(0), (Shape{4, 4, 4, 4}));
  EXPECT_EQ(layout.slice(0, 3).shape, (Shape{4, 100}));
  EXPECT_EQ(layout.padding_numel(), 0);
  const auto elements = GroupLayout::ragged({{.name = "w", .shape = {1, 1000}}}, 8, 1, 1);
  EXPECT_EQ(elements.ragged_dims(0), 2);
  EXPECT_EQ(elements.slice(0, 7).shape, (Shape{125}));
}

TEST(GroupLayout, RaggedFillsGapsWithSmallParameters) {
  // The cut at 3120 falls between rows of b when b starts at 3020; the bias goes into the gap in front of it.
  const Parameters parameters = {
      {.name = "a", .shape = {30, 100}}, {.name = "b", .shape = {32, 100}}, {.name = "bias", .shape = {20}}};
  const auto layout = GroupLayout::ragged(parameters, 2, 20, 1);
  EXPECT_EQ(layout.shard_numel(), 3120);
  EXPECT_EQ(layout.full_offset(0), 0);
  EXPECT_EQ(layout.full_offset(1), 3020);
  EXPECT_EQ(layout.full_offset(2), 3000);
  EXPECT_EQ(layout.ragged_dims(1), 1);
  EXPECT_EQ(layout.ragged_units(1), (Shape{1, 31}));
}

TEST(GroupLayout, RaggedIsDeterministicAndFastForLargeWorlds) {
  Parameters parameters;
  for (int block = 0; block < 11; ++block) {
    for (auto& parameter : llama_block(1024 + 64 * block, 2752 + 24 * block)) parameters.push_back(parameter);
  }
  parameters.push_back({.name = "head", .shape = {50257, 1024}});
  for (const int world : {1, 2, 7, 64, 1000, 1024}) {
    auto best = std::chrono::steady_clock::duration::max();
    for (int run = 0; run < 5; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      const auto layout = GroupLayout::ragged(parameters, world);
      best = std::min(best, std::chrono::steady_clock::now() - begin);
      const auto again = GroupLayout::ragged(parameters, world);
      for (std::size_t i = 0; i < layout.size(); ++i) {
        ASSERT_EQ(layout.full_offset(i), again.full_offset(i));
        ASSERT_EQ(layout.ragged_dims(i), again.ragged_dims(i));
      }
      EXPECT_LE(layout.padding_numel() * 100, layout.full_numel() + 100 * (16 * world + 15 * 100)) << world;
    }
    const double milliseconds = std::chrono::duration<double, std::milli>(best).count();
    RecordProperty(concat("ms_world_", world), std::to_string(milliseconds));
    EXPECT_LT(milliseconds, 10) << "world " << world;
  }
}

TEST(GroupLayout, RejectsBadArguments) {
  const Parameters good = {{.name = "w", .shape = {4, 4}}};
  EXPECT_EQ(value_error([&] { return GroupLayout::per_parameter(good, 0); }),
            "[GroupLayout::per_parameter] world is 0, want at least 1");
  EXPECT_EQ(value_error([&] { return GroupLayout::ragged(good, 2, 0); }),
            "[GroupLayout::ragged] alignment is 0, want at least 1");
  EXPECT_EQ(value_error([&] { return GroupLayout::ragged(good, 2, 16, 0); }),
            "[GroupLayout::ragged] parameter_alignment is 0, want at least 1");
  EXPECT_EQ(value_error([&] {
              return GroupLayout::per_parameter({{.name = "w", .shape = {4, 4}, .shard_dim = 2}}, 2);
            }),
            "[GroupLayout::per_parameter] parameter w has shard_dim 2, want 0 <= shard_dim < 2");
  EXPECT_EQ(value_error([&] { return GroupLayout::per_parameter({{.name = "w", .shape = {}, .shard_dim = 1}}, 2); }),
            "[GroupLayout::per_parameter] parameter w has shard_dim 1, want 0 <= shard_dim < 0");
  EXPECT_EQ(value_error([&] {
              return GroupLayout::ragged({{.name = "w", .shape = {4, -1}}}, 2);
            }),
            "[GroupLayout::ragged] parameter w has a dimension of size -1, want at least 0");
  EXPECT_EQ(value_error([&] { return GroupLayout::per_parameter(good, 2).ragged_units(0); }),
            "[GroupLayout::ragged_units] the layout is per-parameter, want ragged");
}

}  // namespace
}  // namespace hyper_parallel::fsdp
