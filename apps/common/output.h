#pragma once
// What a program has printed.
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::apps {

/// To be called at the end. Error: not everything could be written, to a full disk for example.
inline void finish_output(const char* program) {
  errno = 0;  // stays so where the error is one of earlier writes
  const bool failed = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (failed)
    throw Error(concat('[', program, "] cannot write the output", errno != 0 ? concat(": ", std::strerror(errno)) : ""));
}

}  // namespace hyper_parallel::apps
