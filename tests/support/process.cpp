#include "support/process.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace hyper_parallel::testing {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (auto& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    if (!added.contains(text.substr(0, text.find('=')))) out.push_back(text);
  }
  for (const auto& [name, value] : added) out.push_back(name + "=" + value);
  return out;
}

}  // namespace

Process::Process(const std::string& program, const std::vector<std::string>& arguments,
                 const std::map<std::string, std::string>& environment) {
  std::string path = (std::filesystem::temp_directory_path() / "hp_process_XXXXXX").string();
  const int file = ::mkstemp(path.data());
  if (file < 0) fail("mkstemp");
  path_ = path;
  std::vector<std::string> words{program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  auto variables = merged_environment(environment);
  const auto argv = pointers(words);
  const auto envp = pointers(variables);
  pid_ = ::fork();
  if (pid_ < 0) fail("fork");
  if (pid_ == 0) {
    // Only calls that are safe between fork and exec of a process with threads.
    ::dup2(file, STDOUT_FILENO);
    ::dup2(file, STDERR_FILENO);
    ::execve(program.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(file);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), reaped_(other.reaped_), code_(other.code_), path_(std::move(other.path_)) {}

Process::~Process() {
  if (pid_ < 0) return;
  if (!reaped_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ::unlink(path_.c_str());
}

void Process::kill(int signal) const {
  if (!reaped_ && ::kill(pid_, signal) != 0) fail("kill");
}

int Process::wait(std::chrono::milliseconds patience) {
  const auto end = Clock::now() + patience;
  while (!reaped_) {
    int status = 0;
    const auto got = ::waitpid(pid_, &status, WNOHANG);
    if (got < 0) fail("waitpid");
    if (got == pid_) {
      reaped_ = true;
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else if (Clock::now() > end) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
      reaped_ = true;
      code_ = -1;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  return code_;
}

bool Process::wait_for_output(const std::string& text, std::chrono::milliseconds patience) const {
  const auto end = Clock::now() + patience;
  while (output().find(text) == std::string::npos) {
    siginfo_t info{};
    const bool ended =
        !reaped_ && ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
    if (reaped_ || ended || Clock::now() > end) return output().find(text) != std::string::npos;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

std::string Process::output() const {
  std::ifstream file(path_);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  if (socket < 0) fail("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  const bool ok = ::bind(socket, generic, length) == 0 && ::getsockname(socket, generic, &length) == 0;
  const int port = ntohs(address.sin_port);
  ::close(socket);
  if (!ok) fail("bind");
  return port;
}

std::string self_path() {
  std::array<char, PATH_MAX> path{};
  const auto length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  if (length < 0) fail("readlink");
  return std::string(path.data(), static_cast<std::size_t>(length));
}

std::vector<Process> start_ranks(int world_size, const std::string& program, const std::vector<std::string>& arguments,
                                 const std::map<std::string, std::string>& environment) {
  const auto port = std::to_string(free_port());
  std::vector<Process> out;
  out.reserve(static_cast<std::size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    auto all = environment;
    all["RANK"] = all["LOCAL_RANK"] = std::to_string(rank);
    all["WORLD_SIZE"] = all["LOCAL_WORLD_SIZE"] = std::to_string(world_size);
    all["MASTER_ADDR"] = "127.0.0.1";
    all["MASTER_PORT"] = port;
    out.emplace_back(program, arguments, all);
  }
  return out;
}

std::vector<Process> start_on_two_hosts(const std::string& program, const std::vector<std::string>& arguments,
                                        const std::map<std::string, std::string>& environment) {
  auto all = environment;
  all["WORLD_SIZE"] = "4";
  all["LOCAL_WORLD_SIZE"] = "2";
  all["MASTER_ADDR"] = "127.0.0.1";
  all["MASTER_PORT"] = std::to_string(free_port());
  all["GLOO_SOCKET_IFNAME"] = "lo";
  std::vector<Process> out;
  for (const char* rank : {"0", "1"}) {
    all["RANK"] = all["LOCAL_RANK"] = rank;
    out.emplace_back(program, arguments, all);
  }
  const std::string both = "RANK=2 LOCAL_RANK=0 \"$@\" & first=$!; RANK=3 LOCAL_RANK=1 \"$@\" && wait $first";
  std::vector<std::string> words = {"--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", both, "sh", program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  out.emplace_back("/usr/bin/unshare", words, all);
  return out;
}

}  // namespace hyper_parallel::testing
