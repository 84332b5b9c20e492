// Memory shared by the ranks of a host: the same bits as over Gloo, and messages in every order that Comm allows.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <future>

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/mesh/device_mesh.h>

#include "support/counting_allocator.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/same_host_mode.h"

namespace hyper_parallel {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Mode;
using testing::RankOptions;
using testing::run_ranks;
using torch::Tensor;

enum class Memory { kTorch, kGroup };

/// Memory of the group's allocator.
Tensor group_memory(const Comm& comm, std::int64_t n, torch::Dtype type) {
  const auto bytes = static_cast<std::size_t>(n) * c10::elementSize(type);
  auto storage = c10::Storage(c10::Storage::use_byte_size_t{}, bytes, comm.allocator()->allocate(bytes), nullptr, false);
  return torch::empty({0}, type).set_(storage, 0, {n}, {1});
}

Tensor numbers(const Comm& comm, std::int64_t n, torch::Dtype type, int seed, Memory memory) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed));
  auto values = (torch::randn({n}, generator, torch::TensorOptions()) * 3).to(type);
  if (memory == Memory::kTorch) return values;
  return group_memory(comm, n, type).copy_(values);
}

struct Outcome {
  std::vector<Tensor> tensors;
  std::vector<std::int64_t> bytes;
};

// Every operation once, several of them in flight.
void run_operations(const Comm& comm, torch::Dtype type, std::int64_t n, Memory memory, Outcome& out) {
  const int rank = comm.rank(), world = comm.size();
  const auto make = [&](std::int64_t count, int seed) { return numbers(comm, count, type, seed * 16 + rank, memory); };
  const auto gathered = make(n * world, 1), scattered = make(n, 2), reduced = make(n, 3), exchanged = make(n * world, 4);
  const auto cast = make(n, 5), part = make(n, 6), uneven = make(n * world + world * (world - 1) / 2, 7);
  const auto own = make(n, 11), rows = make(n * world, 12), own_uneven = make(n + rank, 13);
  comm.reset_counters();
  auto gather = comm.all_gather_single(gathered, own, {.label = "a"});
  auto reduce = comm.reduce_scatter_single(scattered, rows, {.label = "b"});
  auto exchange = comm.all_to_all_single(exchanged, rows);
  std::vector<std::int64_t> sizes;
  for (int r = 0; r < world; ++r) sizes.push_back(n + r);
  auto gather_uneven = comm.all_gather_v(uneven, own_uneven, sizes);
  auto all = comm.all_reduce(reduced, {.op = ReduceOp::kSum});
  exchange.wait();
  all.wait();
  gather_uneven.wait();
  gather.wait();
  reduce.wait();
  comm.broadcast(cast, world - 1).wait();
  comm.scatter(part, rows, 0).wait();
  auto sent = comm.send(own, (rank + 1) % world == rank ? rank : (rank + 1) % world);
  const auto received = make(n, 8);
  comm.recv(received, (rank + world - 1) % world).wait();
  sent.wait();
  comm.barrier();
  out.bytes.push_back(comm.counters().bytes_sent);
  out.bytes.push_back(comm.counters().bytes_received);
  for (const auto& tensor : {gathered, scattered, reduced, exchanged, cast, part, uneven, received}) {
    out.tensors.push_back(tensor.clone());
  }
}

// Around the limits of what travels in an entry, in a copy and in place.
const std::vector<std::int64_t> kSizes{0, 1, 27, 433, 1025, 65537};
const std::vector<torch::Dtype> kTypes{torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kByte};

std::vector<Outcome> outcomes(const char* mode, const char* transport, int world, Memory memory, c10::Allocator* allocator) {
  const Mode scoped(mode);
  std::vector<Outcome> out(static_cast<std::size_t>(world));
  run_ranks(world, RankOptions{.allocator = allocator}, [&](int rank) {
    const auto comm = current_world().comm();
    EXPECT_EQ(comm.transport_name(), transport);
    for (const auto type : kTypes) {
      for (const auto n : kSizes) run_operations(comm, type, n, memory, out[static_cast<std::size_t>(rank)]);
    }
  });
  return out;
}

void expect_same(const std::vector<Outcome>& got, const std::vector<Outcome>& want, const std::string& what) {
  for (std::size_t r = 0; r < want.size(); ++r) {
    EXPECT_EQ(got[r].bytes, want[r].bytes) << what << ", rank " << r;
    ASSERT_EQ(got[r].tensors.size(), want[r].tensors.size());
    for (std::size_t i = 0; i < want[r].tensors.size(); ++i) {
      const auto& a = got[r].tensors[i];
      const auto& b = want[r].tensors[i];
      ASSERT_EQ(a.nbytes(), b.nbytes());
      const bool same = a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
      EXPECT_TRUE(same) << what << ", rank " << r << ", tensor " << i % 8 << " of round " << i / 8;
    }
  }
}

class SameBits : public ::testing::TestWithParam<int> {};

TEST_P(SameBits, AsOverGlooFromEveryMemory) {
  const int world = GetParam();
  const auto want = outcomes("0", "gloo", world, Memory::kTorch, nullptr);
  for (const char* mode : {"1", "processes"}) {
    for (const auto memory : {Memory::kTorch, Memory::kGroup}) {
      const auto what = std::string(mode) + (memory == Memory::kGroup ? ", the group's memory" : ", torch's memory");
      expect_same(outcomes(mode, "samehost", world, memory, nullptr), want, what);
    }
    expect_same(outcomes(mode, "samehost", world, Memory::kGroup, testing::counting_allocator()), want, "the user's memory");
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SameBits, ::testing::Values(2, 3, 4, 8));

/// Both ways in which threads can be ranks: sharing addresses, and as if they were processes.
class Messages : public ::testing::TestWithParam<const char*> {
 protected:
  template <class Body>
  void on_two(Body body, std::chrono::milliseconds timeout = 30s) {
    const Mode mode(GetParam());
    run_ranks(2, RankOptions{.timeout = timeout}, [&](int rank) {
      const auto comm = current_world().comm();
      ASSERT_EQ(comm.transport_name(), "samehost");
      body(comm, rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, Messages, ::testing::Values("1", "processes"));

// 1 in an entry, 3000 in a copy, 100,000 in place or in a copy.
std::int64_t bytes_of(int i) { return i % 3 == 0 ? 1 : i % 3 == 1 ? 3000 : 100'000; }
Tensor message(int i) { return torch::full({bytes_of(i)}, i % 251, torch::kByte); }

TEST_P(Messages, ManyMoreThanThereAreEntries) {
  constexpr int kMessages = 900;
  on_two([](const Comm& comm, int rank) {
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < kMessages; ++i) {
      tensors.push_back(rank == 0 ? message(i) : torch::zeros({bytes_of(i)}, torch::kByte));
      works.push_back(rank == 0 ? comm.send(tensors.back(), 1) : comm.recv(tensors.back(), 0));
    }
    // Rank 0 backwards: the last one can leave only after all others were announced.
    if (rank == 0) std::reverse(works.begin(), works.end());
    for (auto& work : works) work.wait();
    for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(torch::equal(tensors[static_cast<std::size_t>(i)], message(i))) << i;
  });
}

TEST_P(Messages, AnAwaitedOneBehindManyThatNobodyAskedFor) {
  constexpr int kMessages = 700;
  on_two([](const Comm& comm, int rank) {
    const auto word = torch::full({20'000}, rank == 0 ? 7.0F : 0.0F);
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    if (rank == 0) {
      for (int i = 0; i < kMessages; ++i) works.push_back(comm.send(tensors.emplace_back(message(i)), 1));
      comm.broadcast(word, 0).wait();
    } else {
      comm.broadcast(word, 0).wait();
      EXPECT_EQ(word[19'999].item<float>(), 7.0F);
      for (int i = 0; i < kMessages; ++i) {
        works.push_back(comm.recv(tensors.emplace_back(torch::zeros({bytes_of(i)}, torch::kByte)), 0));
      }
    }
    for (auto& work : works) work.wait();
    for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(torch::equal(tensors[static_cast<std::size_t>(i)], message(i))) << i;
  });
}

// As over Gloo, a posted receive is enough: the sender does not depend on what the receiver's thread does next.
TEST_P(Messages, ASenderGoesOnWhileTheReceiverComputes) {
  std::promise<void> sent;
  on_two([&](const Comm& comm, int rank) {
    const auto tensor = numbers(comm, 300'000, torch::kFloat, 5, Memory::kGroup);
    if (rank == 0) {
      std::this_thread::sleep_for(50ms);
      comm.send(tensor, 1).wait();
      sent.set_value();
    } else {
      const auto want = tensor.clone();
      tensor.zero_();
      auto work = comm.recv(tensor, 0);
      ASSERT_EQ(sent.get_future().wait_for(25s), std::future_status::ready);
      work.wait();
      EXPECT_TRUE(torch::equal(tensor, want));
    }
  });
}

TEST_P(Messages, WaitsInAnyOrder) {
  on_two([](const Comm& comm, int rank) {
    for (int round = 0; round < 20; ++round) {
      std::vector<Tensor> outputs;
      std::vector<Work> works;
      for (int i = 0; i < 10; ++i) {
        const auto input = numbers(comm, 1 + i * 1500, torch::kFloat, i * 2 + rank, Memory::kGroup);
        outputs.push_back(group_memory(comm, 2 * input.numel(), torch::kFloat));
        works.push_back(comm.all_gather_single(outputs.back(), input));
      }
      for (std::size_t i = 0; i < works.size(); ++i) works[(i * 7 + static_cast<std::size_t>(3 * rank)) % 10].wait();
      for (int i = 0; i < 10; ++i) {
        for (int r = 0; r < 2; ++r) {
          const auto want = numbers(comm, 1 + i * 1500, torch::kFloat, i * 2 + r, Memory::kTorch);
          EXPECT_TRUE(torch::equal(outputs[static_cast<std::size_t>(i)].narrow(0, r * want.numel(), want.numel()), want));
        }
      }
    }
  });
}

TEST_P(Messages, DroppedWorksKeepTheirMemory) {
  on_two([](const Comm& comm, int rank) {
    for (int i = 0; i < 30; ++i) {
      {
        const auto input = numbers(comm, 40'000, torch::kFloat, rank, Memory::kGroup);
        const auto output = group_memory(comm, 80'000, torch::kFloat);
        [[maybe_unused]] const auto dropped = comm.all_gather_single(output, input);
      }
      const auto sum = torch::full({5000}, rank + 1.0F);
      comm.all_reduce(sum).wait();
      EXPECT_EQ(sum.min().item<float>(), 3.0F);
      EXPECT_EQ(sum.max().item<float>(), 3.0F);
    }
    comm.barrier();
  });
}

TEST_P(Messages, TimeOutOnBothSides) {
  for (const std::string op : {"send", "recv"}) {
    on_two([&](const Comm& comm, int rank) {
      const auto tensor = group_memory(comm, 100'000, torch::kFloat).zero_();
      comm.barrier();
      if (rank == 1) return std::this_thread::sleep_for(1500ms);
      const auto message = message_of<TimeoutError>(
          [&] { (op == "send" ? comm.send(tensor, 1, {.timeout = 300ms}) : comm.recv(tensor, 1, {.timeout = 300ms})).wait(); });
      EXPECT_THAT(message, HasSubstr("[" + op + "] no answer from peer rank 1 (global 1) within 0.3 s"));
    });
  }
}

TEST_P(Messages, WhatARankSentBeforeItLeftArrives) {
  on_two([](const Comm& comm, int rank) {
    if (rank == 0) {
      comm.send(message(0), 1).wait();
      comm.send(message(1), 1).wait();
      return;
    }
    const auto first = torch::zeros({bytes_of(0)}, torch::kByte), second = torch::zeros({bytes_of(1)}, torch::kByte);
    const auto lost = message_of<CommError>([&] {
      std::vector<Work> works;
      works.push_back(comm.recv(first, 0));
      works.push_back(comm.recv(second, 0));
      auto third = comm.recv(torch::zeros({1}), 0);
      for (auto& work : works) work.wait();
      third.wait();
    });
    EXPECT_THAT(lost, HasSubstr("peer rank 0 (global 0) closed the connection"));
    EXPECT_TRUE(torch::equal(first, message(0)));
    EXPECT_TRUE(torch::equal(second, message(1)));
  });
}

TEST_P(Messages, APeerThatLeavesTakesBackWhatNobodyRead) {
  on_two([](const Comm& comm, int rank) {
    const auto tensor = group_memory(comm, 100'000, torch::kFloat).fill_(rank);
    comm.barrier();
    if (rank == 0) {
      [[maybe_unused]] const auto dropped = comm.send(tensor, 1);
      return;
    }
    std::this_thread::sleep_for(300ms);
    const auto message = message_of<CommError>([&] { comm.recv(tensor, 0).wait(); });
    EXPECT_THAT(message, HasSubstr("peer rank 0 (global 0) closed the connection"));
    EXPECT_EQ(tensor[0].item<float>(), 1.0F);
  });
}

// A rank that reduces when the rows are there reads them where they are. One that comes later finds a copy in its workspace,
// because the other could not go on otherwise.
TEST_P(Messages, ReductionsReadTheirRowsWithTheSenderUnlessItWaits) {
  constexpr std::int64_t kRow = 50'000;
  on_two([](const Comm& comm, int rank) {
    const auto input = group_memory(comm, 2 * kRow, torch::kFloat).fill_(rank + 1.0F);
    const auto output = torch::zeros({kRow}), workspace = torch::full({2 * kRow}, -5.0F), token = torch::zeros({1});
    auto work = comm.reduce_scatter_single(output, input, {.workspace = &workspace});
    comm.barrier();
    if (rank == 1) comm.recv(token, 0).wait();
    work.wait();
    if (rank == 0) comm.send(token, 1).wait();
    EXPECT_TRUE(torch::equal(output, torch::full({kRow}, 3.0F)));
    const auto row = workspace.narrow(0, (1 - rank) * kRow, kRow);
    EXPECT_TRUE(torch::equal(row, torch::full({kRow}, rank == 0 ? -5.0F : 1.0F)));
  });
}

// Groups share arenas and have mailboxes of their own.
TEST_P(Messages, SeveralGroupsAtOnce) {
  const Mode mode(GetParam());
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    const auto a = mesh.get_group("a"), b = mesh.get_group("b"), all = current_world().comm();
    EXPECT_EQ(a.allocator(), b.allocator());
    const auto mine = torch::full({30'000}, rank + 1.0F);
    for (int i = 0; i < 20; ++i) {
      const auto x = torch::zeros({60'000}), y = torch::zeros({60'000}), z = torch::zeros({120'000});
      auto first = a.all_gather_single(x, mine), second = b.all_gather_single(y, mine), third = all.all_gather_single(z, mine);
      if (rank % 2 == 0) second.wait();
      third.wait();
      first.wait();
      second.wait();
      EXPECT_EQ(x.sum().item<float>(), 30'000 * (rank % 2 == 0 ? 4.0F : 6.0F));
      EXPECT_EQ(y.sum().item<float>(), 30'000 * (rank < 2 ? 3.0F : 7.0F));
      EXPECT_EQ(z.sum().item<float>(), 30'000 * 10.0F);
    }
  });
}

// Two ranks with options of their own in one world; `body` runs with the world's group.
template <class Body>
void with_options(const std::vector<std::optional<bool>>& samehost, Body body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      init_process_group(
          {.timeout = 20s, .rank = rank, .world_size = 2, .store = store, .samehost = samehost[static_cast<std::size_t>(rank)]});
      body(current_world().comm());
      destroy_process_group();
    });
  }
  for (auto& thread : threads) thread.join();
}

std::string after_sum(const Comm& comm) {
  const auto tensor = torch::ones({100});
  comm.all_reduce(tensor).wait();
  EXPECT_EQ(tensor[99].item<float>(), 2.0F);
  return std::string(comm.transport_name());
}

TEST(Choice, OptionAndEnvironment) {
  const auto expect = [](const std::vector<std::optional<bool>>& samehost, const char* transport) {
    with_options(samehost, [&](const Comm& comm) { EXPECT_EQ(after_sum(comm), transport); });
  };
  const Mode on("1");
  expect({std::nullopt, std::nullopt}, "samehost");
  expect({false, false}, "gloo");
  const Mode off("0");
  expect({std::nullopt, std::nullopt}, "gloo");
  expect({true, true}, "samehost");
}

TEST(Choice, OneRankIsEnoughForAllToUseGloo) {
  const Mode on("1");
  ::testing::internal::CaptureStderr();
  with_options({true, false}, [&](const Comm& comm) { EXPECT_EQ(after_sum(comm), "gloo"); });
  const auto log = ::testing::internal::GetCapturedStderr();
  const std::string line = "group world uses Gloo, not shared memory: rank 1: it is switched off";
  EXPECT_THAT(log, HasSubstr(line));
  EXPECT_EQ(log.find(line), log.rfind(line)) << "one line, of rank 0";
}

TEST(Choice, GroupsWithoutPeers) {
  EXPECT_EQ(Comm::fake(0, 4).transport_name(), "fake");
  run_ranks(1, [] { EXPECT_EQ(current_world().comm().transport_name(), "none"); });
  EXPECT_THROW((void)Comm().transport_name(), ValueError);
}

TEST(Choice, ABadVariableIsNamed) {
  const Mode bad("maybe");
  EXPECT_EQ(message_of<ValueError>([] { init_process_group({.rank = 0, .world_size = 1}); }),
            "[init_process_group] HP_SAMEHOST=\"maybe\", want 0, 1, copy or processes");
}

std::int64_t status_kilobytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::atoll(line.c_str() + key.size() + 1);
  }
  ADD_FAILURE() << "no " << key << " in /proc/self/status";
  return 0;
}

TEST(Choice, WithoutAddressSpaceAllUseGlooAndSaySo) {
  const Mode on("1");
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  auto tight = before;
  tight.rlim_cur = static_cast<rlim_t>(status_kilobytes("VmSize") * 1024) + (rlim_t{1} << 30);
  ::testing::internal::CaptureStderr();
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  with_options({true, true}, [&](const Comm& comm) { EXPECT_EQ(after_sum(comm), "gloo"); });
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("uses Gloo, not shared memory: rank 0: cannot map"), HasSubstr("Cannot allocate memory")));
}

TEST(GroupMemory, IsAlignedReusedAndOutlivesTheWorld) {
  const Mode on("1");
  Tensor kept;
  run_ranks(2, [&](int rank) {
    const auto comm = current_world().comm();
    const auto address = [](const Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()); };
    const auto small = group_memory(comm, 3, torch::kFloat), large = group_memory(comm, 5000, torch::kFloat);
    EXPECT_EQ(address(small) % 64, 0U);
    EXPECT_EQ(address(large) % 4096, 0U);
    std::set<std::uintptr_t> places;
    for (int i = 0; i < 50; ++i) places.insert(address(group_memory(comm, 100'000, torch::kFloat)));
    EXPECT_EQ(places.size(), 1U) << "freed memory is used again";
    EXPECT_EQ(group_memory(comm, 0, torch::kFloat).numel(), 0);
    if (rank == 1) kept = group_memory(comm, 1000, torch::kFloat).fill_(5);
  });
  EXPECT_EQ(kept.sum().item<float>(), 5000.0F);
}

TEST(GroupMemory, LargeBlocksGoBackToTheSystem) {
  const Mode on("1");
  run_ranks(2, [](int rank) {
    const auto comm = current_world().comm();
    comm.barrier();
    if (rank == 0) {
      const auto before = status_kilobytes("RssShmem");
      {
        const auto tensor = group_memory(comm, 50'000'000, torch::kFloat).fill_(1);
        EXPECT_GE(status_kilobytes("RssShmem") - before, 190'000);
      }
      EXPECT_LE(status_kilobytes("RssShmem") - before, 66'000);
    }
    comm.barrier();
  });
}

// A child has a copy of the allocator but the same pages: it must neither hand them out nor give them back.
TEST(GroupMemory, IsLeftAloneByAForkedChild) {
  const Mode on("1");
  run_ranks(2, [](int rank) {
    const auto comm = current_world().comm();
    comm.barrier();
    if (rank == 0) {
      auto tensor = group_memory(comm, 40'000'000, torch::kFloat).fill_(3);
      const auto child = ::fork();
      if (child == 0) {
        tensor.reset();
        auto mine = comm.allocator()->allocate(1 << 20);
        std::memset(mine.get(), 9, 1 << 20);
        ::_exit(0);
      }
      int status = -1;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      const auto next = group_memory(comm, 1 << 18, torch::kFloat).fill_(4);
      EXPECT_EQ(tensor.min().item<float>(), 3.0F);
      EXPECT_EQ(tensor.max().item<float>(), 3.0F);
    }
    comm.barrier();
  });
}

}  // namespace
}  // namespace hyper_parallel
