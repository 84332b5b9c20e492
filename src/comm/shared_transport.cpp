// Who waits for whom, and why nobody waits for ever: docs/design/009-same-host.md.
#include "comm/shared_transport.h"

#include <deque>
#include <mutex>
#include <thread>

#include <poll.h>

#include <hyper_parallel/core/error.h>

#include "comm/helper_thread.h"
#include "comm/shared_inbox.h"
#include "comm/shared_outbox.h"
#include "comm/shared_slices.h"

namespace hyper_parallel {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kShortestSpin{3};
constexpr microseconds kLongestSpin{40};
constexpr milliseconds kLookAtPeers{100};  // how long a dead peer stays unnoticed
constexpr milliseconds kLastReader{1000};  // how long abort waits for a peer that is reading

class SharedTransport final : public Transport {
 public:
  explicit SharedTransport(SharedGroup group) : group_(std::move(group)), me_(group_.mailbox.seat(group_.rank)) {
    for (int r = 0; r < group_.size; ++r) {
      const auto& peer = group_.peers[static_cast<std::size_t>(r)];
      out_.emplace_back(group_.mailbox, group_.rank, r, group_.arena, peer.same_process);
      in_.emplace_back(group_.mailbox, r, group_.rank, peer.arena);
    }
    helper_ = start_helper([this] { help(); });
  }
  ~SharedTransport() override { abort(); }

  Handle send(const at::Tensor& bytes, int peer, int tag) override {
    auto message = c10::make_intrusive<SharedSend>(bytes, peer, tag);
    const std::lock_guard lock(mutex_);
    check_open(peer);
    advance(false);
    out(peer).post(message);
    return message;
  }

  Handle receive(const at::Tensor& bytes, int peer, int tag) override { return post_receive(bytes, peer, tag, false); }
  Handle receive_to_read(const at::Tensor& bytes, int peer, int tag) override { return post_receive(bytes, peer, tag, true); }
  const void* borrow(const Handle& handle) override;
  void give_back(const Handle& handle) noexcept override {
    const std::lock_guard lock(mutex_);
    auto& message = static_cast<SharedReceive&>(*handle);
    in(message.peer).give_back(message);
  }

  void wait(const Handle& handle, milliseconds timeout) override;
  [[nodiscard]] bool maps() const noexcept override { return group_.maps; }
  [[nodiscard]] std::shared_ptr<SharedSlices> make_slices(std::size_t bytes) override {
    return std::make_shared<SharedSlices>(group_.arena, group_.rank, group_.size, bytes);
  }
  void connect(SharedSlices& slices, std::span<const SliceAddress> addresses) override {
    std::vector<std::shared_ptr<Mapping>> arenas;
    for (const auto& peer : group_.peers) arenas.push_back(peer.arena);
    slices.connect(addresses, arenas);
  }
  void ring_peers() noexcept override {
    for (int r = 0; r < group_.size; ++r) {
      if (r != group_.rank) ring(seat(r).bell);
    }
  }
  void wait_for(Word& value, Word count, int peer, milliseconds timeout) override;
  void abort() noexcept override;
  void publish(const std::string& key, const std::string& note) noexcept override { group_.notes.publish(key, note); }
  std::string read_note(const std::string& key, milliseconds patience) noexcept override {
    return group_.notes.read(key, patience);
  }
  [[nodiscard]] const char* name() const noexcept override { return "samehost"; }

 private:
  Handle post_receive(const at::Tensor& bytes, int peer, int tag, bool to_read) {
    auto message = c10::make_intrusive<SharedReceive>(bytes, peer, tag);
    message->to_read = to_read;
    const std::lock_guard lock(mutex_);
    check_open(peer);
    in(peer).post(message);
    return message;
  }
  [[nodiscard]] Outbox& out(int peer) { return out_[static_cast<std::size_t>(peer)]; }
  [[nodiscard]] Inbox& in(int peer) { return in_[static_cast<std::size_t>(peer)]; }
  [[nodiscard]] Seat& seat(int peer) const { return group_.mailbox.seat(peer); }
  [[noreturn]] static void throw_closed(int peer) {
    throw TransportError(TransportError::Kind::kClosed, concat("rank ", peer, " closed the connection"));
  }
  void check_open(int peer) const {
    if (aborted_) throw_closed(peer);
  }
  // Does everything that can be done now; true when a receive was finished.
  bool advance(bool help) {
    bool finished = false;
    for (int r = 0; r < group_.size; ++r) {
      if (r == group_.rank) continue;
      finished = in(r).advance(help) || finished;
      out(r).advance();
    }
    return finished;
  }
  bool is_done(SharedMessage& message);
  template <class Done, class Urge>
  void wait_until(int peer, milliseconds timeout, Done done, Urge urge_peer);
  [[nodiscard]] bool has_closed(int peer) const { return word(seat(peer).closed).load(std::memory_order_acquire) != 0; }
  [[nodiscard]] bool has_died(int peer) const {
    const auto& process = group_.peers[static_cast<std::size_t>(peer)].process;
    if (!process.valid()) return false;
    pollfd query{process.get(), POLLIN, 0};
    return ::poll(&query, 1, 0) > 0;
  }
  // Asks the peer's helper to do what `message` waits for. False: ask again later.
  bool urge(SharedMessage& message);
  bool spin(Word seen);
  void help();
  void let_go() noexcept;

  SharedGroup group_;
  Seat& me_;
  std::mutex mutex_;        ///< this rank's thread against its helper
  std::deque<Outbox> out_;  ///< by peer
  std::deque<Inbox> in_;
  bool aborted_ = false;
  bool stopping_ = false;
  microseconds spin_for_ = kLongestSpin;
  std::thread helper_;
};

bool SharedTransport::is_done(SharedMessage& message) {
  const std::lock_guard lock(mutex_);
  check_open(message.peer);
  advance(false);
  if (auto* send = dynamic_cast<SharedSend*>(&message)) return out(message.peer).done(*send);
  const auto& receive = static_cast<const SharedReceive&>(message);
  if (receive.closed) throw_closed(message.peer);
  if (!receive.error.empty()) throw TransportError(TransportError::Kind::kOther, receive.error);
  return receive.done;
}

const void* SharedTransport::borrow(const Handle& handle) {
  const std::lock_guard lock(mutex_);
  auto& message = static_cast<SharedReceive&>(*handle);
  check_open(message.peer);
  const void* where = in(message.peer).borrow(message);
  if (!message.done) throw_closed(message.peer);
  return where;
}

bool SharedTransport::urge(SharedMessage& message) {
  const std::lock_guard lock(mutex_);
  if (const auto* send = dynamic_cast<const SharedSend*>(&message)) return out(message.peer).urge(*send);
  const bool queued = word(group_.mailbox.lane(message.peer, group_.rank).backlog).load(std::memory_order_acquire) != 0;
  if (queued) ring(seat(message.peer).helper);
  return false;
}

// Spinning in vain is worse than useless where the scheduler has put both ranks on one core, so it is tried less and less.
bool SharedTransport::spin(Word seen) {
  if (!group_.spin) return false;
  const auto end = Clock::now() + spin_for_;
  do {
    for (int i = 0; i < 50; ++i) {
      if (look(me_.bell) != seen) {
        spin_for_ = std::min(2 * spin_for_, kLongestSpin);
        return true;
      }
      relax();
    }
  } while (Clock::now() < end);
  spin_for_ = std::max(spin_for_ / 2, kShortestSpin);
  return false;
}

template <class Done, class Urge>
void SharedTransport::wait_until(int peer, milliseconds timeout, Done done, Urge urge_peer) {
  const auto deadline = Clock::now() + timeout;
  bool urged = false;
  while (true) {
    const auto seen = look(me_.bell);
    if (done()) return;
    // What it did before it closed still counts.
    if (has_closed(peer)) {
      if (done()) return;
      throw_closed(peer);
    }
    if (spin(seen)) continue;
    if (!urged) urged = urge_peer();
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) throw TransportError(TransportError::Kind::kTimeout, "timed out");
    if (sleep_on(me_.bell, seen, std::min(left, kLookAtPeers))) continue;
    if (has_died(peer)) {
      if (done()) return;
      throw_closed(peer);
    }
  }
}

void SharedTransport::wait(const Handle& handle, milliseconds timeout) {
  auto& message = *static_cast<SharedMessage*>(handle.get());
  wait_until(
      message.peer, timeout, [&] { return is_done(message); }, [&] { return urge(message); });
}

void SharedTransport::wait_for(Word& value, Word count, int peer, milliseconds timeout) {
  check_open(peer);
  if (has_reached(value, count)) return;
  wait_until(
      peer, timeout, [&] { return has_reached(value, count); }, [] { return true; });
}

void SharedTransport::help() {
  while (true) {
    const auto seen = look(me_.helper);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      if (advance(true)) ring(me_.bell);
    }
    sleep_on(me_.helper, seen, milliseconds(60'000));
  }
}

void SharedTransport::abort() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) return;
    aborted_ = true;
    stopping_ = true;
    for (auto& inbox : in_) inbox.abandon();
  }
  ring(me_.helper);
  helper_.join();
  let_go();
  word(me_.closed).store(1, std::memory_order_seq_cst);
  for (int r = 0; r < group_.size; ++r) {
    if (r != group_.rank) ring(seat(r).bell);
  }
}

// Tensors that peers may be reading must outlive that: a moment for a living peer, for ever if it is stopped in the middle.
void SharedTransport::let_go() noexcept {
  for (int r = 0; r < group_.size; ++r) {
    if (r == group_.rank) continue;
    const auto end = Clock::now() + kLastReader;
    const bool thread = group_.peers[static_cast<std::size_t>(r)].same_process;
    while (true) {
      const auto seen = look(me_.bell);
      if (out(r).revoke() || has_died(r)) break;
      if (!thread && Clock::now() > end) break;
      sleep_on(me_.bell, seen, milliseconds(10));
    }
    out(r).abandon(!has_died(r));
  }
}

}  // namespace

std::unique_ptr<Transport> make_shared_transport(SharedGroup group) {
  return std::make_unique<SharedTransport>(std::move(group));
}

}  // namespace hyper_parallel
