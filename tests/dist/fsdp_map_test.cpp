// Shards that the ranks of a host map instead of copying: the same bits, and nobody reads what is being written.
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/hyper_parallel.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_host_mode.h"
#include "support/small_net.h"
#include "support/wide_net.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kDim = WideImpl::kDim;

struct Case {
  std::string name = {};
  std::vector<int64_t> mesh = {2};
  std::optional<ReshardAfterForward> reshard = {};
  bool bf16 = false, accumulate = false, freeze = false, offload = false, checkpoint = false, torch_optimizer = false;
  bool keep_after_backward = false, evaluate = false, by_hand = false, reload = false, convert = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

HSDPModule shard(const Wide& model, const Case& c) {
  FullyShardOptions options = on_mesh(c.mesh, ShardLayout::kRagged);
  options.reshard_after_forward = c.reshard;
  if (c.bf16) options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (c.offload) options.offload_policy = CPUOffloadPolicy{};
  return shard_wide(model, options);
}

Tensor run(Wide& model, const Tensor& x, bool recompute) {
  if (!recompute) return model(x);
  return checkpoint([&](const Tensor& input) { return model(input); }, x);
}

/// What is done between two steps.
void between_steps(const Case& c, Wide& model, const HSDPModule& root, const Tensor& x, int step, std::vector<Tensor>& seen) {
  torch::NoGradGuard no_grad;
  if (c.evaluate) seen.push_back(model(x).clone());
  if (c.by_hand) {
    const UnshardScope scope(root);
    seen.push_back(model->blocks[0]->a->weight.clone());
    // A copy of this rank's own: writing to it does nobody harm.
    model->blocks[0]->a->weight.mul_(0);
    seen.push_back(model(x).clone());
  }
  if (c.reload && step == 0) {
    std::vector<std::pair<std::string, Tensor>> values;
    for (auto& [name, value] : full_parameters(root)) values.emplace_back(name, value * 0.5);
    fsdp::load_full(root, values);
  }
  if (c.convert && step == 1) root.to(torch::kDouble);
}

std::vector<Tensor> train(const Case& c) {
  Wide model;
  seed_parameters(*model, 3);
  if (c.freeze) model->blocks[1]->a->weight.set_requires_grad(false), model->blocks[2]->b->weight.set_requires_grad(false);
  const HSDPModule root = shard(model, c);
  if (c.keep_after_backward) root.set_reshard_after_backward(false);
  optim::AdamW ours(root, {.lr = 1e-2});
  torch::optim::SGD theirs(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  std::vector<Tensor> seen;
  for (int step = 0; step < 3; ++step) {
    const auto type = c.convert && step == 2 ? torch::kDouble : torch::kFloat;
    const Tensor x = wave({4, kDim}, 10 * step + get_rank()).to(type);
    for (const bool sync : {false, true}) {
      if (!sync && !c.accumulate) continue;
      root.set_requires_gradient_sync(sync);
      const Tensor loss = run(model, x, c.checkpoint).to(torch::kFloat).square().mean();
      seen.push_back(loss.detach().clone());
      loss.backward();
    }
    clip_grad_norm_(root, 0.5);
    c.torch_optimizer ? (void)theirs.step() : ours.step();
    root.zero_grad();
    between_steps(c, model, root, x, step, seen);
  }
  for (auto& [name, value] : full_parameters(root)) seen.push_back(value);
  return seen;
}

std::vector<std::vector<Tensor>> outcomes(const char* mode, const Case& c) {
  const Mode scoped(mode);
  std::vector<std::vector<Tensor>> out(static_cast<std::size_t>(ranks_of(c.mesh)));
  run_ranks(ranks_of(c.mesh), [&](int rank) { out[static_cast<std::size_t>(rank)] = train(c); });
  return out;
}

class Mapping : public ::testing::TestWithParam<Case> {};

TEST_P(Mapping, HasTheBitsOfGloo) {
  const Case& c = GetParam();
  const auto want = outcomes("0", c);
  for (const char* mode : {"1", "processes", "copy"}) {
    const auto got = outcomes(mode, c);
    for (std::size_t r = 0; r < want.size(); ++r) {
      ASSERT_EQ(got[r].size(), want[r].size());
      for (std::size_t i = 0; i < want[r].size(); ++i)
        ASSERT_TRUE(torch::equal(got[r][i], want[r][i])) << mode << ", rank " << r << ", tensor " << i;
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int world : {1, 2, 3, 4, 8}) {
    for (const bool bf16 : {false, true})
      all.push_back({.name = "W" + std::to_string(world) + (bf16 ? "BFloat16" : "Float"), .mesh = {world}, .bf16 = bf16});
  }
  all.push_back({.name = "Keep", .reshard = false});
  all.push_back({.name = "KeepBFloat16", .reshard = false, .bf16 = true});
  all.push_back({.name = "CutOverTwo", .mesh = {4}, .reshard = 2});
  all.push_back({.name = "Hybrid", .mesh = {2, 2}});
  all.push_back({.name = "HybridBFloat16", .mesh = {2, 2}, .bf16 = true, .accumulate = true});
  all.push_back({.name = "Accumulate", .mesh = {3}, .accumulate = true});
  all.push_back({.name = "AccumulateKept", .accumulate = true, .keep_after_backward = true});
  all.push_back({.name = "Frozen", .mesh = {3}, .freeze = true});
  all.push_back({.name = "Offload", .offload = true});
  all.push_back({.name = "Checkpoint", .mesh = {3}, .bf16 = true, .checkpoint = true});
  all.push_back({.name = "TorchOptimizer", .torch_optimizer = true});
  all.push_back({.name = "Evaluate", .mesh = {3}, .evaluate = true});
  all.push_back({.name = "EvaluateBFloat16", .bf16 = true, .evaluate = true});
  all.push_back({.name = "ByHand", .evaluate = true, .by_hand = true});
  all.push_back({.name = "Reload", .mesh = {3}, .bf16 = true, .evaluate = true, .reload = true});
  all.push_back({.name = "Convert", .evaluate = true, .convert = true});
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Mapping, ::testing::ValuesIn(cases()), [](const auto& instance) { return instance.param.name; });

/// Permissions and sharing of the page where `data` lies, e.g. "r--s".
std::string access_to(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string access;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> access;
    if (address >= begin && address < end) return access;
  }
  return "nothing";
}

int64_t sum_of_shards(const HSDPModule& root) {
  int64_t bytes = 0;
  for (const auto& group : root.groups()) bytes += static_cast<int64_t>(group.shard.nbytes());
  return bytes;
}

class Accounts : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Accounts, ::testing::Values(false, true),
                         [](const auto& instance) { return instance.param ? "BFloat16" : "Float"; });

TEST_P(Accounts, SayWhatIsSharedAndThePlanIsExact) {
  const Case c{.bf16 = GetParam()};
  std::array<int64_t, 2> pool = {}, sent = {};
  for (const bool map : {false, true}) {
    const Mode mode(map ? "1" : "copy");
    run_ranks(2, [&](int rank) {
      Wide model;
      const HSDPModule root = shard(model, c);
      const Comm comm = root.data_parallel_comm();
      EXPECT_EQ(comm.maps_slices(), map);
      const fsdp::MemoryUse plan = root.plan_memory();
      for (int step = 0; step < 3; ++step) {
        comm.reset_counters();
        model(wave({4, kDim}, step)).to(torch::kFloat).sum().backward();
        root.zero_grad();
      }
      const fsdp::MemoryUse use = root.memory_use();
      EXPECT_EQ(use.pool, plan.pool);
      EXPECT_EQ(use.copies, plan.copies);
      EXPECT_EQ(use.total(), plan.total());
      const CommCounters counters = comm.counters();
      EXPECT_EQ(counters.bytes_sent, counters.bytes_received);
      const int64_t peers = sum_of_shards(root) / (c.bf16 ? 2 : 1);
      if (map) {
        EXPECT_GT(use.mapped, peers * 7 / 10);
        EXPECT_LT(use.mapped, peers);
        // The blocks are gathered twice, the root once.
        EXPECT_GE(counters.bytes_mapped, 2 * use.mapped);
        EXPECT_EQ(counters.bytes_copied(), counters.bytes_received - counters.bytes_mapped);
        const int64_t copy = c.bf16 ? peers : 0;
        EXPECT_GT(use.copies, copy);
        EXPECT_LE(use.copies, copy + 4 * 3 * 4096) << "three pages of the view for each unit";
      } else {
        EXPECT_EQ(use.mapped, 0);
        EXPECT_EQ(use.copies, 0);
      }
      if (rank == 0) pool[map ? 1 : 0] = use.pool, sent[map ? 1 : 0] = counters.bytes_sent;
    });
  }
  EXPECT_LT(pool[1], pool[0]) << "gathered parameters need no pool";
  EXPECT_EQ(sent[1], sent[0]) << "payload is counted alike";
}

TEST(MappedView, IsGuardedAndByHandACopy) {
  const Mode mode("1");
  run_ranks(2, [](int) {
    Wide model;
    (void)shard(model, {});
    const Tensor weight = model->blocks[2]->b->weight;
    const HSDPModule last = HSDPModule::of(model->blocks[2]);
    last.unshard();
    EXPECT_EQ(access_to(weight.const_data_ptr()), "rw-s") << "a copy in the arena";
    last.reshard();
    torch::NoGradGuard no_grad;
    model(wave({2, kDim}, 0));
    EXPECT_THAT(message_of<c10::Error>([&] { (void)weight.const_data_ptr(); }), HasSubstr("are resharded"));
  });
}

TEST(MappedView, ShowsPeersPagesThatCannotBeWritten) {
  const Mode mode("1");
  run_ranks(2, [](int rank) {
    torch::manual_seed(0);
    nn::Linear layer(torch::nn::LinearOptions(256, 64).bias(false));
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kRagged));
    layer(wave({2, 256}, rank)).sum();  // stays gathered until backward
    const auto* data = static_cast<const char*>(layer->weight.const_data_ptr());
    for (int r = 0; r < 2; ++r) EXPECT_EQ(access_to(data + r * 32'768), "r--s") << "slice " << r;
    const Tensor mine = root.groups()[0].shard;
    EXPECT_EQ(access_to(mine.const_data_ptr()), "rw-s");
    EXPECT_EQ(std::memcmp(mine.const_data_ptr(), data + rank * 32'768, 32'768), 0);
  });
}

/// Rank 0 is fast and writes to its shards as soon as it may; the others are slow readers.
enum class Phase { kForward, kBackward, kFrozenBackward };
class SlowReaders : public ::testing::TestWithParam<std::tuple<Phase, bool, int>> {};
INSTANTIATE_TEST_SUITE_P(All, SlowReaders,
                         ::testing::Combine(::testing::Values(Phase::kForward, Phase::kBackward, Phase::kFrozenBackward),
                                            ::testing::Bool(), ::testing::Values(2, 3)));

Tensor slow_pass(Wide& model, Phase phase, int rank) {
  const auto nap = [rank] {
    if (rank != 0) std::this_thread::sleep_for(150ms);
  };
  model->before = [nap, phase](std::size_t block, Tensor& x) {
    if (phase == Phase::kForward) return block == 2 ? nap() : void();
    if (block != 1) return;
    x = x * 1;  // a hook on it runs between the backwards of the middle and the first block
    x.register_hook([nap](const Tensor&) { nap(); });
  };
  Tensor x = wave({2, kDim}, 5);
  if (phase == Phase::kForward) {
    torch::NoGradGuard no_grad;
    return model(x).to(torch::kFloat).clone();
  }
  x.set_requires_grad(true);
  model(x).to(torch::kFloat).sum().backward();
  return x.grad().clone();
}

TEST_P(SlowReaders, AreWaitedFor) {
  const auto [phase, bf16, world] = GetParam();
  const Case c{.mesh = {world}, .bf16 = bf16};
  const auto values = [&, phase = phase](const char* name) {
    const Mode mode(name);
    std::vector<Tensor> out(static_cast<std::size_t>(2 * world));
    run_ranks(world, [&](int rank) {
      Wide model;
      seed_parameters(*model, 3);
      if (phase == Phase::kFrozenBackward) {
        for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
      }
      const HSDPModule root = shard(model, c);
      slow_pass(model, Phase::kForward, 0);  // prefetch is learned
      for (int i = 0; i < 2; ++i) {
        out[static_cast<std::size_t>(2 * rank + i)] = slow_pass(model, phase, rank);
        torch::NoGradGuard no_grad;
        for (const auto& group : root.groups()) group.shard.mul_(-1.5);
        root.zero_grad();
      }
    });
    return out;
  };
  const auto want = values("0"), got = values("1");
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_TRUE(torch::equal(got[i], want[i])) << "rank " << i / 2 << ", pass " << i % 2;
}

TEST(Exceptions, LeaveMappedUnitsUsable) {
  for (const bool bf16 : {false, true}) {
    const auto values = [&](const char* name) {
      const Mode mode(name);
      std::vector<Tensor> out(2);
      run_ranks(2, [&](int rank) {
        Wide model;
        seed_parameters(*model, 3);
        const HSDPModule root = shard(model, {.bf16 = bf16});
        for (int i = 0; i < 3; ++i) {
          model->before = [](std::size_t block, Tensor&) {
            if (block == 1) throw std::runtime_error("no");
          };
          EXPECT_THROW(model(wave({2, kDim}, i)), std::runtime_error);
          model->before = nullptr;
          model(wave({2, kDim}, i)).to(torch::kFloat).square().mean().backward();
          torch::NoGradGuard no_grad;
          for (const auto& group : root.groups()) group.shard.add_(group.grad, -1e-3);
          root.zero_grad();
        }
        std::vector<Tensor> all;
        for (auto& [parameter, value] : full_parameters(root)) all.push_back(value.flatten());
        out[static_cast<std::size_t>(rank)] = torch::cat(all);
        EXPECT_TRUE(out[static_cast<std::size_t>(rank)].isfinite().all().item<bool>());
      });
      return out;
    };
    const auto want = values("0"), got = values("1");
    for (std::size_t r = 0; r < 2; ++r) EXPECT_TRUE(torch::equal(got[r], want[r]));
  }
}

// A rank may run a model alone whose parameters were gathered by hand: nothing waits for the others.
TEST(Exceptions, AHeldModelRunsOnOneRankAlone) {
  const Mode mode("1");
  run_ranks(2, [](int rank) {
    Wide model;
    const HSDPModule root = shard(model, {.reshard = false});
    model(wave({2, kDim}, 0)).sum();  // all stay mapped
    const UnshardScope scope(root);
    torch::NoGradGuard no_grad;
    for (int i = 0; rank == 0 && i < 3; ++i) model(wave({2, kDim}, i));
  });
}

TEST(WithoutAddresses, ShardsAreCopiedAndOneLineSaysSo) {
  const Mode mode("1");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  ::testing::internal::CaptureStderr();
  run_ranks(2, [&](int rank) {
    nn::Linear layer(torch::nn::LinearOptions(2048, 8192).bias(false));  // 64 MiB
    const HSDPModule root = fully_shard(layer, on_all(ShardLayout::kRagged));
    const Comm comm = root.data_parallel_comm();
    comm.barrier();
    if (rank == 0) {
      // Memory in arenas needs no new addresses; the view does.
      std::ifstream statm("/proc/self/statm");
      rlim_t pages = 0;
      statm >> pages;
      auto tight = before;
      tight.rlim_cur = pages * 4096 + (rlim_t{40} << 20);
      ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
    }
    comm.barrier();
    torch::NoGradGuard no_grad;
    EXPECT_EQ(layer(torch::ones({1, 2048})).numel(), 8192);
    comm.barrier();
    if (rank == 0) {
      ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    }
    EXPECT_EQ(root.memory_use().mapped, 0);
  });
  const auto log = ::testing::internal::GetCapturedStderr();
  const std::string line = "shards are copied, not mapped: rank 0: cannot reserve addresses";
  EXPECT_THAT(log, HasSubstr(line));
  EXPECT_EQ(log.find(line), log.rfind(line));
}

/// Two ranks with options of their own.
std::vector<bool> maps_with(const std::vector<InitOptions>& options) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<bool> maps(2);
  std::vector<std::thread> threads;
  std::array<bool, 2> result = {};
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      InitOptions mine = options[static_cast<std::size_t>(rank)];
      mine.timeout = 20s, mine.rank = rank, mine.world_size = 2, mine.store = store;
      init_process_group(mine);
      at::set_num_threads(1);
      Wide model;
      const HSDPModule root = shard(model, {});
      model(wave({2, kDim}, 0)).sum().backward();
      result[static_cast<std::size_t>(rank)] = root.memory_use().mapped > 0;
      EXPECT_EQ(root.data_parallel_comm().maps_slices(), root.memory_use().mapped > 0);
      destroy_process_group();
    });
  }
  for (auto& thread : threads) thread.join();
  return {result[0], result[1]};
}

TEST(Options, SwitchMappingOffAndPlaceMemory) {
  using Both = std::vector<bool>;
  const Both yes{true, true}, no{false, false};
  const Mode on("1");
  EXPECT_EQ(maps_with({{}, {}}), yes);
  EXPECT_EQ(maps_with({{.map_shards = false}, {}}), no) << "one rank is enough";
  EXPECT_EQ(maps_with({{}, {.samehost = false}}), no);
  EXPECT_EQ(maps_with({{.first_touch = true}, {.first_touch = true}}), yes);
  EXPECT_EQ(maps_with({{.huge_pages = true}, {.huge_pages = true}}), yes);
  const Mode copy("copy");
  EXPECT_EQ(maps_with({{}, {}}), no);
  EXPECT_EQ(maps_with({{.map_shards = true}, {.map_shards = true}}), yes);
}

}  // namespace
}  // namespace hyper_parallel::testing
