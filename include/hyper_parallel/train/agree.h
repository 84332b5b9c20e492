#pragma once
// Failures that only some ranks see, turned into one that all ranks see.
#include <functional>
#include <string>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {
class Comm;
}

namespace hyper_parallel::train {

/// An error that every rank of the run throws alike: rank 0 reports it for all.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// Runs `local` on every rank and throws on all of them when it threw on any: AgreedError with the text of the first rank that
/// failed, and its number unless all ranks failed alike. Collective over `comm`; `local` must not communicate.
void agree_on(const Comm& comm, const std::function<void()>& local);

}  // namespace hyper_parallel::train
