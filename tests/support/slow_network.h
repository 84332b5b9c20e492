#pragma once
// A slow network between rank threads: messages arrive late, and waiting for them costs no processor time.
#include <chrono>
#include <cstdint>
#include <memory>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel::testing {

struct SlowNetworkOptions {
  std::chrono::microseconds latency{0};  ///< from the end of sending to arrival
  /// What one rank can send, all its messages one after the other; 0: no limit.
  double bytes_per_second = 0;
};

/// Delays all messages of the groups that it is told about. A message is on its way from the moment of its `send`, whatever the
/// ranks do meanwhile; a receiver that waits for it too early sleeps. Bytes still travel through the group's own transport.
/// Thread safety: any thread.
class SlowNetwork {
 public:
  explicit SlowNetwork(const SlowNetworkOptions& options);
  ~SlowNetwork();

  /// Puts this network under the group's transport. Each rank of the group calls it, while no operation is pending. Groups of
  /// one have nothing to delay.
  void carry(const Comm& comm);
  /// For messages that are sent from now on.
  void set_options(const SlowNetworkOptions& options);
  /// Messages that arrived so far, at all ranks.
  [[nodiscard]] std::int64_t delivered() const;

  class Board;

 private:
  std::shared_ptr<Board> board_;
};

}  // namespace hyper_parallel::testing
