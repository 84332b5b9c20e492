#include <hyper_parallel/fsdp/group_layout.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

namespace hyper_parallel::fsdp {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 4;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

std::int64_t product(std::span<const std::int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

/// lcm(a, b), or kHuge when it is larger than that.
std::int64_t capped_lcm(std::int64_t a, std::int64_t b) {
  const std::int64_t factor = b / std::gcd(a, b);
  return a > kHuge / factor ? kHuge : a * factor;
}

void validate(std::string_view op, std::span<const ParameterShape> parameters, int world, std::int64_t alignment) {
  check_value(world >= 1, op, "world is ", world, ", want at least 1");
  check_value(alignment >= 1, op, "alignment is ", alignment, ", want at least 1");
  for (const auto& parameter : parameters) {
    for (const std::int64_t size : parameter.shape) {
      check_value(size >= 0, op, "parameter ", parameter.name, " has a dimension of size ", size, ", want at least 0");
    }
  }
}

/// Finds slice size, order and offsets of a ragged layout.
///
/// For a slice size S, parameters are put down one after the other. One that would be cut inside a unit moves up to the next
/// offset where the cut falls between units, and later parameters that fit whole go into the gap. A parameter longer than S meets
/// several cuts, so S must be a multiple of its unit. When no S within the padding budget works, the units to blame are made
/// smaller: prefix of one more dimension, at last single elements, which always fit. The idea of slices that end at row ends is
/// veScale-FSDP's.
class RaggedPlanner {
 public:
  RaggedPlanner(std::span<const ParameterShape> parameters, std::span<const std::int64_t> numel, int world,
                std::int64_t alignment, std::int64_t parameter_alignment)
      : parameters_(parameters), numel_(numel), world_(world), alignment_(alignment), parameter_alignment_(parameter_alignment) {
    std::int64_t aligned = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      dims_.push_back(parameters[i].shape.empty() ? 0 : 1);
      units_.push_back(unit_numel(i));
      aligned += round_up(numel[i], parameter_alignment);
    }
    min_slice_ = round_up(ceil_div(aligned, world), alignment);
    max_slice_ = std::max(min_slice_, (aligned + aligned / 100) / world / alignment * alignment);
    offsets_.resize(parameters.size());
  }

  void run() {
    while (!try_units()) refine();
  }

  [[nodiscard]] std::int64_t slice() const { return slice_; }
  [[nodiscard]] const std::vector<std::int64_t>& offsets() const { return offsets_; }
  [[nodiscard]] const std::vector<std::int64_t>& dims() const { return dims_; }
  [[nodiscard]] std::int64_t unit(std::size_t i) const { return units_[i]; }

 private:
  static constexpr int kSliceTries = 4;

  [[nodiscard]] std::int64_t unit_numel(std::size_t i) const {
    return std::max<std::int64_t>(1, product(std::span(parameters_[i].shape).subspan(static_cast<std::size_t>(dims_[i]))));
  }

  /// Tries slice sizes with the present units; names the unit to refine when none fits. Parameters of one to two slices may get
  /// by with one cut, so that they bind the slice size only in the first attempt.
  bool try_units() {
    for (const std::int64_t sure_cuts : {1, 2}) {
      std::int64_t step = alignment_;
      std::int64_t largest = 1;
      for (std::size_t i = 0; i < units_.size(); ++i) {
        if (numel_[i] <= sure_cuts * min_slice_) continue;
        step = capped_lcm(step, units_[i]);
        largest = std::max(largest, units_[i]);
      }
      blamed_unit_ = largest;
      if (step < kHuge && try_slices(round_up(min_slice_, step), step)) return true;
    }
    return false;
  }

  bool try_slices(std::int64_t first, std::int64_t step) {
    const std::int64_t stride = std::max<std::int64_t>(1, (max_slice_ - first) / step / (kSliceTries - 1)) * step;
    for (const std::int64_t alignment : {parameter_alignment_, std::int64_t{1}}) {
      for (slice_ = first; slice_ <= max_slice_; slice_ += stride) {
        if (place_all(alignment)) return true;
      }
    }
    return false;
  }

  void refine() {
    check_internal(blamed_unit_ > 1, "ragged", "no unit left to split");
    for (std::size_t i = 0; i < units_.size(); ++i) {
      if (units_[i] != blamed_unit_ || numel_[i] == 0) continue;
      while (units_[i] == blamed_unit_) {
        ++dims_[i];
        units_[i] = unit_numel(i);
      }
    }
  }

  /// Puts every parameter down, the gaps filled first-fit; false when they do not fit into world * slice_.
  bool place_all(std::int64_t alignment) {
    std::vector<bool> placed(units_.size(), false);
    std::int64_t cursor = 0;
    std::int64_t widest_gap = 0;
    for (std::size_t i = 0; i < units_.size(); ++i) {
      if (placed[i]) continue;
      const auto offset = lowest_offset(cursor, i, alignment);
      if (!offset) {
        blamed_unit_ = units_[i];
        return false;
      }
      const std::int64_t gap = *offset - round_up(cursor, parameter_alignment_);
      if (numel_[i] > 0 && gap != 0) {
        fill_gap(i + 1, cursor, *offset, alignment, placed);
        if (gap > widest_gap) {
          widest_gap = gap;
          blamed_unit_ = units_[i];
        }
      }
      offsets_[i] = *offset;
      cursor = *offset + numel_[i];
      if (cursor > slice_ * world_) return false;
    }
    return true;
  }

  void fill_gap(std::size_t from, std::int64_t cursor, std::int64_t end, std::int64_t alignment, std::vector<bool>& placed) {
    for (std::size_t i = from; i < units_.size() && cursor < end; ++i) {
      if (placed[i] || numel_[i] == 0 || numel_[i] > end - cursor) continue;
      const auto offset = lowest_offset(cursor, i, alignment);
      if (!offset || *offset + numel_[i] > end) continue;
      offsets_[i] = *offset;
      placed[i] = true;
      cursor = *offset + numel_[i];
    }
  }

  /// True when parameter i at `offset` is cut between its units only.
  [[nodiscard]] bool fits(std::int64_t offset, std::size_t i) const {
    const std::int64_t cut = (offset / slice_ + 1) * slice_;
    const std::int64_t end = offset + numel_[i];
    if (cut >= end) return true;
    return (cut - offset) % units_[i] == 0 && (cut + slice_ >= end || slice_ % units_[i] == 0);
  }

  /// The lowest multiple of `alignment` from `cursor` on where parameter i may start. A parameter that meets no cut, or cuts that
  /// suit it wherever it starts, is aligned to parameter_alignment_ in any case.
  [[nodiscard]] std::optional<std::int64_t> lowest_offset(std::int64_t cursor, std::size_t i, std::int64_t alignment) const {
    if (numel_[i] == 0) return std::min(cursor, slice_ * world_);
    const std::int64_t start = round_up(cursor, parameter_alignment_);
    if (fits(start, i)) return start;
    const std::int64_t cut = (start / slice_ + 1) * slice_;
    const std::int64_t lowest = start + (cut - start) % units_[i];
    const std::int64_t period = alignment / std::gcd(alignment, units_[i]) * units_[i];
    for (std::int64_t offset = lowest; offset < std::min(cut, lowest + period); offset += units_[i]) {
      if (offset % alignment == 0 && fits(offset, i)) return offset;
    }
    const std::int64_t after = round_up(cut, parameter_alignment_);
    if (fits(after, i)) return after;
    return std::nullopt;
  }

  std::span<const ParameterShape> parameters_;
  std::span<const std::int64_t> numel_;
  std::int64_t world_, alignment_, parameter_alignment_;
  std::int64_t min_slice_ = 0, max_slice_ = 0, slice_ = 0, blamed_unit_ = 1;
  std::vector<std::int64_t> dims_, units_, offsets_;
};

}  // namespace

GroupLayout GroupLayout::per_parameter(std::vector<ParameterShape> parameters, int world, std::int64_t alignment) {
  constexpr std::string_view kOp = "GroupLayout::per_parameter";
  validate(kOp, parameters, world, alignment);
  GroupLayout layout;
  layout.kind_ = ShardLayout::kPerParameter;
  layout.world_ = world;
  layout.slices_.resize(static_cast<std::size_t>(world));
  for (auto& slices : layout.slices_) slices.reserve(parameters.size());
  std::int64_t shard_offset = 0;
  std::int64_t full_offset = 0;
  for (const auto& parameter : parameters) {
    const auto ndim = static_cast<std::int64_t>(parameter.shape.size());
    check_value(parameter.shard_dim >= 0 && parameter.shard_dim < std::max<std::int64_t>(ndim, 1), kOp, "parameter ",
                parameter.name, " has shard_dim ", parameter.shard_dim, ", want 0 <= shard_dim < ", ndim);
    const auto dim = static_cast<std::size_t>(parameter.shard_dim);
    // A scalar is cut like a vector of one element, which rank 0 owns.
    Shape local = ndim == 0 ? Shape{1} : parameter.shape;
    const std::int64_t size = local[dim];
    const std::int64_t chunk = ceil_div(size, world);
    local[dim] = 1;
    const std::int64_t rest = product(local);
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t start = std::min(rank * chunk, size);
      local[dim] = std::min(chunk, size - start);
      layout.slices_[static_cast<std::size_t>(rank)].push_back({.shape = ndim == 0 && rank == 0 ? Shape{} : local,
                                                                .numel = local[dim] * rest,
                                                                .shard_offset = shard_offset,
                                                                .start = start});
    }
    layout.numel_.push_back(size * rest);
    layout.full_offset_.push_back(full_offset);
    layout.ragged_dims_.push_back(0);
    shard_offset += chunk * rest;
    full_offset += dim == 0 ? chunk * rest * world : size * rest;
  }
  layout.shard_numel_ = round_up(shard_offset, alignment);
  layout.full_numel_ = round_up(full_offset, alignment);
  layout.parameters_ = std::move(parameters);
  layout.finish();
  return layout;
}

GroupLayout GroupLayout::ragged(std::vector<ParameterShape> parameters, int world, std::int64_t alignment,
                                std::int64_t parameter_alignment) {
  constexpr std::string_view kOp = "GroupLayout::ragged";
  validate(kOp, parameters, world, alignment);
  check_value(parameter_alignment >= 1, kOp, "parameter_alignment is ", parameter_alignment, ", want at least 1");
  GroupLayout layout;
  layout.kind_ = ShardLayout::kRagged;
  layout.world_ = world;
  for (const auto& parameter : parameters) layout.numel_.push_back(product(parameter.shape));
  layout.parameters_ = std::move(parameters);

  RaggedPlanner planner(layout.parameters_, layout.numel_, world, alignment, parameter_alignment);
  planner.run();
  const std::int64_t slice = planner.slice();
  layout.shard_numel_ = slice;
  layout.full_numel_ = slice * world;
  layout.full_offset_ = planner.offsets();
  layout.ragged_dims_ = planner.dims();

  layout.slices_.resize(static_cast<std::size_t>(world));
  for (auto& slices : layout.slices_) slices.reserve(layout.size());
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::int64_t numel = layout.numel_[i];
    const auto dims = static_cast<std::size_t>(layout.ragged_dims_[i]);
    const auto& shape = layout.parameters_[i].shape;
    Shape local(shape.begin() + static_cast<std::ptrdiff_t>(dims), shape.end());
    local.insert(local.begin(), 0);
    const std::int64_t units = product(std::span(shape).first(dims));
    for (int rank = 0; rank < world; ++rank) {
      const std::int64_t begin = std::clamp<std::int64_t>(rank * slice - layout.full_offset_[i], 0, numel);
      const std::int64_t end = std::clamp<std::int64_t>((rank + 1) * slice - layout.full_offset_[i], 0, numel);
      // Units without elements lie nowhere: rank 0 has them.
      local[0] = numel == 0 ? (rank == 0 ? units : 0) : (end - begin) / planner.unit(i);
      layout.slices_[static_cast<std::size_t>(rank)].push_back(
          {.shape = local,
           .numel = end - begin,
           .shard_offset = end > begin ? layout.full_offset_[i] + begin - rank * slice : 0,
           .start = begin});
    }
  }
  layout.finish();
  return layout;
}

std::vector<std::int64_t> GroupLayout::ragged_units(std::size_t i) const {
  check_value(kind_ == ShardLayout::kRagged, "GroupLayout::ragged_units", "the layout is per-parameter, want ragged");
  std::vector<std::int64_t> units;
  for (int rank = 0; rank < world_; ++rank) units.push_back(slice(i, rank).shape[0]);
  if (std::all_of(units.begin(), units.end(), [](std::int64_t n) { return n == 0; })) units[0] = 1;
  return units;
}

std::int64_t GroupLayout::padding_numel() const {
  return std::accumulate(padding_.begin(), padding_.end(), std::int64_t{0},
                         [](std::int64_t sum, const Range& range) { return sum + range.numel; });
}

void GroupLayout::finish() {
  in_place_ = world_ == 1 || full_numel_ == shard_numel_ * world_;
  std::vector<Range> used;
  for (int rank = 0; rank < world_; ++rank) {
    for (std::size_t i = 0; i < size(); ++i) {
      const auto& part = slice(i, rank);
      if (part.numel == 0) continue;
      const std::int64_t offset = rank * shard_numel_ + part.shard_offset;
      used.push_back({offset, part.numel});
      if (!in_place_ || part.numel == numel_[i]) {
        in_place_ = in_place_ && offset == full_offset_[i];
        continue;
      }
      std::int64_t start = part.start;
      if (kind_ == ShardLayout::kPerParameter) {
        const auto dim = static_cast<std::size_t>(parameters_[i].shard_dim);
        const std::span<const std::int64_t> shape = parameters_[i].shape;
        start *= product(shape.subspan(dim + 1));
        in_place_ = product(shape.first(dim)) == 1;
      }
      in_place_ = in_place_ && offset == full_offset_[i] + start;
    }
  }
  const auto before = [](const Range& a, const Range& b) { return a.offset < b.offset; };
  if (!std::is_sorted(used.begin(), used.end(), before)) std::sort(used.begin(), used.end(), before);
  std::int64_t cursor = 0;
  used.push_back({shard_numel_ * world_, 0});
  for (const auto& [offset, numel] : used) {
    check_internal(offset >= cursor, "GroupLayout", "slices overlap at element ", offset);
    if (offset > cursor) padding_.push_back({cursor, offset - cursor});
    cursor = offset + numel;
  }
}

}  // namespace hyper_parallel::fsdp
