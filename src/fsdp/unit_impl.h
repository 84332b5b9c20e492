#pragma once
// A unit: its groups, its autograd node, and the phases of a step.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/fsdp/unit.h>

#include "fsdp/param_group.h"
#include "fsdp/source_layout.h"

namespace hyper_parallel::fsdp {

class Runtime;
class UnitNode;
struct ForwardPass;

/// Parameters that are gathered and reduced together. One per fully_shard call; shared by every handle.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  Unit(std::string name, const FullyShardOptions& options, SourceMesh mesh, Comm shard_comm, Comm data_parallel_comm);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  /// Once, before anything else.
  void add_groups(std::vector<std::unique_ptr<ParamGroup>> groups);
  /// Changes master dtypes; see fsdp::convert.
  void convert(const std::function<std::optional<at::ScalarType>(const ParamGroup&)>& choose);
  /// Converts groups whose leaves the module's own `to` has converted, all of them alike.
  void follow_module();
  void cast_buffers(at::ScalarType dtype);
  /// Puts the units below `children` into this unit's tree.
  void adopt(const std::vector<ChildUnit>& children);

  /// Units whose last gradients arrive together reduce in falling order of this.
  [[nodiscard]] std::uint64_t priority() const;

  // Phases, in the order of a step.
  void pre_forward();
  void post_forward(int member, bool completed);
  void pre_backward();
  /// The part of pre_backward that needs no gradient: gathers the parameters.
  void start_backward();
  void post_backward(std::vector<at::Tensor> gradients);
  /// After the last gradient of a backward: back to the sharded state.
  /// \param stale the backward completed gradients of the tree, so that an optimizer step may follow
  void end_backward(bool stale);

  /// Gradients of the tree are there, so that an optimizer step may follow.
  void gradients_completed();
  /// Takes over shards that torch::load has moved, and frees what was gathered from older ones. Before a gather for forward.
  void refresh();
  /// The user gathers by hand, in call `op`; see `held`.
  void start_hold(std::string_view op);
  void start_unshard(bool by_hand = false);
  void finish_unshard();
  void reshard();
  /// Afterwards no peer reads the shards for a gather of this unit.
  void finish_sending();
  /// Packs `gradients` (zeros where undefined), frees the parameters and starts the reduction.
  void start_reduce(std::vector<std::vector<at::Tensor>>& gradients);
  /// Moves the reduction one stage on; false once it is complete.
  [[nodiscard]] bool advance_reduce();
  void reset();

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] std::string qualified(const ManagedParameter& parameter) const {
    return qualified(parameter.member, parameter.name);
  }
  /// Name below the outermost unit of what has this name below a member of this unit.
  [[nodiscard]] std::string qualified(int member, const std::string& name) const;
  [[nodiscard]] const FullyShardOptions& options() const { return options_; }
  [[nodiscard]] std::vector<std::unique_ptr<ParamGroup>>& groups() { return groups_; }
  [[nodiscard]] const std::vector<std::unique_ptr<ParamGroup>>& groups() const { return groups_; }
  [[nodiscard]] const Comm& data_parallel_comm() const { return data_parallel_comm_; }
  /// All ranks: source axes included.
  [[nodiscard]] const Comm& unit_comm() const { return unit_comm_; }
  [[nodiscard]] const SourceMesh& mesh() const { return mesh_; }
  /// Gradients by group and parameter: undefined between backwards.
  [[nodiscard]] std::vector<std::vector<at::Tensor>>& no_gradients() { return gradients_; }
  [[nodiscard]] Runtime& runtime() { return *runtime_; }
  [[nodiscard]] bool is_root() const { return parent_ == nullptr; }
  [[nodiscard]] const Unit* parent() const { return parent_; }
  [[nodiscard]] bool in_backward() const { return in_backward_; }
  [[nodiscard]] bool is_unsharded() const { return state_ == State::kUnsharded; }
  [[nodiscard]] bool is_unsharding() const { return state_ == State::kUnsharding; }
  [[nodiscard]] bool trainable() const;
  /// A frozen parameter may be wanted after the last gradient of the unit is there, for those of its inputs: see FrozenWatch.
  [[nodiscard]] bool has_frozen() const;
  /// Its frozen parameters can be freed before the end of the backward that begins.
  [[nodiscard]] bool may_watch() const;
  /// Those whose graphs are alive.
  [[nodiscard]] std::vector<std::shared_ptr<ForwardPass>> passes() const;
  /// The one under way; null if no parameter is frozen.
  [[nodiscard]] const std::shared_ptr<ForwardPass>& pass() const { return pass_; }
  [[nodiscard]] const UnitNode* node() const;
  /// frozen_done will be called. \param gradients_due this backward reaches a trainable parameter
  void watch(bool gradients_due);
  /// Nothing of this backward wants the frozen parameters any more.
  void frozen_done();
  [[nodiscard]] bool holds_gradients() const;
  /// What must be equal on all ranks, one line per parameter.
  void describe(std::vector<std::string>& lines) const;
  /// This unit and all below, children first, in wrap order.
  void subtree(std::vector<Unit*>& units);
  /// This unit, or with `recurse` subtree().
  [[nodiscard]] std::vector<Unit*> reached(bool recurse);
  /// Units directly below, in module order.
  [[nodiscard]] std::vector<Unit*> children() const;

  /// The front end's answer to: which buffers do this unit's modules have? Names relative to the member.
  struct NamedBuffer {
    int member = 0;
    std::string name;
    at::Tensor buffer;
  };
  std::function<std::vector<NamedBuffer>()> list_buffers;
  /// Buffers by the name below the outermost unit.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> buffers() const;
  /// Those that began on the meta device and have no values.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> buffers_without_values() const;
  /// Gives memory to buffers on the meta device and marks them as unwritten.
  void materialize_buffers();

  int members = 1;  ///< modules that form this unit
  FrontEnd front_end;
  void show(bool gathered);

  /// The user gathered it by hand: a forward does not gather it again, and whoever changes the shards must reshard it.
  bool held = false;
  int scopes = 0;  ///< UnshardScopes around: forwards free nothing

  // Switches; see UnitHandle.
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  bool reduce_scatter_unused_params = true;
  /// Its gathers may show peers' shards: it is freed before these change.
  [[nodiscard]] bool maps() const { return reshard_after_backward; }
  [[nodiscard]] bool gathers_in_backward() const { return unshard_in_backward || recomputed; }
  using PrefetchList = std::optional<std::vector<std::weak_ptr<Unit>>>;
  PrefetchList forward_prefetch, backward_prefetch;
  CommSettings settings;
  void set_reshard_after_forward(std::optional<bool> value) {
    options_.reshard_after_forward = value ? std::optional<ReshardAfterForward>(*value) : std::nullopt;
  }

  enum class AfterForward { kKeep, kCut, kFree };
  [[nodiscard]] AfterForward after_forward() const;
  /// The memory budget that decides what happens after forward, if one does, and its decision.
  [[nodiscard]] const MemoryBudget* budget() const;
  bool budget_keeps = false;

  // Bookkeeping of the runtime.
  int index = 0;
  bool awaits_backward = false;      ///< an output that needs a gradient was returned since the last backward
  bool ran = false;                  ///< in a forward since the first one after the last backward began
  bool owes_reduction = false;       ///< ran a forward with gradients since its last reduction
  bool reduced_in_backward = false;  ///< took part in a reduction of the backward that is running
  bool awaits_install = false;       ///< its flat gradients hold reductions that the leaves have not been given
  bool recomputed = false;           ///< ran inside a checkpoint since the last backward, which will run it again
  int segments_in_backward = 0;      ///< checkpointed segments with parameters of this unit whose backward is running

 private:
  enum class State { kSharded, kUnsharding, kUnsharded };

  void reconnect();
  void connect(ManagedParameter& parameter, std::size_t group, std::size_t index_in_group);
  template <class LookAhead>
  void unshard_and(const LookAhead& look_ahead);
  void call_hooks(std::vector<at::Tensor>& gradients);
  void sync_requires_grad();
  void verify_once(bool& done, const char* what);
  void readopt();
  void leave_mapping();
  [[nodiscard]] bool mapped() const;
  void cut();
  void free_after_backward();
  void begin_pass();
  [[nodiscard]] bool keeps_frozen() const { return has_frozen() && frozen_ != Frozen::kDone; }
  [[nodiscard]] bool stale();
  [[nodiscard]] std::uint64_t version() const;
  [[nodiscard]] std::string after_forward_text() const;

  std::string name_;
  std::vector<std::string> paths_;  ///< of the modules below the outermost one, by member; empty while this is the outermost
  FullyShardOptions options_;
  SourceMesh mesh_;
  Comm shard_comm_, data_parallel_comm_, unit_comm_;
  std::vector<std::unique_ptr<ParamGroup>> groups_;
  c10::intrusive_ptr<UnitNode> node_;
  struct NodeInput {
    std::size_t group = 0, parameter = 0;
  };
  std::vector<NodeInput> node_inputs_;                // by input number of the node
  std::vector<std::vector<int>> input_of_parameter_;  // [group][parameter], -1: not connected yet
  std::shared_ptr<Runtime> runtime_;
  Unit* parent_ = nullptr;
  std::vector<std::weak_ptr<Unit>> children_;
  State state_ = State::kSharded;
  std::int64_t gathered_pass_ = 0;  ///< forward pass in which the parameters were gathered
  bool aliased_ = false;            ///< every group is: gathering does nothing
  bool has_parts_ = false;          ///< after cut()
  bool kept_ = false;               ///< gathered in an earlier pass, with nothing since that could have changed the shards
  std::uint64_t kept_version_ = 0;  ///< of the shards then
  bool in_backward_ = false;
  bool awaits_gradients_ = false;  ///< an output has got its gradient and the parameters, which compute on, have not
  /// In the backward that is running: nobody knows until when they are wanted, FrozenWatch does, they are not any more.
  enum class Frozen { kUnknown, kWatched, kDone } frozen_ = Frozen::kUnknown;
  bool gradients_due_ = false;  ///< while watched: post_backward is still to come
  bool by_hand_ = false;        ///< start_hold since the last backward
  bool shown_ = false;          ///< the front end shows the gathered parameters
  std::shared_ptr<ForwardPass> pass_;
  std::vector<std::weak_ptr<ForwardPass>> passes_;
  int running_ = 0;               ///< forwards under way: a forward may call another method of its module as a forward
  std::vector<int> members_run_;  ///< members that have run since the unit was gathered for the first of them
  trace::AsyncSpan unshard_span_, reduce_span_;
  bool gather_verified_ = false;
  bool reduce_verified_ = false;
  std::unordered_map<const void*, Unwritten> unwritten_buffers_;  // by tensor
  std::vector<std::vector<at::Tensor>> gradients_;                // by group and parameter, empty between backwards
};

/// UnitHandle::plan_memory, with the present decisions about memory budgets.
[[nodiscard]] MemoryUse plan_memory(Unit& root, const Accumulation& accumulation);

}  // namespace hyper_parallel::fsdp
