#pragma once
// What state dictionaries and checkpoints want from an optimizer, ours or torch's.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/dtensor.h>

namespace hyper_parallel::optim {

/// State of one parameter on this rank.
struct HP_API ParameterState {
  std::string name;
  std::int64_t step = 0;  ///< updates so far
  /// By name ("exp_avg", ...): shaped like the sharded parameter, sharing memory with the optimizer. Empty before its first step.
  std::vector<std::pair<std::string, at::Tensor>> tensors = {};
  /// ValueError: no such tensor.
  [[nodiscard]] const at::Tensor& at(std::string_view tensor) const;
};

/// Parameters that are updated with the same settings.
struct ParamGroupState {
  std::vector<std::string> params;
  std::map<std::string, std::vector<double>> settings;  ///< as torch names them: "lr", "betas" (two numbers), "amsgrad" (0 or 1)
};

/// An optimizer whose state can be taken out and put back, by the names of its parameters. All members are local. Thread safety:
/// one thread at a time.
class HP_API StatefulOptimizer {
 public:
  using State = ParameterState;
  virtual ~StatefulOptimizer() = default;
  StatefulOptimizer() = default;
  StatefulOptimizer(StatefulOptimizer&&) = default;
  StatefulOptimizer& operator=(StatefulOptimizer&&) = default;

  /// State of every parameter that this optimizer updates.
  [[nodiscard]] virtual std::vector<State> state() const = 0;
  /// Takes over (copies) what `state` gave, of the same parameters cut the same way, in any order. ValueError (nothing is changed
  /// then): a parameter that is missing, unknown or given twice, another number of elements, other tensors.
  virtual void load_state(const std::vector<State>& state) = 0;
  /// The checks of load_state.
  virtual void check_state(const std::vector<State>& state) = 0;
  /// False: it knows whether a parameter was updated, not how often (torch's SGD); `step` is 1 for all of those then.
  [[nodiscard]] virtual bool counts_steps() const { return true; }

  [[nodiscard]] virtual std::vector<ParamGroupState> param_groups() const = 0;
  /// Takes over the settings that it can change; others are passed over. One entry for each group, in the order of
  /// param_groups(). ValueError (nothing is changed then): another number of groups, or of values in a setting.
  virtual void load_param_groups(const std::vector<ParamGroupState>& groups) = 0;

  /// The parameters that lie in parts on the ranks of a mesh, by name; the others are whole on every rank.
  [[nodiscard]] virtual std::map<std::string, DTensor> sharded_parameters() const = 0;
};

}  // namespace hyper_parallel::optim
