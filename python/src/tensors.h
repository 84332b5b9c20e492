#pragma once
// The tensors inside arguments and results of a forward.
#include <functional>

#include "object.h"

namespace hyper_parallel::python {

/// `value` with f of each tensor in place of the tensor; `value` itself where f changes nothing. Looks into tuples, named tuples,
/// lists, dictionaries, sets and their subclasses, dataclasses, and what is registered with torch.utils._pytree.
[[nodiscard]] py::object map_tensors(py::handle value, const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace hyper_parallel::python
