#pragma once
// Arguments that a thread wants added to every operation it calls: a device for factories, a generator for random numbers.
#include <memory>

#include <ATen/core/Generator.h>

namespace hyper_parallel::nn {

/// Random operations without a generator of their own use `generator` while one lives; factories are left alone.
class GeneratorScope {
 public:
  explicit GeneratorScope(const at::Generator& generator);
  GeneratorScope(const GeneratorScope&) = delete;
  GeneratorScope& operator=(const GeneratorScope&) = delete;
  ~GeneratorScope();

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

}  // namespace hyper_parallel::nn
