// torch::nn constructors and initialisers take neither a device nor a generator. The dispatcher can add both: a fallback on a key
// that comes before all others, and that only the thread-local state of a scope includes. Outside of scopes no call reaches it.
#include "nn/factory_mode.h"

#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <hyper_parallel/nn/init.h>

namespace hyper_parallel {
namespace {

// Torch reserves it for programs that try a mode of their own; nothing in torch includes it.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

struct Additions {
  bool meta = false;
  const at::Generator* generator = nullptr;
};
thread_local Additions additions;

void add_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  c10::IValue* device = nullptr;
  c10::IValue* generator = nullptr;
  bool of_tensors = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor() || value.isTensorList()) of_tensors = true;
    if (arguments[i].name() == "device" && value.isNone()) device = &value;
    if (arguments[i].name() == "generator" && value.isNone()) generator = &value;
  }
  if (additions.meta && device != nullptr && !of_tensors) *device = c10::Device(c10::kMeta);
  if (additions.generator != nullptr && generator != nullptr) *generator = *additions.generator;
  if (!additions.meta) {
    // What an operation is made of comes here as well: dropout takes no generator, the bernoulli_ in it does.
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard go_on(kKey);
  op.callBoxed(stack);
}

/// Never destroyed: a program may build modules until its end.
void install_once() {
  [[gnu::used]] static const auto* library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&add_arguments>());
    return made;
  }();
}

/// Registers the fallback before it includes the key.
struct Included {
  Included() { install_once(); }
  Additions before = additions;
  std::optional<c10::impl::IncludeDispatchKeyGuard> include;
  void enter() { include.emplace(kKey); }
  void leave() {
    include.reset();
    additions = before;
  }
};

}  // namespace

struct MetaInit::Scope : Included {};

MetaInit::MetaInit() : scope_(std::make_unique<Scope>()) {
  scope_->enter();
  additions.meta = true;
}

MetaInit::~MetaInit() { scope_->leave(); }

namespace nn {

struct GeneratorScope::Scope : Included {};

GeneratorScope::GeneratorScope(const at::Generator& generator) : scope_(std::make_unique<Scope>()) {
  scope_->enter();
  additions = {.meta = false, .generator = &generator};
}

GeneratorScope::~GeneratorScope() { scope_->leave(); }

}  // namespace nn
}  // namespace hyper_parallel
