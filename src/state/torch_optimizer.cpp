// The kinds of torch's optimizers: what they keep of a parameter, and their settings.
#include <hyper_parallel/state/torch_optimizer.h>

#include <functional>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <hyper_parallel/core/error.h>

#include "state/model_view.h"

namespace hyper_parallel {
namespace {

namespace to = torch::optim;

constexpr std::string_view kOp = "TorchOptimizer";

/// A tensor of a parameter's state.
struct Slot {
  const char* name;
  std::function<at::Tensor&(to::OptimizerParamState&)> of;
  /// Whether a step with these settings needs it.
  std::function<bool(const to::OptimizerOptions&)> needed;
};

struct Setting {
  const char* name;
  std::function<std::vector<double>(to::OptimizerOptions&)> get;
  std::function<void(to::OptimizerOptions&, const std::vector<double>&)> set;
};

struct Kind {
  std::string name;
  std::function<std::unique_ptr<to::OptimizerParamState>()> make;
  std::function<std::int64_t*(to::OptimizerParamState&)> step;  ///< nullptr: not counted
  std::vector<Slot> slots;
  std::vector<Setting> settings;
  /// State before the first step; empty: none.
  std::function<void(to::OptimizerParamState&, const at::Tensor& parameter, const to::OptimizerOptions&)> begin = {};
};

template <class Options, class F>
Setting setting(const char* name, F f) {
  using Value = std::decay_t<decltype(f(std::declval<Options&>()))>;
  const auto of = [f](to::OptimizerOptions& options) -> Value& { return f(static_cast<Options&>(options)); };
  if constexpr (std::is_arithmetic_v<Value>) {
    return {name, [of](to::OptimizerOptions& o) { return std::vector<double>{static_cast<double>(of(o))}; },
            [of](to::OptimizerOptions& o, const std::vector<double>& v) { of(o) = static_cast<Value>(v.at(0)); }};
  } else {
    return {name,
            [of](to::OptimizerOptions& o) {
              return std::vector<double>{std::get<0>(of(o)), std::get<1>(of(o))};
            },
            [of](to::OptimizerOptions& o, const std::vector<double>& v) {
              of(o) = {v.at(0), v.at(1)};
            }};
  }
}

template <class State, class F>
std::function<at::Tensor&(to::OptimizerParamState&)> tensor(F f) {
  return [f](to::OptimizerParamState& state) -> at::Tensor& { return f(static_cast<State&>(state)); };
}

bool always(const to::OptimizerOptions&) { return true; }
bool never(const to::OptimizerOptions&) { return false; }

/// Adam and AdamW.
template <class Options, class State>
Kind adam_kind(std::string name) {
  const auto amsgrad = [](const to::OptimizerOptions& options) { return static_cast<const Options&>(options).amsgrad(); };
  return {.name = std::move(name),
          .make = [] { return std::make_unique<State>(); },
          .step = [](to::OptimizerParamState& state) { return &static_cast<State&>(state).step(); },
          .slots = {{"exp_avg", tensor<State>([](State& s) -> at::Tensor& { return s.exp_avg(); }), always},
                    {"exp_avg_sq", tensor<State>([](State& s) -> at::Tensor& { return s.exp_avg_sq(); }), always},
                    {"max_exp_avg_sq", tensor<State>([](State& s) -> at::Tensor& { return s.max_exp_avg_sq(); }), amsgrad}},
          .settings = {setting<Options>("lr", [](Options& o) -> double& { return o.lr(); }),
                       setting<Options>(
                           "betas", [](Options & o) -> auto& { return o.betas(); }),
                       setting<Options>("eps", [](Options& o) -> double& { return o.eps(); }),
                       setting<Options>("weight_decay", [](Options& o) -> double& { return o.weight_decay(); }),
                       setting<Options>("amsgrad", [](Options& o) -> bool& { return o.amsgrad(); })}};
}

Kind sgd_kind() {
  using Options = to::SGDOptions;
  using State = to::SGDParamState;
  return {.name = "SGD",
          .make = [] { return std::make_unique<State>(); },
          .step = [](to::OptimizerParamState&) -> std::int64_t* { return nullptr; },
          .slots = {{"momentum_buffer", tensor<State>([](State& s) -> at::Tensor& { return s.momentum_buffer(); }), never}},
          .settings = {setting<Options>("lr", [](Options& o) -> double& { return o.lr(); }),
                       setting<Options>("momentum", [](Options& o) -> double& { return o.momentum(); }),
                       setting<Options>("dampening", [](Options& o) -> double& { return o.dampening(); }),
                       setting<Options>("weight_decay", [](Options& o) -> double& { return o.weight_decay(); }),
                       setting<Options>("nesterov", [](Options& o) -> bool& { return o.nesterov(); })}};
}

Kind adagrad_kind() {
  using Options = to::AdagradOptions;
  using State = to::AdagradParamState;
  return {.name = "Adagrad",
          .make = [] { return std::make_unique<State>(); },
          .step = [](to::OptimizerParamState& state) { return &static_cast<State&>(state).step(); },
          .slots = {{"sum", tensor<State>([](State& s) -> at::Tensor& { return s.sum(); }), always}},
          .settings = {setting<Options>("lr", [](Options& o) -> double& { return o.lr(); }),
                       setting<Options>("lr_decay", [](Options& o) -> double& { return o.lr_decay(); }),
                       setting<Options>("weight_decay", [](Options& o) -> double& { return o.weight_decay(); }),
                       setting<Options>("initial_accumulator_value",
                                        [](Options& o) -> double& { return o.initial_accumulator_value(); }),
                       setting<Options>("eps", [](Options& o) -> double& { return o.eps(); })},
          .begin =
              [](to::OptimizerParamState& state, const at::Tensor& parameter, const to::OptimizerOptions& options) {
                static_cast<State&>(state).sum(
                    at::full_like(parameter.detach(), static_cast<const Options&>(options).initial_accumulator_value()));
              }};
}

Kind rmsprop_kind() {
  using Options = to::RMSpropOptions;
  using State = to::RMSpropParamState;
  const auto momentum = [](const to::OptimizerOptions& options) { return static_cast<const Options&>(options).momentum() > 0; };
  const auto centered = [](const to::OptimizerOptions& options) { return static_cast<const Options&>(options).centered(); };
  return {.name = "RMSprop",
          .make = [] { return std::make_unique<State>(); },
          .step = [](to::OptimizerParamState& state) { return &static_cast<State&>(state).step(); },
          .slots = {{"square_avg", tensor<State>([](State& s) -> at::Tensor& { return s.square_avg(); }), always},
                    {"momentum_buffer", tensor<State>([](State& s) -> at::Tensor& { return s.momentum_buffer(); }), momentum},
                    {"grad_avg", tensor<State>([](State& s) -> at::Tensor& { return s.grad_avg(); }), centered}},
          .settings = {setting<Options>("lr", [](Options& o) -> double& { return o.lr(); }),
                       setting<Options>("alpha", [](Options& o) -> double& { return o.alpha(); }),
                       setting<Options>("eps", [](Options& o) -> double& { return o.eps(); }),
                       setting<Options>("weight_decay", [](Options& o) -> double& { return o.weight_decay(); }),
                       setting<Options>("momentum", [](Options& o) -> double& { return o.momentum(); }),
                       setting<Options>("centered", [](Options& o) -> bool& { return o.centered(); })}};
}

Kind kind_of(const to::Optimizer& optimizer) {
  if (dynamic_cast<const to::AdamW*>(&optimizer) != nullptr) return adam_kind<to::AdamWOptions, to::AdamWParamState>("AdamW");
  if (dynamic_cast<const to::Adam*>(&optimizer) != nullptr) return adam_kind<to::AdamOptions, to::AdamParamState>("Adam");
  if (dynamic_cast<const to::SGD*>(&optimizer) != nullptr) return sgd_kind();
  if (dynamic_cast<const to::Adagrad*>(&optimizer) != nullptr) return adagrad_kind();
  if (dynamic_cast<const to::RMSprop*>(&optimizer) != nullptr) return rmsprop_kind();
  const bool lbfgs = dynamic_cast<const to::LBFGS*>(&optimizer) != nullptr;
  throw ValueError(
      concat('[', kOp, "] the optimizer is ",
             lbfgs ? "torch::optim::LBFGS, whose history is one tensor of all parameters of a rank and cannot be cut anew"
                   : "of a kind that is not known",
             ", want Adam, AdamW, SGD, Adagrad or RMSprop of torch::optim"));
}

}  // namespace

struct TorchOptimizer::Impl {
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::optional<DTensor> sharded;
    std::size_t group = 0;
  };
  to::Optimizer& optimizer;
  Kind kind;
  std::vector<Parameter> parameters;

  [[nodiscard]] to::OptimizerParamState* find(const Parameter& parameter) const {
    const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
    return found == optimizer.state().end() ? nullptr : found->second.get();
  }
  [[nodiscard]] to::OptimizerOptions& options(const Parameter& parameter) const {
    return optimizer.param_groups()[parameter.group].options();
  }
  void take(const Parameter& parameter, const State& state) const;
};

TorchOptimizer::TorchOptimizer(const std::shared_ptr<torch::nn::Module>& model, to::Optimizer& optimizer)
    : impl_(new Impl{optimizer, kind_of(optimizer), {}}) {
  const state::ModelView view(kOp, model);
  std::set<std::string> names;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      const state::ModelTensor* known = view.find(params[i]);
      check_value(known != nullptr && known->is_parameter, kOp, "parameter ", i, " of group ", g,
                  " is no parameter of the model, want those that parameters() of the sharded model gives");
      check_value(names.insert(known->name()).second, kOp, "parameter ", known->name(),
                  " is listed twice and would be updated twice, want it once (parameters() gives a tied one under each name)");
      impl_->parameters.push_back({known->name(), params[i], known->sharded, g});
    }
  }
}

TorchOptimizer::TorchOptimizer(TorchOptimizer&&) noexcept = default;
TorchOptimizer::~TorchOptimizer() = default;

std::vector<TorchOptimizer::State> TorchOptimizer::state() const {
  std::vector<State> states;
  for (const Impl::Parameter& parameter : impl_->parameters) {
    State& state = states.emplace_back(State{.name = parameter.name});
    to::OptimizerParamState* kept = impl_->find(parameter);
    if (kept == nullptr) continue;
    for (const Slot& slot : impl_->kind.slots) {
      if (const at::Tensor& tensor = slot.of(*kept); tensor.defined()) state.tensors.emplace_back(slot.name, tensor);
    }
    const std::int64_t* step = impl_->kind.step(*kept);
    state.step = step != nullptr ? *step : state.tensors.empty() ? 0 : 1;
    if (state.step == 0) state.tensors.clear();
  }
  return states;
}

void TorchOptimizer::check_state(const std::vector<State>& states) {
  std::map<std::string, const State*> given;
  for (const State& state : states)
    check_value(given.emplace(state.name, &state).second, kOp, "the state has ", state.name, " twice, want it once");
  for (const Impl::Parameter& parameter : impl_->parameters) {
    const auto found = given.find(parameter.name);
    check_value(found != given.end(), kOp, "the state lacks ", parameter.name, ", want all parameters of ", impl_->kind.name);
    const State& state = *found->second;
    check_value(state.step >= 0, kOp, "step of ", state.name, " is ", state.step, ", want at least 0");
    for (const auto& [name, tensor] : state.tensors) {
      bool known = false;
      for (const Slot& slot : impl_->kind.slots) known = known || name == slot.name;
      check_value(known, kOp, "the state of ", state.name, " has a tensor ", name, ", want those of ", impl_->kind.name);
      check_value(tensor.defined() && tensor.numel() == parameter.tensor.numel(), kOp, name, " of ", state.name, " has ",
                  tensor.defined() ? tensor.numel() : 0, " elements, want the ", parameter.tensor.numel(),
                  " of this rank's part");
    }
  }
  check_value(given.size() == impl_->parameters.size(), kOp, "the state has ", given.size(), " parameters, want the ",
              impl_->parameters.size(), " of ", impl_->kind.name);
}

void TorchOptimizer::Impl::take(const Parameter& parameter, const State& state) const {
  void* key = parameter.tensor.unsafeGetTensorImpl();
  auto& all = optimizer.state();
  if (state.step == 0) {
    all.erase(key);
    if (!kind.begin) return;
    auto fresh = kind.make();
    kind.begin(*fresh, parameter.tensor, options(parameter));
    all[key] = std::move(fresh);
    return;
  }
  auto& kept = all[key];
  if (kept == nullptr) kept = kind.make();
  for (const Slot& slot : kind.slots) {
    at::Tensor& tensor = slot.of(*kept);
    const at::Tensor* given = nullptr;
    for (const auto& [name, value] : state.tensors) {
      if (name == slot.name) given = &value;
    }
    if (!tensor.defined() && (given != nullptr || slot.needed(options(parameter))))
      tensor = at::zeros_like(parameter.tensor.detach(), at::MemoryFormat::Contiguous);
    if (given != nullptr) tensor.copy_(given->view(tensor.sizes()));
  }
  if (std::int64_t* step = kind.step(*kept)) *step = state.step;
}

void TorchOptimizer::load_state(const std::vector<State>& states) {
  check_state(states);
  const at::NoGradGuard no_grad;
  std::map<std::string, const State*> given;
  for (const State& state : states) given.emplace(state.name, &state);
  for (const Impl::Parameter& parameter : impl_->parameters) impl_->take(parameter, *given.at(parameter.name));
}

bool TorchOptimizer::counts_steps() const { return impl_->kind.name != "SGD"; }

std::vector<optim::ParamGroupState> TorchOptimizer::param_groups() const {
  std::vector<optim::ParamGroupState> groups(impl_->optimizer.param_groups().size());
  for (const Impl::Parameter& parameter : impl_->parameters) groups[parameter.group].params.push_back(parameter.name);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const Setting& setting : impl_->kind.settings)
      groups[g].settings[setting.name] = setting.get(impl_->optimizer.param_groups()[g].options());
  }
  return groups;
}

void TorchOptimizer::load_param_groups(const std::vector<optim::ParamGroupState>& groups) {
  const std::vector<optim::ParamGroupState> here = param_groups();
  check_value(groups.size() == here.size(), kOp, groups.size(), " parameter groups, want ", here.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const auto& [name, values] : groups[g].settings) {
      const auto known = here[g].settings.find(name);
      check_value(known == here[g].settings.end() || known->second.size() == values.size(), kOp, name, " has ", values.size(),
                  " value(s), want ", known == here[g].settings.end() ? 0 : known->second.size());
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const Setting& setting : impl_->kind.settings) {
      const auto found = groups[g].settings.find(setting.name);
      if (found != groups[g].settings.end()) setting.set(impl_->optimizer.param_groups()[g].options(), found->second);
    }
  }
}

std::map<std::string, DTensor> TorchOptimizer::sharded_parameters() const {
  std::map<std::string, DTensor> result;
  for (const Impl::Parameter& parameter : impl_->parameters) {
    if (parameter.sharded) result.emplace(parameter.name, *parameter.sharded);
  }
  return result;
}

}  // namespace hyper_parallel
