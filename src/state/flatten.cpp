// An optimizer's state dictionary as one map, and back.
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/state/state_dict.h>

namespace hyper_parallel {
namespace {

constexpr std::string_view kState = "state.", kGroups = "param_groups.";

at::Tensor numbers(const std::vector<double>& values) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kDouble);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<double>());
  return tensor;
}

std::vector<double> numbers_of(const std::string& name, const StateValue& value) {
  const auto* tensor = std::get_if<at::Tensor>(&value);
  check_value(tensor != nullptr && tensor->defined() && !tensor->is_meta() && tensor->dim() <= 1 && !tensor->is_complex(),
              "unflatten", name, " is no row of numbers, want the values of a setting");
  const at::Tensor row = tensor->detach().to(at::TensorOptions().device(at::kCPU).dtype(at::kDouble)).contiguous();
  return {row.const_data_ptr<double>(), row.const_data_ptr<double>() + row.numel()};
}

}  // namespace

OptimizerStateDict flatten(const OptimizerStateDict& state_dict) {
  check_value(state_dict.flat.empty(), "flatten", "the state dictionary is flat already");
  OptimizerStateDict result;
  for (const auto& [name, tensors] : state_dict.state) {
    for (const auto& [slot, value] : tensors) result.flat.emplace(concat(kState, name, '.', slot), value);
  }
  for (std::size_t g = 0; g < state_dict.param_groups.size(); ++g) {
    const optim::ParamGroupState& group = state_dict.param_groups[g];
    check_value(!group.params.empty(), "flatten", "parameter group ", g,
                " has no parameters, under whose names its settings would be, want at least one");
    for (const std::string& name : group.params) {
      for (const auto& [setting, values] : group.settings)
        result.flat.emplace(concat(kGroups, name, '.', setting), numbers(values));
    }
  }
  return result;
}

OptimizerStateDict unflatten(const OptimizerStateDict& state_dict) {
  constexpr std::string_view kOp = "unflatten";
  check_value(state_dict.state.empty() && state_dict.param_groups.empty(), kOp, "the state dictionary is not flat");
  OptimizerStateDict result;
  std::map<std::string, std::map<std::string, std::vector<double>>> settings;
  for (const auto& [name, value] : state_dict.flat) {
    const bool is_state = name.starts_with(kState);
    const std::string_view prefix = is_state ? kState : kGroups;
    const std::size_t dot = name.rfind('.');
    check_value(
        name.starts_with(prefix) && dot > prefix.size() && dot + 1 < name.size(), kOp, '"', name,
        "\" is no name of a flat state dictionary, want state.<parameter>.<tensor> or param_groups.<parameter>.<setting>");
    const std::string parameter = name.substr(prefix.size(), dot - prefix.size());
    if (is_state) {
      result.state[parameter][name.substr(dot + 1)] = value;
    } else {
      settings[parameter][name.substr(dot + 1)] = numbers_of(name, value);
    }
  }
  for (auto& [parameter, values] : settings) {
    // Parameters with the same settings are one group; which they were is not in the flat form.
    auto group = result.param_groups.begin();
    while (group != result.param_groups.end() && group->settings != values) ++group;
    if (group == result.param_groups.end()) group = result.param_groups.insert(group, {{}, values});
    group->params.push_back(parameter);
  }
  return result;
}

}  // namespace hyper_parallel
