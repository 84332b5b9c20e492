#pragma once
// What the module consists of besides module.cpp.
#include <hyper_parallel/fsdp/source_shard.h>

#include "object.h"

namespace hyper_parallel::python {

/// Source layouts and plans (source.cpp).
void bind_sources(py::module_& m);
/// Optimizers, clipping, averages, loss scaling (optim.cpp).
void bind_optim(py::module_& m);
/// Levels, scopes, values, traces (tools.cpp).
void bind_tools(py::module_& m);

/// A list of (parameter, name, mesh or None, placements, shape or None, gradients of copies, origin_is_dtensor); see _C.pyi.
[[nodiscard]] SourceShardInfos to_sources(const py::object& entries);

}  // namespace hyper_parallel::python
