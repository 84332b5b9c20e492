#pragma once
// Which processes hold memory that ranks share.
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <sys/types.h>

namespace hyper_parallel::testing {

/// Inodes of the shared files that a process has mapped or open; none of a process that is gone or of another user.
inline std::set<std::string> shared_files(pid_t pid) {
  const std::string mark = "memfd:hyper_parallel", process = "/proc/" + std::to_string(pid);
  std::set<std::string> out;
  std::ifstream maps(process + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(mark) == std::string::npos) continue;
    std::string range, access, offset, device, inode;
    std::istringstream(line) >> range >> access >> offset >> device >> inode;
    out.insert(inode);
  }
  std::error_code gone;
  for (std::filesystem::directory_iterator it(process + "/fd", gone), end; !gone && it != end; it.increment(gone)) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(it->path(), closed).string();
    struct stat about {};
    if (target.find(mark) == std::string::npos || ::stat(it->path().c_str(), &about) != 0) continue;
    out.insert(std::to_string(about.st_ino));
  }
  return out;
}

/// The processes of this machine that have one of `files` mapped or open.
inline std::vector<pid_t> holders_of(const std::set<std::string>& files) {
  std::vector<pid_t> out;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ptr != name.data() + name.size()) continue;
    for (const std::string& file : shared_files(pid)) {
      if (!files.contains(file)) continue;
      out.push_back(pid);
      break;
    }
  }
  return out;
}

}  // namespace hyper_parallel::testing
