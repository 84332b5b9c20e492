#include "parallel/unit_choice.h"

#include <algorithm>
#include <unordered_map>

#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <hyper_parallel/nn/module.h>

#include "nn/access.h"

namespace hyper_parallel::parallel {
namespace {

using torch::nn::Module;

std::string below(const std::string& module, const std::string& child) {
  return module.empty() ? child : concat(module, '.', child);
}

bool is_container(const Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
}

class Choice {
 public:
  Choice(const ModelTree& tree, const ParallelizeOptions& options, plan::Problems& problems)
      : tree_(tree), options_(options), problems_(problems) {}

  std::set<std::string> names(const std::set<std::string>& expert_modules) {
    if (options_.containers) {
      for (const std::string& pattern : *options_.containers) {
        const std::vector<const NamedModule*> found = matching("containers", pattern, /*model_too=*/true);
        for (const NamedModule* container : found) take_children(*container);
      }
    } else {
      find_containers(tree_.modules.front());
    }
    for (const std::string& pattern : options_.extra_units) take_shallowest(pattern);
    for (const std::string& expert : expert_modules) {
      if (!expert.empty()) chosen_.insert(expert);
    }
    if (chosen_.empty())
      problems_.add(
          "no unit besides the model: no container with modules that have parameters, no extra_units, no experts, want ",
          "at least one");
    return chosen_;
  }

 private:
  [[nodiscard]] std::vector<const NamedModule*> matching(const char* option, const std::string& pattern, bool model_too) {
    std::vector<const NamedModule*> found;
    for (const NamedModule& entry : tree_.modules) {
      if (matches_pattern(pattern, entry.name)) found.push_back(&entry);
    }
    if (found.empty()) problems_.add(option, ": \"", pattern, "\" matches no module");
    if (!model_too && !found.empty() && found.front()->name.empty()) {
      problems_.add(option, ": \"", pattern, "\" matches the model itself, which is a unit anyway, want modules below it");
      found.clear();
    }
    return found;
  }

  void take_shallowest(const std::string& pattern) {
    const auto dots = [](const NamedModule* entry) { return std::count(entry->name.begin(), entry->name.end(), '.'); };
    const std::vector<const NamedModule*> found = matching("extra_units", pattern, /*model_too=*/false);
    const auto first = std::min_element(found.begin(), found.end(), [&](auto* a, auto* b) { return dots(a) < dots(b); });
    for (const NamedModule* entry : found) {
      if (dots(entry) == dots(*first)) chosen_.insert(entry->name);
    }
  }

  void take_children(const NamedModule& container) {
    for (const auto& child : container.module->named_children()) {
      if (!child.value()->parameters().empty()) chosen_.insert(below(container.name, child.key()));
    }
  }

  /// Outermost containers only: those inside of a block are its own business.
  void find_containers(const NamedModule& entry) {
    if (is_container(*entry.module)) {
      take_children(entry);
      return;
    }
    for (const auto& child : entry.module->named_children()) find_containers({below(entry.name, child.key()), child.value()});
  }

  const ModelTree& tree_;
  const ParallelizeOptions& options_;
  plan::Problems& problems_;
  std::set<std::string> chosen_;
};

void check_hooks(const ChosenUnit& unit, plan::Problems& problems) {
  const auto* hooked = dynamic_cast<const nn::HookedBase*>(unit.module.get());
  if (hooked == nullptr) {
    problems.add(unit.title(), ": the module has no hooks, want one declared with HP_MODULE",
                 unit.name.empty() ? "" : ", or other containers");
  } else if (hooked->unit() != nullptr) {
    problems.add(unit.title(), ": is a unit already, want a model without units");
  }
}

/// The deepest unit around all names: the one with the longest name.
std::size_t owner_of(const RegisteredParameter& parameter, const std::vector<ChosenUnit>& units) {
  std::size_t owner = units.size() - 1;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const bool around = std::all_of(parameter.names.begin(), parameter.names.end(),
                                    [&](const std::string& name) { return units[i].contains(name); });
    if (around && units[i].name.size() > units[owner].name.size()) owner = i;
  }
  return owner;
}

}  // namespace

ModelTree::ModelTree(const std::shared_ptr<Module>& root) {
  std::set<const void*> seen;
  visit({"", root}, seen);
}

void ModelTree::visit(const NamedModule& entry, std::set<const void*>& seen) {
  if (!seen.insert(entry.module.get()).second) return;
  modules.push_back(entry);
  for (const auto& item : nn::Access::parameters(*entry.module)) {
    if (!item.value().defined()) continue;
    auto known = std::find_if(parameters.begin(), parameters.end(),
                              [&](const RegisteredParameter& other) { return other.tensor.is_same(item.value()); });
    if (known == parameters.end()) known = parameters.insert(known, {.tensor = item.value()});
    known->names.push_back(below(entry.name, item.key()));
  }
  for (const auto& child : entry.module->named_children()) visit({below(entry.name, child.key()), child.value()}, seen);
}

std::vector<ChosenUnit> choose_units(const ModelTree& tree, const ParallelizeOptions& options,
                                     const std::set<std::string>& expert_modules, plan::Problems& problems) {
  const std::set<std::string> names = Choice(tree, options, problems).names(expert_modules);
  std::vector<ChosenUnit> units;
  const auto add = [&](const NamedModule& entry) {
    ChosenUnit unit{.name = entry.name, .module = entry.module};
    for (const std::string& expert : expert_modules)
      unit.expert = unit.expert || (!expert.empty() && ChosenUnit{.name = expert, .module = nullptr}.contains(entry.name));
    check_hooks(unit, problems);
    units.push_back(std::move(unit));
  };
  for (const NamedModule& entry : tree.modules) {
    if (!entry.name.empty() && names.contains(entry.name)) add(entry);
  }
  units.push_back({.name = "", .module = tree.modules.front().module});
  check_hooks(units.back(), problems);

  for (std::size_t i = 0; i < tree.parameters.size(); ++i) {
    const auto is_it = [&](const at::Tensor& ignored) { return ignored.is_same(tree.parameters[i].tensor); };
    const std::vector<at::Tensor>& ignored = options.fully_shard.ignored_params;
    if (std::none_of(ignored.begin(), ignored.end(), is_it)) units[owner_of(tree.parameters[i], units)].parameters.push_back(i);
  }
  return units;
}

}  // namespace hyper_parallel::parallel
