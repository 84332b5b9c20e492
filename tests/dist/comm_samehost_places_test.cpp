// Where shared memory lies, what of it is there from the start, and whose files a rank takes for those of its peers.
#include <array>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/core/error.h>

#include "support/message_of.h"
#include "support/same_host_mode.h"

namespace hyper_parallel {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::Mode;

/// Two ranks with these options, a group of both.
template <class Body>
void with_options(const InitOptions& options, Body body) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      InitOptions mine = options;
      mine.timeout = 20s, mine.rank = rank, mine.world_size = 2, mine.store = store;
      init_process_group(mine);
      body(current_world().comm(), rank);
      destroy_process_group();
    });
  }
  for (auto& thread : threads) thread.join();
}

/// What /proc/self/smaps says of the mapping where `data` lies: the value of `key`.
std::string about_mapping(const void* data, const std::string& key) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (range >> std::hex >> begin >> dash >> end && dash == '-') here = address >= begin && address < end;
    if (here && line.starts_with(key + ":")) return line.substr(key.size() + 1) + ' ';
  }
  return "nothing";
}

constexpr std::size_t kBytes = std::size_t{16} << 20;

TEST(FirstTouch, WritesToAllPagesOfABlockAtOnce) {
  const Mode on("processes");
  for (const bool touch : {false, true}) {
    with_options({.first_touch = touch}, [&](const Comm& comm, int rank) {
      comm.barrier();
      if (rank == 0) {
        const auto block = comm.allocator()->allocate(kBytes);
        std::vector<unsigned char> there(kBytes / 4096);
        ASSERT_EQ(::mincore(block.get(), kBytes, there.data()), 0);
        const auto pages = std::count_if(there.begin(), there.end(), [](unsigned char page) { return (page & 1) != 0; });
        if (touch) {
          EXPECT_EQ(pages, static_cast<std::ptrdiff_t>(there.size()));
        } else {
          EXPECT_LE(pages, 4) << "but what messages used before";
        }
      }
      comm.barrier();
    });
  }
}

// The kernel notes the wish ("hg") whether or not it will fulfil it.
TEST(HugePages, AreAskedForInEveryMapping) {
  const Mode on("processes");
  for (const bool huge : {false, true}) {
    with_options({.huge_pages = huge}, [&](const Comm& comm, int rank) {
      const auto block = comm.allocator()->allocate(kBytes);
      GatheredBuffer buffer = comm.gathered_buffer(1 << 16);
      ASSERT_TRUE(buffer.connect());
      const auto view = buffer.view();
      const auto* shown = static_cast<const char*>(view.get());
      for (const void* place :
           {static_cast<const void*>(block.get()), static_cast<const void*>(shown), static_cast<const void*>(shown + (1 << 16))})
        EXPECT_EQ(about_mapping(place, "VmFlags").find(" hg ") != std::string::npos, huge) << about_mapping(place, "VmFlags");
      comm.barrier();
      if (rank == 0) {
        // The peers' arenas, mapped to read: all mappings of arenas have the flag, or none.
        std::ifstream maps("/proc/self/smaps");
        bool arena = false;
        int seen = 0;
        for (std::string line; std::getline(maps, line);) {
          if (line.find("-") < line.find(' ')) arena = line.find("memfd:hyper_parallel arena") != std::string::npos;
          if (!arena || !line.starts_with("VmFlags:")) continue;
          ++seen;
          EXPECT_EQ((line + ' ').find(" hg ") != std::string::npos, huge) << line;
        }
        EXPECT_GE(seen, 4) << "two arenas, each mapped by its owner and its peer, and views";
      }
      comm.barrier();
    });
  }
}

/// What a rank says about its host, as in src/comm/same_host.cpp.
std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::array<char, 64> space{};
  EXPECT_GT(::readlink("/proc/self/ns/pid", space.data(), space.size() - 1), 0);
  return concat(boot, '/', space.data(), '/', ::geteuid());
}

/// Rank 0 of two meets a rank 1 that names the file `address` as its arena. What rank 0 logs.
std::string log_of_meeting(const std::string& address) {
  const Mode on("1");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ::testing::internal::CaptureStderr();
  const auto set = [&](const std::string& key, const std::string& text) {
    store->set("group/cpu:0+1x2/samehost/" + key, std::vector<std::uint8_t>(text.begin(), text.end()));
  };
  set("offer/1", concat('+', this_host(), '\n', address, "\n+"));
  set("mapped/1", "+");
  init_process_group({.timeout = 1s, .rank = 0, .world_size = 2, .store = store, .wait_for_ranks = false});
  EXPECT_THROW((void)current_world().comm(), CommError) << "nobody answers over Gloo either";
  destroy_process_group();
  return ::testing::internal::GetCapturedStderr();
}

// Process numbers are used again, and other processes have files too: what is opened must be what was announced.
TEST(Impostors, AreNotTakenForThePeer) {
  const std::string id(32, 'a');
  constexpr std::size_t kSize = 1 << 20;
  const int file = ::memfd_create("impostor", MFD_CLOEXEC);
  ASSERT_GE(file, 0);
  ASSERT_EQ(::ftruncate(file, kSize), 0);
  EXPECT_THAT(log_of_meeting(concat(::getpid(), ' ', file, ' ', kSize, ' ', id)), HasSubstr("is the file of another run"));
  EXPECT_THAT(log_of_meeting(concat(::getpid(), ' ', file, ' ', 2 * kSize, ' ', id)), HasSubstr("is not the announced file"));
  const int device = ::open("/dev/zero", O_RDWR | O_CLOEXEC);
  EXPECT_THAT(log_of_meeting(concat(::getpid(), ' ', device, " 0 ", id)), HasSubstr("is not the announced file"));
  if (::geteuid() == 0) {
    ASSERT_EQ(::fchown(file, 65534, 65534), 0);
    EXPECT_THAT(log_of_meeting(concat(::getpid(), ' ', file, ' ', kSize, ' ', id)), HasSubstr("is not the announced file"));
  }
  EXPECT_THAT(log_of_meeting("somewhere"), HasSubstr("no address of a shared file"));
  ::close(device);
  EXPECT_THAT(log_of_meeting(concat(::getpid(), ' ', 1 << 20, ' ', kSize, ' ', id)), HasSubstr("cannot open /proc/"));
  ::close(file);
}

}  // namespace
}  // namespace hyper_parallel
