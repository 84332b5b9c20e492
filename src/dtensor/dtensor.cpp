#include <hyper_parallel/dtensor/dtensor.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>

#include <c10/core/ScalarType.h>

#include <hyper_parallel/comm/comm.h>

#include "dtensor/exchange.h"

namespace hyper_parallel {
namespace {

using Sizes = std::vector<std::int64_t>;

std::size_t at_index(std::int64_t index) { return static_cast<std::size_t>(index); }

std::string text_of(at::IntArrayRef sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += concat(text.empty() ? "" : ", ", size);
  return "[" + text + "]";
}

Box whole(const Sizes& shape) { return {.offset = Sizes(shape.size(), 0), .size = shape}; }

RegionOf region_of(const MeshView& view, const Layout& layout, const Sizes& shape) {
  return [&view, layout, shape](std::int64_t position) { return layout.boxes(shape, view.coordinate(position)); };
}

/// Number of dimensions of the whole tensor, from that of a local one.
std::int64_t global_ndim(const std::vector<Placement>& placements, std::int64_t local_ndim) {
  for (const auto& placement : placements) {
    if (placement.is_ragged_shard()) return local_ndim - 1 + placement.ragged_dims();
  }
  return local_ndim;
}

/// What a rank must know of another one's local tensor, in one line.
std::string describe_local(const at::Tensor& local) {
  std::ostringstream out;
  out << c10::toString(local.scalar_type()) << ' ' << local.dim();
  for (const std::int64_t size : local.sizes()) out << ' ' << size;
  return out.str();
}

struct LocalDescription {
  std::string dtype;
  Sizes shape;

  explicit LocalDescription(const std::string& line) {
    std::istringstream in(line);
    std::size_t ndim = 0;
    in >> dtype >> ndim;
    shape.resize(ndim);
    for (auto& size : shape) in >> size;
  }
};

/// The shape whose parts the local tensors of all ranks are. Collective over the mesh; every rank throws the same error.
Sizes agree_on_shape(const MeshView& view, const std::vector<Placement>& placements, const at::Tensor& local) {
  constexpr std::string_view kOp = "DTensor::from_local";
  for (const auto& placement : placements) {
    check_value(!placement.is_ragged_shard() || placement.ragged_dims() <= 1, kOp, placement,
                " leaves the shape open, want it in the options");
  }
  const Comm group = view.group();
  const auto lines = group.all_gather_string(describe_local(local), {.label = kOp});
  std::vector<LocalDescription> locals;
  for (const int rank : view.mesh.ranks()) {
    const auto group_rank = std::find(group.ranks().begin(), group.ranks().end(), rank) - group.ranks().begin();
    locals.emplace_back(lines[at_index(group_rank)]);
    check_value(locals.back().dtype == locals.front().dtype, kOp, "rank ", rank, " has dtype ", locals.back().dtype, ", want ",
                locals.front().dtype, " as rank ", view.mesh.ranks().front());
    check_value(locals.back().shape.size() == locals.front().shape.size(), kOp, "rank ", rank, " has a local tensor of shape ",
                text_of(locals.back().shape), ", want as many dimensions as ", text_of(locals.front().shape), " on rank ",
                view.mesh.ranks().front());
  }
  const std::int64_t ndim = global_ndim(placements, static_cast<std::int64_t>(locals.front().shape.size()));
  const Layout layout = Layout::from_placements(view.mesh.shape(), placements, ndim);
  const std::int64_t lead =
      static_cast<std::int64_t>(locals.front().shape.size()) - ndim;  // 1 when whole tensors are the ragged units
  Sizes shape;
  for (std::int64_t d = 0; d < ndim; ++d) {
    // Along the axes that cut a dimension its parts add up; along all others rank 0 speaks for everyone.
    Layout::Axes axes = layout.axes(d);
    if (d == 0 && lead == 0 && layout.ragged_axis()) axes.push_back(*layout.ragged_axis());
    std::int64_t size = 0;
    for (std::int64_t position = 0; position < view.size(); ++position) {
      const Sizes coordinate = view.coordinate(position);
      bool counts = true;
      for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
        counts = counts &&
                 (coordinate[axis] == 0 || std::find(axes.begin(), axes.end(), static_cast<std::int64_t>(axis)) != axes.end());
      }
      if (counts) size += locals[at_index(position)].shape[at_index(d + lead)];
    }
    shape.push_back(size);
  }
  layout.validate(shape);
  for (std::int64_t position = 0; position < view.size(); ++position) {
    const Sizes want = layout.local_shape(shape, view.coordinate(position));
    check_value(locals[at_index(position)].shape == want, kOp, "rank ", view.mesh.ranks()[at_index(position)],
                " has a local tensor of shape ", text_of(locals[at_index(position)].shape), ", want ", text_of(want),
                " of a tensor of shape ", text_of(shape), " in ", layout.to_string(view.mesh.mesh_dim_names()),
                " (pass the shape if that is another one)");
  }
  return shape;
}

/// For each mesh axis, whether its partial values stay as they are. Later axes are reduced first, so an axis whose values are
/// reduced takes those of later axes with it, except where both do the same.
std::vector<bool> kept_partial(const Layout& from, const Layout& to) {
  std::vector<bool> kept;
  std::vector<ReduceOp> reduced;
  for (std::size_t axis = 0; axis < from.placements().size(); ++axis) {
    const auto& source = from.placements()[axis];
    const auto differs = [&](ReduceOp op) { return op != source.reduce_op(); };
    kept.push_back(source.is_partial() && source == to.placements()[axis] &&
                   std::none_of(reduced.begin(), reduced.end(), differs));
    if (source.is_partial() && !kept.back() && from.mesh_shape()[axis] > 1) reduced.push_back(source.reduce_op());
  }
  return kept;
}

/// Makes `local` this rank's contribution along the axes that have become partial: the reductions, later axes first, must give
/// the value. Coordinate 0 keeps it; elsewhere the reduction over all later axes must give the neutral element. Kept axes hold
/// contributions already.
void make_partial(const MeshView& view, const at::Tensor& local, const Layout& to, const std::vector<bool>& kept) {
  const Sizes coordinate = view.coordinate(view.position);
  bool neutral = false;
  for (std::size_t axis = 0; axis < coordinate.size(); ++axis) {
    const auto& placement = to.placements()[axis];
    if (!placement.is_partial() || coordinate[axis] == 0 || (kept[axis] && !neutral)) continue;
    if (placement.reduce_op() == ReduceOp::kSum) local.zero_();
    if (placement.reduce_op() == ReduceOp::kProduct) local.fill_(1);
    neutral = neutral || placement.reduce_op() == ReduceOp::kSum || placement.reduce_op() == ReduceOp::kProduct;
  }
}

/// Equal share of the elements of a region for the rank at `coordinate` among the ranks along `axes`.
Region share_of(const Region& region, const Sizes& mesh_shape, const Sizes& coordinate, const Sizes& axes) {
  std::int64_t index = 0;
  std::int64_t count = 1;
  for (const std::int64_t axis : axes) {
    index = index * mesh_shape[at_index(axis)] + coordinate[at_index(axis)];
    count *= mesh_shape[at_index(axis)];
  }
  const std::int64_t numel = numel_of(region);
  const std::int64_t chunk = (numel + count - 1) / count;
  const std::int64_t begin = std::min(index * chunk, numel);
  const std::int64_t end = std::min(begin + chunk, numel);
  Region share;
  std::int64_t start = 0;
  for (const auto& box : region) {
    const std::int64_t size = box.numel();
    const auto part =
        boxes_of_range(box, static_cast<std::int64_t>(box.size.size()), std::clamp<std::int64_t>(begin - start, 0, size),
                       std::clamp<std::int64_t>(end - start, 0, size));
    share.insert(share.end(), part.begin(), part.end());
    start += size;
  }
  return share;
}

/// Flat elements of the new local tensor, new partial axes taken for replicated ones.
at::Tensor move(const MeshView& view, const Layout& from, const Layout& to, const Sizes& shape, const at::Tensor& local) {
  const std::vector<bool> kept = kept_partial(from, to);
  const auto& mesh_shape = view.mesh.shape();
  Exchange exchange{.have = region_of(view, from, shape),
                    .want = region_of(view, to, shape),
                    .axes = {},
                    .partial_axes = {},
                    .partial_ops = {}};
  Sizes reduced;
  std::vector<ReduceOp> ops;
  bool one_step = true;
  for (std::int64_t axis = 0; axis < view.mesh.ndim(); ++axis) {
    const auto& source = from.placements()[at_index(axis)];
    const auto& target = to.placements()[at_index(axis)];
    if (source.is_shard() || source.is_ragged_shard()) exchange.axes.push_back(axis);
    if (!source.is_partial() || kept[at_index(axis)] || mesh_shape[at_index(axis)] == 1) continue;
    check_value(source.reduce_op() != ReduceOp::kAvg || local.is_floating_point() || local.is_complex(), "DTensor::redistribute",
                "average of ", c10::toString(local.scalar_type()), ", want a floating dtype");
    reduced.push_back(axis);
    ops.push_back(source.reduce_op());
    one_step = one_step && (target.is_shard() || target.is_ragged_shard());
  }
  if (reduced.empty()) return run_exchange(view, exchange, local);
  Sizes all_axes = exchange.axes;
  all_axes.insert(all_axes.end(), reduced.begin(), reduced.end());
  if (one_step) {
    exchange.axes = all_axes;
    exchange.partial_axes = reduced;
    exchange.partial_ops = ops;
    return run_exchange(view, exchange, local);
  }
  const RegionOf share = [&view, &mesh_shape, reduced, have = exchange.have](std::int64_t position) {
    return share_of(have(position), mesh_shape, view.coordinate(position), reduced);
  };
  const Exchange reduce{.have = exchange.have, .want = share, .axes = reduced, .partial_axes = reduced, .partial_ops = ops};
  const at::Tensor reduced_share = run_exchange(view, reduce, local);
  exchange.have = share;
  exchange.axes = all_axes;
  return run_exchange(view, exchange, reduced_share);
}

}  // namespace

DTensor::DTensor(at::Tensor local, DeviceMesh mesh, Layout layout, std::vector<std::int64_t> shape)
    : local_(std::move(local)), mesh_(std::move(mesh)), layout_(std::move(layout)), shape_(std::move(shape)) {}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, const std::vector<Placement>& placements,
                            const FromLocalOptions& options) {
  constexpr std::string_view kOp = "DTensor::from_local";
  check_value(local.defined(), kOp, "the local tensor is undefined");
  const MeshView view(kOp, mesh);
  const Sizes shape = options.shape ? *options.shape : agree_on_shape(view, placements, local);
  return from_local(local, mesh, Layout::from_placements(mesh.shape(), placements, static_cast<std::int64_t>(shape.size())),
                    shape);
}

DTensor DTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh, const Layout& layout,
                            std::vector<std::int64_t> shape) {
  constexpr std::string_view kOp = "DTensor::from_local";
  check_value(local.defined(), kOp, "the local tensor is undefined");
  const MeshView view(kOp, mesh);
  check_value(layout.defined() && layout.mesh_shape() == mesh.shape(), kOp, layout.to_string(), " on ", mesh.to_string(),
              ", want a layout for a mesh of this shape");
  layout.validate(shape);
  const Sizes want = layout.local_shape(shape, view.coordinate(view.position));
  const bool scalar = shape.empty() && local.dim() == 0 && want == Sizes{1};
  check_value(scalar || local.sizes() == want, kOp, "local tensor has shape ", text_of(local.sizes()), ", want ", text_of(want),
              " of a tensor of shape ", text_of(shape), " in ", layout.to_string(mesh.mesh_dim_names()));
  return {scalar ? local.view(want) : local, mesh, layout, std::move(shape)};
}

std::int64_t DTensor::numel() const {
  return std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<Box> DTensor::boxes() const {
  const MeshView view("DTensor::boxes", mesh_);
  return layout_.boxes(shape_, view.coordinate(view.position));
}

std::string DTensor::to_string() const {
  if (!defined()) return "DTensor()";
  return concat("DTensor(", text_of(shape_), ", ", layout_.to_string(mesh_.mesh_dim_names()), ")");
}

DTensor DTensor::redistribute(const std::vector<Placement>& placements) const {
  check_value(defined(), "DTensor::redistribute", "the tensor is undefined");
  return redistribute(Layout::from_placements(mesh_.shape(), placements, dim()));
}

DTensor DTensor::redistribute(const Layout& layout) const {
  constexpr std::string_view kOp = "DTensor::redistribute";
  check_value(defined(), kOp, "the tensor is undefined");
  check_value(layout.defined() && layout.mesh_shape() == mesh_.shape(), kOp, layout.to_string(), " on ", mesh_.to_string(),
              ", want a layout for a mesh of this shape");
  layout.validate(shape_);
  if (layout == layout_) return *this;
  const MeshView view(kOp, mesh_);
  const at::Tensor flat = move(view, layout_, layout, shape_, local_.detach().contiguous().view(-1));
  const at::Tensor local = flat.view(layout.local_shape(shape_, view.coordinate(view.position)));
  make_partial(view, local, layout, kept_partial(layout_, layout));
  return {local, mesh_, layout, shape_};
}

at::Tensor DTensor::full_tensor() const {
  check_value(defined(), "DTensor::full_tensor", "the tensor is undefined");
  return redistribute(std::vector<Placement>(mesh_.shape().size())).to_local();
}

DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, const std::vector<Placement>& placements,
                          const DistributeOptions& options) {
  constexpr std::string_view kOp = "distribute_tensor";
  check_value(tensor.defined(), kOp, "the tensor is undefined");
  const MeshView view(kOp, mesh);
  const Sizes shape = tensor.sizes().vec();
  const Layout layout = Layout::from_placements(mesh.shape(), placements, tensor.dim());
  layout.validate(shape);
  const Sizes coordinate = view.coordinate(view.position);
  const at::Tensor source = tensor.detach().contiguous().view(-1);
  const RegionOf want = region_of(view, layout, shape);
  at::Tensor flat;
  if (options.src_data_rank) {
    check_value(*options.src_data_rank >= 0 && *options.src_data_rank < mesh.size(), kOp, "src_data_rank is ",
                *options.src_data_rank, ", want 0 <= src_data_rank < ", mesh.size());
    view.group().check_same(kOp, {concat("tensor ", c10::toString(tensor.scalar_type()), " ", text_of(shape), " in ",
                                         layout.to_string(mesh.mesh_dim_names()), " from rank ", *options.src_data_rank)});
    flat = run_scatter(view, *options.src_data_rank, whole(shape), want, source);
  } else {
    const Region mine = want(view.position);
    flat = source.new_empty({numel_of(mine)});
    copy_own({whole(shape)}, mine, source, flat);
  }
  const at::Tensor local = flat.view(layout.local_shape(shape, coordinate));
  make_partial(view, local, layout, std::vector<bool>(mesh.shape().size(), false));
  return {local, mesh, layout, shape};
}

}  // namespace hyper_parallel
