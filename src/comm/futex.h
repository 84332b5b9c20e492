#pragma once
// Words in memory that several processes map, and sleeping on them.
#include <atomic>
#include <chrono>
#include <cstdint>

namespace hyper_parallel {

/// What processes synchronise on. Plain memory is mapped, so every access goes through `word`.
using Word = std::uint32_t;
static_assert(std::atomic_ref<Word>::is_always_lock_free && sizeof(Word) == 4, "a lock inside one process protects nothing here");

inline std::atomic_ref<Word> word(Word& value) noexcept { return std::atomic_ref<Word>(value); }

/// An event count: who changes something that others may wait for rings, who finds nothing to do sleeps until the next ring.
/// All zero is a valid start.
struct Bell {
  Word count = 0;
  Word sleepers = 0;
};

/// What the bell shows now: read it, then look for work, then sleep on what was read. So no ring in between is lost.
inline Word look(Bell& bell) noexcept { return word(bell.count).load(std::memory_order_acquire); }
/// Wakes everyone who sleeps on `bell`. A system call only if someone does.
void ring(Bell& bell) noexcept;
/// Sleeps until the bell no longer shows `seen`, at most `patience`. May return early. False when the time was over.
bool sleep_on(Bell& bell, Word seen, std::chrono::milliseconds patience) noexcept;

/// Tells the processor that this thread spins.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace hyper_parallel
