#include "state/optimizer_view.h"

#include <utility>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/optim/flat_optimizer.h>

namespace hyper_parallel::state {

using optim::ParameterState;

std::vector<ParameterState> NamedOptimizer::state() const {
  std::vector<ParameterState> states = optimizer->state();
  for (ParameterState& state : states) state.name = to_model.at(state.name);
  return states;
}

std::vector<ParameterState> NamedOptimizer::own(std::vector<ParameterState> states) const {
  std::map<std::string, std::string> own;
  for (const auto& [name, of_model] : to_model) own.emplace(of_model, name);
  for (ParameterState& state : states) state.name = own.at(state.name);
  return states;
}

void NamedOptimizer::check_state(const std::vector<ParameterState>& states) const { optimizer->check_state(own(states)); }
void NamedOptimizer::load_state(const std::vector<ParameterState>& states) const { optimizer->load_state(own(states)); }

std::vector<optim::ParamGroupState> NamedOptimizer::param_groups() const {
  std::vector<optim::ParamGroupState> groups = optimizer->param_groups();
  for (optim::ParamGroupState& group : groups) {
    for (std::string& name : group.params) name = to_model.at(name);
  }
  return groups;
}

OptimizerView::OptimizerView(std::string_view op, const ModelRef& model, const OptimizerRefs& optimizers)
    : model_(op, model.module()) {
  check_value(!optimizers.refs().empty(), op, "there are no optimizers, want at least one");
  for (const OptimizerRefs::Ref& ref : optimizers.refs()) {
    NamedOptimizer& named = optimizers_.emplace_back();
    if (const auto* torch_optimizer = std::get_if<torch::optim::Optimizer*>(&ref)) {
      check_value(*torch_optimizer != nullptr, op, "an optimizer is null, want one");
      owned_.push_back(std::make_unique<TorchOptimizer>(model.module(), **torch_optimizer));
      named.optimizer = owned_.back().get();
    } else {
      named.optimizer = std::get<optim::StatefulOptimizer*>(ref);
      check_value(named.optimizer != nullptr, op, "an optimizer is null, want one");
    }
    // Ours know parameters by their names below the outermost unit.
    std::map<std::string, const ModelTensor*> places;
    if (const auto* flat = dynamic_cast<const optim::FlatOptimizer*>(named.optimizer)) {
      for (const fsdp::ShardedGroup& group : flat->root().groups()) {
        for (const fsdp::ShardedParameter& parameter : group.parameters)
          places.emplace(parameter.name, model_.find(parameter.sharded));
      }
    }
    for (const ParameterState& state : named.optimizer->state()) {
      const auto place = places.find(state.name);
      const ModelTensor* known = place == places.end() ? model_.find(state.name) : place->second;
      check_value(known != nullptr, op, "the optimizer updates ", state.name,
                  ", which is no parameter of the model, want the model that it was made for");
      named.to_model.emplace(state.name, known->name());
      check_value(owners_.emplace(known->name(), optimizers_.size() - 1).second, op, "parameter ", known->name(),
                  " is in two optimizers, want it in one");
    }
  }
}

const ModelTensor* OptimizerView::find(const std::string& name) const {
  const ModelTensor* known = model_.find(name);
  return known != nullptr && owners_.contains(known->name()) ? known : nullptr;
}

}  // namespace hyper_parallel::state
