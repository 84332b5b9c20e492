#include <hyper_parallel/dtensor/layout.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>

#include "dtensor/hash.h"

namespace hyper_parallel {

struct Layout::Impl {
  std::vector<std::int64_t> mesh_shape;
  std::vector<Placement> placements;
  std::vector<Axes> axes_of_dim;
  std::optional<std::int64_t> ragged_axis;
  std::size_t hash = 0;

  [[nodiscard]] bool same(const Impl& other) const {
    return mesh_shape == other.mesh_shape && placements == other.placements && axes_of_dim.size() == other.axes_of_dim.size();
  }
};

namespace {

using Sizes = std::vector<std::int64_t>;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// Live layouts by hash. Never destroyed, so that layouts in static storage may die after it would have.
struct InternTable {
  std::mutex mutex;
  std::unordered_multimap<std::size_t, std::weak_ptr<const Layout::Impl>> entries;

  static InternTable& get() {
    static InternTable& table = *new InternTable;
    return table;
  }

  std::shared_ptr<const Layout::Impl> intern(Layout::Impl value) {
    std::vector<std::shared_ptr<const Layout::Impl>> keep;  // dies after the lock: the last owner takes the lock again
    const std::lock_guard lock(mutex);
    const auto [begin, end] = entries.equal_range(value.hash);
    for (auto entry = begin; entry != end; ++entry) {
      keep.push_back(entry->second.lock());
      if (keep.back() && keep.back()->same(value)) return keep.back();
    }
    const std::size_t key = value.hash;
    const std::shared_ptr<const Layout::Impl> made(new Layout::Impl(std::move(value)), [](const Layout::Impl* impl) {
      InternTable::get().forget(impl->hash);
      delete impl;
    });
    entries.emplace(key, made);
    return made;
  }

  void forget(std::size_t key) {
    const std::lock_guard lock(mutex);
    const auto [begin, end] = entries.equal_range(key);
    for (auto entry = begin; entry != end;) entry = entry->second.expired() ? entries.erase(entry) : std::next(entry);
  }
};

/// Puts `axis` into the list of cuts of one dimension by later axes, behind the first few whose sizes multiply to `factor`.
void insert_cut(Layout::Axes& cuts, std::int64_t axis, std::int64_t factor, const Sizes& mesh_shape, const Placement& placement) {
  std::int64_t product = 1;
  std::size_t position = 0;
  std::string possible = "1";
  while (product != factor && position < cuts.size()) {
    const std::int64_t size = mesh_shape[at(cuts[position++])];
    product *= size;
    if (size != 1) possible += concat(", ", product);
  }
  check_value(product == factor, "Layout", "split factor of ", placement, " on mesh axis ", axis, " is ", factor,
              ", want a product of the sizes of the first cuts that later axes make on this dimension: ", possible);
  cuts.insert(cuts.begin() + static_cast<std::ptrdiff_t>(position), axis);
}

Box cut_box(const Sizes& mesh_shape, const std::vector<Layout::Axes>& axes_of_dim, std::span<const std::int64_t> shape,
            std::span<const std::int64_t> coordinate) {
  Box box;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    std::int64_t offset = 0;
    std::int64_t size = shape[d];
    for (const std::int64_t axis : axes_of_dim[d]) {
      const std::int64_t chunk = (size + mesh_shape[at(axis)] - 1) / mesh_shape[at(axis)];
      const std::int64_t begin = std::min(coordinate[at(axis)] * chunk, size);
      offset += begin;
      size = std::min(chunk, size - begin);
    }
    box.offset.push_back(offset);
    box.size.push_back(size);
  }
  return box;
}

std::int64_t prefix_product(const Sizes& sizes, std::int64_t dims) {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(dims), std::int64_t{1}, std::multiplies<>());
}

std::int64_t sum(const Sizes& sizes, std::int64_t count) {
  return std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(count), std::int64_t{0});
}

}  // namespace

Layout Layout::from_placements(const std::vector<std::int64_t>& mesh_shape, std::vector<Placement> placements,
                               std::int64_t ndim) {
  constexpr std::string_view kOp = "Layout";
  check_value(ndim >= 0, kOp, "ndim is ", ndim, ", want at least 0");
  check_value(placements.size() == mesh_shape.size(), kOp, placements.size(), " placements ",
              hyper_parallel::to_string(placements), ", want one for each of ", mesh_shape.size(), " mesh axes");
  Impl impl;
  impl.axes_of_dim.resize(at(ndim));
  for (auto axis = static_cast<std::int64_t>(mesh_shape.size()) - 1; axis >= 0; --axis) {
    auto& placement = placements[at(axis)];
    const std::int64_t size = mesh_shape[at(axis)];
    check_value(size >= 1, kOp, "mesh axis ", axis, " has size ", size, ", want at least 1");
    if (placement.is_shard()) {
      const std::int64_t dim = placement.dim() < 0 ? placement.dim() + ndim : placement.dim();
      check_value(dim >= 0 && dim < ndim, kOp, placement, " on mesh axis ", axis, ", want a dimension of a tensor with ", ndim);
      insert_cut(impl.axes_of_dim[at(dim)], axis, placement.split_factor(), mesh_shape, placement);
      placement = placement.split_factor() == 1 ? Shard(dim) : StridedShard(dim, placement.split_factor());
    } else if (placement.is_ragged_shard()) {
      check_value(!impl.ragged_axis, kOp, "two ragged axes, ", axis, " and ", impl.ragged_axis.value_or(0), ", want at most one");
      check_value(placement.ragged_dims() <= ndim, kOp, placement, " flattens ", placement.ragged_dims(),
                  " dimensions of a tensor with ", ndim);
      check_value(static_cast<std::int64_t>(placement.local_units().size()) == size, kOp, placement, " on mesh axis ", axis,
                  ", want one entry of local_units for each of its ", size, " ranks");
      impl.ragged_axis = axis;
    }
  }
  impl.mesh_shape = mesh_shape;
  impl.placements = std::move(placements);
  impl.hash = at(ndim);
  for (const std::int64_t size : mesh_shape) hash_combine(impl.hash, at(size));
  for (const auto& placement : impl.placements) hash_combine(impl.hash, placement.hash());
  return Layout(InternTable::get().intern(std::move(impl)));
}

Layout Layout::from_axes(const std::vector<std::int64_t>& mesh_shape, const std::vector<Axes>& axes_of_dim,
                         const std::vector<std::pair<std::int64_t, Placement>>& others) {
  std::vector<Placement> placements(mesh_shape.size());
  std::set<std::int64_t> seen;
  const auto take = [&](std::int64_t axis) {
    check_value(axis >= 0 && axis < static_cast<std::int64_t>(mesh_shape.size()), "Layout", "mesh axis ", axis,
                ", want 0 <= axis < ", mesh_shape.size());
    check_value(seen.insert(axis).second, "Layout", "mesh axis ", axis, " is used twice");
  };
  for (std::size_t d = 0; d < axes_of_dim.size(); ++d) {
    const auto& axes = axes_of_dim[d];
    for (std::size_t i = 0; i < axes.size(); ++i) {
      take(axes[i]);
      std::int64_t factor = 1;
      for (std::size_t j = 0; j < i; ++j) factor *= axes[j] > axes[i] ? mesh_shape[at(axes[j])] : 1;
      placements[at(axes[i])] = StridedShard(static_cast<std::int64_t>(d), factor);
    }
  }
  for (const auto& [axis, placement] : others) {
    check_value(!placement.is_shard(), "Layout", placement, " among the other axes, want it in axes_of_dim");
    take(axis);
    placements[at(axis)] = placement;
  }
  return from_placements(mesh_shape, std::move(placements), static_cast<std::int64_t>(axes_of_dim.size()));
}

const std::vector<std::int64_t>& Layout::mesh_shape() const { return impl_->mesh_shape; }
std::int64_t Layout::ndim() const { return static_cast<std::int64_t>(impl_->axes_of_dim.size()); }
const std::vector<Placement>& Layout::placements() const { return impl_->placements; }
std::optional<std::int64_t> Layout::ragged_axis() const { return impl_->ragged_axis; }
std::size_t Layout::hash() const noexcept { return impl_ ? impl_->hash : 0; }

const Layout::Axes& Layout::axes(std::int64_t dim) const {
  check_value(dim >= 0 && dim < ndim(), "Layout::axes", "dim is ", dim, ", want 0 <= dim < ", ndim());
  return impl_->axes_of_dim[at(dim)];
}

bool Layout::has_partial() const {
  return std::any_of(impl_->placements.begin(), impl_->placements.end(), [](const Placement& p) { return p.is_partial(); });
}

bool Layout::is_replicated() const {
  return std::all_of(impl_->placements.begin(), impl_->placements.end(), [](const Placement& p) { return p.is_replicate(); });
}

Layout Layout::shard_innermost(std::int64_t axis, std::int64_t dim) const {
  constexpr std::string_view kOp = "Layout::shard_innermost";
  check_value(axis >= 0 && axis < static_cast<std::int64_t>(impl_->mesh_shape.size()), kOp, "mesh axis ", axis,
              ", want 0 <= axis < ", impl_->mesh_shape.size());
  check_value(impl_->placements[at(axis)].is_replicate(), kOp, "mesh axis ", axis, " is ", impl_->placements[at(axis)],
              ", want Replicate()");
  const std::int64_t normalised = dim < 0 ? dim + ndim() : dim;
  check_value(normalised >= 0 && normalised < ndim(), kOp, "dim is ", dim, ", want a dimension of a tensor with ", ndim());
  auto axes = impl_->axes_of_dim;
  axes[at(normalised)].push_back(axis);
  std::vector<std::pair<std::int64_t, Placement>> others;
  for (std::size_t i = 0; i < impl_->placements.size(); ++i) {
    const auto& placement = impl_->placements[i];
    if (placement.is_partial() || placement.is_ragged_shard()) others.emplace_back(static_cast<std::int64_t>(i), placement);
  }
  return from_axes(impl_->mesh_shape, axes, others);
}

void Layout::validate(std::span<const std::int64_t> shape) const {
  check_value(static_cast<std::int64_t>(shape.size()) == ndim(), "Layout::validate", "tensor has ", shape.size(),
              " dimensions, want ", ndim(), " for ", to_string());
  for (const std::int64_t size : shape) check_value(size >= 0, "Layout::validate", "tensor has a dimension of size ", size);
  if (!impl_->ragged_axis) return;
  // Every combination of coordinates along the axes that cut the flattened dimensions gives one ragged block.
  const auto& ragged = impl_->placements[at(*impl_->ragged_axis)];
  Axes axes;
  for (std::int64_t d = 0; d < ragged.ragged_dims(); ++d)
    axes.insert(axes.end(), impl_->axes_of_dim[at(d)].begin(), impl_->axes_of_dim[at(d)].end());
  Sizes coordinate(impl_->mesh_shape.size(), 0);
  while (true) {
    static_cast<void>(ragged_range(cut_box(impl_->mesh_shape, impl_->axes_of_dim, shape, coordinate), coordinate));
    std::size_t i = 0;
    while (i < axes.size() && ++coordinate[at(axes[i])] == impl_->mesh_shape[at(axes[i])]) coordinate[at(axes[i++])] = 0;
    if (i == axes.size()) return;
  }
}

std::vector<std::int64_t> Layout::local_shape(std::span<const std::int64_t> shape,
                                              std::span<const std::int64_t> coordinate) const {
  check_arguments("Layout::local_shape", shape, coordinate);
  Box outer = outer_box(shape, coordinate);
  if (!impl_->ragged_axis) return outer.size;
  const auto [begin, end] = ragged_range(outer, coordinate);
  const std::int64_t dims = impl_->placements[at(*impl_->ragged_axis)].ragged_dims();
  outer.size.erase(outer.size.begin(), outer.size.begin() + static_cast<std::ptrdiff_t>(dims));
  outer.size.insert(outer.size.begin(), end - begin);
  return outer.size;
}

std::vector<Box> Layout::boxes(std::span<const std::int64_t> shape, std::span<const std::int64_t> coordinate) const {
  check_arguments("Layout::boxes", shape, coordinate);
  const Box outer = outer_box(shape, coordinate);
  if (outer.numel() == 0) return {};
  if (!impl_->ragged_axis) return {outer};
  const auto [begin, end] = ragged_range(outer, coordinate);
  return boxes_of_range(outer, impl_->placements[at(*impl_->ragged_axis)].ragged_dims(), begin, end);
}

Box Layout::outer_box(std::span<const std::int64_t> shape, std::span<const std::int64_t> coordinate) const {
  return cut_box(impl_->mesh_shape, impl_->axes_of_dim, shape, coordinate);
}

std::pair<std::int64_t, std::int64_t> Layout::ragged_range(const Box& outer, std::span<const std::int64_t> coordinate) const {
  const std::int64_t axis = *impl_->ragged_axis;
  const auto& placement = impl_->placements[at(axis)];
  const auto& units = placement.local_units();
  const std::int64_t total = sum(units, static_cast<std::int64_t>(units.size()));
  const std::int64_t positions = prefix_product(outer.size, placement.ragged_dims());
  check_value(positions % total == 0, "Layout", placement, " on a block with ", positions,
              " flattened positions, want a multiple of the ", total, " units");
  const std::int64_t unit = positions / total;
  const std::int64_t begin = sum(units, coordinate[at(axis)]);
  return {begin * unit, (begin + units[at(coordinate[at(axis)])]) * unit};
}

void Layout::check_arguments(std::string_view op, std::span<const std::int64_t> shape,
                             std::span<const std::int64_t> coordinate) const {
  check_value(static_cast<std::int64_t>(shape.size()) == ndim(), op, "tensor has ", shape.size(), " dimensions, want ", ndim(),
              " for ", to_string());
  check_value(coordinate.size() == impl_->mesh_shape.size(), op, "coordinate has ", coordinate.size(), " entries, want ",
              impl_->mesh_shape.size());
  for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
    check_value(coordinate[axis] >= 0 && coordinate[axis] < impl_->mesh_shape[axis], op, "coordinate is ", coordinate[axis],
                " on mesh axis ", axis, ", want 0 <= coordinate < ", impl_->mesh_shape[axis]);
  }
}

std::string Layout::to_string(std::span<const std::string> axis_names) const {
  if (!impl_) return "Layout()";
  std::string text;
  for (std::size_t axis = 0; axis < impl_->mesh_shape.size(); ++axis) {
    const std::string name = axis < axis_names.size() ? axis_names[axis] : std::to_string(axis);
    text += concat(axis > 0 ? ", " : "", name, "=", impl_->mesh_shape[axis], ": ", impl_->placements[axis]);
  }
  return "Layout(" + text + ")";
}

}  // namespace hyper_parallel
