#include <hyper_parallel/optim/flat_optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/dtensor/dtensor.h>

#include "optim/flat_update.h"

namespace hyper_parallel::optim {
namespace {

constexpr std::string_view kMaster = "master";

bool low_precision(c10::ScalarType dtype) { return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16; }
bool supported(c10::ScalarType dtype) {
  return low_precision(dtype) || dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
}

void check_settings(const std::string& op, const GroupSettings& settings) {
  const auto& [beta1, beta2] = settings.betas;
  check_value(settings.lr >= 0, op, "lr is ", settings.lr, ", want at least 0");
  check_value(settings.eps >= 0, op, "eps is ", settings.eps, ", want at least 0");
  check_value(settings.weight_decay >= 0, op, "weight_decay is ", settings.weight_decay, ", want at least 0");
  check_value(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, op, "betas are ", beta1, " and ", beta2,
              ", want both in [0, 1)");
}

at::Tensor part(const at::Tensor& flat, std::int64_t offset, const fsdp::ShardedParameter& parameter) {
  return flat.narrow(0, offset, parameter.numel).view(parameter.sharded.sizes());
}

}  // namespace

FlatOptimizer::~FlatOptimizer() = default;

FlatOptimizer::FlatOptimizer(const fsdp::UnitHandle& root, Setup setup) : root_(root), setup_(std::move(setup)) {
  const std::string& name = op();
  check_value(root_.defined(), name, "root is empty, want the handle that fully_shard returned");
  check_settings(name, setup_.defaults);
  if (setup_.state_dtype) {
    const c10::ScalarType dtype = *setup_.state_dtype;
    check_value(supported(dtype) && dtype != c10::ScalarType::Half, name, "state_dtype is ", dtype,
                ", want float32, float64 or bfloat16 (squares leave the range of float16)");
  }
  resolve_groups();
  std::set<std::string> known;
  for (const fsdp::ShardedGroup& shard : root_.groups()) {
    Group& group = groups_.emplace_back();
    group.dtype = shard.shard.scalar_type();
    for (const auto& parameter : shard.parameters) {
      Parameter& own = group.parameters.emplace_back();
      if (setup_.parameters && !setup_.parameters(parameter.name, parameter.full_shape)) continue;
      if (!shard.trainable && !supported(group.dtype)) continue;  // e.g. quantised and frozen
      // What is on meta gets its memory later.
      const bool placed = shard.shard.is_cpu() || shard.shard.is_meta();
      check_value(placed && supported(group.dtype), name, "parameter ", parameter.name, " is ", group.dtype, " on ",
                  shard.shard.device(), ", want floating-point parameters on the CPU");
      known.insert(parameter.name);
      own.group = group_of(parameter);
      own.decays = !setup_.decays || setup_.decays(parameter.name, parameter.full_shape);
      own.offset = group.numel;
      group.numel += parameter.numel;
    }
  }
  for (const ParamGroup& group : setup_.groups) {
    for (const std::string& wanted : group.names)
      check_value(known.contains(wanted), name, "parameter group lists ", wanted,
                  ", want the name of a parameter that it updates");
  }
}

/// Settings of each group, what it leaves open filled in; the group of all other parameters comes last.
void FlatOptimizer::resolve_groups() {
  std::set<std::string> listed;
  for (std::size_t i = 0; i < setup_.groups.size(); ++i) {
    const ParamGroup& group = setup_.groups[i];
    check_value(!group.names.empty() || group.predicate, op(), "parameter group ", i,
                " has neither names nor a predicate, want one of them");
    check_value(setup_.takes_betas || (!group.betas && !group.eps), op(), "parameter group ", i,
                " sets betas or eps, want lr and weight_decay only");
    for (const std::string& name : group.names)
      check_value(listed.insert(name).second, op(), "parameter groups list ", name, " twice, want it in one group");
    GroupSettings settings = setup_.defaults;
    settings.lr = group.lr.value_or(settings.lr);
    settings.weight_decay = group.weight_decay.value_or(settings.weight_decay);
    settings.betas = group.betas.value_or(settings.betas);
    settings.eps = group.eps.value_or(settings.eps);
    check_settings(op(), settings);
    settings_.push_back(settings);
  }
  settings_.push_back(setup_.defaults);
}

int FlatOptimizer::group_of(const fsdp::ShardedParameter& parameter) const {
  const auto& groups = setup_.groups;
  const auto found = std::find_if(groups.begin(), groups.end(), [&](const ParamGroup& group) {
    return std::find(group.names.begin(), group.names.end(), parameter.name) != group.names.end() ||
           (group.predicate && group.predicate(parameter.name, parameter.full_shape));
  });
  return static_cast<int>(found - groups.begin());
}

std::vector<fsdp::ShardedGroup> FlatOptimizer::shards() const {
  std::vector<fsdp::ShardedGroup> shards = root_.groups();
  check_value(shards.size() == groups_.size(), op(), "the unit tree has ", shards.size(), " groups, want ", groups_.size(),
              ": build the optimizer after the last fully_shard");
  return shards;
}

/// Checks all gradients before the first parameter changes.
std::vector<fsdp::ShardedGroup> FlatOptimizer::shards_to_update() const {
  std::vector<fsdp::ShardedGroup> all = shards();
  for (std::size_t g = 0; g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i) {
      fsdp::ShardedParameter& parameter = all[g].parameters[i];
      at::Tensor& grad = parameter.grad;
      if (groups_[g].parameters[i].group < 0 || !grad.defined()) continue;
      check_value(grad.is_cpu() && supported(grad.scalar_type()) && grad.numel() == parameter.numel, op(), "the gradient of ",
                  parameter.name, " is ", grad.scalar_type(), " ", grad.sizes(), " on ", grad.device(),
                  ", want a floating-point tensor of ", parameter.numel, " elements on the CPU");
      grad = grad.contiguous();
    }
  }
  return all;
}

c10::ScalarType FlatOptimizer::state_dtype(const Group& group) const {
  const bool wide = group.dtype == c10::ScalarType::Double;
  return setup_.state_dtype.value_or(wide ? c10::ScalarType::Double : c10::ScalarType::Float);
}

bool FlatOptimizer::has_master(const Group& group) const { return setup_.master_weights && low_precision(group.dtype); }

std::int64_t FlatOptimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const Group& group : groups_) {
    const std::size_t slots = setup_.slots.size() * c10::elementSize(state_dtype(group));
    bytes += group.numel * static_cast<std::int64_t>(slots + (has_master(group) ? sizeof(float) : 0));
  }
  return bytes;
}

void FlatOptimizer::make_state(const fsdp::ShardedGroup& shard, Group& group) const {
  const auto flat = [&](c10::ScalarType dtype) { return at::zeros({group.numel}, shard.shard.options().dtype(dtype)); };
  while (group.slots.size() < setup_.slots.size()) group.slots.push_back(flat(state_dtype(group)));
  if (!has_master(group) || group.master.defined()) return;
  group.master = flat(c10::ScalarType::Float);
  for (std::size_t i = 0; i < shard.parameters.size(); ++i) {
    const Parameter& own = group.parameters[i];
    if (own.group >= 0) part(group.master, own.offset, shard.parameters[i]).copy_(shard.parameters[i].sharded);
  }
}

bool FlatOptimizer::begin(const fsdp::ShardedGroup& shard, Group& group, std::size_t i) {
  const fsdp::ShardedParameter& parameter = shard.parameters[i];
  if (group.parameters[i].group < 0 || !parameter.grad.defined()) return false;
  ++group.parameters[i].step;
  if (parameter.numel == 0) return false;
  make_state(shard, group);
  return true;
}

FlatOptimizer::Update FlatOptimizer::update_of(const fsdp::ShardedGroup& shard, const Group& group, std::size_t i) const {
  const fsdp::ShardedParameter& parameter = shard.parameters[i];
  const Parameter& own = group.parameters[i];
  Update update{.weights = {.parameter = values_of(shard.shard, parameter.offset), .master = {}},
                .gradient = values_of(parameter.grad),
                .slots = {},
                .numel = parameter.numel,
                .step = own.step,
                .settings = settings_[static_cast<std::size_t>(own.group)]};
  if (group.master.defined()) update.weights.master = values_of(group.master, own.offset);
  for (std::size_t slot = 0; slot < group.slots.size(); ++slot) update.slots[slot] = values_of(group.slots[slot], own.offset);
  if (!own.decays) update.settings.weight_decay = 0;
  return update;
}

// One call for each parameter: a kernel call costs nanoseconds, so that gathering neighbours would buy nothing.
void FlatOptimizer::step() {
  const trace::Span span("optim", op());
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> all = shards_to_update();
  for (std::size_t g = 0; g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i) {
      if (!begin(all[g], groups_[g], i)) continue;
      update(update_of(all[g], groups_[g], i));
      count_write(all[g].parameters[i].sharded);
    }
  }
}

void FlatOptimizer::zero_grad(bool set_to_none) { root_.zero_grad(set_to_none); }

std::vector<double> FlatOptimizer::lrs() const {
  std::vector<double> lrs;
  for (const GroupSettings& settings : settings_) lrs.push_back(settings.lr);
  return lrs;
}

void FlatOptimizer::set_lrs(const std::vector<double>& lrs) {
  check_value(lrs.size() == settings_.size(), op(), lrs.size(), " learning rates, want ", settings_.size(),
              ", one for each parameter group");
  for (const double lr : lrs) check_value(lr >= 0, op(), "lr is ", lr, ", want at least 0");
  for (std::size_t i = 0; i < lrs.size(); ++i) settings_[i].lr = lrs[i];
}

void FlatOptimizer::set_lr(double lr) { set_lrs(std::vector<double>(num_groups(), lr)); }

const at::Tensor& ParameterState::at(std::string_view tensor) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& entry) { return entry.first == tensor; });
  check_value(found != tensors.end(), "state", name, " has no ", tensor, ", want a tensor that its optimizer keeps");
  return found->second;
}

std::vector<FlatOptimizer::State> FlatOptimizer::state() const {
  std::vector<State> states;
  const std::vector<fsdp::ShardedGroup> all = shards();
  for (std::size_t g = 0; g < all.size(); ++g) {
    const Group& group = groups_[g];
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i) {
      if (group.parameters[i].group < 0) continue;
      const auto& parameter = all[g].parameters[i];
      State& state = states.emplace_back(State{.name = parameter.name, .step = group.parameters[i].step});
      if (state.step == 0) continue;
      const auto add = [&](std::string_view slot, const at::Tensor& flat, c10::ScalarType dtype) {
        // A rank without elements of the whole flat group never made it; all ranks list the same tensors.
        if (!flat.defined() && parameter.numel > 0) return;
        state.tensors.emplace_back(
            slot, flat.defined() ? part(flat, group.parameters[i].offset, parameter) : at::empty_like(parameter.sharded, dtype));
      };
      for (std::size_t slot = 0; slot < setup_.slots.size(); ++slot)
        add(setup_.slots[slot], slot < group.slots.size() ? group.slots[slot] : at::Tensor(), state_dtype(group));
      if (has_master(group)) add(kMaster, group.master, c10::ScalarType::Float);
    }
  }
  return states;
}

std::vector<ParamGroupState> FlatOptimizer::param_groups() const {
  std::vector<ParamGroupState> result(settings_.size());
  for (std::size_t i = 0; i < settings_.size(); ++i) result[i].settings = {{"lr", {settings_[i].lr}}};
  const std::vector<fsdp::ShardedGroup> all = shards();
  for (std::size_t g = 0; g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i) {
      const int group = groups_[g].parameters[i].group;
      if (group >= 0) result[static_cast<std::size_t>(group)].params.push_back(all[g].parameters[i].name);
    }
  }
  return result;
}

void FlatOptimizer::load_param_groups(const std::vector<ParamGroupState>& groups) {
  std::vector<double> rates = lrs();
  check_value(groups.size() == rates.size(), op(), groups.size(), " parameter groups, want ", rates.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto lr = groups[i].settings.find("lr");
    if (lr == groups[i].settings.end()) continue;
    check_value(lr->second.size() == 1, op(), "lr has ", lr->second.size(), " values, want one");
    rates[i] = lr->second[0];
  }
  set_lrs(rates);
}

std::map<std::string, DTensor> FlatOptimizer::sharded_parameters() const {
  std::map<std::string, DTensor> result;
  for (auto& [name, parameter] : root_.named_dtensors()) result.emplace(name, parameter);
  return result;
}

template <class F>
void FlatOptimizer::visit(const std::vector<fsdp::ShardedGroup>& all, F&& f) {
  for (std::size_t g = 0; g < all.size(); ++g) {
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i) {
      if (groups_[g].parameters[i].group >= 0) f(all[g], groups_[g], i);
    }
  }
}

void FlatOptimizer::check_state(const std::vector<State>& states) {
  std::map<std::string, const State*> given;
  for (const State& state : states)
    check_value(given.emplace(state.name, &state).second, op(), "the state has ", state.name, " twice, want it once");
  std::size_t used = 0;
  visit(shards(), [&](const fsdp::ShardedGroup& shard, const Group&, std::size_t i) {
    const auto& parameter = shard.parameters[i];
    check_value(given.contains(parameter.name), op(), "the state lacks ", parameter.name, ", want all parameters");
    ++used;
    const State& state = *given.at(parameter.name);
    check_value(state.step >= 0, op(), "step of ", state.name, " is ", state.step, ", want at least 0");
    for (const auto& [name, tensor] : state.tensors) {
      const bool slot = std::find(setup_.slots.begin(), setup_.slots.end(), name) != setup_.slots.end();
      check_value(slot || name == kMaster, op(), "the state of ", state.name, " has a tensor ", name, ", want those of ", op());
      check_value(tensor.defined() && tensor.numel() == parameter.numel, op(), name, " of ", state.name, " has ",
                  tensor.defined() ? tensor.numel() : 0, " elements, want the ", parameter.numel, " of this rank's part");
    }
  });
  check_value(used == given.size(), op(), "the state has ", given.size(), " parameters, want the ", used, " of this optimizer");
}

void FlatOptimizer::load_state(const std::vector<State>& states) {
  FlatOptimizer::check_state(states);
  at::NoGradGuard no_grad;
  std::map<std::string, const State*> given;
  for (const State& state : states) given.emplace(state.name, &state);
  visit(shards(), [&](const fsdp::ShardedGroup& shard, Group& group, std::size_t i) {
    const auto& parameter = shard.parameters[i];
    const State& state = *given.at(parameter.name);
    if (!state.tensors.empty()) make_state(shard, group);
    group.parameters[i].step = state.step;
    for (const auto& [name, tensor] : state.tensors) {
      if (name == kMaster && !group.master.defined()) continue;
      const auto slot = std::find(setup_.slots.begin(), setup_.slots.end(), name) - setup_.slots.begin();
      const at::Tensor& flat = name == kMaster ? group.master : group.slots[static_cast<std::size_t>(slot)];
      part(flat, group.parameters[i].offset, parameter).copy_(tensor.view(parameter.sharded.sizes()));
    }
  });
}

}  // namespace hyper_parallel::optim
