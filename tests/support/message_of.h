#pragma once
#include <exception>
#include <string>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::testing {

/// The message of the ValueError that `call` throws, "no ValueError" when it returns. Other exceptions pass through.
template <class Call>
std::string value_error(Call&& call) {
  try {
    static_cast<void>(call());
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no ValueError";
}

/// The message of the Expected that `call` throws, "wrong type: ..." for another exception. For calls on a rank of several: an
/// exception that leaves it would hide what the other ranks saw.
template <class Expected, class Call>
std::string message_of(Call&& call) {
  try {
    static_cast<void>(call());
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("wrong type: ") + error.what();
  }
  return "nothing thrown";
}

}  // namespace hyper_parallel::testing
