#pragma once
// Stores whose host may be stopped: every call comes back.
#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/helper_thread.h"

namespace hyper_parallel {

/// What the host of a store may take beyond the time that a call itself waits.
constexpr std::chrono::milliseconds kStoreAnswer{2000};
constexpr const char* kNoStoreAnswer = "timed out: the host of the store does not answer";

/// What `body` returns or throws on a thread of its own; without state (`valid()` is false) if it is not back after `patience`.
/// Then the thread is left behind with all that `body` holds, so that must be its own.
template <class Body>
std::future<std::invoke_result_t<Body&>> try_within(std::chrono::milliseconds patience, Body body) {
  std::packaged_task<std::invoke_result_t<Body&>()> task(std::move(body));
  auto result = task.get_future();
  auto thread = start_helper(std::move(task));
  const bool back = result.wait_for(patience) == std::future_status::ready;
  back ? thread.join() : thread.detach();
  return back ? std::move(result) : decltype(result)();
}

/// Calls of `inner`, each of which ends with an error after the time that it may wait (`timeout` if it says none) and
/// kStoreAnswer. A store over TCP waits without end for the answer of a host that is stopped, whatever time it is given, and no
/// other thread gets through meanwhile; so after the first such call the others fail at once. Thread safety: that of `inner`.
class BoundedStore final : public c10d::Store {
 public:
  BoundedStore(c10::intrusive_ptr<c10d::Store> inner, std::chrono::milliseconds timeout);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<std::uint8_t>>& values) override;
  [[nodiscard]] bool hasExtendedApi() const override;

 private:
  template <class Question>
  std::invoke_result_t<Question, c10d::Store&> ask(std::chrono::milliseconds time, Question question);

  c10::intrusive_ptr<c10d::Store> inner_;
  std::atomic<bool> answers_{true};
};

}  // namespace hyper_parallel
