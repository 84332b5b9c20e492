#include "comm/shared_inbox.h"

#include <algorithm>
#include <cstring>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

Inbox::Inbox(const Mailbox& mailbox, int from, int to, std::shared_ptr<Mapping> arena)
    : lane_(mailbox.lane(from, to)), peer_(mailbox.seat(from)), arena_(std::move(arena)) {}

void Inbox::post(const Message& message) {
  advance();
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& one) { return one.tag == message->tag; });
  if (found == arrived_.end()) {
    posted_.push_back(message);
    return;
  }
  if (found->copy == nullptr) --waiting_;
  fetch(*message, *found);
  arrived_.erase(found);
}

bool Inbox::advance() {
  bool finished = false;
  const auto tail = word(lane_.tail).load(std::memory_order_acquire);
  for (; head_ != tail; ++head_) {
    const auto slot = word(lane_.order[head_ % kEntries]).load(std::memory_order_relaxed) % kEntries;
    Arrived message{lane_.entries[slot].tag, slot};
    const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Message& one) { return one->tag == message.tag; });
    if (found == posted_.end()) {
      arrived_.push_back(std::move(message));
      ++waiting_;
      continue;
    }
    fetch(**found, message);
    posted_.erase(found);
    finished = true;
  }
  // Every entry holds a message that nobody has asked for, and what was asked for is queued behind them.
  if (waiting_ >= kEntries && !posted_.empty()) make_room();
  return finished;
}

void Inbox::make_room() {
  for (auto& message : arrived_) {
    if (message.copy != nullptr) continue;
    auto& entry = lane_.entries[message.slot];
    const auto* from = source(entry);
    if (from == nullptr || !claim(entry)) continue;
    message.bytes = entry.bytes;
    message.copy = std::make_unique<unsigned char[]>(entry.bytes);
    std::memcpy(message.copy.get(), from, entry.bytes);
    finish(entry);
    --waiting_;
  }
}

const void* Inbox::source(const Entry& entry) const {
  switch (static_cast<Place>(entry.place)) {
    case Place::kInline:
      return entry.bytes <= kInlineBytes ? entry.payload.data() : nullptr;
    case Place::kStaged:
    case Place::kArena:
      return entry.where <= arena_->size() && entry.bytes <= arena_->size() - entry.where ? arena_->data() + entry.where
                                                                                          : nullptr;
    case Place::kAddress:
      return reinterpret_cast<const void*>(entry.where);
  }
  return nullptr;
}

bool Inbox::claim(Entry& entry) {
  Word expected = kEntryPosted;
  return word(entry.state).compare_exchange_strong(expected, kEntryClaimed, std::memory_order_acq_rel);
}

void Inbox::finish(Entry& entry) {
  word(entry.state).store(kEntryDone, std::memory_order_seq_cst);
  ring(peer_.bell);
  if (word(lane_.backlog).load(std::memory_order_seq_cst) != 0) ring(peer_.helper);
}

void Inbox::fetch(SharedReceive& message, Arrived& from) {
  auto& entry = lane_.entries[from.slot];
  const bool copied = from.copy != nullptr;
  const auto bytes = copied ? from.bytes : entry.bytes;
  const void* data = copied ? from.copy.get() : source(entry);
  if (data == nullptr || bytes != message.size()) {
    message.error = concat("a message of ", bytes, " bytes came for a receive of ", message.size());
    return;
  }
  if (!copied && !claim(entry)) {
    message.closed = true;
    return;
  }
  std::memcpy(message.bytes.data_ptr(), data, message.size());
  message.done = true;
  if (!copied) finish(entry);
}

void Inbox::abandon() {
  posted_.clear();
  arrived_.clear();
}

}  // namespace hyper_parallel
