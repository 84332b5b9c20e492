#include "fsdp/managed_registry.h"

#include <mutex>
#include <unordered_map>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, const Unit*> units;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: units may die after static destructors ran
  return *instance;
}

}  // namespace

void remember_managed(const at::Tensor& tensor, const Unit& unit) {
  const std::lock_guard lock(registry().mutex);
  registry().units[tensor.unsafeGetTensorImpl()] = &unit;
}

void forget_managed(const at::Tensor& tensor) {
  const std::lock_guard lock(registry().mutex);
  registry().units.erase(tensor.unsafeGetTensorImpl());
}

std::optional<std::string> managed_by(const at::Tensor& tensor) {
  const std::lock_guard lock(registry().mutex);
  const auto entry = registry().units.find(tensor.unsafeGetTensorImpl());
  if (entry == registry().units.end()) return std::nullopt;
  const Unit& unit = *entry->second;
  for (const auto& group : unit.groups()) {
    for (const ManagedParameter& parameter : group->parameters()) {
      if (parameter.full.is_same(tensor) || parameter.sharded.is_same(tensor))
        return concat("unit ", unit.name(), " as ", parameter.name);
    }
  }
  return concat("unit ", unit.name());
}

}  // namespace hyper_parallel::fsdp
