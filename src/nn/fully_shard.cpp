// Maps torch::nn modules onto the engine's slots.
#include <hyper_parallel/nn/fully_shard.h>

#include <algorithm>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/embedding.h>

#include "fsdp/unit_impl.h"
#include "nn/access.h"
#include "nn/shared_parameters.h"

namespace hyper_parallel {
namespace {

using torch::nn::Module;

constexpr std::string_view kOp = "fully_shard";

using nn::Access;

struct Collected {
  std::vector<fsdp::ParameterSlot> slots;
  std::vector<fsdp::ChildUnit> children;
};

class Collector {
 public:
  explicit Collector(const FullyShardOptions& options, const std::vector<at::Tensor>& shared = {}) {
    for (const at::Tensor& parameter : shared) shared_.insert(parameter.unsafeGetTensorImpl());
    for (const at::Tensor& parameter : options.ignored_params) {
      check_value(parameter.defined(), kOp, "ignored_params has an undefined tensor, want parameters of the module");
      ignored_.insert(parameter.unsafeGetTensorImpl());
    }
  }

  void collect_member(Module& module, int member) {
    member_ = member;
    collect(module, "", true);
  }

  [[nodiscard]] Collected take() { return std::move(result_); }

 private:
  void collect(Module& module, const std::string& prefix, bool top) {
    if (!visited_.insert(&module).second) return;
    auto* hooked = dynamic_cast<nn::HookedBase*>(&module);
    const bool inner_unit = !top && hooked != nullptr && hooked->unit() != nullptr;
    if (inner_unit) {
      auto child = std::find_if(result_.children.begin(), result_.children.end(),
                                [&](const fsdp::ChildUnit& known) { return known.unit == hooked->unit(); });
      if (child == result_.children.end()) child = result_.children.insert(child, {hooked->unit(), {}});
      const auto member = static_cast<std::size_t>(hooked->member());
      child->paths.resize(std::max(child->paths.size(), member + 1));
      child->paths[member] = prefix.substr(0, prefix.size() - 1);
    }
    inside_ += inner_unit ? 1 : 0;
    take_parameters(module, prefix);
    for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + '.', false);
    inside_ -= inner_unit ? 1 : 0;
  }

  void take_parameters(Module& module, const std::string& prefix) {
    auto& parameters = Access::parameters(module);
    for (auto& entry : parameters) {
      const at::Tensor& parameter = entry.value();
      if (!parameter.defined() || ignored_.contains(parameter.unsafeGetTensorImpl())) continue;
      if (inside_ > 0 && !shared_.contains(parameter.unsafeGetTensorImpl())) continue;
      check_value(dynamic_cast<torch::nn::ParameterListImpl*>(&module) == nullptr &&
                      dynamic_cast<torch::nn::ParameterDictImpl*>(&module) == nullptr,
                  kOp, "parameter ", prefix, entry.key(),
                  " is in a ParameterList or ParameterDict, which would hand the shard to forward: ",
                  "register it with register_parameter and keep the returned tensor");
      auto install = [&module, key = entry.key()](const at::Tensor& sharded) { Access::parameters(module)[key] = sharded; };
      const auto [place, added] = slot_of_.emplace(parameter.unsafeGetTensorImpl(), result_.slots.size());
      if (added) {
        result_.slots.push_back({.name = prefix + entry.key(), .parameter = parameter, .member = member_});
      }
      result_.slots[place->second].install.emplace_back(std::move(install));
    }
  }

  Collected result_;
  std::unordered_set<const void*> ignored_;
  std::unordered_set<const void*> shared_;  ///< wanted from inside of inner units, too
  std::unordered_set<const Module*> visited_;
  std::unordered_map<const void*, std::size_t> slot_of_;
  int inside_ = 0;
  int member_ = 0;
};

nn::HookedBase& hooks_of(Module& module) {
  auto* hooked = dynamic_cast<nn::HookedBase*>(&module);
  check_value(hooked != nullptr, kOp, "module ", module.name(),
              " has no hooks, want one declared with HP_MODULE (library modules: hyper_parallel::nn::",
              "Linear, Embedding, LayerNorm, or HP_MODULE_IMPL)");
  check_value(hooked->unit() == nullptr, kOp, "module ", module.name(), " is already a unit, want fully_shard once per module");
  return *hooked;
}

/// Buffers of `module` and of the modules below it that belong to the same unit.
void list_buffers(Module& module, int member, const std::string& prefix, bool top, std::unordered_set<const Module*>& visited,
                  std::vector<fsdp::Unit::NamedBuffer>& buffers) {
  const auto* hooked = dynamic_cast<const nn::HookedBase*>(&module);
  if ((!top && hooked != nullptr && hooked->unit() != nullptr) || !visited.insert(&module).second) return;
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    if (entry.value().defined()) buffers.push_back({member, prefix + entry.key(), entry.value()});
  }
  for (const auto& child : module.named_children())
    list_buffers(*child.value(), member, prefix + child.key() + '.', false, visited, buffers);
}

/// The engine knows no modules; it asks for their buffers. The modules own the unit, so it must not own them.
std::function<std::vector<fsdp::Unit::NamedBuffer>()> buffer_list(const std::vector<std::shared_ptr<Module>>& roots) {
  return [members = std::vector<std::weak_ptr<Module>>(roots.begin(), roots.end())] {
    std::vector<fsdp::Unit::NamedBuffer> buffers;
    std::unordered_set<const Module*> visited;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (const auto module = members[i].lock()) list_buffers(*module, static_cast<int>(i), "", true, visited, buffers);
    }
    return buffers;
  };
}

bool is_below(const Module& module, const Module& ancestor) {
  const auto children = ancestor.children();
  return std::any_of(children.begin(), children.end(),
                     [&](const auto& child) { return child.get() == &module || is_below(module, *child); });
}

/// Those of a list that are below no other one.
std::vector<std::shared_ptr<Module>> outermost(const std::vector<std::shared_ptr<Module>>& modules) {
  check_value(!modules.empty(), kOp, "list of modules is empty, want at least one");
  for (std::size_t i = 0; i < modules.size(); ++i)
    check_value(modules[i] != nullptr, kOp, "list element ", i, " is no module (null)");

  std::vector<std::shared_ptr<Module>> roots;
  for (const auto& module : modules) {
    const bool below = std::any_of(modules.begin(), modules.end(),
                                   [&](const auto& other) { return other != module && is_below(*module, *other); });
    if (!below && std::find(roots.begin(), roots.end(), module) == roots.end()) roots.push_back(module);
  }
  return roots;
}

/// "BlockImpl" -> "Block"; names of hooked types are the mangled template, so ask the user's class.
std::string display_name(const Module& module) {
  std::string name = module.name();
  if (const auto begin = name.find("Hooked<"); begin != std::string::npos) {
    name = name.substr(begin + 7);
    name = name.substr(0, name.find(','));
  }
  if (const auto scope = name.rfind("::"); scope != std::string::npos) name = name.substr(scope + 2);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

}  // namespace

HSDPModule HSDPModule::of(const std::shared_ptr<Module>& module) {
  check_value(module != nullptr, "HSDPModule::of", "module is null");
  auto* hooked = dynamic_cast<nn::HookedBase*>(module.get());
  check_value(hooked != nullptr && hooked->unit() != nullptr, "HSDPModule::of", "module ", module->name(),
              " is not sharded, want one after fully_shard");
  return {module, hooked->unit()};
}

int HSDPModule::member() const {
  check_value(module_ != nullptr, "call", "this handle has no module, want one that fully_shard or HSDPModule::of returned");
  const auto* hooked = dynamic_cast<nn::HookedBase*>(module_.get());
  check_value(hooked != nullptr && hooked->unit() == unit(), "call", "module ", display_name(*module_),
              " is inside of another module of the list that forms unit ", name(), ", want the handle of that one");
  return hooked->member();
}

std::vector<HSDPModule> nn::fully_shard_with(const std::vector<std::shared_ptr<Module>>& modules,
                                             const FullyShardOptions& options, const std::vector<at::Tensor>& shared) {
  const std::vector<std::shared_ptr<Module>> roots = outermost(modules);
  Collector collector(options, shared);
  std::vector<nn::HookedBase*> hooks;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    hooks.push_back(&hooks_of(*roots[i]));
    collector.collect_member(*roots[i], static_cast<int>(i));
  }
  Collected collected = collector.take();
  const auto unit = fsdp::make_unit(display_name(*roots.front()), std::move(collected.slots), options, collected.children,
                                    static_cast<int>(roots.size()));
  unit->list_buffers = buffer_list(roots);
  for (std::size_t i = 0; i < hooks.size(); ++i) hooks[i]->set_unit(unit, static_cast<int>(i));

  // The gradient of a look-up does not read the table; what a subclass does is unknown.
  const Module& front = *roots.front();
  if (roots.size() == 1 && typeid(front) == typeid(nn::Hooked<torch::nn::EmbeddingImpl>))
    fsdp::UnitHandle(unit).set_unshard_in_backward(false);
  std::vector<HSDPModule> handles;
  handles.reserve(modules.size());
  for (const auto& module : modules) handles.emplace_back(module, unit);
  return handles;
}

std::vector<HSDPModule> fully_shard(const std::vector<std::shared_ptr<Module>>& modules, const FullyShardOptions& options) {
  return nn::fully_shard_with(modules, options, {});
}

std::vector<std::pair<std::string, at::Tensor>> managed_parameters(const std::vector<std::shared_ptr<Module>>& modules,
                                                                   const FullyShardOptions& options) {
  const std::vector<std::shared_ptr<Module>> roots = outermost(modules);
  Collector collector(options);
  for (std::size_t i = 0; i < roots.size(); ++i) collector.collect_member(*roots[i], static_cast<int>(i));
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const fsdp::ParameterSlot& slot : collector.take().slots)
    parameters.emplace_back(roots.size() == 1 ? slot.name : concat(slot.member, '.', slot.name), slot.parameter);
  return parameters;
}

HSDPModule fully_shard(const std::shared_ptr<Module>& module, const FullyShardOptions& options) {
  check_value(module != nullptr, kOp, "module is null, want a torch::nn module");
  return fully_shard(std::vector<std::shared_ptr<Module>>{module}, options).front();
}

}  // namespace hyper_parallel
