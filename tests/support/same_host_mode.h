#pragma once
#include <cstdlib>
#include <optional>
#include <string>

namespace hyper_parallel::testing {

/// HP_SAMEHOST while it lives.
class Mode {
 public:
  explicit Mode(const char* value) {
    const char* before = std::getenv("HP_SAMEHOST");
    if (before != nullptr) before_ = before;
    ::setenv("HP_SAMEHOST", value, 1);
  }
  Mode(const Mode&) = delete;
  Mode& operator=(const Mode&) = delete;
  ~Mode() { before_ ? ::setenv("HP_SAMEHOST", before_->c_str(), 1) : ::unsetenv("HP_SAMEHOST"); }

 private:
  std::optional<std::string> before_;
};

}  // namespace hyper_parallel::testing
