// What changes the memory or the dtype of a group after it was made.
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "fsdp/flat_tensor.h"
#include "fsdp/param_group.h"

namespace hyper_parallel::fsdp {

/// After the shard has new memory.
void ParamGroup::rehome() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    const auto& slice = layout_.slice(i, rank_);
    parameter.home = part_of_flat(shard_, slice.shard_offset, slice.numel, slice.shape);
    become(parameter.sharded, parameter.home);
  }
}

void ParamGroup::materialize() {
  if (!on_meta()) return;
  at::NoGradGuard no_grad;
  shard_ = allocate_shard();
  shard_.zero_();
  rehome();
  for (auto& parameter : parameters_) {
    parameter.uninitialised = true;
    parameter.unwritten = Unwritten(parameter.sharded);
  }
  if (aliased_) build_full_views();
}

void ParamGroup::set_value(std::size_t i, const at::Tensor& whole) {
  at::NoGradGuard no_grad;
  auto& parameter = parameters_[i];
  if (parameter.home.numel() > 0) parameter.home.copy_(own_part(block_of(whole.detach(), i), i));
  parameter.uninitialised = false;
}

at::Tensor ParamGroup::home_row(std::size_t i) const { return parameters_[i].home.view({-1}); }

void ParamGroup::check_memory(std::string_view op) const {
  if (!on_meta()) return;
  std::string names;
  for (const auto& parameter : parameters_) names += concat(names.empty() ? "" : ", ", parameter.name);
  throw ValueError(concat('[', op, "] parameters ", names, " of unit ", options_.unit,
                          " are on the meta device, want memory and values: call to_empty and reset_parameters, load_full or ",
                          "load_from_rank0 on the root's handle"));
}

std::optional<at::ScalarType> ParamGroup::dtype_from_outside() const {
  const at::ScalarType dtype = parameters_.front().sharded.scalar_type();
  if (dtype == shard_.scalar_type() || !at::isFloatingType(dtype) || !at::isFloatingType(shard_.scalar_type()))
    return std::nullopt;
  for (const auto& parameter : parameters_) {
    const at::Tensor& leaf = parameter.sharded;
    if (leaf.scalar_type() != dtype || leaf.device() != shard_.device() || leaf.sizes() != parameter.home.sizes())
      return std::nullopt;
  }
  return dtype;
}

void ParamGroup::convert(at::ScalarType master, at::ScalarType compute, at::ScalarType reduce) {
  check_internal(!holds_gradients() && !has_part_ && !gather_.pending(), "fully_shard", "unit ", options_.unit,
                 " converted in the middle of a step");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (auto& parameter : parameters_) {
    at::Tensor& grad = gradient(parameter);
    gradients.push_back(grad.defined() ? (options_.main_grad ? grad.detach() : grad.detach().to(master)) : at::Tensor());
    grad = at::Tensor();
    gradient_changed(parameter);
  }
  release_grad();
  spare_grad_.reset();
  wire_ = {};
  accumulation_ = {};
  partial_ = {};
  exchange_ = {};

  std::vector<at::Tensor> moved;
  for (const auto& parameter : parameters_) {
    const bool home = parameter.sharded.scalar_type() == shard_.scalar_type();
    moved.push_back(home ? at::Tensor() : parameter.sharded.variable_data());
  }
  const at::Tensor before = std::exchange(shard_, at::Tensor());
  master_ = master_.dtype(master);
  set_dtypes(compute, reduce);
  if (before.is_meta()) {
    shard_ = at::empty({layout_.shard_numel()}, before.options().dtype(master));
  } else {
    shard_ = allocate_shard();
    shard_.copy_(before);
  }
  for (auto& parameter : parameters_) {
    // The mark of a float does not survive a cast.
    parameter.uninitialised = parameter.uninitialised && parameter.unwritten.still(parameter.sharded);
  }
  rehome();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (moved[i].defined() && !before.is_meta()) parameter.home.copy_(moved[i]);
    if (parameter.uninitialised) parameter.unwritten = Unwritten(parameter.sharded);
  }
  build_full_views();
  build_gather_copies();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    ensure_grad();
    parameters_[i].grad_home.copy_(gradients[i]);
    gradient(parameters_[i]) = parameters_[i].grad_home.variable_data();
    gradient_changed(parameters_[i]);
  }
}

}  // namespace hyper_parallel::fsdp
