#include "comm/shared_inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

Inbox::Inbox(const Mailbox& mailbox, int from, int to, std::shared_ptr<Mapping> arena)
    : lane_(mailbox.lane(from, to)), peer_(mailbox.seat(from)), arena_(std::move(arena)) {}

void Inbox::post(const Message& message) {
  advance(false);
  const auto found = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& one) { return one.tag == message->tag; });
  if (found == arrived_.end()) {
    posted_.push_back(message);
    return;
  }
  if (found->copy == nullptr) --waiting_;
  deliver(message, *found);
  arrived_.erase(found);
}

bool Inbox::advance(bool help) {
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
    deliver(*found, message);
    posted_.erase(found);
    finished = true;
  }
  if (help) fetch_held(false);
  // Every entry holds a message that nobody reads now, and what was asked for is queued behind them.
  if (waiting_ + held_.size() >= kEntries && !posted_.empty()) make_room();
  return finished;
}

void Inbox::make_room() {
  fetch_held(true);
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

void Inbox::deliver(const Message& message, Arrived& from) {
  auto& entry = lane_.entries[from.slot];
  const bool stays = message->to_read && from.copy == nullptr && entry.bytes > kInlineBytes && entry.bytes == message->size() &&
                     source(entry) != nullptr && word(entry.wanted).load(std::memory_order_acquire) == 0;
  if (!stays) return fetch(*message, from);
  message->slot = from.slot;
  message->done = true;
  held_.push_back(message);
}

// Copies messages that could have stayed: those that the sender waits for, or all.
void Inbox::fetch_held(bool all) {
  std::erase_if(held_, [&](const Message& message) {
    if (!all && word(lane_.entries[message->slot].wanted).load(std::memory_order_acquire) == 0) return false;
    Arrived from{message->tag, std::exchange(message->slot, kEntries)};
    message->done = false;
    fetch(*message, from);
    return true;
  });
}

const void* Inbox::borrow(SharedReceive& message) {
  if (message.slot == kEntries) return nullptr;
  auto& entry = lane_.entries[message.slot];
  const auto held = std::find_if(held_.begin(), held_.end(), [&](const Message& one) { return one.get() == &message; });
  if (claim(entry)) {
    lent_.push_back(*held);
  } else {
    message.done = false;
    message.slot = kEntries;
  }
  held_.erase(held);
  return message.done ? source(entry) : nullptr;
}

void Inbox::give_back(SharedReceive& message) {
  const auto lent = std::find_if(lent_.begin(), lent_.end(), [&](const Message& one) { return one.get() == &message; });
  if (lent == lent_.end()) return;
  finish(lane_.entries[std::exchange(message.slot, kEntries)]);
  lent_.erase(lent);
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
  held_.clear();
  while (!lent_.empty()) give_back(*lent_.back());
}

}  // namespace hyper_parallel
