#pragma once
// Layout: which part of a tensor every rank of a mesh owns. Torch-free.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/box.h>
#include <hyper_parallel/dtensor/placement.h>

namespace hyper_parallel {

/// How a tensor lies on a mesh: for each tensor dimension the ordered list of mesh axes that cut it, outermost first, and what
/// the other axes do (replicate, hold partial values, cut ragged).
///
/// Several axes may cut one dimension; each cuts the block that the one before it left, in ceil chunks. A ragged axis, at most
/// one, cuts last.
/// ```
///  10 rows, axes (fsdp=2, tp=2), dim 0 cut by [tp, fsdp]   =   [StridedShard(0, 2), Shard(0)]
///  tp 0: rows 0-4      tp 1: rows 5-9
///  fsdp 0: 0 1 2       fsdp 0: 5 6 7
///  fsdp 1: 3 4         fsdp 1: 8 9
/// ```
/// An immutable, interned value: equal layouts share one object, so copies and comparisons are cheap. It knows the sizes of the
/// mesh axes and the number of tensor dimensions, neither ranks nor tensor sizes. All members are local. Thread safety: any
/// thread.
class HP_API Layout {
 public:
  using Axes = std::vector<std::int64_t>;  ///< positions of mesh axes

  Layout() = default;  ///< undefined: only `defined` and comparison may be called

  /// Reads PyTorch's notation: one placement per mesh axis, for a tensor with `ndim` dimensions (negative dims count from the
  /// end).
  ///
  /// A split factor must be the product of the sizes of the first few cuts that later axes make on the same dimension: it says
  /// after how many of them this axis cuts. ValueError: other split factors, dims out of range, one placement per axis missing,
  /// more than one ragged axis, local_units that do not fit the axis.
  [[nodiscard]] static Layout from_placements(const std::vector<std::int64_t>& mesh_shape, std::vector<Placement> placements,
                                              std::int64_t ndim);
  /// The same from the ordered list of axes of each tensor dimension; `others` gives what the remaining axes do, by default
  /// Replicate(). ValueError: an axis out of range or used twice.
  [[nodiscard]] static Layout from_axes(const std::vector<std::int64_t>& mesh_shape, const std::vector<Axes>& axes_of_dim,
                                        const std::vector<std::pair<std::int64_t, Placement>>& others = {});

  [[nodiscard]] bool defined() const noexcept { return impl_ != nullptr; }
  [[nodiscard]] const std::vector<std::int64_t>& mesh_shape() const;
  [[nodiscard]] std::int64_t ndim() const;  ///< of the tensor
  /// One placement per mesh axis, dims not negative, StridedShard only where the split factor is not 1. Lossless: from_placements
  /// gives this layout.
  [[nodiscard]] const std::vector<Placement>& placements() const;
  /// The mesh axes that cut `dim`, outermost first. Lossless up to the place of axes of size 1, which cut nothing.
  [[nodiscard]] const Axes& axes(std::int64_t dim) const;
  [[nodiscard]] std::optional<std::int64_t> ragged_axis() const;
  [[nodiscard]] bool has_partial() const;
  [[nodiscard]] bool is_replicated() const;  ///< every axis replicates

  /// This layout with `dim` cut once more, innermost, by `axis`, which must replicate so far. That is what FSDP does to a source
  /// layout: [Replicate(), Shard(0)] cut by axis 0 on dim 0 becomes [StridedShard(0, n), Shard(0)]. ValueError: the axis is in
  /// use.
  [[nodiscard]] Layout shard_innermost(std::int64_t axis, std::int64_t dim) const;

  /// ValueError unless a tensor of `shape` can lie this way: number of dimensions, and units that divide a ragged block.
  void validate(std::span<const std::int64_t> shape) const;
  /// Shape of the local tensor at `coordinate` (one index per mesh axis). Ragged: (units, remaining dimensions...). Sizes may be
  /// 0.
  [[nodiscard]] std::vector<std::int64_t> local_shape(std::span<const std::int64_t> shape,
                                                      std::span<const std::int64_t> coordinate) const;
  /// The rectangles of the global tensor that the rank at `coordinate` owns, none of them empty. Their elements, one box after
  /// the other and row-major in each, are the elements of the local tensor. One box (or none) without a ragged axis, else at most
  /// 2 * ragged_dims - 1.
  [[nodiscard]] std::vector<Box> boxes(std::span<const std::int64_t> shape, std::span<const std::int64_t> coordinate) const;

  /// "Layout(fsdp=2: _StridedShard(dim=0, sf=2), tp=2: Shard(dim=0))"; axes are numbered when no names are given.
  [[nodiscard]] std::string to_string(std::span<const std::string> axis_names = {}) const;
  [[nodiscard]] std::size_t hash() const noexcept;
  friend bool operator==(const Layout& a, const Layout& b) noexcept { return a.impl_ == b.impl_; }

  struct Impl;  // src/dtensor

 private:
  explicit Layout(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] Box outer_box(std::span<const std::int64_t> shape, std::span<const std::int64_t> coordinate) const;
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> ragged_range(const Box& outer,
                                                                   std::span<const std::int64_t> coordinate) const;
  void check_arguments(std::string_view op, std::span<const std::int64_t> shape, std::span<const std::int64_t> coordinate) const;

  std::shared_ptr<const Impl> impl_;
};

}  // namespace hyper_parallel

template <>
struct std::hash<hyper_parallel::Layout> {
  std::size_t operator()(const hyper_parallel::Layout& layout) const noexcept { return layout.hash(); }
};
