#include "comm/same_host.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <hyper_parallel/core/log.h>

#include "comm/arena.h"
#include "comm/bounded_store.h"
#include "comm/shared_transport.h"
#include "comm/torch_compat.h"

namespace hyper_parallel {
namespace {

constexpr const char* kOff = "it is switched off";

// Every answer starts with one of these.
constexpr char kYes = '+';
constexpr char kNo = '-';
// Follows the no to a group that has ranks on several hosts.
constexpr char kApart = '~';

// Ranks with the same text can look each other's processes up: same start of the same kernel, same process numbers.
std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  const auto length = ::readlink("/proc/self/ns/pid", space, sizeof(space) - 1);
  if (boot.empty() || length <= 0) throw SharedMemoryError("/proc does not tell which host this is");
  return concat(boot, '/', space, '/', ::geteuid());
}

int usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

FileDescriptor open_process(int pid) {
  FileDescriptor process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid()) throw SharedMemoryError(concat("pidfd_open of process ", pid, ": ", std::strerror(errno)));
  return process;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

// One attempt of a group. Rank 0 collects and decides twice: on what the ranks offer, and on whether they could map it.
class Meeting {
 public:
  Meeting(World::Impl& world, c10::intrusive_ptr<c10d::Store> store, int rank, const std::vector<int>& ranks)
      : world_(world),
        notes_(store),
        store_(std::move(store), world.timeout),
        rank_(rank),
        size_(static_cast<int>(ranks.size())),
        ranks_(ranks) {}

  std::unique_ptr<Transport> run(const std::string& name) {
    const auto plan = agree("offer", offer(), &Meeting::plan);
    if (plan.front() == kNo) return say_no(name, plan);
    std::string answer(1, kYes);
    std::unique_ptr<SharedGroup> group;
    try {
      group = map(lines_of(plan.substr(1)));
    } catch (const SharedMemoryError& error) {
      answer = concat(kNo, error.what());
    }
    const auto verdict = agree("mapped", answer, &Meeting::verdict);
    if (verdict.front() == kNo) return say_no(name, verdict);
    if (mailbox_.mapping != nullptr) mailbox_.mapping->close_file();
    return make_shared_transport(std::move(*group));
  }

 private:
  using Decide = std::string (Meeting::*)(const std::vector<std::string>&);

  // "+" and, line by line: host, arena, whether to map, on rank 0 the mailbox.
  std::string offer() {
    if (world_.same_host == SameHost::kOff) return concat(kNo, kOff);
    try {
      std::string reason;
      arena_ = find_or_make_arena(world_, &reason);
      if (arena_ == nullptr) return concat(kNo, reason);
      // Shards that are to be mapped must lie in the arena.
      const bool maps = world_.map && world_.allocator == nullptr;
      auto text = concat(kYes, host_id(), '\n', arena_->address().to_text(), '\n', maps ? kYes : kNo);
      if (rank_ == 0) {
        mailbox_ = make_shared_file("hyper_parallel mailbox", Mailbox::file_bytes(size_));
        text += '\n' + mailbox_.address.to_text();
      }
      return text;
    } catch (const SharedMemoryError& error) {
      return concat(kNo, error.what());
    }
  }

  // All ranks get what rank 0 decides on the texts of all.
  std::string agree(const std::string& what, const std::string& mine, Decide decide) {
    if (rank_ != 0) {
      store_.set(concat(what, '/', rank_), mine);
      return store_.get_to_str(what);
    }
    std::vector<std::string> all{mine};
    for (int r = 1; r < size_; ++r) all.push_back(store_.get_to_str(concat(what, '/', r)));
    auto decision = (this->*decide)(all);
    store_.set(what, decision);
    return decision;
  }

  // "+" and, line by line, the mailbox, the arenas and whether all want to map.
  std::string plan(const std::vector<std::string>& offers) {
    auto text = concat(kYes, mailbox_.address.to_text());
    std::string host;
    bool maps = true;
    std::size_t off = 0;
    for (const auto& offer : offers) off += offer == concat(kNo, kOff) ? 1 : 0;
    if (off == offers.size()) return std::string(1, kNo);
    for (std::size_t r = 0; r < offers.size(); ++r) {
      if (offers[r].front() == kNo) return refusal(r, offers[r]);
      const auto lines = lines_of(offers[r].substr(1));
      if (r == 0) host = lines.at(0);
      if (lines.at(0) != host)
        return concat(kNo, kApart, "ranks ", ranks_.front(), " and ", ranks_[r],
                      " are on different hosts, in different containers or of different users");
      text += '\n' + lines.at(1);
      maps = maps && lines.at(2).front() == kYes;
    }
    return text + '\n' + (maps ? kYes : kNo);
  }

  std::string verdict(const std::vector<std::string>& answers) {
    for (std::size_t r = 0; r < answers.size(); ++r) {
      if (answers[r].front() == kNo) return refusal(r, answers[r]);
    }
    return std::string(1, kYes);
  }

  [[nodiscard]] std::string refusal(std::size_t r, const std::string& answer) const {
    return concat(kNo, "rank ", ranks_[r], ": ", answer.substr(1));
  }

  std::unique_ptr<SharedGroup> map(const std::vector<std::string>& addresses) {
    if (addresses.size() != static_cast<std::size_t>(size_) + 2) throw SharedMemoryError("cut plan");
    const auto mailbox_address = SharedFileAddress::from_text(addresses[0]);
    auto mailbox = map_shared_file(mailbox_address, true);
    if (!is_own_file(mailbox_address)) mailbox->close_file();
    if (mailbox->size() < Mailbox::file_bytes(size_)) throw SharedMemoryError("short mailbox");
    std::vector<SharedPeer> peers(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const auto address = SharedFileAddress::from_text(addresses[static_cast<std::size_t>(r) + 1]);
      auto& peer = peers[static_cast<std::size_t>(r)];
      const bool own = is_own_file(address);
      peer.same_process = own && world_.same_host == SameHost::kOn;
      peer.arena = world_.peer_arenas[address.id].lock();
      if (peer.arena == nullptr) {
        peer.arena = map_shared_file(address, false, !peer.same_process);
        if (world_.huge_pages) ask_for_huge_pages(peer.arena->data(), peer.arena->size());
      }
      world_.peer_arenas[address.id] = peer.arena;
      if (!own) peer.process = open_process(address.pid);
    }
    const int neighbours = world_.neighbours > 0 ? world_.neighbours : size_;
    return std::make_unique<SharedGroup>(SharedGroup{rank_, size_, Mailbox(std::move(mailbox), size_), arena_, std::move(peers),
                                                     std::move(notes_), neighbours <= usable_cores(),
                                                     addresses.back().front() == kYes});
  }

  std::unique_ptr<Transport> say_no(const std::string& name, const std::string& decision) const {
    if (rank_ != 0 || decision.size() < 2) return nullptr;
    const auto level = decision[1] == kApart ? log::Level::kInfo : log::Level::kWarn;  // nothing is amiss between hosts
    const auto reason = decision.substr(decision[1] == kApart ? 2 : 1);
    if (log::enabled(level)) log::write(level, concat("group ", name, " uses Gloo, not shared memory: ", reason));
    return nullptr;
  }

  World::Impl& world_;
  StoreNotes notes_;
  BoundedStore store_;
  int rank_;
  int size_;
  const std::vector<int>& ranks_;  ///< global
  std::shared_ptr<Arena> arena_;
  SharedFile mailbox_;  ///< of rank 0, until all have mapped it
};

}  // namespace

std::shared_ptr<Arena> find_or_make_arena(World::Impl& world, std::string* reason) {
  if (world.arena == nullptr && world.same_host != SameHost::kOff) {
    try {
      world.arena = Arena::create(world.neighbours > 0 ? world.neighbours : world.size,
                                  {.huge_pages = world.huge_pages, .first_touch = world.first_touch});
    } catch (const SharedMemoryError& error) {
      if (reason != nullptr) *reason = error.what();
    }
  }
  return world.arena;
}

std::unique_ptr<Transport> make_same_host_transport(World::Impl& world, const std::string& key, int group_rank,
                                                    const std::vector<int>& ranks, const std::string& name) {
  auto* base = dynamic_cast<c10d::Store*>(world.store.get());
  check_internal(base != nullptr, "make_same_host_transport", "a world of ", world.size, " without a store");
  const QuietTorchLog quiet;
  try {
    auto store = c10::make_intrusive<c10d::PrefixStore>(key + "/samehost", c10::intrusive_ptr<c10d::Store>::reclaim_copy(base));
    return Meeting(world, std::move(store), group_rank, ranks).run(name);
  } catch (const std::exception& error) {
    throw translate(error);
  }
}

}  // namespace hyper_parallel
