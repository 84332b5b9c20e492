#include "comm/bounded_store.h"

#include "comm/torch_compat.h"

namespace hyper_parallel {

BoundedStore::BoundedStore(c10::intrusive_ptr<c10d::Store> inner, std::chrono::milliseconds timeout)
    : c10d::Store(timeout), inner_(std::move(inner)) {}

template <class Question>
std::invoke_result_t<Question, c10d::Store&> BoundedStore::ask(std::chrono::milliseconds time, Question question) {
  TORCH_CHECK_WITH(DistStoreError, answers_, kNoStoreAnswer);
  auto answer = try_within(time + kStoreAnswer, [inner = inner_, question = std::move(question)] {
    const QuietTorchLog quiet;
    return question(*inner);
  });
  if (!answer.valid()) answers_ = false;
  TORCH_CHECK_WITH(DistStoreError, answer.valid(), kNoStoreAnswer);
  return answer.get();
}

c10::intrusive_ptr<c10d::Store> BoundedStore::clone() {
  return c10::make_intrusive<BoundedStore>(ask(timeout_, [](c10d::Store& store) { return store.clone(); }), timeout_);
}

void BoundedStore::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(timeout_, [key, value](c10d::Store& store) { store.set(key, value); });
}

// Waits by itself: the store's own time may be longer.
std::vector<std::uint8_t> BoundedStore::get(const std::string& key) {
  return ask(timeout_, [key, time = timeout_](c10d::Store& store) {
    store.wait({key}, time);
    return store.get(key);
  });
}

std::int64_t BoundedStore::add(const std::string& key, std::int64_t value) {
  return ask(timeout_, [key, value](c10d::Store& store) { return store.add(key, value); });
}

bool BoundedStore::deleteKey(const std::string& key) {
  return ask(timeout_, [key](c10d::Store& store) { return store.deleteKey(key); });
}

bool BoundedStore::check(const std::vector<std::string>& keys) {
  return ask(timeout_, [keys](c10d::Store& store) { return store.check(keys); });
}

std::int64_t BoundedStore::getNumKeys() {
  return ask(timeout_, [](c10d::Store& store) { return store.getNumKeys(); });
}

void BoundedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void BoundedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  ask(timeout, [keys, timeout](c10d::Store& store) { store.wait(keys, timeout); });
}

void BoundedStore::append(const std::string& key, const std::vector<std::uint8_t>& value) {
  ask(timeout_, [key, value](c10d::Store& store) { store.append(key, value); });
}

std::vector<std::vector<std::uint8_t>> BoundedStore::multiGet(const std::vector<std::string>& keys) {
  return ask(timeout_, [keys, time = timeout_](c10d::Store& store) {
    store.wait(keys, time);
    return store.multiGet(keys);
  });
}

void BoundedStore::multiSet(const std::vector<std::string>& keys, const std::vector<std::vector<std::uint8_t>>& values) {
  ask(timeout_, [keys, values](c10d::Store& store) { store.multiSet(keys, values); });
}

bool BoundedStore::hasExtendedApi() const { return inner_->hasExtendedApi(); }

}  // namespace hyper_parallel
