#include "support/counting_allocator.h"

#include <atomic>
#include <cstring>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

namespace hyper_parallel::testing {
namespace {

std::atomic<std::int64_t> live{0};
std::atomic<std::int64_t> peak{0};
std::atomic<std::int64_t> allocations{0};

// In front of each block; as wide as torch's alignment, so that the data stay aligned.
struct alignas(64) Header {
  std::size_t bytes;
};

void release(void* data) {
  if (data == nullptr) return;
  auto* header = static_cast<Header*>(data) - 1;
  live -= static_cast<std::int64_t>(header->bytes);
  c10::free_cpu(header);
}

class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    auto* header = static_cast<Header*>(c10::alloc_cpu(bytes + sizeof(Header)));
    header->bytes = bytes;
    ++allocations;
    const auto now = live += static_cast<std::int64_t>(bytes);
    auto highest = peak.load();
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
    void* data = header + 1;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator* counting_allocator() {
  static auto* const instance = new Counting;
  return instance;
}

AllocationCounts allocation_counts() { return {live.load(), peak.load(), allocations.load()}; }

void reset_allocation_counts() {
  peak = live.load();
  allocations = 0;
}

// Priority above the default, or torch keeps its own.
CountCpuAllocations::CountCpuAllocations() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(counting_allocator(), 1); }
CountCpuAllocations::~CountCpuAllocations() { c10::SetCPUAllocator(before_, 1); }

}  // namespace hyper_parallel::testing
