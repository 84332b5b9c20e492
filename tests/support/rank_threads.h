#pragma once
// Ranks as threads of one process: they meet in a store in memory and talk over loopback, like processes would.
#include <chrono>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace c10 {
struct Allocator;
}

namespace hyper_parallel::testing {

struct RankOptions {
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  ///< of every collective
  /// After this the process prints which ranks hang and aborts: a hanging thread cannot be stopped otherwise.
  std::chrono::milliseconds watchdog = std::chrono::seconds(110);
  c10::Allocator* allocator = nullptr;  ///< of the groups' buffers
};

/// What run_ranks throws: the first exception of a rank, as "rank R/W: message".
class RankError : public std::runtime_error {
 public:
  RankError(int rank, const std::string& message, std::exception_ptr cause)
      : std::runtime_error(message), rank_(rank), cause_(std::move(cause)) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }
  /// Throws the rank's own exception.
  [[noreturn]] void rethrow_cause() const { std::rethrow_exception(cause_); }

 private:
  int rank_;
  std::exception_ptr cause_;
};

/// Runs `body(rank)` on `world_size` threads, each with a world of its own (init_process_group) and one intra-op thread. The
/// world of a rank is destroyed when its body returns or throws, so that the others notice.
void run_rank_threads(int world_size, const RankOptions& options, const std::function<void(int)>& body);

/// run_rank_threads with a body that takes the rank or nothing.
template <class Body>
void run_ranks(int world_size, const RankOptions& options, Body&& body) {
  if constexpr (std::is_invocable_v<Body&, int>) {
    run_rank_threads(world_size, options, [&body](int rank) { body(rank); });
  } else {
    run_rank_threads(world_size, options, [&body](int) { body(); });
  }
}

template <class Body>
void run_ranks(int world_size, Body&& body) {
  run_ranks(world_size, RankOptions{}, std::forward<Body>(body));
}

}  // namespace hyper_parallel::testing
