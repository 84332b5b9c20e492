#pragma once
// Placement: what one mesh axis does to a tensor, in PyTorch's notation. Torch-free.
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

/// What one mesh axis does to a tensor: an immutable value, made by Replicate, Shard, StridedShard, RaggedShard and Partial.
///
/// A list with one placement per mesh axis describes a distributed tensor: `{Shard(0), Replicate()}`. Which axis cuts first,
/// where several cut one dimension, is what Layout spells out. Thread safety: const members from any thread.
class HP_API Placement {
 public:
  enum class Kind { kReplicate, kShard, kStridedShard, kRaggedShard, kPartial };

  Placement() = default;  ///< Replicate()

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  [[nodiscard]] bool is_replicate() const noexcept { return kind_ == Kind::kReplicate; }
  /// Shard or StridedShard: a dimension is cut in ceil chunks.
  [[nodiscard]] bool is_shard() const noexcept { return kind_ == Kind::kShard || kind_ == Kind::kStridedShard; }
  [[nodiscard]] bool is_shard(std::int64_t dim) const noexcept { return is_shard() && dim_ == dim; }
  [[nodiscard]] bool is_strided_shard() const noexcept { return kind_ == Kind::kStridedShard; }
  [[nodiscard]] bool is_ragged_shard() const noexcept { return kind_ == Kind::kRaggedShard; }
  [[nodiscard]] bool is_partial() const noexcept { return kind_ == Kind::kPartial; }

  /// Shard, StridedShard: the tensor dimension (negative until a Layout knows the number of dimensions).
  [[nodiscard]] std::int64_t dim() const;
  /// StridedShard: product of the sizes of later mesh axes that cut the same dimension before this one does; Shard: 1.
  [[nodiscard]] std::int64_t split_factor() const;
  /// RaggedShard: how many leading dimensions are flattened into units.
  [[nodiscard]] std::int64_t ragged_dims() const;
  /// RaggedShard: each rank's share of the units, as proportions.
  [[nodiscard]] const std::vector<std::int64_t>& local_units() const;
  [[nodiscard]] ReduceOp reduce_op() const;  ///< Partial

  /// As Python's repr: "Shard(dim=0)", "_StridedShard(dim=0, sf=2)", "RaggedShard(dims=(0,), local_units=(1, 2))",
  /// "Partial(sum)".
  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] std::size_t hash() const noexcept;
  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  std::int64_t dim_ = 0;     // RaggedShard: number of leading dimensions
  std::int64_t factor_ = 1;  // StridedShard
  std::vector<std::int64_t> units_;

  friend HP_API Placement Shard(std::int64_t dim);
  friend HP_API Placement StridedShard(std::int64_t dim, std::int64_t split_factor);
  friend HP_API Placement RaggedShard(std::int64_t dims, std::vector<std::int64_t> local_units);
  friend HP_API Placement Partial(ReduceOp op);
};

/// Every rank along the axis holds the same values.
[[nodiscard]] HP_API Placement Replicate();
/// Dimension `dim` is cut in ceil chunks of c = ceil(n / ranks): rank r holds [r * c, min((r + 1) * c, n)), which may be empty.
[[nodiscard]] HP_API Placement Shard(std::int64_t dim);
/// Shard(dim) that acts after later mesh axes of total size `split_factor` have cut `dim`. ValueError: split_factor < 1.
[[nodiscard]] HP_API Placement StridedShard(std::int64_t dim, std::int64_t split_factor);
/// The first `dims` dimensions, flattened, are cut in contiguous parts of sizes proportional to `local_units`, one entry per rank
/// of the axis. The local tensor has shape (units, remaining dimensions...). ValueError: dims < 0, a negative entry, sum not
/// positive.
[[nodiscard]] HP_API Placement RaggedShard(std::int64_t dims, std::vector<std::int64_t> local_units);
/// Every rank along the axis holds a contribution; the value is their reduction in rank order.
[[nodiscard]] HP_API Placement Partial(ReduceOp op = ReduceOp::kSum);

/// "sum", "avg", "product", "min", "max"
[[nodiscard]] HP_API std::string_view to_string(ReduceOp op);
/// "[Shard(dim=0), Replicate()]"
[[nodiscard]] HP_API std::string to_string(const std::vector<Placement>& placements);
HP_API std::ostream& operator<<(std::ostream& out, const Placement& placement);

}  // namespace hyper_parallel

template <>
struct std::hash<hyper_parallel::Placement> {
  std::size_t operator()(const hyper_parallel::Placement& placement) const noexcept { return placement.hash(); }
};
