#include "process_stats.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace bench {

double status_mib(std::string_view key) {
  std::ifstream status("/proc/self/status");
  for (std::string name; status >> name;) {
    double kib = 0;
    if (name.size() == key.size() + 1 && name.starts_with(key) && status >> kib) return kib / 1024;
    status.ignore(4096, '\n');
  }
  throw std::runtime_error("/proc/self/status has no " + std::string(key));
}

double proportional_mib() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  }
  throw std::runtime_error("/proc/self/smaps_rollup has no Pss");
}

void clear_peak() {
  std::ofstream file("/proc/self/clear_refs");
  if (!(file << "5" << std::flush)) throw std::runtime_error("cannot write /proc/self/clear_refs");
}

std::int64_t sent_bytes() {
  std::int64_t total = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    tcp_info info{};
    socklen_t size = sizeof info;
    // Fails for everything that is no TCP socket.
    if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    if (size >= offsetof(tcp_info, tcpi_bytes_received)) total += static_cast<std::int64_t>(info.tcpi_bytes_acked);
  }
  return total;
}

Usage usage() {
  rusage raw{};
  getrusage(RUSAGE_SELF, &raw);
  auto ms = [](const timeval& t) { return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_usec) / 1e3; };
  return {ms(raw.ru_utime), ms(raw.ru_stime), raw.ru_minflt};
}

}  // namespace bench
