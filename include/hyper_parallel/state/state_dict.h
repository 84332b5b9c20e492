#pragma once
// State dictionaries of models and optimizers, as torch.distributed.checkpoint.state_dict has them.
#include <concepts>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/optim/stateful_optimizer.h>

namespace hyper_parallel {

/// A tensor that lies in parts on the ranks of a mesh, or one that is whole.
using StateValue = std::variant<at::Tensor, DTensor>;

/// Parameters and buffers by name. A tied parameter is there under each of its names.
using ModelStateDict = std::map<std::string, StateValue>;

/// State and settings of one or several optimizers.
struct OptimizerStateDict {
  /// By parameter and tensor: {"layers.0.weight": {"step": …, "exp_avg": …}}. Parameters without a step have no entry.
  std::map<std::string, std::map<std::string, StateValue>> state;
  std::vector<optim::ParamGroupState> param_groups;
  /// With flatten_optimizer_state_dict everything is here and nothing above: "state.layers.0.weight.exp_avg",
  /// "param_groups.layers.0.weight.lr".
  std::map<std::string, StateValue> flat;
};

struct StateDictOptions {
  bool full_state_dict = false;         ///< whole tensors instead of DTensors
  bool cpu_offload = false;             ///< on the CPU; with full_state_dict on the first rank only, the others get nothing
  bool ignore_frozen_params = false;    ///< parameters that need no gradient are left out, and not asked for when loading
  bool keep_submodule_prefixes = true;  ///< false is refused: pass the submodule, whose names have no prefix
  bool strict = true;                   ///< when loading, names that only one side has are errors; otherwise they are passed over
  bool broadcast_from_rank0 =
      false;  ///< when loading with full_state_dict: the first rank's dictionary counts, the others' are ignored
  bool flatten_optimizer_state_dict = false;
  Comm comm = {};  ///< the ranks that have the model; default: all ranks of the world
};

/// A module with units of fully_shard inside, as an argument: a handle, a holder, or a pointer.
class ModelRef {
 public:
  ModelRef(const HSDPModule& model) : module_(model.module()) {}  // NOLINT(google-explicit-constructor)
  template <std::derived_from<torch::nn::Module> M>
  ModelRef(const std::shared_ptr<M>& model) : module_(model) {}  // NOLINT(google-explicit-constructor)
  template <class Contained>
  ModelRef(const torch::nn::ModuleHolder<Contained>& model) : module_(model.ptr()) {}  // NOLINT(google-explicit-constructor)
  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

/// One optimizer or several, of ours or of torch::optim, as an argument. Refers to them.
class OptimizerRefs {
 public:
  using Ref = std::variant<optim::StatefulOptimizer*, torch::optim::Optimizer*>;
  OptimizerRefs(optim::StatefulOptimizer& optimizer) : refs_{&optimizer} {}  // NOLINT(google-explicit-constructor)
  OptimizerRefs(torch::optim::Optimizer& optimizer) : refs_{&optimizer} {}   // NOLINT(google-explicit-constructor)
  OptimizerRefs(std::initializer_list<Ref> optimizers) : refs_(optimizers) {}
  explicit OptimizerRefs(std::vector<Ref> optimizers) : refs_(std::move(optimizers)) {}
  [[nodiscard]] const std::vector<Ref>& refs() const { return refs_; }

 private:
  std::vector<Ref> refs_;
};

/// Names that a load passed over.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;     ///< of the model, which the dictionary lacks
  std::vector<std::string> unexpected_keys;  ///< of the dictionary, which the model lacks
};

// What holds for all of these.
//
// Names are those of named_parameters() and named_buffers() of the module. Units may be gathered or not, on meshes of their own,
// with source layouts; what no unit manages is whole. Without full_state_dict values share memory with the model and the
// optimizer, nothing is sent, and the functions that get are local. With it values are copies and the functions are collective
// over `options.comm`: one tensor after the other is gathered, so that memory besides the result is one tensor.
//
// The functions that set are collective over `options.comm`. They copy into the tensors that are there: parameters, leaves and
// optimizers stay the same, dtypes are cast. A value may be a DTensor of the same shape in any layout (it is redistributed), a
// whole tensor that every rank has, or this rank's part, whatever full_state_dict says. With broadcast_from_rank0 the first rank
// has whole tensors and sends each rank its part, one tensor after the other: memory besides the target is one tensor there, and
// nothing elsewhere but for parts that are not contiguous.
//
// ValueError, on all ranks alike and before anything is changed: a model in the middle of a step, names that do not fit (strict),
// shapes that do not fit, values that are undefined, sparse or on meta, dtypes that cannot be cast, ranks that disagree, options
// that contradict each other, parameters below `model` that belong to a unit above it. CommError.

[[nodiscard]] HP_API ModelStateDict get_model_state_dict(const ModelRef& model, const StateDictOptions& options = {});
/// \return what was passed over
HP_API IncompatibleKeys set_model_state_dict(const ModelRef& model, const ModelStateDict& state_dict,
                                             const StateDictOptions& options = {});

/// Settings: those of torch's optimizers under their names, `lr` of ours. ValueError, too: a parameter that is no parameter of
/// the model, or is listed twice; kinds of optimizer that TorchOptimizer refuses; with flatten_optimizer_state_dict a group
/// without parameters.
[[nodiscard]] HP_API OptimizerStateDict get_optimizer_state_dict(const ModelRef& model, const OptimizerRefs& optimizers,
                                                                 const StateDictOptions& options = {});
/// Parameters that `state_dict` lists without state have none afterwards, those that it does not name keep theirs. A group takes
/// the settings of the groups that list its parameters, those that it knows. Strict: names that the optimizers lack are errors.
/// ValueError, too: tensors that the optimizer does not keep, groups with different settings for parameters of one group.
HP_API void set_optimizer_state_dict(const ModelRef& model, const OptimizerRefs& optimizers, const OptimizerStateDict& state_dict,
                                     const StateDictOptions& options = {});

struct StateDicts {
  ModelStateDict model;
  OptimizerStateDict optimizer;
};
[[nodiscard]] HP_API StateDicts get_state_dict(const ModelRef& model, const OptimizerRefs& optimizers,
                                               const StateDictOptions& options = {});
/// Both, or nothing is changed.
HP_API IncompatibleKeys set_state_dict(const ModelRef& model, const OptimizerRefs& optimizers, const StateDicts& state_dicts,
                                       const StateDictOptions& options = {});

/// A dictionary in the flat form and back. Local. ValueError: it is flat already (not flat), a group without parameters, a name
/// that is no name of a flat dictionary.
[[nodiscard]] HP_API OptimizerStateDict flatten(const OptimizerStateDict& state_dict);
[[nodiscard]] HP_API OptimizerStateDict unflatten(const OptimizerStateDict& state_dict);

}  // namespace hyper_parallel
