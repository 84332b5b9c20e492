#pragma once
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace hyper_parallel::fsdp {

class Unit;

/// Which tensors are parameters of which unit. Thread safety: any thread (ranks may be threads of one process).
void remember_managed(const at::Tensor& tensor, const Unit& unit);
void forget_managed(const at::Tensor& tensor);
[[nodiscard]] std::optional<std::string> managed_by(const at::Tensor& tensor);

}  // namespace hyper_parallel::fsdp
