#pragma once
// The parameters of a unit that share dtype and trainability: their flat shard, their gathered storage, their gradients.
//
//   shard  [S]     flat, master dtype, lives for ever          S_i = views, the registered leaves
//   full   [F]     compute dtype, memory from the pool         P_i = views, what the model computes with
//   grad   [S]     flat, master dtype, from the first backward S_i.grad = views
//   pack   [W, S]  one row per receiving rank, memory from the pool
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/fsdp/group_layout.h>
#include <hyper_parallel/fsdp/unit.h>

#include "fsdp/buffer.h"
#include "fsdp/unwritten.h"

namespace hyper_parallel::fsdp {

struct GroupOptions {
  std::string unit;  ///< name of the owning unit: label of every collective
  Comm shard_comm;
  Comm replicate_comm;  ///< undefined without replicas
  at::ScalarType compute_dtype = at::kFloat;
  at::ScalarType reduce_dtype = at::kFloat;
  at::DeviceType device = at::kCPU;  ///< where shards get their memory; parameters may still be on meta
};

/// Bytes that a group takes from the pool, by buffer; zero for a buffer that it does not need.
struct GroupFootprint {
  std::size_t full = 0, gathered = 0;
  std::size_t wire = 0, wire_receive = 0;
  std::size_t accumulation = 0, accumulation_receive = 0;  ///< only when they differ from the wire's
  std::size_t partial = 0, exchange = 0;
  bool trainable = false;
};

struct ManagedParameter {
  std::string name;  ///< relative to its module of the unit
  int member = 0;    ///< which of the unit's modules that is
  std::vector<std::int64_t> full_shape;
  at::Tensor full;       ///< P, the handle in the model's code
  at::Tensor sharded;    ///< S, the registered leaf
  at::Tensor home;       ///< where S must live: a view of the flat shard
  at::Tensor grad_home;  ///< where S.grad must live: a view of the flat gradient
  bool trainable = true;
  bool uninitialised = false;  ///< began on the meta device, and no function of ours has given it values
  Unwritten unwritten;         ///< tells whether somebody else has
  bool present = false;        ///< some backward since the last reduction produced a gradient here, on this rank
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
  [[nodiscard]] bool trainable() const;
  /// True when the gathered storage is the shard itself (world of one, same dtype): nothing ever comes or goes.
  [[nodiscard]] bool aliased() const { return aliased_; }
  void rename_unit(const std::string& unit);

  /// Makes every leaf a view of the flat shard again (torch::load and Module::to replace its storage), taking over the new
  /// values.
  void readopt();

  /// True while the shard has no memory.
  [[nodiscard]] bool on_meta() const { return shard_.is_meta(); }
  /// Gives a shard on the meta device memory; its values are marked as unwritten. No-op otherwise.
  void materialize();
  /// Copies this rank's part of `whole` (any dtype) into the shard.
  void set_value(std::size_t i, const at::Tensor& whole);
  /// Part of the whole parameter i that `shard_rank` owns; a view where possible.
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

  void start_gather(MemoryPool& pool);
  void finish_gather(MemoryPool& pool);
  /// Waits for a gather in flight and throws its result away.
  void drop_gather(MemoryPool& pool);
  void free_full(MemoryPool& pool);

  /// Adds this rank's gradients (by parameter, undefined where there is none) to the local accumulation.
  void accumulate(std::vector<at::Tensor>& gradients, MemoryPool& pool);
  /// Packs what was accumulated and `gradients` for the reduction; zeros where there is nothing. Local, so that the gathered
  /// parameters can be freed before launch_reduce takes receive space.
  /// \param again the flat gradient holds an earlier reduction of the same backward, to which this one is added
  void start_reduce(std::vector<at::Tensor>& gradients, bool again, MemoryPool& pool);
  void launch_reduce(MemoryPool& pool);
  /// Waits for the stage in flight and starts the next one; false once the flat gradient is complete.
  [[nodiscard]] bool advance_reduce(MemoryPool& pool);
  /// Drops local accumulation and reductions in flight.
  void reset(MemoryPool& pool);

  /// Gives .grad to parameter i after a reduction in which some rank had a gradient for it.
  void install_grad(std::size_t i);
  [[nodiscard]] GroupFootprint footprint() const;
  /// Bytes that this group holds outside the pool.
  [[nodiscard]] std::int64_t shard_bytes() const { return static_cast<std::int64_t>(shard_.nbytes()); }
  [[nodiscard]] std::int64_t shard_bytes_held() const { return on_meta() ? 0 : shard_bytes(); }
  [[nodiscard]] std::int64_t grad_bytes() const { return grad_.defined() ? static_cast<std::int64_t>(grad_.nbytes()) : 0; }

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
  enum class Stage { kIdle, kReduceScatter, kAllReduce };

  void fill_shard(const std::vector<ParameterSlot>& slots);
  void build_full_views();
  void rehome();
  void set_dtypes(at::ScalarType compute, at::ScalarType reduce);
  void build_gather_copies();
  void make_leaves(const std::vector<ParameterSlot>& slots);
  [[nodiscard]] at::Tensor own_part(const at::Tensor& whole, std::size_t i) const;
  [[nodiscard]] Pack make_pack(at::ScalarType dtype) const;
  [[nodiscard]] std::vector<Piece> pack_pieces(const at::Tensor& flat) const;
  [[nodiscard]] std::int64_t exchange_numel() const;
  void ensure_grad();
  void release_grad();
  [[nodiscard]] bool any_grad() const;
  [[nodiscard]] bool prepare_grad(bool keep);
  void pack(Pack& pack, std::vector<at::Tensor>& gradients, bool add);
  void reduce_alone(std::vector<at::Tensor>& gradients, bool add);
  void check_gradients(const std::vector<at::Tensor>& gradients) const;
  [[nodiscard]] std::pair<double, double> scales() const;
  [[nodiscard]] bool alone() const { return layout_.world() == 1 && replicas_ == 1; }
  [[nodiscard]] Pack& accumulation() { return accum_dtype_differs_ ? accumulation_ : wire_; }
  [[nodiscard]] std::string describe(std::size_t i) const;

  GroupLayout layout_;
  GroupOptions options_;
  std::vector<ManagedParameter> parameters_;
  at::TensorOptions master_, compute_;
  int rank_ = 0;
  int replicas_ = 1;

  at::Tensor shard_, grad_;
  bool may_alias_ = false;  ///< the guard's strictness, decided once
  bool aliased_ = false;    ///< world 1, same dtype: the gathered storage is the shard itself
  SwappedBuffer full_;
  SwappedBuffer gathered_;  ///< rank-major gather output when it is not the full buffer
  std::vector<at::Tensor> gather_sources_, gather_places_;
  Work gather_;

  at::ScalarType wire_dtype_ = at::kFloat;
  bool accum_dtype_differs_ = false;
  Pack wire_;
  Pack accumulation_;       ///< only when it has another dtype than the wire
  SwappedBuffer partial_;   ///< reduced over the shard group, not yet over the replicas
  SwappedBuffer exchange_;  ///< workspace of the all-reduce over the replicas
  Pack* in_flight_ = nullptr;
  Stage stage_ = Stage::kIdle;
  Work reduction_;
  bool accumulated_ = false;
  bool add_to_grad_ = false;
  std::vector<at::Tensor> sources_, places_;  // kept for their capacity
};

}  // namespace hyper_parallel::fsdp
