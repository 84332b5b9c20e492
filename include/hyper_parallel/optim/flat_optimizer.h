#pragma once
// What the optimizers over flat shards have in common: parameter groups, state, learning rates.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/optim/stateful_optimizer.h>

namespace hyper_parallel::optim {

/// Chooses parameters by what all ranks know of them: fully qualified name and shape of the whole parameter.
using ParameterPredicate = std::function<bool(const std::string& name, const std::vector<std::int64_t>& full_shape)>;

/// Parameters with settings of their own; what is not set is the optimizer's. A parameter belongs to the first group that lists
/// it or whose predicate takes it.
struct ParamGroup {
  std::vector<std::string> names = {};
  ParameterPredicate predicate = {};
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  std::optional<std::pair<double, double>> betas = {};  ///< AdamW only
  std::optional<double> eps = {};                       ///< AdamW only
};

/// The settings that a parameter is updated with.
struct GroupSettings {
  double lr = 0;
  double weight_decay = 0;
  std::pair<double, double> betas = {0, 0};
  double eps = 0;
};

/// Base of our optimizers: they update the shards of a unit tree in place, element by element, in blocks of fp32 arithmetic (fp64
/// for fp64 parameters).
///
/// Shards are fp32, fp64, bf16 or fp16, gradients and state of any of these dtypes. The result does not depend on the number of
/// ranks, the layout, or the order of parameters and groups, bit for bit. Parameters without gradient are left alone, with their
/// own step count, as in torch; shards may be empty. State is made at the first step of a parameter's flat group; after that,
/// steps allocate no tensor memory. Thread safety: one thread at a time. Owns its state; shares the parameters with the units.
class HP_API FlatOptimizer : public StatefulOptimizer {
 public:
  ~FlatOptimizer() override;
  FlatOptimizer(FlatOptimizer&&) = default;
  FlatOptimizer& operator=(FlatOptimizer&&) = default;

  /// Updates every parameter that has a gradient. Local, except for Muon. ValueError: units were added to the tree after the
  /// optimizer was built, a gradient that is no floating-point tensor of the shard's size on the CPU (nothing is changed
  /// then).
  virtual void step();
  /// Clears the gradients of all parameters of the tree, also of those that this optimizer leaves alone. Local.
  void zero_grad(bool set_to_none = true);

  /// Number of parameter groups: those of the options in their order, then one of all other parameters.
  [[nodiscard]] std::size_t num_groups() const { return lrs().size(); }
  /// Rate of the group of all other parameters.
  [[nodiscard]] double lr() const { return lrs().back(); }
  /// Rates of all groups; with Muon, those of its matrices first.
  [[nodiscard]] virtual std::vector<double> lrs() const;
  /// ValueError: negative, NaN, or another number of rates than groups.
  virtual void set_lrs(const std::vector<double>& lrs);
  /// Gives all groups one rate. ValueError: negative or NaN.
  void set_lr(double lr);

  /// State of every parameter that this optimizer updates. Local.
  [[nodiscard]] std::vector<State> state() const override;
  /// Takes over (copies) what `state` gave, of the same parameters cut the same way, in any order. Local. ValueError (nothing is
  /// changed then): a parameter that is missing, unknown or given twice, another number of elements, other tensors.
  void load_state(const std::vector<State>& state) override;
  /// Bytes of the state, and of what else this optimizer keeps, once every parameter has had a gradient. Local.
  [[nodiscard]] virtual std::int64_t state_bytes() const;
  void check_state(const std::vector<State>& state) override;

  /// Names and rates, in the order of lrs().
  [[nodiscard]] std::vector<ParamGroupState> param_groups() const override;
  /// Takes the rates over.
  void load_param_groups(const std::vector<ParamGroupState>& groups) override;
  [[nodiscard]] std::map<std::string, DTensor> sharded_parameters() const override;

  [[nodiscard]] const fsdp::UnitHandle& root() const { return root_; }

 protected:
  struct Setup {
    std::string op;  ///< class name, for messages
    GroupSettings defaults = {};
    std::vector<ParamGroup> groups = {};
    bool takes_betas = false;
    ParameterPredicate parameters = {};  ///< which are updated; default: all
    ParameterPredicate decays = {};      ///< which get weight decay; default: all
    std::optional<c10::ScalarType> state_dtype = {};
    bool master_weights = false;
    std::vector<std::string> slots = {};  ///< names of the state tensors
  };
  FlatOptimizer(const fsdp::UnitHandle& root, Setup setup);

  struct Parameter {
    int group = -1;  ///< position in `settings_`, -1: not updated
    bool decays = true;
    std::int64_t step = 0;
    std::int64_t offset = 0;  ///< of its part in the flat state
  };
  struct Group {
    std::vector<Parameter> parameters;
    std::int64_t numel = 0;         ///< elements of the parameters that are updated, on this rank
    c10::ScalarType dtype = {};     ///< of the shard
    std::vector<at::Tensor> slots;  ///< flat state, as large as that; empty before the first step
    at::Tensor master;              ///< flat fp32 copy of low-precision parameters, when asked for
  };
  struct Update;  // src/optim/flat_update.h

  /// Changes one parameter, which has a gradient and at least one element on this rank.
  virtual void update(const Update& update) = 0;

  [[nodiscard]] std::vector<fsdp::ShardedGroup> shards() const;
  /// The same with gradients that were checked and are contiguous.
  [[nodiscard]] std::vector<fsdp::ShardedGroup> shards_to_update() const;
  /// Counts the step of parameter `i` and makes the state of its group. \return whether there is something to update here.
  bool begin(const fsdp::ShardedGroup& shard, Group& group, std::size_t i);
  [[nodiscard]] Update update_of(const fsdp::ShardedGroup& shard, const Group& group, std::size_t i) const;
  [[nodiscard]] const std::string& op() const { return setup_.op; }

  std::vector<Group> groups_;            // one for each flat group of the tree
  std::vector<GroupSettings> settings_;  // of each parameter group

 private:
  [[nodiscard]] int group_of(const fsdp::ShardedParameter& parameter) const;
  [[nodiscard]] c10::ScalarType state_dtype(const Group& group) const;
  [[nodiscard]] bool has_master(const Group& group) const;
  void resolve_groups();
  template <class F>
  void visit(const std::vector<fsdp::ShardedGroup>& all, F&& f);
  void make_state(const fsdp::ShardedGroup& shard, Group& group) const;

  fsdp::UnitHandle root_;
  Setup setup_;
};

}  // namespace hyper_parallel::optim
