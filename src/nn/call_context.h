#pragma once
// What a call of a function depends on besides its arguments: random numbers and autocast.
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace hyper_parallel::nn::detail {

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

struct AutocastState {
  at::DeviceType device = at::kCPU;
  bool enabled = false;
  at::ScalarType dtype = at::kBFloat16;
};

struct CallContext {
  std::vector<GeneratorState> random;
  std::vector<AutocastState> autocast;
};

/// The present state of `generators`, with `default_generators` also of those of the CPU and of the devices of `inputs`, and of
/// autocast on these devices.
[[nodiscard]] CallContext present_context(const std::vector<at::Generator>& generators, bool default_generators,
                                          const std::vector<at::Tensor>& inputs);

/// Autocast without its cache of casted weights: one that was filled in another segment would make a recomputation differ from
/// its forward.
class NoAutocastCache {
 public:
  NoAutocastCache();
  ~NoAutocastCache();
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool before_;
};

/// Puts `context` into place; afterwards everything is and goes on as before.
class ContextGuard {
 public:
  explicit ContextGuard(const CallContext& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  CallContext before_;
  NoAutocastCache no_cache_;
};

}  // namespace hyper_parallel::nn::detail
