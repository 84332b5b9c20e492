#pragma once
// What the kernel knows about this process. The same figures, read the same way, as in baseline.py.
#include <sys/resource.h>

#include <cstdint>
#include <string_view>

namespace bench {

/// A line of /proc/self/status in MiB, e.g. "VmHWM" or "VmRSS".
double status_mib(std::string_view key);
/// Resident memory in MiB, pages that several processes use in equal parts.
double proportional_mib();
/// Makes VmHWM start again from the memory in use now.
void clear_peak();
/// Bytes that the peers of this process's TCP connections have acknowledged, over its whole life.
std::int64_t sent_bytes();

struct Usage {
  double user_ms = 0, system_ms = 0;
  std::int64_t minor_faults = 0;
};
Usage usage();

}  // namespace bench
