// Shared memory between processes: where the system refuses it, between two runs, and towards other users.
#include <cerrno>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/process.h"
#include "support/shared_files.h"

namespace hyper_parallel::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> sums(const std::map<std::string, std::string>& environment) {
  auto ranks = start_ranks(2, HP_WORLD_PROGRAM, {"sum"}, environment);
  std::vector<std::string> out;
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.wait(60s), 0) << rank.output();
    out.push_back(rank.output());
  }
  return out;
}

TEST(RefusedCalls, FallBackToGlooAndSaySoOnce) {
  for (const std::string call : {"memfd_create", "pidfd_open"}) {
    const auto out = sums({{"REFUSE", call}, {"HP_SAMEHOST", "1"}});
    for (const auto& text : out) EXPECT_THAT(text, HasSubstr("sum 3, gloo\n"));
    EXPECT_THAT(out[0], AllOf(HasSubstr("uses Gloo, not shared memory: rank 0: " + call), HasSubstr("Operation not permitted")));
    EXPECT_THAT(out[1], Not(HasSubstr("shared memory")));
  }
}

TEST(NoDevShm, IsNotNeeded) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can hide /dev/shm";
  for (const auto& text : sums({{"HIDE_SHM", "1"}, {"HP_SAMEHOST", "1"}}))
    EXPECT_THAT(text, HasSubstr("sum 3, samehost, maps\n"));
}

TEST(FileSizeLimit, IsFoundBeforeTheSystemEndsTheProcess) {
  const auto out = sums({{"LIMIT_FILES", "1000000"}, {"HP_SAMEHOST", "1"}});
  for (const auto& text : out) EXPECT_THAT(text, HasSubstr("sum 3, gloo\n"));
  EXPECT_THAT(out[0], AllOf(HasSubstr("uses Gloo, not shared memory: rank 0: cannot reserve "),
                            HasSubstr(" MiB: files are limited to 976 KiB (ulimit -f)")));
}

/// The size of the arenas of the first two ranks of a large world, of which `local` run on this host.
std::uint64_t arena_bytes(const std::string& local) {
  const std::string port = std::to_string(free_port());
  std::vector<Process> ranks;
  for (const char* rank : {"0", "1"}) {
    ranks.emplace_back(HP_WORLD_PROGRAM, std::vector<std::string>{"first_two"},
                       std::map<std::string, std::string>{{"RANK", rank},
                                                          {"WORLD_SIZE", "4194304"},
                                                          {"LOCAL_WORLD_SIZE", local},
                                                          {"MASTER_ADDR", "127.0.0.1"},
                                                          {"MASTER_PORT", port},
                                                          {"HP_SAMEHOST", "1"}});
  }
  std::uint64_t bytes = 0;
  for (auto& rank : ranks) {
    EXPECT_EQ(rank.wait(60s), 0) << rank.output();
    const std::string text = rank.output();
    const auto at = text.find("samehost, arenas of ");
    if (at == std::string::npos) ADD_FAILURE() << text;
    if (at != std::string::npos) bytes = std::stoull(text.substr(at + 20));
  }
  return bytes;
}

// Every rank maps the arenas of its whole host, however many ranks other hosts have.
TEST(ArenaSize, FollowsTheRanksOfTheHost) {
  EXPECT_EQ(arena_bytes("2048"), std::uint64_t{1} << 33);
  EXPECT_EQ(arena_bytes("4194304"), std::uint64_t{1} << 26) << "the least";
  EXPECT_GT(arena_bytes("2"), std::uint64_t{1} << 30);
}

TEST(TwoRuns, NeverMeet) {
  auto first = start_ranks(2, HP_WORLD_PROGRAM, {"loop", "15000"}, {{"HP_SAMEHOST", "1"}});
  auto second = start_ranks(2, HP_WORLD_PROGRAM, {"loop", "15000"}, {{"HP_SAMEHOST", "1"}});
  for (auto* run : {&first, &second}) {
    for (auto& rank : *run) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
  }
  const auto mine = shared_files(first[0].pid()), theirs = shared_files(second[0].pid());
  EXPECT_EQ(mine, shared_files(first[1].pid()));
  EXPECT_EQ(theirs, shared_files(second[1].pid()));
  EXPECT_EQ(mine.size(), 3U) << "two arenas and a mailbox";
  for (const auto& inode : mine) EXPECT_EQ(theirs.count(inode), 0U);
}

/// Exit code: how many of the process's shared files another user can open, or 100 if the user cannot be changed.
int files_open_to_others(pid_t pid, const std::vector<std::string>& paths) {
  const auto child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(100);
    int open = 0;
    for (const auto& path : paths) {
      if (::open(path.c_str(), O_RDONLY) >= 0) ++open;
    }
    ::_exit(open);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child) << "looking at process " << pid;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(OtherUsers, CannotOpenTheFiles) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  auto ranks = start_ranks(2, HP_WORLD_PROGRAM, {"loop", "15000"}, {{"HP_SAMEHOST", "1"}});
  for (auto& rank : ranks) ASSERT_TRUE(rank.wait_for_output("looping", 60s)) << rank.output();
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(ranks[0].pid()) + "/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.find("memfd:hyper_parallel") != std::string::npos) paths.push_back(entry.path().string());
  }
  ASSERT_GE(paths.size(), 2U) << "its own arena and its peer's";
  for (const auto& path : paths) EXPECT_GE(::open(path.c_str(), O_RDONLY | O_CLOEXEC), 0) << "the owner can: " << path;
  EXPECT_EQ(files_open_to_others(ranks[0].pid(), paths), 0);
}

}  // namespace
}  // namespace hyper_parallel::testing
