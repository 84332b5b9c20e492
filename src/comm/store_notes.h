#pragma once
// What a rank leaves in the group's store for peers that can no longer be reached otherwise.
#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "comm/backend.h"

namespace c10d {
class Store;
}

namespace hyper_parallel {

class BoundedStore;

/// First line of what Gloo or a store says, without source position and stack trace.
std::string first_line_of(std::string text);
/// Sorts an exception of Gloo or of a store.
TransportError translate(const std::exception& error);

/// Notes of one group. Thread safety: one thread at a time.
class StoreNotes {
 public:
  explicit StoreNotes(c10::intrusive_ptr<c10d::Store> store);
  StoreNotes(StoreNotes&&) noexcept;
  ~StoreNotes();
  /// As Transport's functions of these names. Both come back in time even if the store's host is stopped; then it is not asked
  /// again.
  void publish(const std::string& key, const std::string& note) noexcept;
  std::string read(const std::string& key, std::chrono::milliseconds patience) noexcept;

 private:
  c10::intrusive_ptr<BoundedStore> store_;
};

}  // namespace hyper_parallel
