#pragma once
// The parameters of a unit that share dtype, trainability and place: their flat shard, their gathered storage, their gradients.
//
//   shard  [S]     flat, master dtype, lives for ever          S_i = views, the registered leaves
//   full   [F]     compute dtype, memory from the pool         P_i = views, what the model computes with
//                  or what peers of the same host have: then in compute dtype each rank has a copy of its shard
//   part   [F/k]   compute dtype, memory from the pool         what is left after forward when it is cut over k ranks
//   grad   [S]     flat, from the first backward               S_i.grad (or the main gradients) = views
//   pack   [W, S]  one row per receiving rank, memory from the pool
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/fsdp/comm_hooks.h>
#include <hyper_parallel/fsdp/group_layout.h>
#include <hyper_parallel/fsdp/unit.h>

#include "comm/rows.h"
#include "fsdp/buffer.h"
#include "fsdp/source_layout.h"
#include "fsdp/unwritten.h"

namespace hyper_parallel::fsdp {

/// How a unit gathers and reduces; shared by its groups, may change between steps.
struct CommSettings {
  ReduceOp reduce_op = ReduceOp::kAvg;
  std::optional<double> divide_factor = {};   ///< instead of the number of ranks
  std::optional<double> scaling_factor = {};  ///< of every reduction
  CustomAllGather all_gather = {};
  CustomReduceScatter reduce_scatter = {};
  AllReduceHook all_reduce_hook = {};
};

struct GroupOptions {
  std::string unit;  ///< name of the owning unit: label of every collective
  Comm shard_comm;
  Comm replicate_comm;     ///< undefined without replicas
  Comm parts_comm;         ///< see ShardedGroup
  Comm post_forward_comm;  ///< among which ranks the gathered parameters are cut after forward; undefined otherwise
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  bool replicated = false;  ///< whole on every rank, though the unit is sharded
  bool main_grad = false;   ///< gradients are fp32 and not in `.grad`
  bool offload = false, pin_memory = false;
  at::DeviceType device = at::kCPU;  ///< of the gathered parameters, and without offload of the shards; parameters may be on meta
  const CommSettings* settings = nullptr;
  std::vector<SourceBlock> source = {};               ///< by parameter; empty without source axes
  std::int64_t whole_copies = 1, partial_copies = 1;  ///< those of every block in `source`
};

/// Bytes that a group takes from the pool, by buffer; zero for a buffer that it does not need.
struct GroupFootprint {
  std::size_t full = 0, gathered = 0, part = 0;
  std::size_t wire = 0, wire_receive = 0;
  MemoryPool::Use gathered_use = MemoryPool::Use::kData;
  std::size_t accumulation = 0, accumulation_receive = 0;  ///< only when they differ from the wire's
  std::size_t partial = 0, exchange = 0;
  MemoryPool::Use receive_use = MemoryPool::Use::kData;
  bool staged = false;      ///< every reduction goes through `partial`
  bool replicated = false;  ///< has replicas: `exchange` is needed
  bool together = false;    ///< gathers in one operation with others of the unit that say so
  bool custom = false;      ///< reduces by the user's own means: `exchange` is needed for results that are added to parked ones
  bool trainable = false;
};

struct ManagedParameter {
  std::string name;                       ///< relative to its module of the unit
  int member = 0;                         ///< which of the unit's modules that is
  std::vector<std::int64_t> full_shape;   ///< of the gathered parameter
  std::vector<std::int64_t> whole_shape;  ///< of the parameter of which that is a block; the same without source axes
  at::Tensor full;                        ///< P, the handle in the model's code
  at::Tensor sharded;                     ///< S, the registered leaf
  at::Tensor home;                        ///< where S must live: a view of the flat shard
  at::Tensor grad_home;                   ///< where the gradient must live: a view of the flat gradient
  at::Tensor main_grad;                   ///< the gradient, when it is not S.grad
  std::shared_ptr<ParameterLeaf> leaf;    ///< what the program sees in place of S; null: S itself
  bool trainable = true;
  bool uninitialised = false;  ///< began on the meta device, and no function of ours has given it values
  Unwritten unwritten;         ///< tells whether somebody else has
  /// Some backward since the last reduction produced a gradient here, on this rank or, once it was reduced, on those it was
  /// reduced with.
  bool present = false;
};

/// A communication under way: ours or the user's.
class PendingComm {
 public:
  PendingComm() = default;
  PendingComm(Work work) : work_(std::move(work)) {}  // NOLINT(google-explicit-constructor)
  explicit PendingComm(CommWait custom) : custom_(std::move(custom)) {}
  [[nodiscard]] bool pending() const { return work_.pending() || custom_; }
  void wait() {
    work_.wait();
    if (const CommWait custom = std::exchange(custom_, {})) custom();
  }
  /// Work::advance; a custom operation is left for wait.
  void advance() { work_.advance(); }

 private:
  Work work_;
  CommWait custom_;
};

/// How to gather.
struct GatherWay {
  std::int64_t pass = 0;  ///< number of the forward pass: shards do not change within one
  bool map = true;        ///< peers' memory will do: the unit is freed before anybody writes shards
};

/// Gathers, frees, and reduces one group. Knows no schedule: the unit says when.
class ParamGroup {
 public:
  ParamGroup(GroupLayout layout, std::vector<ParameterSlot> slots, GroupOptions options);

  [[nodiscard]] const GroupLayout& layout() const { return layout_; }
  [[nodiscard]] std::vector<ManagedParameter>& parameters() { return parameters_; }
  [[nodiscard]] const std::vector<ManagedParameter>& parameters() const { return parameters_; }
  [[nodiscard]] const GroupOptions& options() const { return options_; }
  [[nodiscard]] const at::Tensor& shard() const { return shard_; }
  [[nodiscard]] const at::Tensor& grad() const { return grad_; }
  /// The gradient of a parameter: `.grad` of its leaf or its main gradient. Call gradient_changed after replacing it.
  [[nodiscard]] at::Tensor& gradient(ManagedParameter& parameter) const {
    at::Tensor& grad = options_.main_grad ? parameter.main_grad : parameter.sharded.mutable_grad();
    if (parameter.leaf) grad = parameter.leaf->grad();
    return grad;
  }
  void gradient_changed(ManagedParameter& parameter) const {
    if (parameter.leaf) parameter.leaf->set_grad(options_.main_grad ? parameter.main_grad : parameter.sharded.grad());
  }
  [[nodiscard]] bool trainable() const;   ///< some parameter is
  [[nodiscard]] bool has_frozen() const;  ///< some parameter is
  /// True when the gathered storage is the shard itself (world of one, same dtype): nothing ever comes or goes.
  [[nodiscard]] bool aliased() const { return aliased_; }
  void rename_unit(const std::string& unit);

  /// Makes every leaf a view of the flat shard again (torch::load and Module::to replace its storage), taking over the new
  /// values. True if anything had moved.
  bool readopt();
  /// Changes with every write to a shard that torch counts (not those of its C++ optimizers).
  [[nodiscard]] std::uint64_t version() const;

  /// True while the shard has no memory.
  [[nodiscard]] bool on_meta() const { return shard_.is_meta(); }
  /// Gives a shard on the meta device memory; its values are marked as unwritten. No-op otherwise.
  void materialize();
  /// The block of `whole` that is gathered here: all of it without source axes.
  [[nodiscard]] at::Tensor block_of(const at::Tensor& whole, std::size_t i) const;
  /// Copies this rank's part of `whole` (any dtype) into the shard.
  void set_value(std::size_t i, const at::Tensor& whole);
  /// Part of the gathered parameter i that `shard_rank` owns; a view where possible.
  [[nodiscard]] at::Tensor part_of(const at::Tensor& whole, std::size_t i, int shard_rank) const;
  /// Where this rank's part of parameter i is, as one row.
  [[nodiscard]] at::Tensor home_row(std::size_t i) const;
  /// ValueError, naming the parameters, while the shard has no memory.
  void check_memory(std::string_view op) const;
  /// The dtype that all leaves have got from outside (Module::to), nullopt when it is the shard's or they differ.
  [[nodiscard]] std::optional<at::ScalarType> dtype_from_outside() const;
  /// Changes the master dtype, in which .grad is kept as well, and with it the dtypes of compute and reduction. Values of
  /// leaves that were converted from outside are taken over. Local accumulation and gathered copies must be gone.
  void convert(at::ScalarType master, at::ScalarType compute, at::ScalarType reduce);

  /// From now on, what is gathered by rows here is one operation with what is gathered by rows in `others`, whose start_gather
  /// and finish_gather follow this group's. They have the same shard group.
  void gather_together(std::vector<ParamGroup*> others) {
    others_ = std::move(others);
    for (ParamGroup* group : others_) group->follows_ = true;
  }
  /// From the shards, or, after cut(), from the parts that are left.
  void start_gather(const GatherWay& way, MemoryPool& pool);
  void finish_gather(MemoryPool& pool);
  /// The gather in flight lets peers read this rank's shard, and goes on doing so until wait_for_readers or drop_gather.
  [[nodiscard]] bool sends_shard() const { return sends_shard_ && gather_.pending(); }
  /// Waits for a gather in flight and throws its result away.
  void drop_gather(MemoryPool& pool);
  void free_full(MemoryPool& pool);
  /// Keeps this rank's part of the gathered parameters and frees the rest. Without post_forward_comm: free_full.
  void cut(MemoryPool& pool);

  // Shards that peers have mapped: docs/design/009-same-host.md.

  /// The gathered parameters are, or are about to be, what peers have.
  [[nodiscard]] bool mapped() const { return mapping_ || full_.lent(); }
  /// A phase begins that may read what was gathered in an earlier one.
  void go_on_reading() { reading_ = reading_ || full_.lent(); }
  /// The phase is over: peers may write their shards as far as this rank is concerned. True if it had gathered any. Local.
  bool finish_reading();
  /// Waits until finish_reading was called by all ranks that gathered with this one, and until peers have copied what they read
  /// of this rank's shard. Afterwards this rank may write it.
  void wait_for_readers();
  /// Bytes besides the shard that mapping needs, and bytes of peers' memory that it shows.
  [[nodiscard]] std::int64_t copy_bytes() const;
  [[nodiscard]] std::int64_t mapped_bytes() const { return gathered_slices_.mapped_bytes(); }
  /// What copy_bytes is once it was gathered. \param map see GatherWay
  [[nodiscard]] std::int64_t planned_copy_bytes(bool map) const;

  /// Adds this rank's gradients (by parameter, undefined where there is none) to the local accumulation.
  void accumulate(std::vector<at::Tensor>& gradients, MemoryPool& pool);
  /// Packs what was accumulated and `gradients` for the reduction; zeros where there is nothing. Local, so that the gathered
  /// parameters can be freed before launch_reduce takes receive space.
  /// \param again the flat gradient holds an earlier reduction of the same backward, to which this one is added
  void start_reduce(std::vector<at::Tensor>& gradients, bool again, MemoryPool& pool);
  /// \param park keep the result, reduced over the shard group only, and add it to the next reduction
  void launch_reduce(bool park, MemoryPool& pool);
  /// Waits for the stage in flight and starts the next one; false once the flat gradient is complete.
  [[nodiscard]] bool advance_reduce(MemoryPool& pool);
  /// Drops local accumulation, parked results and reductions in flight.
  void reset(MemoryPool& pool);
  /// Holds gradients that have not reached the flat gradient: accumulated, parked or in flight.
  [[nodiscard]] bool holds_gradients() const { return accumulated_ || parked_ || stage_ != Stage::kIdle; }
  /// The unit's settings have changed what is sent: buffers are made anew. Only while holds_gradients() is false.
  void settings_changed();

  /// After the reductions since the last forget_presence, `present` is what it is on all of `ranks` ranks.
  [[nodiscard]] bool knows_presence(int ranks) const {
    return ranks == 1 || (!custom_reduced_ && layout_.world() * replicas_ == ranks);
  }
  void forget_presence();
  /// Gives its gradient to parameter i after a reduction in which some rank had one for it.
  void install_grad(std::size_t i);
  /// \param map see GatherWay
  [[nodiscard]] GroupFootprint footprint(bool map) const;
  /// Nobody to reduce with: gradients go straight into the flat gradient.
  [[nodiscard]] bool alone() const;
  /// Bytes that this group holds outside the pool.
  [[nodiscard]] std::int64_t shard_bytes() const { return static_cast<std::int64_t>(shard_.nbytes()); }
  [[nodiscard]] std::int64_t shard_bytes_held() const { return on_meta() ? 0 : shard_bytes(); }
  [[nodiscard]] std::int64_t grad_bytes() const;
  /// What grad_bytes is once there is a gradient, if zero_grad(set_to_none=true) goes before each step.
  [[nodiscard]] std::int64_t planned_grad_bytes() const;

 private:
  /// One copy of a gradient, or of a piece of it, into a pack buffer.
  struct Piece {
    std::size_t parameter = 0;
    std::vector<std::int64_t> view = {};  ///< shape in which the whole gradient is copied; empty: the range below of `dim`
    std::int64_t dim = 0, start = 0, length = 0;
    at::Tensor place = {};
  };
  /// Gradients of all ranks' shards, row r for rank r, and the space into which the peers' rows arrive.
  struct Pack {
    SwappedBuffer buffer;
    SwappedBuffer receive;
    std::vector<Piece> pieces;
    std::vector<at::Tensor> padding;
  };
  /// An all-reduce has two stages of its own, so that both its phases travel while something computes.
  enum class Stage { kIdle, kReduceScatter, kAllReduce, kSpread };

  void fill_shard(const std::vector<ParameterSlot>& slots);
  [[nodiscard]] at::Tensor allocate_shard();
  [[nodiscard]] bool can_map() const;
  [[nodiscard]] bool maps_shard() const { return compute_.dtype() == master_.dtype(); }
  [[nodiscard]] std::int64_t slice_bytes() const;
  bool start_mapping(const GatherWay& way);
  [[nodiscard]] RowGather row_gather(bool from_shard, MemoryPool& pool);
  void build_full_views();
  void rehome();
  void set_dtypes(at::ScalarType compute, at::ScalarType reduce);
  void build_gather_copies();
  [[nodiscard]] MemoryPool::Use gathered_use() const;
  [[nodiscard]] bool in_one_piece(std::size_t i) const;
  void unpack_row(int rank, const void* row, MemoryPool& pool);
  void make_leaves(const std::vector<ParameterSlot>& slots);
  [[nodiscard]] at::Tensor own_part(const at::Tensor& whole, std::size_t i) const;
  [[nodiscard]] c10::Allocator* host_allocator() const;
  [[nodiscard]] PendingComm all_gather(const Comm& comm, const at::Tensor& output, const at::Tensor& input) const;
  void choose_wire_dtype();
  [[nodiscard]] Pack make_pack(at::ScalarType dtype) const;
  [[nodiscard]] MemoryPool::Use receive_use() const;
  [[nodiscard]] std::vector<Piece> pack_pieces(const at::Tensor& flat) const;
  [[nodiscard]] std::int64_t exchange_numel() const;
  void ensure_grad();
  void ensure_packs();
  void release_grad();
  [[nodiscard]] bool any_grad();
  [[nodiscard]] bool kept_elsewhere() const;
  [[nodiscard]] bool prepare_grad(bool keep);
  void pack(Pack& pack, std::vector<at::Tensor>& gradients, bool add);
  void reduce_alone(std::vector<at::Tensor>& gradients, bool add);
  void check_gradients(const std::vector<at::Tensor>& gradients) const;
  [[nodiscard]] std::pair<double, double> scales() const;
  [[nodiscard]] bool staged() const;
  [[nodiscard]] Pack& accumulation() { return accum_dtype_differs_ ? accumulation_ : wire_; }
  void launch_scatter(MemoryPool& pool);
  void finish_scatter(MemoryPool& pool);
  void finish_reduce(MemoryPool& pool);
  [[nodiscard]] const at::Tensor& write_presence(at::Tensor& notes, const Comm& comm) const;
  void read_presence(const at::Tensor& notes, const Comm& comm);
  [[nodiscard]] std::string describe(std::size_t i) const;

  GroupLayout layout_;
  GroupOptions options_;
  std::vector<ManagedParameter> parameters_;
  at::TensorOptions master_, compute_;
  int rank_ = 0;
  int replicas_ = 1;

  at::Tensor shard_, grad_;
  at::Tensor spare_grad_;   ///< the one before, which a .grad referred to when local accumulation began
  bool may_alias_ = false;  ///< the guard's strictness, decided once
  bool aliased_ = false;    ///< world 1, same dtype: the gathered storage is the shard itself
  SwappedBuffer full_;
  SwappedBuffer gathered_;                                         ///< rank-major gather output when it is not the full buffer
  SwappedBuffer part_;                                             ///< this rank's part of full_ between forward and backward
  SwappedBuffer row_;                                              ///< one rank's part of it, wherever that is
  std::vector<std::vector<at::Tensor>> row_sources_, row_places_;  ///< by rank: parts of parameters that lie in several pieces
  PendingComm gather_;
  bool reads_rows_ = false;                     ///< the gather in flight hands out its rows
  bool unpacks_ = false;                        ///< and they are wanted
  bool joined_ = false;                         ///< it is that of another group
  bool follows_ = false;                        ///< as it is whenever it can
  std::vector<ParamGroup*> others_, together_;  ///< gather with this one: whenever they can, and now
  std::vector<RowGather> parts_;                // kept for its capacity
  PendingComm sent_;                            ///< an earlier one, of which peers may still read this rank's row
  bool sends_shard_ = false;                    ///< it sends this rank's from the shard itself
  bool has_part_ = false;
  bool regathering_ = false;  ///< the gather in flight joins parts

  GatheredBuffer gathered_slices_;   ///< where shards or their copies are mapped
  at::Tensor copy_;                  ///< of the shard in the compute dtype, if that is another: this rank's slice
  std::int64_t copied_in_pass_ = 0;  ///< when it was written
  bool mapping_ = false;             ///< the gather in flight maps
  bool reading_ = false;             ///< peers' slices are read in this phase
  bool wait_due_ = false;            ///< between finish_reading and wait_for_readers
  bool map_refused_ = false;         ///< by the system, on some rank

  at::ScalarType wire_dtype_ = at::kFloat;
  bool accum_dtype_differs_ = false;
  Pack wire_;
  Pack accumulation_;       ///< only when it has another dtype than the wire
  SwappedBuffer partial_;   ///< reduced over the shard group, not yet over the replicas
  SwappedBuffer exchange_;  ///< workspace of the all-reduce over the replicas, and of custom reduce-scatters onto a parked result
  Pack* in_flight_ = nullptr;
  Stage stage_ = Stage::kIdle;
  PendingComm reduction_;
  bool accumulated_ = false;
  bool park_ = false;                              ///< the reduction in flight ends parked
  bool parked_ = false;                            ///< partial_ holds earlier results
  at::Tensor scatter_notes_, replica_notes_;       ///< a bit per parameter that has a gradient, by rank
  bool custom_reduced_ = false;                    ///< without such bits
  std::pair<double, double> scales_ = {1.0, 1.0};  ///< of the reduction in flight
  bool to_partial_ = false;                        ///< where the reduction in flight goes
  bool add_to_grad_ = false;
  std::vector<at::Tensor> sources_, places_;  // kept for their capacity
};

}  // namespace hyper_parallel::fsdp
