#pragma once
// The handles of SharedTransport, and what it knows of a peer.
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "comm/backend.h"
#include "comm/shared_mailbox.h"
#include "comm/shared_memory.h"

namespace hyper_parallel {

struct SharedMessage : c10::intrusive_ptr_target {
  SharedMessage(const at::Tensor& memory, int to_or_from, int its_tag) : bytes(memory), peer(to_or_from), tag(its_tag) {}
  [[nodiscard]] std::size_t size() const { return static_cast<std::size_t>(bytes.numel()); }

  at::Tensor bytes;
  int peer;
  int tag;
  Word slot = kEntries;  ///< its entry, once it has one
  bool done = false;
};

struct SharedSend final : SharedMessage {
  using SharedMessage::SharedMessage;
  Place place = Place::kInline;
  std::uint64_t where = 0;
  std::uint64_t staged_bytes = 0;
  /// The tensor is free as soon as the message is announced.
  [[nodiscard]] bool buffered() const { return place == Place::kInline || place == Place::kStaged; }
};

struct SharedReceive final : SharedMessage {
  using SharedMessage::SharedMessage;
  std::string error;  ///< why it failed
  bool closed = false;
  bool to_read = false;  ///< may stay with the sender; then `slot` is its entry
};

/// The other side of a pair.
struct SharedPeer {
  std::shared_ptr<Mapping> arena;
  FileDescriptor process;     ///< readable when the process has ended; none for a rank of this process
  bool same_process = false;  ///< its addresses are valid here
};

}  // namespace hyper_parallel
