#include "train/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>

namespace hyper_parallel::train {
namespace {

std::string reason(int number) { return std::generic_category().message(number); }

/// "process 1234 on host".
std::string this_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return concat("process ", ::getpid(), " on ", host.data());
}

std::string holder(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string text;
  if (!std::getline(in, text) || !text.starts_with("process ")) return "another process";
  return text.substr(0, 300);
}

/// 0, or errno.
int lock(int descriptor, std::chrono::milliseconds patience) {
  constexpr std::chrono::milliseconds kPause{50};
  const auto end = std::chrono::steady_clock::now() + patience;
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= end) return errno;
    std::this_thread::sleep_for(kPause);
  }
  return 0;
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder, const std::string& setting, std::chrono::milliseconds patience) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw Error(concat("[run] cannot create the folder ", folder.string(), ": ", error.message(), " (", setting, ")"));
  const std::filesystem::path file = folder / kFile;
  const auto cannot_write = [&](int number) {
    return Error(concat("[run] cannot write ", file.string(), ": ", reason(number), " (", setting, ")"));
  };
  FolderLock lock_of_it;
  lock_of_it.descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (!lock_of_it.held()) throw cannot_write(errno);
  const int problem = lock(lock_of_it.descriptor_, patience);
  if (problem == EWOULDBLOCK) {
    throw Error(concat("[run] ", folder.string(), " is in use by ", holder(file), ", want a folder that no other run writes to (",
                       setting, ")"));
  }
  if (problem != 0) log::warn("no lock on ", folder.string(), ", which other runs must not write to: ", reason(problem));
  const std::string mine = this_process() + '\n';
  const auto size = static_cast<ssize_t>(mine.size());
  if (::ftruncate(lock_of_it.descriptor_, 0) != 0) throw cannot_write(errno);
  const ssize_t written = ::pwrite(lock_of_it.descriptor_, mine.data(), mine.size(), 0);
  if (written != size) throw cannot_write(written < 0 ? errno : ENOSPC);
  *this = std::move(lock_of_it);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

FolderLock::~FolderLock() {
  if (held()) ::close(descriptor_);
}

}  // namespace hyper_parallel::train
