#pragma once
// Errors of the library. Message form: `[op] what, got, want (where)`.
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <hyper_parallel/core/export.h>

namespace hyper_parallel {

/// Base of every exception that the library throws (Python's RuntimeError).
class HP_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

/// The caller passed something invalid; nothing was changed or sent (Python's ValueError).
class HP_API ValueError : public Error {
 public:
  using Error::Error;
};

/// A broken invariant of the library itself: please report it.
class HP_API InternalError : public Error {
 public:
  using Error::Error;
};

/// A file that holds model or training state is missing, damaged or does not fit.
class HP_API CheckpointError : public Error {
 public:
  using Error::Error;
};

/// What a failed collective was doing.
struct CommFailure {
  std::string operation;       ///< e.g. "all_gather_single"
  std::string label;           ///< who asked for it, e.g. the name of a unit
  std::string group;           ///< name of the process group
  std::uint64_t sequence = 0;  ///< position of the operation in its group, from 1
  std::int64_t bytes = 0;      ///< payload bytes of the whole operation on this rank
  int peer = -1;               ///< group rank of the peer that failed, -1 when unknown
};

/// A collective failed: a peer died, disagreed or did not answer.
class HP_API CommError : public Error {
 public:
  CommError(const std::string& message, CommFailure failure) : Error(message), failure_(std::move(failure)) {}
  [[nodiscard]] const CommFailure& failure() const noexcept { return failure_; }

 private:
  CommFailure failure_;
};

/// A peer did not answer within the timeout of the operation.
class HP_API TimeoutError : public CommError {
 public:
  using CommError::CommError;
};

/// Joins the arguments with operator<<.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// Throws ValueError with "[op] " and the joined arguments unless `condition` holds.
template <class... Args>
void check_value(bool condition, std::string_view op, const Args&... args) {
  if (!condition) throw ValueError(concat('[', op, "] ", args...));
}

/// Throws InternalError with "[op] internal: " and the joined arguments unless `condition` holds.
template <class... Args>
void check_internal(bool condition, std::string_view op, const Args&... args) {
  if (!condition) throw InternalError(concat('[', op, "] internal: ", args...));
}

}  // namespace hyper_parallel
