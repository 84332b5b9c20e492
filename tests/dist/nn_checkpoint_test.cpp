// Activation checkpointing: the gradients of the plain run, less memory, no more traffic than one gather for each forward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// Where the checkpoints are.
enum class Place { kNone, kAround, kInside, kBoth, kSeveral, kWhole, kNested };
constexpr std::array kPlaces = {Place::kAround, Place::kInside, Place::kBoth, Place::kSeveral, Place::kWhole, Place::kNested};

const char* name_of(Place place) {
  switch (place) {
    case Place::kNone: return "none";
    case Place::kAround: return "around each unit";
    case Place::kInside: return "inside each unit";
    case Place::kBoth: return "around and inside";
    case Place::kSeveral: return "around two units";
    case Place::kWhole: return "around the root";
    case Place::kNested: return "around a unit around two";
  }
  return "";
}

/// a and b of Mlp, the middle optionally checkpointed.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t hidden) {
    a = register_module("a", torch::nn::Linear(kDim, hidden));
    b = register_module("b", torch::nn::Linear(hidden, kDim));
    scale = register_parameter("scale", torch::tensor(0.7F));
  }
  torch::Tensor forward(torch::Tensor x) {
    ++runs;
    const auto middle = [this](const torch::Tensor& h) { return b(torch::silu(a(h))); };
    return x + scale * (inside ? checkpoint(middle, x) : middle(x));
  }
  static constexpr int64_t kDim = 12;
  torch::nn::Linear a = nullptr, b = nullptr;
  torch::Tensor scale;
  bool inside = false;
  int runs = 0;
};
HP_MODULE(Block);

/// Table tied to the head, four blocks; two of them can be made one unit.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    table = register_module("table", torch::nn::Embedding(NetImpl::kVocab, BlockImpl::kDim));
    for (int i = 0; i < 4; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(5 + 3 * i)));
    head = register_module("head", TiedHead(table->weight, NetImpl::kVocab));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor h = table(tokens);
    const auto pair = [this](std::size_t i) {
      return [this, i](const torch::Tensor& x) {
        return place == Place::kNested ? blocks[i + 1](checkpoint(blocks[i], x)) : blocks[i + 1](blocks[i](x));
      };
    };
    if (place == Place::kSeveral || place == Place::kNested) {
      for (const std::size_t i : {0, 2}) h = checkpoint(pair(i), h);
    } else {
      const bool around = place == Place::kAround || place == Place::kBoth;
      for (Block& block : blocks) h = around ? checkpoint(block, h) : block(h);
    }
    return head(h);
  }
  void put(Place where) {
    place = where;
    for (Block& block : blocks) block->inside = where == Place::kInside || where == Place::kBoth;
  }
  torch::nn::Embedding table = nullptr;
  std::vector<Block> blocks;
  TiedHead head = nullptr;
  Place place = Place::kNone;
};
HP_MODULE(Stack);

Stack make_stack(Place place) {
  Stack stack;
  seed_parameters(*stack, 3);
  stack->put(place);
  return stack;
}

enum class Units { kEach, kList };

HSDPModule shard_stack(const Stack& stack, const FullyShardOptions& options, Units units = Units::kEach) {
  if (units == Units::kList) {
    fully_shard(std::vector<Block>{stack->blocks[0], stack->blocks[1]}, options);
    fully_shard(std::vector<Block>{stack->blocks[2], stack->blocks[3]}, options);
  } else {
    for (const Block& block : stack->blocks) fully_shard(block, options);
  }
  return fully_shard(stack, options);
}

torch::Tensor run(Stack& stack, const torch::Tensor& tokens) {
  return stack->place == Place::kWhole ? checkpoint(stack, tokens) : stack(tokens);
}

torch::Tensor loss_of(Stack& stack, const Batch& batch) { return net_loss(run(stack, batch.tokens), batch.targets); }

/// Gradients of three steps, each on another batch, with an update in between.
std::vector<Tensors> train(Stack& stack, const HSDPModule& root, int rank, int world) {
  std::vector<Tensors> gradients;
  torch::optim::SGD sgd(stack->parameters(), 0.1);
  for (uint64_t step = 0; step < 3; ++step) {
    sgd.zero_grad();
    loss_of(stack, make_batch(2 * world, step).part(rank, world)).backward();
    gradients.push_back(full_gradients(root));
    sgd.step();
  }
  return gradients;
}

void expect_equal(const std::vector<Tensors>& got, const std::vector<Tensors>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t step = 0; step < got.size(); ++step) {
    ASSERT_EQ(got[step].size(), want[step].size()) << what << ", step " << step;
    for (const auto& [name, value] : want[step])
      EXPECT_TRUE(torch::equal(got[step].at(name), value)) << what << ", step " << step << ", " << name;
  }
}

struct Case {
  std::string name;
  std::vector<int64_t> mesh;
  ShardLayout layout = ShardLayout::kPerParameter;
  std::optional<bool> reshard = {};
  bool low_precision = false;
  Units units = Units::kEach;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Checkpoint : public ::testing::TestWithParam<Case> {};

/// Bit for bit, wherever the checkpoints are.
TEST_P(Checkpoint, GradientsOfThePlainRun) {
  const Case& c = GetParam();
  run_ranks(ranks_of(c.mesh), [&](int rank) {
    FullyShardOptions options = on_mesh(c.mesh, c.layout, c.reshard);
    if (c.low_precision) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32};
    Stack plain = make_stack(Place::kNone);
    const std::vector<Tensors> want = train(plain, shard_stack(plain, options, c.units), rank, ranks_of(c.mesh));
    for (const Place place : kPlaces) {
      Stack stack = make_stack(place);
      const HSDPModule root = shard_stack(stack, options, c.units);
      expect_equal(train(stack, root, rank, ranks_of(c.mesh)), want, name_of(place));
      EXPECT_EQ(stack->blocks[0]->runs, place == Place::kInside ? 3 : place == Place::kNested ? 9 : 6) << name_of(place);
      for (const Block& block : stack->blocks) EXPECT_FALSE(HSDPModule::of(block).is_unsharded());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Checkpoint,
                         ::testing::Values(Case{"one", {1}}, Case{"two", {2}}, Case{"four", {4}},
                                           Case{"ragged", {2}, ShardLayout::kRagged},
                                           Case{"kept", {2}, ShardLayout::kPerParameter, false},
                                           Case{"freed", {2}, ShardLayout::kRagged, true},
                                           Case{"hsdp", {2, 2}}, Case{"hsdpragged", {2, 2}, ShardLayout::kRagged},
                                           Case{"bf16", {2}, ShardLayout::kPerParameter, {}, true},
                                           Case{"bf16ragged", {2, 2}, ShardLayout::kRagged, true, true},
                                           Case{"lists", {2}, ShardLayout::kPerParameter, {}, false, Units::kList}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace hyper_parallel::testing
