#include "state/model_state.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include <hyper_parallel/core/error.h>

#include "ckpt/agree.h"

namespace hyper_parallel {
namespace state {
namespace {

Target target_of(const ModelTensor& tensor) { return {tensor.tensor, tensor.sharded}; }

bool skipped(const ModelTensor& tensor, const StateDictOptions& options) { return tensor.frozen && options.ignore_frozen_params; }

std::vector<std::string> lines_of(const ModelView& view) {
  std::vector<std::string> lines;
  for (const ModelTensor& tensor : view.tensors()) lines.push_back(tensor.line());
  return lines;
}

}  // namespace

const std::string* ModelLoader::given(const ModelTensor& tensor) const {
  const auto found =
      std::find_if(tensor.names.begin(), tensor.names.end(), [&](const std::string& name) { return values_.contains(name); });
  return found == tensor.names.end() ? nullptr : &*found;
}

std::string ModelLoader::check() {
  view_ = ModelView(op_, model_.module());
  view_.check_between_steps(op_);
  fits_.assign(view_.tensors().size(), std::nullopt);
  const bool send = options_.broadcast_from_rank0;
  std::string wrong;
  const auto complain = [&](const std::string& name, const std::string& problem) {
    if (!problem.empty()) wrong += concat(wrong.empty() ? "" : "; ", name, ' ', problem);
  };
  for (const ModelTensor& tensor : view_.tensors()) {
    if (send) complain(tensor.name(), scatter_problem(comm_, target_of(tensor)));
  }
  if (send && comm_.rank() != 0) {
    check_value(wrong.empty(), op_, wrong);
    return {};
  }
  for (std::size_t i = 0; i < view_.tensors().size(); ++i) {
    const ModelTensor& tensor = view_.tensors()[i];
    if (skipped(tensor, options_)) continue;
    const std::string* name = given(tensor);
    if (name == nullptr) {
      keys_.missing_keys.push_back(tensor.name());
      continue;
    }
    for (const std::string& alias : tensor.names) {
      const auto value = values_.find(alias);
      if (value == values_.end()) continue;
      const Fit found = fit(value->second, target_of(tensor));
      complain(alias, found.problem);
      if (send && found.problem.empty() && std::holds_alternative<DTensor>(value->second))
        complain(alias, "is a DTensor, want a whole tensor with broadcast_from_rank0");
      if (send && found.problem.empty() && found.way == Fit::Way::kPart)
        complain(alias, "is a part, want the whole tensor with broadcast_from_rank0");
      if (&alias == name) fits_[i] = found;
    }
  }
  for (const auto& [name, value] : values_) {
    if (view_.find(name) == nullptr) keys_.unexpected_keys.push_back(name);
  }
  std::string text = options_.strict ? listed("missing: ", keys_.missing_keys) : "";
  if (options_.strict) {
    const std::string unexpected = listed("unexpected: ", keys_.unexpected_keys);
    text += concat(text.empty() || unexpected.empty() ? "" : "; ", unexpected);
  }
  text += concat(text.empty() || wrong.empty() ? "" : "; ", wrong);
  check_value(text.empty(), op_, text);
  if (!send) return {};
  nlohmann::json plan = {
      {"missing", keys_.missing_keys}, {"unexpected", keys_.unexpected_keys}, {"sent", nlohmann::json::array()}};
  for (const auto& found : fits_) plan["sent"].push_back(found.has_value());
  return plan.dump();
}

void ModelLoader::plan() {
  const std::vector<std::string> texts = ckpt::agree(comm_, op_, [&] { return check(); });
  if (options_.broadcast_from_rank0) {
    if (comm_.size() > 1) comm_.check_same(op_, lines_of(view_), {.label = op_});
    const nlohmann::json plan = nlohmann::json::parse(texts[0]);
    keys_ = {plan["missing"].get<std::vector<std::string>>(), plan["unexpected"].get<std::vector<std::string>>()};
    for (std::size_t i = 0; i < fits_.size(); ++i) {
      if (plan["sent"][i].get<bool>() && !fits_[i]) fits_[i] = Fit{};
    }
    return;
  }
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < fits_.size(); ++i) {
    if (fits_[i] && !fits_[i]->collective().empty())
      lines.push_back(concat(view_.tensors()[i].name(), ": ", fits_[i]->collective()));
  }
  if (comm_.size() > 1) comm_.check_same(op_, lines, {.label = op_});
}

void ModelLoader::apply() {
  view_ = view_.prepared(op_);
  for (std::size_t i = 0; i < fits_.size(); ++i) {
    if (!fits_[i]) continue;
    const ModelTensor& tensor = view_.tensors()[i];
    if (!options_.broadcast_from_rank0) {
      assign(values_.at(*given(tensor)), *fits_[i], target_of(tensor));
    } else {
      scatter(comm_, comm_.rank() == 0 ? &std::get<at::Tensor>(values_.at(*given(tensor))) : nullptr, target_of(tensor));
    }
  }
}

}  // namespace state

ModelStateDict get_model_state_dict(const ModelRef& model, const StateDictOptions& options) {
  constexpr std::string_view kOp = "get_model_state_dict";
  state::ModelView view;
  const auto look = [&] {
    view = state::ModelView(kOp, model.module());
    for (const state::ModelTensor& tensor : view.tensors())
      check_value(!tensor.tensor.is_meta() || (!options.full_state_dict && !options.cpu_offload), kOp, tensor.name(),
                  " has no values yet (it is on meta), want to_empty, reset_parameters or a load before");
    return std::string();
  };
  const Comm comm = state::checked_comm(kOp, options);
  if (options.full_state_dict) {
    ckpt::agree(comm, kOp, look);
    if (comm.size() > 1) comm.check_same(kOp, state::lines_of(view), {.label = kOp});
  } else {
    look();
  }
  ModelStateDict result;
  for (const state::ModelTensor& tensor : view.tensors()) {
    if (state::skipped(tensor, options)) continue;
    const StateValue value = state::value_of(state::target_of(tensor), options, comm);
    const auto* whole = std::get_if<at::Tensor>(&value);
    if (whole != nullptr && !whole->defined()) continue;
    for (const std::string& name : tensor.names) result.emplace(name, value);
  }
  return result;
}

IncompatibleKeys set_model_state_dict(const ModelRef& model, const ModelStateDict& state_dict, const StateDictOptions& options) {
  constexpr std::string_view kOp = "set_model_state_dict";
  state::ModelLoader loader(kOp, model, state_dict, options, state::checked_comm(kOp, options));
  loader.plan();
  loader.apply();
  return loader.passed_over();
}

}  // namespace hyper_parallel
