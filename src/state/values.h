#pragma once
// Values of a state dictionary on their way out of and into tensors that lie in parts.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/state/state_dict.h>

namespace hyper_parallel::state {

/// Where a value goes, or comes from.
struct Target {
  at::Tensor local;                ///< this rank's part, or the whole tensor
  std::optional<DTensor> sharded;  ///< how the parts lie; its local tensor does not count
  [[nodiscard]] std::vector<std::int64_t> shape() const { return sharded ? sharded->shape() : local.sizes().vec(); }
};

/// How a value gets into a target.
struct Fit {
  enum class Way { kWhole, kPart, kRedistribute, kGather } way = Way::kWhole;
  std::string problem = {};  ///< why it does not; empty if it does
  /// What all ranks must do alike, because it is collective; empty if it is local.
  [[nodiscard]] std::string collective() const;
};

/// Local. The target may be on meta.
[[nodiscard]] Fit fit(const StateValue& value, const Target& target);
/// Copies and casts. Collective over the value's mesh where fit says so.
void assign(const StateValue& value, const Fit& fit, const Target& target);

/// Without options: shares memory. full_state_dict: a copy, collective over the mesh; undefined on ranks that get none.
[[nodiscard]] StateValue value_of(const Target& target, const StateDictOptions& options, const Comm& comm);

/// Why a whole tensor of the first rank cannot be sent to the target; empty if it can. Local.
[[nodiscard]] std::string scatter_problem(const Comm& comm, const Target& target);
/// The first rank of `comm` gives each rank its part of `whole`, which is null elsewhere. Collective.
void scatter(const Comm& comm, const at::Tensor* whole, const Target& target);

/// options.comm, or all ranks. ValueError: options that contradict each other.
[[nodiscard]] Comm checked_comm(std::string_view op, const StateDictOptions& options);

/// "missing: a, b"; empty without names.
[[nodiscard]] std::string listed(std::string_view what, const std::vector<std::string>& names);

}  // namespace hyper_parallel::state
