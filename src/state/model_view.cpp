#include "state/model_view.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ops/empty_like.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/nn/module.h>

#include "fsdp/managed_registry.h"
#include "fsdp/places.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::state {
namespace {

/// The units of a module's own tree, in the order of its modules.
std::vector<std::shared_ptr<fsdp::Unit>> units_of(torch::nn::Module& module) {
  std::vector<std::shared_ptr<fsdp::Unit>> units;
  for (const auto& inner : module.modules(/*include_self=*/true)) {
    const auto* hooked = dynamic_cast<const nn::HookedBase*>(inner.get());
    if (hooked == nullptr || hooked->unit() == nullptr) continue;
    if (std::find(units.begin(), units.end(), hooked->unit()) == units.end()) units.push_back(hooked->unit());
  }
  return units;
}

}  // namespace

std::string ModelTensor::line() const {
  return concat(name(), ": ", tensor.scalar_type(), ' ', at::IntArrayRef(shape()),
                sharded ? concat(" as ", sharded->layout().to_string(sharded->device_mesh().mesh_dim_names())) : "",
                frozen ? ", frozen" : "");
}

ModelView::ModelView(std::string_view op, std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
  check_value(module_ != nullptr, op, "the model is null, want a torch::nn module");
  std::unordered_map<const void*, DTensor> managed;
  const std::vector<std::shared_ptr<fsdp::Unit>> units = units_of(*module_);
  for (const auto& unit : units) {
    const auto parameters = fsdp::UnitHandle(unit).named_dtensors(/*recurse=*/false);  // settles leaves that were moved
    std::size_t next = 0;
    for (const auto& group : unit->groups()) {
      for (const fsdp::ManagedParameter& parameter : group->parameters())
        managed.emplace(parameter.sharded.unsafeGetTensorImpl(), parameters[next++].second);
    }
    const bool inside = std::any_of(units.begin(), units.end(), [&](const auto& other) {
      std::vector<fsdp::Unit*> below;
      if (other != unit) other->subtree(below);
      return std::find(below.begin(), below.end(), unit.get()) != below.end();
    });
    if (!inside) tops_.push_back(unit.get());
  }
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!tensor.defined()) return;
    const auto [known, is_new] = by_tensor_.emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
    by_name_.emplace(name, known->second);
    if (!is_new) {
      tensors_[known->second].names.push_back(name);
      return;
    }
    ModelTensor& entry = tensors_.emplace_back();
    entry.names = {name};
    entry.tensor = tensor;
    entry.is_parameter = is_parameter;
    entry.frozen = is_parameter && !tensor.requires_grad();
    if (const auto found = managed.find(tensor.unsafeGetTensorImpl()); found != managed.end()) {
      entry.sharded = found->second;
    } else if (is_parameter) {
      const auto owner = fsdp::managed_by(tensor);
      check_value(!owner, op, "parameter ", name, " is managed by ", owner.value_or(""),
                  ", which is not inside the model that was passed, want the module of that unit or one around it");
    }
  };
  for (const auto& entry : module_->named_parameters()) add(entry.key(), entry.value(), true);
  for (const auto& entry : module_->named_buffers()) add(entry.key(), entry.value(), false);
}

const ModelTensor* ModelView::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const ModelTensor* ModelView::find(const at::Tensor& tensor) const {
  const auto found = by_tensor_.find(tensor.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? nullptr : &tensors_[found->second];
}

void ModelView::check_between_steps(std::string_view op) const {
  for (fsdp::Unit* top : tops_) fsdp::check_between_steps(*top, op);
}

ModelView ModelView::prepared(std::string_view op) const {
  for (fsdp::Unit* top : tops_) fsdp::prepare_for_values(*top, op);
  for (const ModelTensor& entry : tensors_) {
    // What no unit manages; the handle stays, whoever holds it.
    if (entry.sharded || !entry.tensor.is_meta()) continue;
    at::Tensor handle = entry.tensor;
    handle.set_data(at::empty_like(handle, handle.options().device(at::kCPU)));
  }
  return {op, module_};
}

}  // namespace hyper_parallel::state
