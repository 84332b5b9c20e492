#include "comm/shared_outbox.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {
namespace {

// Up to here a copy costs less than waiting until the peer has read the original.
constexpr std::size_t kEagerBytes = 4096;

void keep_for_ever(const at::Tensor& tensor) {
  static auto* const kept = new std::vector<at::Tensor>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept->push_back(tensor);
}

}  // namespace

Outbox::Outbox(const Mailbox& mailbox, int from, int to, std::shared_ptr<Arena> arena, bool same_process)
    : mapping_(mailbox.mapping()),
      lane_(mailbox.lane(from, to)),
      peer_(mailbox.seat(to)),
      arena_(std::move(arena)),
      same_process_(same_process) {
  free_.reserve(kEntries);
  for (Word slot = kEntries; slot > 0; --slot) free_.push_back(slot - 1);
}

void Outbox::post(const Message& message) {
  if (!place_bytes(*message)) {
    throw TransportError(TransportError::Kind::kOther,
                         concat("no room in shared memory for a copy of ", message->size(), " bytes"));
  }
  collect();
  if (queue_.empty() && !free_.empty()) return announce(message);
  queue_.push_back(message);
  // Set before looking once more: the peer that has just finished an entry either sees the flag, or we see its entry.
  word(lane_.backlog).store(1, std::memory_order_seq_cst);
  advance();
}

bool Outbox::place_bytes(SharedSend& message) {
  const auto size = message.size();
  const void* data = message.bytes.const_data_ptr();
  if (size <= kInlineBytes) return true;
  if (size > kEagerBytes && same_process_) {
    message.place = Place::kAddress;
    message.where = reinterpret_cast<std::uintptr_t>(data);
    return true;
  }
  if (size > kEagerBytes) {
    if (const auto offset = arena_->find(data, size)) {
      message.place = Place::kArena;
      message.where = *offset;
      return true;
    }
  }
  const auto range = arena_->take(size);
  if (!range) return false;
  message.place = Place::kStaged;
  message.where = range->offset;
  message.staged_bytes = range->bytes;
  std::memcpy(arena_->at(range->offset), data, size);
  return true;
}

void Outbox::announce(const Message& message) {
  message->slot = free_.back();
  free_.pop_back();
  auto& slot = entry(*message);
  slot.place = static_cast<Word>(message->place);
  slot.tag = message->tag;
  slot.bytes = message->size();
  slot.where = message->where;
  word(slot.wanted).store(0, std::memory_order_relaxed);
  if (message->place == Place::kInline) std::memcpy(slot.payload.data(), message->bytes.const_data_ptr(), message->size());
  word(slot.state).store(kEntryPosted, std::memory_order_relaxed);
  const auto tail = word(lane_.tail).load(std::memory_order_relaxed);
  word(lane_.order[tail % kEntries]).store(message->slot, std::memory_order_relaxed);
  // Releases all of the above, and the tensor's bytes, to the receiver that sees the new tail.
  word(lane_.tail).store(tail + 1, std::memory_order_release);
  message->done = message->buffered();
  under_way_.push_back(message);
  if (message->done) message->bytes.reset();
  ring(peer_.bell);
}

void Outbox::collect() {
  std::erase_if(under_way_, [this](const Message& message) {
    if (word(entry(*message).state).load(std::memory_order_acquire) != kEntryDone) return false;
    release(*message);
    return true;
  });
}

void Outbox::release(SharedSend& message) {
  if (message.place == Place::kStaged) arena_->give({message.where, message.staged_bytes});
  word(entry(message).state).store(kEntryFree, std::memory_order_relaxed);
  free_.push_back(message.slot);
  message.slot = kEntries;
  message.done = true;
  message.bytes.reset();
}

void Outbox::advance() {
  if (queue_.empty()) return;
  collect();
  while (!queue_.empty() && !free_.empty()) {
    const auto next = std::move(queue_.front());
    queue_.pop_front();
    announce(next);
  }
  if (queue_.empty()) word(lane_.backlog).store(0, std::memory_order_seq_cst);
}

bool Outbox::done(SharedSend& message) {
  if (message.done) return true;
  advance();
  if (!message.done && message.slot < kEntries) collect();
  return message.done;
}

bool Outbox::urge(const SharedSend& message) {
  const bool announced = message.slot < kEntries;
  if (announced) word(entry(message).wanted).store(1, std::memory_order_seq_cst);
  ring(peer_.helper);
  return announced;
}

bool Outbox::revoke() {
  queue_.clear();
  collect();
  bool idle = true;
  std::erase_if(under_way_, [&](const Message& message) {
    if (message->buffered()) return false;
    Word expected = kEntryPosted;
    const bool revoked = word(entry(*message).state).compare_exchange_strong(expected, kEntryRevoked, std::memory_order_acq_rel);
    if (!revoked && expected == kEntryClaimed) idle = false;
    return revoked;
  });
  return idle;
}

void Outbox::abandon(bool may_read) {
  for (auto& message : under_way_) {
    if (message->place == Place::kStaged) {
      arena_->give_later({message->where, message->staged_bytes}, &entry(*message).state, kEntryDone, mapping_);
    } else if (!message->buffered() && may_read) {
      keep_for_ever(message->bytes);
    }
  }
  under_way_.clear();
}

}  // namespace hyper_parallel
