#pragma once
// Managed parameters by name, for everything that gives them values.
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {

struct ParameterPlace {
  std::string name;  ///< fully qualified
  Unit* unit = nullptr;
  ParamGroup* group = nullptr;
  std::size_t index = 0;  ///< in the group
  [[nodiscard]] const ManagedParameter& parameter() const { return group->parameters()[index]; }
};

/// Every parameter of the tree below `root`, after its leaf was checked.
[[nodiscard]] std::vector<ParameterPlace> places_of(Unit& root);

/// Every buffer of the tree below `root`.
[[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> buffers_of(Unit& root);

/// ValueError unless no forward waits for its backward and no gradient for its reduction.
void check_between_steps(Unit& root, std::string_view op);

/// Before values change: gives memory to parameters and buffers that have none, drops gathered copies, and lets the next forward
/// compare the ranks again.
void prepare_for_values(Unit& root, std::string_view op);

/// A whole parameter without values, on the device of the shard.
[[nodiscard]] at::Tensor whole_of(const ParameterPlace& place);

}  // namespace hyper_parallel::fsdp
