#pragma once
// References to Python objects that C++ threads may drop.
#include <functional>
#include <memory>
#include <utility>

#include <torch/csrc/utils/pybind.h>

namespace hyper_parallel::python {

/// A strong reference that may be dropped by any thread, with the interpreter lock or without it.
class Ref {
 public:
  Ref() = default;
  explicit Ref(py::object object) : object_(object.release().ptr()) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    // After the interpreter's end nobody can count any more.
    if (object_ == nullptr || Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire lock;
    Py_DECREF(object_);
  }

  [[nodiscard]] PyObject* get() const { return object_; }
  /// Needs the interpreter lock.
  [[nodiscard]] py::object object() const { return py::reinterpret_borrow<py::object>(object_); }

 private:
  PyObject* object_ = nullptr;
};

/// A Python callable that C++ threads may call and drop.
template <class Result, class... Args>
std::function<Result(Args...)> callback(py::object callable) {
  return [held = std::make_shared<Ref>(std::move(callable))](Args... args) -> Result {
    const py::gil_scoped_acquire lock;
    return held->object()(std::forward<Args>(args)...).template cast<Result>();
  };
}

}  // namespace hyper_parallel::python
