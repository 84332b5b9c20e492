#pragma once
// The engine's public face: parameters go in as slots, forwards run inside a ForwardScope, everything else happens in autograd.
// No module type appears here; a front end (nn/, python/) maps its modules onto slots and scopes.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/fsdp/comm_hooks.h>
#include <hyper_parallel/fsdp/policy.h>

namespace hyper_parallel {

class DTensor;

namespace fsdp {

class ParamGroup;
class Unit;

/// The tensor that a program sees as a parameter where that is not the sharded tensor itself but one around it (Python: a DTensor
/// of torch). It has the `requires_grad` and the `.grad` that the engine goes by; the sharded tensor then has neither.
/// Thread safety: that of the unit.
class HP_API ParameterLeaf {
 public:
  ParameterLeaf() = default;
  ParameterLeaf(const ParameterLeaf&) = delete;
  ParameterLeaf& operator=(const ParameterLeaf&) = delete;
  virtual ~ParameterLeaf();
  [[nodiscard]] virtual bool requires_grad() const = 0;
  /// This rank's part of its gradient; undefined while it has none.
  [[nodiscard]] virtual at::Tensor grad() const = 0;
  /// Makes `part` this rank's part of its gradient; undefined: takes the gradient away.
  virtual void set_grad(const at::Tensor& part) = 0;
  /// Its gradient is complete.
  virtual void grad_arrived() {}
  /// Changes with every write that torch counts.
  [[nodiscard]] virtual std::uint64_t version() const = 0;
};

/// What a front end does for a unit. Both may be empty.
struct FrontEnd {
  /// Makes the modules show the gathered parameters (true), or the sharded ones again: around a forward, a backward, and what the
  /// user gathers by hand.
  std::function<void(bool gathered)> show = {};
  /// Takes over what the program has put in the place of leaves. Called before shards are read or described.
  std::function<void()> follow = {};
};

/// A parameter on its way into a unit.
struct ParameterSlot {
  std::string name;      ///< relative to its module of the unit, e.g. "attention.wq.weight"
  at::Tensor parameter;  ///< the handle that the model's code holds; becomes a view of the unit's gathered storage
  /// Put the sharded leaf where the parameter was registered: one call per place (tied parameters have several).
  std::vector<std::function<void(const at::Tensor& sharded)>> install = {};
  int member = 0;  ///< which of the modules that form the unit registers it
  /// Makes what the program sees in place of the sharded tensor. Empty: nothing, it sees that tensor.
  std::function<std::shared_ptr<ParameterLeaf>(const at::Tensor& sharded)> make_leaf = {};
};

/// One managed parameter, as optimizers, clipping and state dictionaries see it.
struct ShardedParameter {
  std::string name;                      ///< fully qualified below the outermost unit
  at::Tensor sharded;                    ///< leaf: this rank's part, master dtype, possibly with zero elements
  std::vector<std::int64_t> full_shape;  ///< shape of the whole parameter, before source axes cut it
  std::int64_t offset = 0;               ///< first element in the group's flat shard
  std::int64_t numel = 0;                ///< elements of this rank's part
  at::Tensor grad = {};  ///< this rank's part of its gradient: `.grad` or fp32 main gradient; undefined without one
};

/// The flat shard of the parameters of one unit that share a master dtype and trainability. A snapshot: ask for it again in each
/// step, since a backward may give the gradients new memory.
struct ShardedGroup {
  at::Tensor shard;  ///< 1-D, master dtype, padding included (padding is always zero in `grad`)
  at::Tensor grad;   ///< 1-D, same shape, fp32 for main gradients; every gradient is a view of it. Undefined for frozen groups
  std::vector<ShardedParameter> parameters;
  Comm shard_comm;  ///< the ranks over which the flat shard is cut; this rank alone for parameters that stay whole
  /// The ranks that hold the same shard (HSDP, source axes that hold copies, all for whole ones); undefined or of size 1
  /// otherwise.
  Comm replicate_comm;
  Comm parts_comm;  ///< the ranks that hold each element once: those of shard_comm, times the source axes that cut
  Comm unit_comm;   ///< all ranks of the unit
  bool trainable = true;
};

/// Waits for an asynchronous unshard; waiting twice, or after the unit was freed, is harmless.
class HP_API UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::weak_ptr<Unit> unit) : unit_(std::move(unit)) {}
  /// The gathered parameters are ready to use afterwards. CommError, TimeoutError.
  void wait();

 private:
  std::weak_ptr<Unit> unit_;
};

/// Bytes that the engine holds on this rank, by purpose; see docs/design/005-memory-and-traffic.md for the formulas.
struct MemoryUse {
  std::int64_t shards = 0;     ///< flat shards
  std::int64_t gradients = 0;  ///< flat sharded gradients
  std::int64_t pool = 0;       ///< gathered parameters, reduce and receive buffers: everything taken from the pool so far
  std::int64_t copies = 0;     ///< what mapping shards of a host's ranks needs: this rank's in the compute dtype, page boundaries
  std::int64_t mapped = 0;     ///< shards and copies of other ranks of the host that are seen in place; no memory of this rank
  /// Memory of this rank; shards and copies are what its peers see in place.
  [[nodiscard]] std::int64_t total() const { return shards + gradients + pool + copies; }
};

/// How the steps that UnitHandle::plan_memory looks at accumulate gradients.
struct Accumulation {
  bool local = false;    ///< some backwards run with set_requires_gradient_sync(false)
  bool partial = false;  ///< some backwards run with set_requires_all_reduce(false)
};

/// A unit of sharding: parameters that are gathered together just in time and whose gradients are reduced together. A cheap
/// handle. On an empty one everything but defined() and unit()
/// throws ValueError.
///
/// Units that were made inside each other's modules form a tree; setters with `recurse` reach all units below.
/// Thread safety: the thread that runs the model, and autograd's threads on its behalf.
class HP_API UnitHandle {
 public:
  UnitHandle() = default;
  explicit UnitHandle(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}
  [[nodiscard]] bool defined() const noexcept { return unit_ != nullptr; }
  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] bool is_unsharded() const;

  /// Gathers the parameters. Collective: over the shard group, and the first time, where the ranks compare, over the whole mesh.
  /// No-op when they are there; with `async_op` the gather only starts. They stay, also between forwards, until reshard(), a
  /// forward that frees them by its own rule, or the end of a backward; after an optimizer step in between they are stale.
  UnshardHandle unshard(bool async_op = false) const;
  /// Frees the gathered parameters. Local, idempotent.
  void reshard() const;

  // Switches. With `recurse` they reach all units below; all are local and must be set alike on all ranks.

  /// False: backward keeps full local gradients (no communication) until a backward runs with true.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true) const;
  /// False: gradients are reduced over the shard group only and parked, in the reduce dtype, until a backward runs with true;
  /// then all of it is reduced over the replicas and becomes `.grad`. Also without replicas (as in HyperParallel; FSDP2 ignores
  /// it there).
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true) const;
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true) const;
  /// False: parameters stay gathered after backward. A backward that completes gradients makes them stale, since an optimizer
  /// step may follow: then the next forward gathers again. After a backward without gradient synchronisation, without all-reduce
  /// or that is not the last, the next forward uses them as they are. Frozen units are gathered again only when their shards are
  /// written.
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true) const;
  /// False: the end of backward does not wait for reductions, and their gradients appear with the next backward for which it is
  /// true (or hsdp_sync_stream). For the whole tree.
  void set_is_last_backward(bool is_last_backward) const;
  /// The optimizer step may still be running when the next forward or unshard() of the tree begins, on another thread or on a
  /// device's stream: `wait` is called once, on the thread of that forward, before the shards are read (PyTorch: an event; here
  /// for example `[&step] { step.get(); }` of a std::future, or a stream's wait for an event). What it throws, the forward
  /// throws. An empty function takes an earlier one back. Whatever else reads or writes parameters must wait by itself. Local.
  void set_post_optim_event(std::function<void()> wait) const;
  /// False: the backward of this unit's forward does not read its parameters (an embedding look-up), so do not gather them there.
  void set_unshard_in_backward(bool unshard_in_backward) const;
  /// False: a unit that ran forward and got no gradient is left out of the reduction instead of taking part with zeros. Only
  /// right when it gets none on every rank.
  void set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse = true) const;
  /// "avg" (default) or "sum", in any case, spaces ignored: how gradients of different ranks are combined. ValueError otherwise.
  void set_reduce_op_type(std::string_view op, bool recurse = true) const;
  /// Every reduction of this unit is multiplied by it; nothing that was reduced before is. nullopt: off. ValueError: not finite.
  void set_gradient_scaling_factor(std::optional<double> factor = {}) const;
  /// The same from a tensor of one element, read at once. ValueError: other sizes.
  void set_gradient_scaling_factor(const at::Tensor& factor) const;
  /// Gradients are divided by it instead of by the number of ranks. nullopt: off. ValueError: zero or not finite.
  void set_gradient_divide_factor(std::optional<double> factor, bool recurse = true) const;
  /// These units are gathered, in this order, right after this one is for forward (backward), instead of the one that came next
  /// the last time; none for an empty list. nullopt: as learned. ValueError: a handle without unit.
  void set_modules_to_forward_prefetch(const std::optional<std::vector<UnitHandle>>& units) const;
  void set_modules_to_backward_prefetch(const std::optional<std::vector<UnitHandle>>& units) const;
  /// Communication of the user's own for this unit. An empty function restores ours. ValueError: gradients are accumulated,
  /// parked or in flight.
  void set_custom_all_gather(CustomAllGather all_gather) const;
  void set_custom_reduce_scatter(CustomReduceScatter reduce_scatter) const;
  void set_all_reduce_hook(AllReduceHook hook, bool recurse = true) const;

  /// Waits for the reductions that backwards before the last one left in flight and gives their gradients to the parameters of
  /// the tree. Collective if there are any.
  void wait_for_gradients() const;
  /// Drops what an aborted iteration left behind: gathers in flight, unsharded copies, accumulated and parked gradients. Keeps
  /// .grad and main gradients. Collective when communication was in flight. After an exception in a backward, the next forward
  /// does it by itself; after one in a forward nothing is left but gradients that earlier backwards without synchronisation
  /// accumulated. \param recursive the whole tree, or this unit only
  void reset_iter_state(bool recursive = true) const;
  /// Clears the gradients and main gradients of all parameters of the tree (or fills them with zeros).
  void zero_grad(bool set_to_none = true) const;
  /// The fp32 gradient of a sharded parameter of the tree (MixedPrecisionPolicy::apply_grad_on_fp32_main_grad); undefined while
  /// it has none. ValueError: no parameter of the tree.
  [[nodiscard]] at::Tensor main_grad(const at::Tensor& sharded) const;

  /// The flat groups of this unit, or of the whole tree below it in wrap order. Re-adopts shards that torch::load has moved.
  /// Local.
  [[nodiscard]] std::vector<ShardedGroup> groups(bool recurse = true) const;
  /// The parameters as distributed tensors (local shard, layout and global shape), by name. Local; shares memory.
  [[nodiscard]] std::vector<std::pair<std::string, DTensor>> named_dtensors(bool recurse = true) const;
  /// The gradients likewise; parameters without gradient are left out.
  [[nodiscard]] std::vector<std::pair<std::string, DTensor>> named_grad_dtensors(bool recurse = true) const;
  [[nodiscard]] MemoryUse memory_use() const;
  /// What memory_use will be from the third step on, if every forward runs each unit of the tree once, in the order of the
  /// modules. Local, before the first step.
  [[nodiscard]] MemoryUse plan_memory(const Accumulation& accumulation = {}) const;
  /// The group of all ranks that see different data: shard axis and, with HSDP, replicate axis.
  [[nodiscard]] Comm data_parallel_comm() const;
  /// The group of all ranks that hold parts or copies of the unit's parameters: data_parallel_comm times the source axes.
  [[nodiscard]] Comm unit_comm() const;

  /// For front ends, once.
  void set_front_end(FrontEnd front_end) const;
  [[nodiscard]] const std::shared_ptr<Unit>& unit() const noexcept { return unit_; }
  /// The unit of a handle that must have one. ValueError: it is empty.
  [[nodiscard]] Unit& get() const;

 private:
  /// Calls f(unit, group, parameter index) for every managed parameter, after its leaf was checked.
  void visit(bool recurse, const std::function<void(Unit&, ParamGroup&, std::size_t)>& f) const;

  std::shared_ptr<Unit> unit_;
};

/// UnitHandle::wait_for_gradients for every tree whose backward ran on this thread and left reductions in flight. Collective if
/// there are any.
HP_API void hsdp_sync_stream();

/// Parameters of a whole tree gathered for a while, for example to sample from a model without gathering each unit for every
/// token: unshard() on all units, reshard() at the end of the scope. Forwards in it free nothing; a backward does. No unit of the
/// tree may be wrapped in it. Collective. ValueError: empty handle. CommError, TimeoutError: then nothing stays gathered that was
/// not before.
class HP_API UnshardScope {
 public:
  explicit UnshardScope(const UnitHandle& root);
  ~UnshardScope();
  UnshardScope(const UnshardScope&) = delete;
  UnshardScope& operator=(const UnshardScope&) = delete;

 private:
  UnitHandle root_;
};

/// A unit inside the modules of another one, with the paths of its modules, by member, below the outer unit's module.
struct ChildUnit {
  std::shared_ptr<Unit> unit;
  std::vector<std::string> paths;
};

/// Takes the slots' parameters over and installs their sharded leaves. Local: ranks that disagree find out at their first
/// forward.
///
/// \param name shown in messages until an outer unit gives the path, e.g. the module's class
/// \param members number of modules that run one after the other and are gathered for the first and freed after the last of them
/// \param children every unit inside this unit's modules, at any depth; their trees become part of this one
/// ValueError (nothing is changed then): no mesh rank, mesh of more than 2 axes, shard dim out of range, a parameter that another
/// unit manages.
[[nodiscard]] HP_API std::shared_ptr<Unit> make_unit(const std::string& name, std::vector<ParameterSlot> slots,
                                                     const FullyShardOptions& options, const std::vector<ChildUnit>& children,
                                                     int members = 1);

/// One forward of a unit. Construction is the pre-forward phase; `finish` the post-forward phase; destruction without `finish`
/// (an exception) brings the unit back to its sharded state.
class HP_API ForwardScope {
 public:
  /// \param member which of the modules that form the unit runs (see make_unit)
  explicit ForwardScope(Unit& unit, int member = 0);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Floating inputs come back in the compute dtype when the policy says so.
  [[nodiscard]] at::Tensor input(const at::Tensor& tensor) const;
  [[nodiscard]] bool casts_inputs() const;
  /// Output cast and the hook that starts this unit's backward.
  [[nodiscard]] at::Tensor output(const at::Tensor& tensor);
  void finish();

 private:
  Unit& unit_;
  int member_;
  bool finished_ = false;
};

}  // namespace fsdp

using fsdp::hsdp_sync_stream;
using fsdp::UnshardScope;

}  // namespace hyper_parallel
