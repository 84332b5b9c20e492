// The state of optimizers, out and in.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/core/error.h>

#include "ckpt/agree.h"
#include "state/model_state.h"
#include "state/optimizer_view.h"
#include "state/values.h"

namespace hyper_parallel {
namespace state {
namespace {

using nlohmann::json;
using optim::ParameterState;
using optim::ParamGroupState;

constexpr const char* kStep = "step";

Target target_of(const ModelTensor& parameter, const at::Tensor& tensor) { return {tensor, parameter.sharded}; }

/// Zeros that take no memory, like this rank's part.
at::Tensor blank(const ModelTensor& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  return at::zeros({1}, tensor.options().device(at::kCPU).requires_grad(false)).expand({tensor.numel()}).view(tensor.sizes());
}

bool skipped(const ModelTensor& parameter, const StateDictOptions& options) {
  return parameter.frozen && options.ignore_frozen_params;
}

bool has_tensor(const ParameterState& state, const std::string& slot) {
  return std::any_of(state.tensors.begin(), state.tensors.end(), [&](const auto& entry) { return entry.first == slot; });
}

/// What a dictionary has of one parameter.
struct Wanted {
  std::int64_t step = 0;           ///< 0: no state
  std::vector<std::string> slots;  ///< ascending
};

std::int64_t step_of(const std::map<std::string, StateValue>& tensors, const std::string& name, std::string* wrong) {
  const auto found = tensors.find(kStep);
  if (found == tensors.end()) return tensors.empty() ? 0 : 1;
  const auto* value = std::get_if<at::Tensor>(&found->second);
  if (value == nullptr || !value->defined() || value->is_meta() || value->numel() != 1 || value->is_complex()) {
    *wrong += concat(wrong->empty() ? "" : "; ", name, ".step is no tensor of one number");
    return 0;
  }
  return value->item().to<std::int64_t>();
}

class OptimizerLoader {
 public:
  OptimizerLoader(std::string_view op, const ModelRef& model, const OptimizerRefs& optimizers, const OptimizerStateDict& values,
                  const StateDictOptions& options, Comm comm)
      : op_(op), model_(model), optimizers_(optimizers), given_(values), options_(options), comm_(std::move(comm)) {}

  /// Finds out what goes where; changes nothing. Collective. ValueError on all ranks alike.
  void plan() {
    const std::vector<std::string> texts = ckpt::agree(comm_, op_, [&] { return check(); });
    std::vector<std::string> lines;
    if (options_.broadcast_from_rank0) {
      read_plan(json::from_cbor(texts[0]));
      for (const ModelTensor& tensor : view_.model().tensors()) {
        if (view_.find(tensor.name()) != nullptr) lines.push_back(tensor.line());
      }
    } else {
      for (const auto& [name, wanted] : wanted_) {
        lines.push_back(concat(name, ": step ", wanted.step));
        for (const std::string& slot : wanted.slots) lines.back() += concat(", ", slot, ' ', fits_.at({name, slot}).collective());
      }
    }
    if (comm_.size() > 1) comm_.check_same(op_, lines, {.label = op_});
  }

  /// Collective.
  void apply() {
    (void)view_.model().prepared(op_);
    view_ = OptimizerView(op_, model_, optimizers_);
    for (const NamedOptimizer& optimizer : view_.optimizers()) {
      make_state(optimizer);
      fill(optimizer);
      set_steps(optimizer);
      std::vector<ParamGroupState> groups = optimizer.param_groups();
      for (ParamGroupState& group : groups) group.settings = settings_for(group);
      optimizer.optimizer->load_param_groups(groups);
    }
  }

 private:
  [[nodiscard]] bool reads() const { return !options_.broadcast_from_rank0 || comm_.rank() == 0; }

  std::string check() {
    view_ = OptimizerView(op_, model_, optimizers_);
    view_.model().check_between_steps(op_);
    std::string wrong;
    for (const ModelTensor& tensor : view_.model().tensors()) {
      const bool sent = options_.broadcast_from_rank0 && view_.find(tensor.name()) != nullptr;
      const std::string problem = sent ? scatter_problem(comm_, target_of(tensor, tensor.tensor)) : "";
      check_value(problem.empty(), op_, tensor.name(), ' ', problem);
    }
    if (!reads()) return {};
    check_value(options_.flatten_optimizer_state_dict || given_.flat.empty(), op_,
                "the state dictionary is flat, want flatten_optimizer_state_dict = true for it");
    values_ = options_.flatten_optimizer_state_dict ? unflatten(given_) : given_;
    std::vector<std::string> unexpected;
    collect(&unexpected, &wrong);
    std::string text = options_.strict ? listed("unexpected: ", unexpected) : "";
    if (const std::string missing = options_.strict ? listed("missing: ", missing_tensors()) : ""; !missing.empty())
      text += concat(text.empty() ? "" : "; ", missing);
    text += concat(text.empty() || wrong.empty() ? "" : "; ", wrong);
    check_value(text.empty(), op_, text);
    for (const NamedOptimizer& optimizer : view_.optimizers()) {
      optimizer.check_state(with_blanks(optimizer));
      for (const ParamGroupState& group : optimizer.param_groups()) check_settings(group);
    }
    if (!options_.broadcast_from_rank0) return {};
    const std::vector<std::uint8_t> bytes = json::to_cbor(written_plan());
    return {bytes.begin(), bytes.end()};
  }

  /// Fills wanted_, places_, fits_ and groups_ from the dictionary.
  void collect(std::vector<std::string>* unexpected, std::string* wrong) {
    const auto complain = [&](const std::string& name, const std::string& problem) {
      if (!problem.empty()) *wrong += concat(wrong->empty() ? "" : "; ", name, ' ', problem);
    };
    for (const auto& [name, tensors] : values_.state) {
      const ModelTensor* parameter = view_.find(name);
      if (parameter == nullptr) {
        unexpected->push_back(name);
        continue;
      }
      if (skipped(*parameter, options_)) continue;
      if (!places_.emplace(parameter->name(), name).second)
        complain(name, concat("is ", parameter->name(), ", which is there too"));
      Wanted& wanted = wanted_[parameter->name()];
      wanted.step = step_of(tensors, name, wrong);
      for (const auto& [slot, value] : tensors) {
        if (slot == kStep) continue;
        wanted.slots.push_back(slot);
        const Fit found = fit(value, target_of(*parameter, parameter->tensor));
        complain(concat(name, '.', slot), found.problem);
        if (options_.broadcast_from_rank0 && found.problem.empty() &&
            (found.way != Fit::Way::kWhole || std::holds_alternative<DTensor>(value)))
          complain(concat(name, '.', slot), "is no whole tensor, want one with broadcast_from_rank0");
        fits_.emplace(std::pair(parameter->name(), slot), found);
      }
    }
    for (const ParamGroupState& group : values_.param_groups) {
      ParamGroupState& known = groups_.emplace_back();
      known.settings = group.settings;
      for (const std::string& name : group.params) {
        const ModelTensor* parameter = view_.find(name);
        if (parameter == nullptr) {
          if (std::find(unexpected->begin(), unexpected->end(), name) == unexpected->end()) unexpected->push_back(name);
          continue;
        }
        if (skipped(*parameter, options_)) continue;
        known.params.push_back(parameter->name());
        wanted_.try_emplace(parameter->name());  // without state in the dictionary: without state here
      }
    }
  }

  /// Of parameters whose state the dictionary has: tensors that only the optimizer has.
  [[nodiscard]] std::vector<std::string> missing_tensors() const {
    std::vector<std::string> missing;
    for (const NamedOptimizer& optimizer : view_.optimizers()) {
      for (const ParameterState& state : optimizer.state()) {
        const auto wanted = wanted_.find(state.name);
        if (wanted == wanted_.end() || wanted->second.step == 0) continue;
        for (const auto& [slot, tensor] : state.tensors) {
          if (std::find(wanted->second.slots.begin(), wanted->second.slots.end(), slot) == wanted->second.slots.end())
            missing.push_back(concat(state.name, '.', slot));
        }
      }
    }
    return missing;
  }

  [[nodiscard]] json written_plan() const {
    json plan = {{"state", json::array()}, {"groups", json::array()}};
    for (const auto& [name, wanted] : wanted_) plan["state"].push_back({name, wanted.step, wanted.slots});
    for (const ParamGroupState& group : groups_) plan["groups"].push_back({group.params, group.settings});
    return plan;
  }

  void read_plan(const json& plan) {
    wanted_.clear();
    groups_.clear();
    for (const json& row : plan["state"])
      wanted_[row[0].get<std::string>()] = {row[1].get<std::int64_t>(), row[2].get<std::vector<std::string>>()};
    for (const json& row : plan["groups"])
      groups_.push_back({row[0].get<std::vector<std::string>>(), row[1].get<std::map<std::string, std::vector<double>>>()});
  }

  /// The settings that the dictionary has for a group: those of the groups that list its parameters.
  [[nodiscard]] std::map<std::string, std::vector<double>> settings_for(const ParamGroupState& group) const {
    const std::set<std::string> members(group.params.begin(), group.params.end());
    const ParamGroupState* found = nullptr;
    for (const ParamGroupState& given : groups_) {
      const bool overlaps =
          std::any_of(given.params.begin(), given.params.end(), [&](const std::string& name) { return members.contains(name); });
      if (!overlaps) continue;
      check_value(found == nullptr || found->settings == given.settings, op_, "the groups of ",
                  found == nullptr ? "" : found->params.front(), " and ", given.params.front(),
                  " have different settings, want one group as in the optimizer");
      found = &given;
    }
    return found == nullptr ? std::map<std::string, std::vector<double>>() : found->settings;
  }

  void check_settings(const ParamGroupState& group) const {
    for (const auto& [setting, values] : settings_for(group)) {
      const auto known = group.settings.find(setting);
      check_value(known == group.settings.end() || known->second.size() == values.size(), op_, "setting ", setting, " has ",
                  values.size(), " value(s), want ", known == group.settings.end() ? 0 : known->second.size());
      check_value(setting != "lr" || (values.size() == 1 && values[0] >= 0), op_, "lr is no number of at least 0");
    }
  }

  /// The state as it is, with zeros for tensors that are still to be made.
  [[nodiscard]] std::vector<ParameterState> with_blanks(const NamedOptimizer& optimizer) const {
    std::vector<ParameterState> states = optimizer.state();
    for (ParameterState& state : states) {
      const auto wanted = wanted_.find(state.name);
      if (wanted == wanted_.end() || wanted->second.step == 0) continue;
      for (const std::string& slot : wanted->second.slots) {
        if (!has_tensor(state, slot)) state.tensors.emplace_back(slot, blank(*view_.find(state.name)));
      }
      state.step = std::max<std::int64_t>(state.step, 1);  // tensors do not show before the first step
    }
    return states;
  }

  void make_state(const NamedOptimizer& optimizer) const { optimizer.load_state(with_blanks(optimizer)); }

  void fill(const NamedOptimizer& optimizer) const {
    for (const ParameterState& state : optimizer.state()) {
      const auto wanted = wanted_.find(state.name);
      if (wanted == wanted_.end() || wanted->second.step == 0) continue;
      const ModelTensor& parameter = *view_.find(state.name);
      for (const std::string& slot : wanted->second.slots) {
        if (!has_tensor(state, slot)) continue;  // e.g. fp32 copies, which this optimizer does without
        const Target target = target_of(parameter, state.at(slot));
        const StateValue* value = reads() ? &values_.state.at(places_.at(state.name)).at(slot) : nullptr;
        if (options_.broadcast_from_rank0) {
          scatter(comm_, value == nullptr ? nullptr : &std::get<at::Tensor>(*value), target);
        } else {
          assign(*value, fits_.at({state.name, slot}), target);
        }
      }
    }
  }

  void set_steps(const NamedOptimizer& optimizer) const {
    std::vector<ParameterState> states = optimizer.state();
    for (ParameterState& state : states) {
      const auto wanted = wanted_.find(state.name);
      if (wanted == wanted_.end()) continue;
      state.step = wanted->second.step;
      if (state.step > 0) continue;
      for (auto& [slot, tensor] : state.tensors) tensor = blank(*view_.find(state.name));
    }
    optimizer.load_state(states);
  }

  std::string op_;
  const ModelRef& model_;
  const OptimizerRefs& optimizers_;
  const OptimizerStateDict& given_;
  const StateDictOptions& options_;
  Comm comm_;
  OptimizerView view_;
  OptimizerStateDict values_;                                // not flat; where this rank reads
  std::map<std::string, Wanted> wanted_;                     // by the model's name
  std::map<std::string, std::string> places_;                // the name in the dictionary, by the model's
  std::map<std::pair<std::string, std::string>, Fit> fits_;  // by name and tensor
  std::vector<ParamGroupState> groups_;
};

}  // namespace
}  // namespace state

OptimizerStateDict get_optimizer_state_dict(const ModelRef& model, const OptimizerRefs& optimizers,
                                            const StateDictOptions& options) {
  constexpr std::string_view kOp = "get_optimizer_state_dict";
  using namespace state;
  struct Item {
    std::string name, slot;
    Target target;
  };
  std::vector<Item> items;
  OptimizerStateDict result;
  const auto look = [&] {
    const OptimizerView view(kOp, model, optimizers);
    for (const NamedOptimizer& optimizer : view.optimizers()) {
      for (const ParameterState& state : optimizer.state()) {
        const ModelTensor& parameter = *view.find(state.name);
        if (state.step == 0 || skipped(parameter, options)) continue;
        if (optimizer.optimizer->counts_steps())
          result.state[state.name].emplace(kStep, at::scalar_tensor(state.step, at::kLong));
        for (const auto& [slot, tensor] : state.tensors) items.push_back({state.name, slot, target_of(parameter, tensor)});
      }
      for (ParamGroupState& group : optimizer.param_groups()) {
        std::erase_if(group.params, [&](const std::string& name) { return skipped(*view.find(name), options); });
        check_value(!options.flatten_optimizer_state_dict || !group.params.empty(), kOp,
                    "a parameter group has no parameters, under whose names its settings would be, want at least one with "
                    "flatten_optimizer_state_dict");
        result.param_groups.push_back(std::move(group));
      }
    }
    return std::string();
  };
  const Comm comm = checked_comm(kOp, options);
  if (options.full_state_dict) {
    ckpt::agree(comm, kOp, look);
    std::vector<std::string> lines;
    for (const Item& item : items) lines.push_back(concat(item.name, '.', item.slot, ": ", at::IntArrayRef(item.target.shape())));
    if (comm.size() > 1) comm.check_same(kOp, lines, {.label = kOp});
  } else {
    look();
  }
  for (const Item& item : items) {
    StateValue value = value_of(item.target, options, comm);
    result.state[item.name].emplace(item.slot, std::move(value));
  }
  if (options.full_state_dict && options.cpu_offload && comm.rank() != 0) return {};
  return options.flatten_optimizer_state_dict ? flatten(result) : result;
}

void set_optimizer_state_dict(const ModelRef& model, const OptimizerRefs& optimizers, const OptimizerStateDict& state_dict,
                              const StateDictOptions& options) {
  constexpr std::string_view kOp = "set_optimizer_state_dict";
  state::OptimizerLoader loader(kOp, model, optimizers, state_dict, options, state::checked_comm(kOp, options));
  loader.plan();
  loader.apply();
}

StateDicts get_state_dict(const ModelRef& model, const OptimizerRefs& optimizers, const StateDictOptions& options) {
  return {get_model_state_dict(model, options), get_optimizer_state_dict(model, optimizers, options)};
}

IncompatibleKeys set_state_dict(const ModelRef& model, const OptimizerRefs& optimizers, const StateDicts& state_dicts,
                                const StateDictOptions& options) {
  constexpr std::string_view kOp = "set_state_dict";
  const Comm comm = state::checked_comm(kOp, options);
  state::ModelLoader first(kOp, model, state_dicts.model, options, comm);
  state::OptimizerLoader second(kOp, model, optimizers, state_dicts.optimizer, options, comm);
  first.plan();
  second.plan();
  first.apply();
  second.apply();
  return first.passed_over();
}

}  // namespace hyper_parallel
