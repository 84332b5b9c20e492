#pragma once
// Seam between Comm and what moves bytes between the ranks of a group.
//
// A transport moves bytes between pairs; Comm builds every collective from that. It is enough for Gloo and for memory shared
// inside a host. A backend with collectives of its own (NCCL) also implements the hooks in `Collective` and says so in
// `supports`; Comm then asks it first. This version has no such backend.
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "comm/futex.h"

namespace at {
class Tensor;
}

namespace hyper_parallel {

class SharedSlices;
struct SliceAddress;

/// Why a message did not arrive, without stack trace.
class TransportError : public std::runtime_error {
 public:
  enum class Kind { kTimeout, kClosed, kOther };
  TransportError(Kind kind, const std::string& detail) : std::runtime_error(detail), kind_(kind) {}
  [[nodiscard]] Kind kind() const noexcept { return kind_; }

 private:
  Kind kind_;
};

/// Operations that a backend may run itself.
enum class Collective { kAllGather, kReduceScatter, kAllReduce, kAllToAll, kBroadcast };

/// Moves bytes between pairs of ranks of one group. Thread safety: one thread at a time.
class Transport {
 public:
  /// A posted message. Holds its memory until it is dropped.
  using Handle = c10::intrusive_ptr<c10::intrusive_ptr_target>;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  /// Whether the backend runs `what` itself, better than pairs would. No transport does so far.
  [[nodiscard]] virtual bool supports(Collective /*what*/) const { return false; }

  /// Posts one message; `bytes` is contiguous. Messages with equal (peer, tag) arrive in order, and both sides must agree on the
  /// size.
  virtual Handle send(const at::Tensor& bytes, int peer, int tag) = 0;
  virtual Handle receive(const at::Tensor& bytes, int peer, int tag) = 0;
  /// Blocks until the message has left (send) or arrived (receive). Throws TransportError.
  virtual void wait(const Handle& handle, std::chrono::milliseconds timeout) = 0;

  /// Like `receive`, for bytes that are read once: a transport that can see the sender's memory may leave them there. After
  /// `wait`, `borrow` says where they are, null for in `bytes`, and they stay there until `give_back`. Throws TransportError.
  virtual Handle receive_to_read(const at::Tensor& bytes, int peer, int tag) { return receive(bytes, peer, tag); }
  virtual const void* borrow(const Handle& /*handle*/) { return nullptr; }
  virtual void give_back(const Handle& /*handle*/) noexcept {}

  /// Whether ranks can see slices of each other's memory side by side (Comm::gathered_buffer): then the next four work. Equal on
  /// all ranks.
  [[nodiscard]] virtual bool maps() const noexcept { return false; }
  [[nodiscard]] virtual std::shared_ptr<SharedSlices> make_slices(std::size_t /*bytes*/) { return nullptr; }
  /// SharedMemoryError.
  virtual void connect(SharedSlices& /*slices*/, std::span<const SliceAddress> /*addresses*/) {}
  /// Wakes the peers, after a word changed that they may wait for.
  virtual void ring_peers() noexcept {}
  /// Blocks until `value`, which rank `peer` writes, has reached `count`. Throws TransportError.
  virtual void wait_for(Word& /*value*/, Word /*count*/, int /*peer*/, std::chrono::milliseconds /*timeout*/) {}

  /// What moves the bytes, e.g. "gloo".
  [[nodiscard]] virtual const char* name() const noexcept = 0;
  /// Closes all connections so that the peers notice at once. Nothing may be posted or waited for afterwards.
  virtual void abort() noexcept = 0;

  /// A note about this rank that peers can read even when messages no longer flow. Best effort.
  virtual void publish(const std::string& key, const std::string& note) noexcept = 0;
  /// The note of a peer, waiting up to `patience`; empty when there is none.
  virtual std::string read_note(const std::string& key, std::chrono::milliseconds patience) noexcept = 0;
};

}  // namespace hyper_parallel
