#include "comm/store_notes.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <hyper_parallel/core/log.h>

#include "comm/helper_thread.h"
#include "comm/torch_compat.h"

namespace hyper_parallel {
namespace {

constexpr std::chrono::milliseconds kAnswer{2000};  // of a store that is alive

}  // namespace

std::string first_line_of(std::string text) {
  if (text.starts_with('[')) {
    const auto end = text.find("] ");
    if (end != std::string::npos) text.erase(0, end + 2);
  }
  return text.substr(0, text.find('\n'));
}

TransportError translate(const std::exception& error) {
  const std::string text = first_line_of(error.what());
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (has("Timed out") || has("timed out") || has("timeout")) return {TransportError::Kind::kTimeout, text};
  if (has("closed") || has("reset by peer") || has("Broken pipe") || has("refused")) return {TransportError::Kind::kClosed, text};
  return {TransportError::Kind::kOther, text};
}

StoreNotes::StoreNotes(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
StoreNotes::StoreNotes(StoreNotes&&) noexcept = default;
StoreNotes::~StoreNotes() = default;

// A store over TCP waits without end for the answer of a host that is stopped, whatever time it is given, and no other thread
// gets through meanwhile. So its thread is left behind then, with what it holds.
bool StoreNotes::send_out(std::chrono::milliseconds patience, Errand errand) noexcept {
  struct Trip {
    std::mutex mutex;
    std::condition_variable back;
    bool done = false, fine = false;
  };
  if (!answers_) return false;
  try {
    const auto trip = std::make_shared<Trip>();
    auto thread = start_helper([trip, store = store_, errand = std::move(errand)] {
      bool fine = false;
      try {
        const QuietTorchLog quiet;
        errand(*store);
        fine = true;
      } catch (const std::exception& error) {
        log::debug("a note in the store: ", first_line_of(error.what()));
      }
      const std::lock_guard lock(trip->mutex);
      trip->done = true;
      trip->fine = fine;
      trip->back.notify_all();
    });
    std::unique_lock lock(trip->mutex);
    answers_ = trip->back.wait_for(lock, patience, [&] { return trip->done; });
    const bool fine = trip->fine;
    lock.unlock();
    answers_ ? thread.join() : thread.detach();
    return fine;
  } catch (const std::exception& error) {
    log::debug("a note in the store: ", error.what());
    return false;
  }
}

void StoreNotes::publish(const std::string& key, const std::string& note) noexcept {
  send_out(kAnswer, [key = "note/" + key, note](c10d::Store& store) { store.set(key, note); });
}

std::string StoreNotes::read(const std::string& key, std::chrono::milliseconds patience) noexcept {
  const auto note = std::make_shared<std::string>();
  const bool there = send_out(patience + kAnswer, [key = "note/" + key, note, patience](c10d::Store& store) {
    store.wait({key}, patience);
    *note = store.get_to_str(key);
  });
  return there ? *note : std::string();
}

}  // namespace hyper_parallel
