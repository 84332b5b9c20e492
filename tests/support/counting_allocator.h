#pragma once
// An allocator that counts what goes through it.
#include <cstdint>

namespace c10 {
struct Allocator;
}

namespace hyper_parallel::testing {

struct AllocationCounts {
  std::int64_t live = 0;         ///< bytes allocated and not freed
  std::int64_t peak = 0;         ///< highest `live` since the last reset
  std::int64_t allocations = 0;  ///< calls since the last reset
};

/// A CPU allocator that counts and takes its memory from torch's. One for the whole process, never destroyed: blocks may outlive
/// any scope. Thread safety: any thread; the counts are sums over all threads.
c10::Allocator* counting_allocator();
[[nodiscard]] AllocationCounts allocation_counts();
/// Sets `peak` to `live` and `allocations` to 0.
void reset_allocation_counts();

/// While it lives, all CPU tensors of the process come from counting_allocator(). Thread safety: one at a time, no other thread
/// allocating while it comes or goes.
class CountCpuAllocations {
 public:
  CountCpuAllocations();
  CountCpuAllocations(const CountCpuAllocations&) = delete;
  CountCpuAllocations& operator=(const CountCpuAllocations&) = delete;
  ~CountCpuAllocations();

 private:
  c10::Allocator* before_;
};

}  // namespace hyper_parallel::testing
