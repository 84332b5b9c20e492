#pragma once
// Where the parameters of a group lie in the gathered buffer and in each rank's flat shard. Pure arithmetic, no torch.
//
//  per-parameter, W=2                 ragged, W=2
//  shard of rank r = [Ar Br Cr]       shard of rank r = slice r of the full buffer
//  full buffer: A0|A1 B0|B1 C0|C1     full buffer: A A A A A A B B B | B B B B B B B C C
//  (gathered rank by rank, copied)    (gathered in place; cut only where a row ends)
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

enum class ShardLayout {
  kPerParameter,  ///< each parameter cut on its own dimension in ceil chunks: Shard(dim)
  kRagged,        ///< the group lies in one flat buffer that is cut in equal contiguous slices at row ends: RaggedShard
};

namespace fsdp {

/// A parameter as the layout sees it.
struct ParameterShape {
  std::string name;                 ///< only for messages
  std::vector<std::int64_t> shape;  ///< empty for a scalar
  std::int64_t shard_dim = 0;       ///< per-parameter layout only; already normalised to [0, dim)
};

/// The part of one parameter that one rank owns.
struct ParameterSlice {
  std::vector<std::int64_t> shape;  ///< local shape without padding; (0, ...) when empty
  std::int64_t numel = 0;
  std::int64_t shard_offset = 0;  ///< first element in the rank's flat shard
  /// Ragged: first element inside the flattened parameter. Per-parameter: first index along shard_dim.
  std::int64_t start = 0;
};

/// Geometry of one group over `world` ranks; an immutable value.
class HP_API GroupLayout {
 public:
  GroupLayout() = default;
  /// ceil-chunk layout. A scalar (0-d) parameter is owned by rank 0 in full: local shape () there and (0) elsewhere.
  /// ValueError: world < 1, shard_dim out of range.
  [[nodiscard]] static GroupLayout per_parameter(std::vector<ParameterShape> parameters, int world, std::int64_t alignment = 16);
  /// Flat layout. Slices are multiples of `alignment` elements; parameters start at multiples of `parameter_alignment` elements
  /// where row cuts leave the choice. Padding stays under 1 % of the total (beyond what alignment itself costs): where whole rows
  /// of dim 0 would waste more, rows are split into smaller units (prefix of more dims, at worst single elements).
  [[nodiscard]] static GroupLayout ragged(std::vector<ParameterShape> parameters, int world, std::int64_t alignment = 16,
                                          std::int64_t parameter_alignment = 16);

  [[nodiscard]] ShardLayout kind() const { return kind_; }
  [[nodiscard]] int world() const { return world_; }
  [[nodiscard]] std::size_t size() const { return parameters_.size(); }
  [[nodiscard]] const ParameterShape& parameter(std::size_t i) const { return parameters_[i]; }
  [[nodiscard]] std::int64_t numel(std::size_t i) const { return numel_[i]; }

  /// Elements of every rank's flat shard, padding included.
  [[nodiscard]] std::int64_t shard_numel() const { return shard_numel_; }
  /// Elements of the full buffer: parameter i is the contiguous block [full_offset(i), full_offset(i) + numel(i)).
  [[nodiscard]] std::int64_t full_numel() const { return full_numel_; }
  [[nodiscard]] std::int64_t full_offset(std::size_t i) const { return full_offset_[i]; }
  /// True when the shards of all ranks, one after the other, are the full buffer: nothing is copied after a gather.
  [[nodiscard]] bool in_place() const { return in_place_; }
  [[nodiscard]] const ParameterSlice& slice(std::size_t i, int rank) const { return slices_[static_cast<std::size_t>(rank)][i]; }
  /// Ragged: how many leading dims are flattened into units (1 = rows of dim 0), and the units that each rank owns.
  [[nodiscard]] std::int64_t ragged_dims(std::size_t i) const { return ragged_dims_[i]; }
  [[nodiscard]] std::vector<std::int64_t> ragged_units(std::size_t i) const;

  /// [offset, offset + numel) ranges of a `world * shard_numel` buffer (rank-major shards) that belong to no parameter, in order.
  struct Range {
    std::int64_t offset = 0;
    std::int64_t numel = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  [[nodiscard]] const std::vector<Range>& padding() const { return padding_; }
  [[nodiscard]] std::int64_t padding_numel() const;

 private:
  ShardLayout kind_ = ShardLayout::kPerParameter;
  int world_ = 1;
  bool in_place_ = true;
  std::int64_t shard_numel_ = 0;
  std::int64_t full_numel_ = 0;
  std::vector<ParameterShape> parameters_;
  std::vector<std::int64_t> numel_, full_offset_, ragged_dims_;
  std::vector<std::vector<ParameterSlice>> slices_;  // [rank][parameter]
  std::vector<Range> padding_;

  void finish();  // derives in_place_ and padding_ from the slices
};

}  // namespace fsdp
}  // namespace hyper_parallel
