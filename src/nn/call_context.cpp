#include "nn/call_context.h"

#include <algorithm>
#include <mutex>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace hyper_parallel::nn::detail {
namespace {

GeneratorState state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return {generator, generator.get_state()};
}

AutocastState autocast_of(at::DeviceType device) {
  return {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
}

void put_back(const CallContext& context) {
  for (const GeneratorState& entry : context.random) {
    at::Generator generator = entry.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(entry.state);
  }
  for (const AutocastState& state : context.autocast) {
    at::autocast::set_autocast_enabled(state.device, state.enabled);
    at::autocast::set_autocast_dtype(state.device, state.dtype);
  }
}

}  // namespace

CallContext present_context(const std::vector<at::Generator>& generators, bool default_generators,
                            const std::vector<at::Tensor>& inputs) {
  std::vector<at::Device> devices{at::Device(at::kCPU)};
  for (const at::Tensor& input : inputs) {
    if (input.defined() && std::find(devices.begin(), devices.end(), input.device()) == devices.end())
      devices.push_back(input.device());
  }
  CallContext context;
  for (const at::Generator& generator : generators) context.random.push_back(state_of(generator));
  for (const at::Device& device : devices) {
    if (default_generators && device.type() != at::kMeta)
      context.random.push_back(state_of(at::globalContext().defaultGenerator(device)));
    if (at::autocast::is_autocast_available(device.type())) context.autocast.push_back(autocast_of(device.type()));
  }
  return context;
}

NoAutocastCache::NoAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}

NoAutocastCache::~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }

ContextGuard::ContextGuard(const CallContext& context) {
  for (const GeneratorState& entry : context.random) before_.random.push_back(state_of(entry.generator));
  for (const AutocastState& state : context.autocast) before_.autocast.push_back(autocast_of(state.device));
  put_back(context);
}

ContextGuard::~ContextGuard() { put_back(before_); }

}  // namespace hyper_parallel::nn::detail
