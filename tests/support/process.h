#pragma once
// Ranks as processes, for tests that kill one or look at exit codes.
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace hyper_parallel::testing {

/// One child process. Its output goes to a file, so that a full pipe cannot block it. Destroying a running child kills it.
class Process {
 public:
  /// Starts `program` with `arguments`; `environment` is added to this process' own.
  Process(const std::string& program, const std::vector<std::string>& arguments,
          const std::map<std::string, std::string>& environment);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  void kill(int signal) const;
  /// Waits for the end: the exit code, 128 + signal when a signal ended it. Kills it and returns -1 after `patience`.
  int wait(std::chrono::milliseconds patience);
  /// Waits until the output has `text`; false when the process ends or `patience` is over before.
  bool wait_for_output(const std::string& text, std::chrono::milliseconds patience) const;
  /// Standard output and error so far.
  [[nodiscard]] std::string output() const;

 private:
  pid_t pid_ = -1;
  bool reaped_ = false;
  int code_ = -1;
  std::string path_;
};

/// A TCP port on loopback that was free a moment ago.
int free_port();
/// Path of the running test program.
std::string self_path();
/// Starts `world_size` copies of `program` with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
std::vector<Process> start_ranks(int world_size, const std::string& program, const std::vector<std::string>& arguments,
                                 const std::map<std::string, std::string>& environment = {});
/// Four ranks, of which the last two have a process space of their own, as on another host; the third process stands for both.
/// For root.
std::vector<Process> start_on_two_hosts(const std::string& program, const std::vector<std::string>& arguments,
                                        const std::map<std::string, std::string>& environment = {});

}  // namespace hyper_parallel::testing
