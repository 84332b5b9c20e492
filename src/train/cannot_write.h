#pragma once
// What is said of a file that could not be written.
#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::train {

/// Right after a stream has failed: errno is that of its last system call.
[[nodiscard]] inline Error cannot_write(const std::filesystem::path& file) {
  const int reason = errno;
  return Error(concat("[log] cannot write ", file.string(), ": ", std::generic_category().message(reason)));
}

}  // namespace hyper_parallel::train
