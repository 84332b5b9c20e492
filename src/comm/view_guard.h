#pragma once
// Says why a process ends that writes to what belongs to other ranks.
#include <cstddef>

namespace hyper_parallel {

/// From now on, the kernel's answer to a write to this range (SIGSEGV), which is mapped read-only because others own its pages,
/// is preceded by a line on standard error. Then whatever handled the signal before does. Thread safety: any thread.
void guard_view(const void* begin, std::size_t bytes) noexcept;
/// Before the range that starts at `begin` is unmapped.
void unguard_view(const void* begin) noexcept;

}  // namespace hyper_parallel
