#pragma once
// Messages from one peer to this rank.
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/shared_message.h"

namespace hyper_parallel {

/// Receiving side of a lane. Thread safety: one thread at a time.
class Inbox {
 public:
  using Message = c10::intrusive_ptr<SharedReceive>;

  Inbox(const Mailbox& mailbox, int from, int to, std::shared_ptr<Mapping> arena);

  /// Copies the message if it is there, or remembers where it goes.
  void post(const Message& message);
  /// Fetches what has been announced for the remembered ones. True when a receive was finished, well or badly. `help`: also what
  /// could stay with the sender, if that waits for it.
  bool advance(bool help);
  /// Where the sender has the bytes of a finished receive, which must not change them now; null when they were copied. False in
  /// `message.done` when the sender took them back.
  const void* borrow(SharedReceive& message);
  void give_back(SharedReceive& message);
  /// Forgets everything: nothing is read or written any more.
  void abandon();

 private:
  struct Arrived {
    int tag;
    Word slot;
    std::unique_ptr<unsigned char[]> copy = {};  ///< of the bytes; then the entry is the sender's again
    std::uint64_t bytes = 0;
  };
  void deliver(const Message& message, Arrived& from);
  void fetch(SharedReceive& message, Arrived& from);
  void fetch_held(bool all);
  bool claim(Entry& entry);
  void finish(Entry& entry);
  void make_room();
  [[nodiscard]] const void* source(const Entry& entry) const;

  Lane& lane_;
  Seat& peer_;
  std::shared_ptr<Mapping> arena_;
  Word head_ = 0;                ///< announcements read so far
  std::deque<Message> posted_;   ///< without a message. No tag is in both lists
  std::deque<Arrived> arrived_;  ///< without a receive
  std::size_t waiting_ = 0;      ///< of these, how many occupy entries
  std::vector<Message> held_;    ///< finished, bytes still with the sender
  std::vector<Message> lent_;    ///< of these, being read
};

}  // namespace hyper_parallel
