// Activation checkpointing: the gradients of the plain run, less memory, no more traffic than one gather for each forward.
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {
namespace {

/// Where the checkpoints are.
enum class Place { kNone, kAround, kInside, kBoth, kSeveral, kWhole, kNested };
constexpr std::array kPlaces = {Place::kAround, Place::kInside, Place::kBoth, Place::kSeveral, Place::kWhole, Place::kNested};

const char* name_of(Place place) {
  switch (place) {
    case Place::kNone:
      return "none";
    case Place::kAround:
      return "around each unit";
    case Place::kInside:
      return "inside each unit";
    case Place::kBoth:
      return "around and inside";
    case Place::kSeveral:
      return "around two units";
    case Place::kWhole:
      return "around the root";
    case Place::kNested:
      return "around a unit around two";
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
      for (const std::size_t i : {0, 2}) h = used(i, h, checkpoint(pair(i), h));
    } else {
      const bool around = place == Place::kAround || place == Place::kBoth;
      for (const std::size_t i : {0, 2}) {
        torch::Tensor y = h;
        for (const std::size_t j : {i, i + 1}) y = around ? checkpoint(blocks[j], y) : blocks[j](y);
        h = used(i, h, y);
      }
    }
    return head(h);
  }
  /// The result of the half that begins with block `first`, or what went into it.
  [[nodiscard]] torch::Tensor used(std::size_t first, const torch::Tensor& before, const torch::Tensor& after) const {
    return drop == (first == 0 ? 2 : 1) ? before : after;
  }
  void put(Place where) {
    place = where;
    for (Block& block : blocks) block->inside = where == Place::kInside || where == Place::kBoth;
  }
  torch::nn::Embedding table = nullptr;
  std::vector<Block> blocks;
  TiedHead head = nullptr;
  Place place = Place::kNone;
  int drop = 0;  ///< 1: the second half runs for nothing, 2: the first half does
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
                                           Case{"freed", {2}, ShardLayout::kRagged, true}, Case{"hsdp", {2, 2}},
                                           Case{"hsdpragged", {2, 2}, ShardLayout::kRagged},
                                           Case{"bf16", {2}, ShardLayout::kPerParameter, {}, true},
                                           Case{"bf16ragged", {2, 2}, ShardLayout::kRagged, true, true},
                                           Case{"lists", {2}, ShardLayout::kPerParameter, {}, false, Units::kList}),
                         [](const auto& test) { return test.param.name; });

/// How often each unit gathered and reduced: label of the engine's operations -> number.
struct Traffic {
  std::map<std::string, int> gathers, reductions;
};

Traffic traffic_since(const Comm& comm, uint64_t sequence) {
  Traffic traffic;
  for (const FlightRecord& record : comm.flight_record()) {
    if (record.sequence <= sequence) continue;
    if (record.operation == "all_gather_single") ++traffic.gathers[record.label];
    if (record.operation == "reduce_scatter_single") ++traffic.reductions[record.label];
  }
  return traffic;
}

uint64_t last_sequence(const Comm& comm) {
  const auto records = comm.flight_record();
  return records.empty() ? 0 : records.back().sequence;
}

/// A unit gathers for its forward and for its recomputation, and reduces once, from the first step on.
TEST(CheckpointTraffic, OneGatherForEachForwardAndOneReduction) {
  for (const bool reshard : {true, false}) {
    for (const Place place :
         {Place::kNone, Place::kAround, Place::kInside, Place::kBoth, Place::kSeveral, Place::kWhole, Place::kNested}) {
      run_ranks(2, [&](int rank) {
        Stack stack = make_stack(place);
        const FullyShardOptions options = on_all(ShardLayout::kPerParameter, reshard);
        const HSDPModule root = shard_stack(stack, options);
        const fsdp::MemoryUse plan = root.plan_memory();
        const Comm comm = options.mesh.get_group();
        for (uint64_t step = 0; step < 3; ++step) {
          const uint64_t before = last_sequence(comm);
          loss_of(stack, make_batch(4, step).part(rank, 2)).backward();
          Traffic traffic = traffic_since(comm, before);
          const auto where = concat(name_of(place), ", step ", step);
          for (const char* unit : {"block0", "block1", "block2", "block3", "Stack"}) {
            EXPECT_EQ(traffic.gathers[unit], reshard ? 2 : 1) << where << ' ' << unit;
            EXPECT_EQ(traffic.reductions[unit], 1) << where << ' ' << unit;
          }
        }
        if (place == Place::kAround || place == Place::kInside) {
          EXPECT_EQ(root.memory_use().pool, plan.pool) << name_of(place);
        }
      });
    }
  }
}

/// Events of one rank in the order in which they happen: collectives of the group, and what the model says.
class Trace {
 public:
  explicit Trace(Comm comm) : comm_(std::move(comm)), sequence_(last_sequence(comm_)) {}
  void say(const std::string& event) {
    drain();
    events_.push_back(event);
  }
  void begin() { sequence_ = last_sequence(comm_), events_.clear(); }
  std::vector<std::string> take() {
    drain();
    return std::exchange(events_, {});
  }

 private:
  void drain() {
    for (const FlightRecord& record : comm_.flight_record()) {
      if (record.sequence <= sequence_) continue;
      sequence_ = record.sequence;
      if (record.operation == "all_gather_single") events_.push_back("gather " + record.label);
      if (record.operation == "reduce_scatter_single") events_.push_back("reduce " + record.label);
    }
  }
  Comm comm_;
  uint64_t sequence_;
  std::vector<std::string> events_;
};

/// Two linear units that report.
struct TracedImpl : torch::nn::Module {
  struct PartImpl : torch::nn::Module {
    explicit PartImpl(std::string part_name) : label(std::move(part_name)) {
      layer = register_module("layer", torch::nn::Linear(4, 4));
    }
    torch::Tensor forward(const torch::Tensor& x) {
      const auto body = [this](const torch::Tensor& h) {
        if (trace != nullptr) trace->say("forward " + label);
        torch::Tensor y = torch::tanh(layer(h));
        if (y.requires_grad()) y.register_hook([this](const torch::Tensor&) { trace->say("backward " + label); });
        return y;
      };
      return inside ? checkpoint(body, x) : body(x);
    }
    std::string label;
    torch::nn::Linear layer = nullptr;
    Trace* trace = nullptr;
    bool inside = false;
  };
  using Part = nn::HookedHolder<PartImpl>;
  TracedImpl() {
    for (const char* part : {"p", "q"}) parts.push_back(register_module(part, Part(part)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (Part& part : parts) {
      x = around ? checkpoint(part, x) : part(x);
      if (part->trace != nullptr) part->trace->say(HSDPModule::of(part).is_unsharded() ? "kept" : "freed");
    }
    return x;
  }
  std::vector<Part> parts;
  bool around = false;
};
using Traced = nn::HookedHolder<TracedImpl>;

/// What happens in the third step, in which the orders have been learned.
std::vector<std::string> traced_step(bool around, bool inside, int rank) {
  Traced model;
  const FullyShardOptions options = on_all(ShardLayout::kPerParameter, /*reshard=*/true);
  for (auto& part : model->parts) fully_shard(part, options);
  fully_shard(model, options);
  Trace trace(options.mesh.get_group());
  model->around = around;
  for (auto& part : model->parts) part->trace = &trace, part->inside = inside;
  for (int step = 0; step < 3; ++step) {
    trace.begin();
    model(wave({2, 4}, rank)).square().sum().backward();
  }
  return trace.take();
}

/// Plain, with the checkpoint around the unit, and inside of it. The unit after the running one is gathered ahead.
TEST(CheckpointTrace, OrderOfEvents) {
  const std::vector<std::string> forward = {"gather p", "gather q", "forward p", "freed", "forward q", "freed"};
  const std::vector<std::string> plain = {"backward q", "gather q", "gather p", "reduce q", "backward p", "reduce p"};
  const std::vector<std::string> again = {"gather q", "gather p",  "forward q",  "backward q",
                                          "reduce q", "forward p", "backward p", "reduce p"};
  const auto joined = [](std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  run_ranks(2, [&](int rank) {
    EXPECT_EQ(traced_step(false, false, rank), joined(forward, plain));
    EXPECT_EQ(traced_step(/*around=*/true, false, rank), joined(forward, again));
    EXPECT_EQ(traced_step(false, /*inside=*/true, rank), joined(forward, again));
  });
}

/// A rank that drops the result of some checkpoints follows the others (B17).
TEST(CheckpointDivergence, RanksThatDropASegment) {
  for (const Place place : kPlaces) {
    if (place == Place::kWhole) continue;  // there is nothing else that could get a gradient
    run_ranks(3, [&](int rank) {
      const auto train_dropping = [&](Place where) {
        Stack stack = make_stack(where);
        const FullyShardOptions options = on_all(ShardLayout::kRagged);
        const HSDPModule root = shard_stack(stack, options);
        std::vector<Tensors> gradients;
        for (uint64_t step = 0; step < 3; ++step) {
          root.zero_grad();
          // Rank 0 uses all, rank 1 nothing of the second half, rank 2 nothing of the first.
          stack->drop = static_cast<int>((static_cast<uint64_t>(rank) + step) % 3);
          loss_of(stack, make_batch(6, step).part(rank, 3)).backward();
          gradients.push_back(full_gradients(root));
        }
        return gradients;
      };
      expect_equal(train_dropping(place), train_dropping(Place::kNone), name_of(place));
    });
  }
}

}  // namespace
}  // namespace hyper_parallel::testing
