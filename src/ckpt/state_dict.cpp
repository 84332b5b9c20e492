// What is saved and loaded, by name.
#include <algorithm>
#include <set>
#include <utility>

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/fsdp/init.h>

#include "ckpt/dtypes.h"
#include "ckpt/runs.h"
#include "fsdp/places.h"

namespace hyper_parallel::ckpt {
namespace {

using State = optim::ParameterState;

constexpr std::string_view kOp = "StateDict::add";

StateDict::Entry entry_of(const std::string& name, const DTensor& tensor) {
  check_value(tensor.defined(), kOp, name, " is an empty DTensor, want one with values");
  check_value(!tensor.layout().has_partial(), kOp, name, " has partial values (", tensor.to_string(), "), want them reduced");
  return {name, tensor.to_local(), tensor.shape(), tensor.boxes(),
          tensor.layout().to_string(tensor.device_mesh().mesh_dim_names())};
}

StateDict::Entry entry_of(const std::string& name, const at::Tensor& tensor) {
  check_value(tensor.defined(), kOp, name, " is an undefined tensor, want one with values");
  std::vector<Box> boxes;
  if (tensor.numel() > 0) boxes.push_back(whole_box(tensor.sizes().vec()));
  return {name, tensor.detach(), tensor.sizes().vec(), std::move(boxes), "whole"};
}

/// The state tensor as it lies on the ranks: like its parameter.
DTensor like(const DTensor& parameter, const at::Tensor& local) {
  return DTensor::from_local(local.view(parameter.to_local().sizes()), parameter.device_mesh(), parameter.layout(),
                             parameter.shape());
}

/// Zeros that take no memory.
at::Tensor zeros_of(const std::vector<std::int64_t>& shape) {
  return at::zeros({1}).expand({whole_box(shape).numel()}).view(shape);
}
at::Tensor zeros_like(const at::Tensor& tensor) {
  return at::zeros({1}, tensor.options().device(at::kCPU)).expand({tensor.numel()}).view(tensor.sizes());
}

}  // namespace

void StateDict::add_entry(Entry entry) {
  check_value(entry.name != "__metadata__" && !entry.name.empty(), kOp, "\"", entry.name, "\" is no name for a tensor");
  if (entry.local.defined()) {
    (void)dtype_of(entry.local.scalar_type(), entry.name);
    check_value(entry.local.layout() == at::kStrided, kOp, entry.name, " is sparse, want a dense tensor");
  }
  const std::string name = entry.name;
  check_value(entries_.emplace(name, std::move(entry)).second, kOp, name, " is there already");
}

void StateDict::add(const std::string& name, const DTensor& tensor) { add_entry(entry_of(name, tensor)); }
void StateDict::add(const std::string& name, const at::Tensor& tensor) { add_entry(entry_of(name, tensor)); }

void StateDict::add_model_entries(const fsdp::UnitHandle& root, const std::string& prefix) {
  for (const auto& [name, parameter] : root.named_dtensors()) add(prefix + name, parameter);
  for (const auto& [name, buffer] : fsdp::buffers_of(*root.unit())) add(prefix + name, buffer);
}

void StateDict::add_model(const fsdp::UnitHandle& root, const std::string& prefix) {
  check_value(root.defined(), "StateDict::add_model", "a handle without unit, want one from fully_shard");
  add_model_entries(root, prefix);
  models_.emplace_back(root, prefix);
}

void StateDict::add_optimizer(const optim::StatefulOptimizer& optimizer, const std::string& prefix) {
  const std::map<std::string, DTensor> parameters = optimizer.sharded_parameters();
  for (const State& state : optimizer.state()) {
    const auto parameter = parameters.find(state.name);
    add(concat(prefix, state.name, ".step"), at::scalar_tensor(state.step, at::kLong));
    for (const auto& [slot, tensor] : state.tensors) {
      const std::string name = concat(prefix, state.name, '.', slot);
      if (parameter != parameters.end()) {
        add(name, like(parameter->second, tensor));
      } else {
        add(name, tensor);
      }
    }
  }
}

void StateDict::add_optimizer(optim::StatefulOptimizer& optimizer, const CheckpointInfo& saved, const std::string& prefix) {
  const std::map<std::string, DTensor> parameters = optimizer.sharded_parameters();
  Optimizer added{&optimizer, prefix, {}};
  for (const State& state : optimizer.state()) {
    const auto parameter = parameters.find(state.name);
    const std::string begin = concat(prefix, state.name, '.');
    added.steps.push_back(at::scalar_tensor(state.step, at::kLong));
    add(begin + "step", added.steps.back());
    std::set<std::string> slots;
    for (auto found = saved.tensors.lower_bound(begin); found != saved.tensors.end() && found->first.starts_with(begin);
         ++found) {
      const std::string slot = found->first.substr(begin.size());
      if (slot != "step" && slot.find('.') == std::string::npos) slots.insert(slot);
    }
    if (slots.empty()) continue;  // it had no step yet
    const std::vector<std::int64_t> shape = saved.tensors.at(begin + *slots.begin()).shape;
    for (const auto& [slot, tensor] : state.tensors) slots.insert(slot);
    for (const std::string& slot : slots) {
      Entry entry;
      if (parameter != parameters.end()) {
        entry = entry_of(begin + slot, parameter->second);
      } else {
        entry = {begin + slot, {}, shape, {}, "whole"};
        if (const Box all = whole_box(entry.shape); all.numel() > 0) entry.boxes.push_back(all);
      }
      entry.local = at::Tensor();  // prepare() gives it
      add_entry(std::move(entry));
    }
  }
  optimizers_.push_back(std::move(added));
}

void StateDict::prepare() {
  for (const auto& [root, prefix] : models_) {
    fsdp::to_empty(root);
    // What was on meta has other tensors now.
    for (const auto& [name, parameter] : root.named_dtensors()) entries_.at(prefix + name).local = parameter.to_local();
    for (const auto& [name, buffer] : fsdp::buffers_of(*root.unit())) entries_.at(prefix + name).local = buffer.detach();
  }
  for (const Optimizer& added : optimizers_) {
    // An optimizer makes its state when it is given some: zeros that take no memory, since it copies them.
    std::vector<State> states = added.optimizer->state();
    const std::map<std::string, DTensor> parameters = added.optimizer->sharded_parameters();
    for (State& state : states) {
      const std::string begin = concat(added.prefix, state.name, '.');
      if (!state.tensors.empty()) continue;
      for (auto found = entries_.lower_bound(begin); found != entries_.end() && found->first.starts_with(begin); ++found) {
        const std::string slot = found->first.substr(begin.size());
        if (slot == "step" || slot.find('.') != std::string::npos) continue;
        const auto parameter = parameters.find(state.name);
        state.tensors.emplace_back(
            slot, parameter != parameters.end() ? zeros_like(parameter->second.to_local()) : zeros_of(found->second.shape));
        state.step = 1;  // state() does not show tensors before the first step; finish() sets the real number
      }
    }
    added.optimizer->load_state(states);
    for (const State& state : added.optimizer->state()) {
      for (const auto& [slot, tensor] : state.tensors) {
        const auto entry = entries_.find(concat(added.prefix, state.name, '.', slot));
        if (entry != entries_.end()) entry->second.local = tensor;
      }
    }
  }
  std::string homeless;
  for (const auto& [name, entry] : entries_) {
    if (!entry.local.defined()) homeless += concat(homeless.empty() ? "" : ", ", name);
  }
  check_value(homeless.empty(), "ckpt.load", "the optimizer does not keep what the checkpoint has: ", homeless);
}

void StateDict::finish() const {
  for (const Optimizer& added : optimizers_) {
    std::vector<State> states = added.optimizer->state();
    for (std::size_t i = 0; i < states.size(); ++i) {
      states[i].step = added.steps[i].item<std::int64_t>();
      if (states[i].step > 0) continue;
      for (auto& [slot, tensor] : states[i].tensors) tensor = zeros_like(tensor);
    }
    added.optimizer->load_state(states);
  }
}

}  // namespace hyper_parallel::ckpt
