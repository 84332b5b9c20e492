#pragma once
// Messages between ranks of one host: copied once, straight out of the sender's memory.
#include <memory>
#include <string>
#include <vector>

#include "comm/arena.h"
#include "comm/shared_message.h"
#include "comm/store_notes.h"

namespace hyper_parallel {

struct SharedGroup {
  int rank = 0;
  int size = 1;
  Mailbox mailbox;
  std::shared_ptr<Arena> arena;   ///< of this rank
  std::vector<SharedPeer> peers;  ///< by rank; the own one is empty
  StoreNotes notes;
  bool spin = false;  ///< there are cores enough to wait without sleeping for a moment
  bool maps = false;  ///< gathered buffers may be mapped
};

std::unique_ptr<Transport> make_shared_transport(SharedGroup group);

}  // namespace hyper_parallel
