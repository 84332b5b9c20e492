#include "comm/store_notes.h"

#include <utility>

#include <hyper_parallel/core/log.h>

#include "comm/bounded_store.h"

namespace hyper_parallel {

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

StoreNotes::StoreNotes(c10::intrusive_ptr<c10d::Store> store)
    : store_(c10::make_intrusive<BoundedStore>(std::move(store), std::chrono::milliseconds::zero())) {}
StoreNotes::StoreNotes(StoreNotes&&) noexcept = default;
StoreNotes::~StoreNotes() = default;

void StoreNotes::publish(const std::string& key, const std::string& note) noexcept {
  try {
    store_->set("note/" + key, note);
  } catch (const std::exception& error) {
    log::debug("a note for the store: ", first_line_of(error.what()));
  }
}

std::string StoreNotes::read(const std::string& key, std::chrono::milliseconds patience) noexcept {
  try {
    store_->wait({"note/" + key}, patience);
    return store_->get_to_str("note/" + key);
  } catch (const std::exception& error) {
    log::debug("a note from the store: ", first_line_of(error.what()));
    return {};
  }
}

}  // namespace hyper_parallel
