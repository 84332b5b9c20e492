#pragma once
// Threads that serve a group beside the rank's own.
#include <csignal>
#include <thread>
#include <utility>

#include <pthread.h>

namespace hyper_parallel {

/// A thread that takes no signals: handlers of the program run on its own threads.
template <class Body>
std::thread start_helper(Body body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  std::thread thread(std::move(body));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace hyper_parallel
