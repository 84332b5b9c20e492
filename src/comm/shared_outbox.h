#pragma once
// Messages from this rank to one peer.
#include <deque>
#include <memory>
#include <vector>

#include "comm/arena.h"
#include "comm/shared_message.h"

namespace hyper_parallel {

/// Sending side of a lane. Thread safety: one thread at a time.
class Outbox {
 public:
  using Message = c10::intrusive_ptr<SharedSend>;

  Outbox(const Mailbox& mailbox, int from, int to, std::shared_ptr<Arena> arena, bool same_process);

  /// Announces a message or queues it. TransportError when there is no memory for its copy.
  void post(const Message& message);
  /// Takes back what the peer is done with and announces what is queued.
  void advance();
  /// Whether the tensor of `message` is free again.
  bool done(SharedSend& message);
  /// Asks the peer to fetch `message` now. False while it is queued: ask again later.
  bool urge(const SharedSend& message);

  /// Takes back what the peer has not begun to read. True when nothing is being read any more; call again otherwise.
  bool revoke();
  /// Gives up for good: copies go when the peer has read them, and what it `may_read` in a tensor is never freed.
  void abandon(bool may_read);

 private:
  bool place_bytes(SharedSend& message);
  void announce(const Message& message);
  void collect();
  void release(SharedSend& message);
  [[nodiscard]] Entry& entry(const SharedSend& message) const { return lane_.entries[message.slot]; }

  std::shared_ptr<Mapping> mapping_;
  Lane& lane_;
  Seat& peer_;
  std::shared_ptr<Arena> arena_;
  bool same_process_;
  std::vector<Word> free_;  ///< entries
  std::vector<Message> under_way_;
  std::deque<Message> queue_;
};

}  // namespace hyper_parallel
