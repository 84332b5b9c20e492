#pragma once
// What a program prints.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::apps {

/// Of an error: what is behind the first line is a stack trace of torch's.
inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

/// To be called at the end. Error: not everything could be written, to a full disk for example.
inline void finish_output(const char* program) {
  errno = 0;  // stays so where the error is one of earlier writes
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (failed)
    throw Error(concat('[', program, "] cannot write the output", errno != 0 ? concat(": ", std::strerror(errno)) : ""));
}

}  // namespace hyper_parallel::apps
