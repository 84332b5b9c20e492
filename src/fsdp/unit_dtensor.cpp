// Managed parameters and gradients as distributed tensors.
#include <utility>

#include <hyper_parallel/dtensor/dtensor.h>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

DTensor wrap(const at::Tensor& local, const Unit& unit, const ParamGroup& group, std::size_t i) {
  const SourceBlock* block = group.options().source.empty() ? nullptr : &group.options().source[i];
  const Layout layout = composed_layout(unit.mesh(), block, group.layout(), i, group.options().replicated);
  return DTensor::from_local(local, unit.mesh().whole, layout, group.parameters()[i].whole_shape);
}

}  // namespace

std::vector<std::pair<std::string, DTensor>> UnitHandle::named_dtensors(bool recurse) const {
  std::vector<std::pair<std::string, DTensor>> result;
  visit(recurse, [&](Unit& unit, ParamGroup& group, std::size_t i) {
    const ManagedParameter& parameter = group.parameters()[i];
    result.emplace_back(unit.qualified(parameter), wrap(parameter.sharded.detach(), unit, group, i));
  });
  return result;
}

std::vector<std::pair<std::string, DTensor>> UnitHandle::named_grad_dtensors(bool recurse) const {
  std::vector<std::pair<std::string, DTensor>> result;
  visit(recurse, [&](Unit& unit, ParamGroup& group, std::size_t i) {
    ManagedParameter& parameter = group.parameters()[i];
    const at::Tensor& gradient = group.gradient(parameter);
    if (gradient.defined()) result.emplace_back(unit.qualified(parameter), wrap(gradient, unit, group, i));
  });
  return result;
}

}  // namespace hyper_parallel::fsdp
