#pragma once
// Which modules become units, and which unit gets a parameter.
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <hyper_parallel/parallel/parallelize.h>

#include "plan/resolve.h"

namespace hyper_parallel::parallel {

struct NamedModule {
  std::string name;  ///< "" is the model
  std::shared_ptr<torch::nn::Module> module;
};

/// A parameter and all names under which modules register it.
struct RegisteredParameter {
  at::Tensor tensor;
  std::vector<std::string> names = {};
};

/// Modules and parameters in module order, outer ones first, each once.
struct ModelTree {
  explicit ModelTree(const std::shared_ptr<torch::nn::Module>& root);
  std::vector<NamedModule> modules;
  std::vector<RegisteredParameter> parameters;

 private:
  void visit(const NamedModule& entry, std::set<const void*>& seen);
};

/// A unit before it is wrapped.
struct ChosenUnit {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  bool expert = false;                       ///< of routed experts, or inside of one
  std::vector<std::size_t> parameters = {};  ///< that it owns: places in ModelTree::parameters
  [[nodiscard]] std::string title() const { return name.empty() ? "the model" : name; }
  [[nodiscard]] bool contains(const std::string& full_name) const {
    return name.empty() || full_name == name || (full_name.starts_with(name) && full_name[name.size()] == '.');
  }
};

/// The units of a model in module order, the model itself last, with the parameters that they own: each belongs to the deepest
/// unit that contains all modules that register it. Those in `ignored` belong to none.
[[nodiscard]] std::vector<ChosenUnit> choose_units(const ModelTree& tree, const ParallelizeOptions& options,
                                                   const std::set<std::string>& expert_modules, plan::Problems& problems);

}  // namespace hyper_parallel::parallel
