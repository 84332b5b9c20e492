#pragma once
// Optimizers of a model, by the model's names.
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/state/state_dict.h>
#include <hyper_parallel/state/torch_optimizer.h>

#include "state/model_view.h"

namespace hyper_parallel::state {

/// One optimizer. Names in what it takes and gives are those of the model.
struct NamedOptimizer {
  optim::StatefulOptimizer* optimizer = nullptr;
  std::map<std::string, std::string> to_model;  ///< by the optimizer's own name

  [[nodiscard]] std::vector<optim::ParameterState> state() const;
  void check_state(const std::vector<optim::ParameterState>& states) const;
  void load_state(const std::vector<optim::ParameterState>& states) const;
  [[nodiscard]] std::vector<optim::ParamGroupState> param_groups() const;

 private:
  [[nodiscard]] std::vector<optim::ParameterState> own(std::vector<optim::ParameterState> states) const;
};

/// Local.
class OptimizerView {
 public:
  OptimizerView() = default;
  /// ValueError of `op`: no optimizer, a parameter of an optimizer that the model does not have, one in two optimizers; see
  /// ModelView and TorchOptimizer.
  OptimizerView(std::string_view op, const ModelRef& model, const OptimizerRefs& optimizers);

  [[nodiscard]] const ModelView& model() const { return model_; }
  [[nodiscard]] const std::vector<NamedOptimizer>& optimizers() const { return optimizers_; }
  /// The parameter that some optimizer has; nullptr: none has it. \param name any of its names
  [[nodiscard]] const ModelTensor* find(const std::string& name) const;

 private:
  ModelView model_;
  std::vector<std::unique_ptr<TorchOptimizer>> owned_;
  std::vector<NamedOptimizer> optimizers_;
  std::map<std::string, std::size_t> owners_;  // by the first name of a parameter
};

}  // namespace hyper_parallel::state
