#include "dtensor/exchange.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel {
namespace {

using Sizes = std::vector<std::int64_t>;

std::size_t at_index(std::int64_t index) { return static_cast<std::size_t>(index); }

/// View of `part` inside `box`, whose elements start at `start` of the flat tensor `flat`.
at::Tensor view_of(const at::Tensor& flat, std::int64_t start, const Box& box, const Box& part) {
  Sizes strides(box.size.size());
  std::int64_t stride = 1;
  for (std::size_t d = box.size.size(); d-- > 0;) {
    strides[d] = stride;
    start += (part.offset[d] - box.offset[d]) * stride;
    stride *= box.size[d];
  }
  return flat.as_strided(part.size, strides, flat.storage_offset() + start);
}

/// Calls f(part, i, start of have[i], j, start of want[j]) for all boxes that two regions share, senders' order first.
template <class F>
void for_each_shared(const Region& have, const Region& want, F&& f) {
  std::int64_t have_start = 0;
  for (const auto& from : have) {
    std::int64_t want_start = 0;
    for (const auto& to : want) {
      if (const auto part = intersect(from, to)) f(*part, from, have_start, to, want_start);
      want_start += to.numel();
    }
    have_start += from.numel();
  }
}

std::int64_t shared_numel(const Region& have, const Region& want) {
  std::int64_t numel = 0;
  for_each_shared(have, want,
                  [&](const Box& part, const Box&, std::int64_t, const Box&, std::int64_t) { numel += part.numel(); });
  return numel;
}

/// The elements that `have` and `want` share, in the order in which both ends of a transfer see them.
at::Tensor pack(const Region& have, const Region& want, const at::Tensor& local) {
  const at::Tensor packed = at::empty({shared_numel(have, want)}, local.options());
  std::int64_t at = 0;
  for_each_shared(have, want, [&](const Box& part, const Box& from, std::int64_t start, const Box&, std::int64_t) {
    packed.narrow(0, at, part.numel()).view(part.size).copy_(view_of(local, start, from, part));
    at += part.numel();
  });
  return packed;
}

/// The inverse on the receiving side: `packed` holds what pack() made from the sender's region.
void unpack(const Region& have, const Region& want, const at::Tensor& packed, const at::Tensor& result) {
  std::int64_t at = 0;
  for_each_shared(have, want, [&](const Box& part, const Box&, std::int64_t, const Box& to, std::int64_t start) {
    view_of(result, start, to, part).copy_(packed.narrow(0, at, part.numel()).view(part.size));
    at += part.numel();
  });
}

at::Tensor combine(const at::Tensor& sum, const at::Tensor& next, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return sum.add(next);
    case ReduceOp::kProduct:
      return sum.mul(next);
    case ReduceOp::kMin:
      return sum.minimum(next);
    case ReduceOp::kMax:
      return sum.maximum(next);
  }
  throw InternalError("[redistribute] internal: unknown reduction");
}

/// Reduces contributions that are ordered row-major over axes of these sizes, the last axis first, in fp32 for fp16 and bf16.
at::Tensor reduce(std::vector<at::Tensor> parts, const Sizes& sizes, const std::vector<ReduceOp>& ops) {
  const auto dtype = parts.front().scalar_type();
  if (dtype == at::kHalf || dtype == at::kBFloat16) {
    for (auto& part : parts) part = part.to(at::kFloat);
  }
  for (std::size_t axis = sizes.size(); axis-- > 0;) {
    const std::size_t count = at_index(sizes[axis]);
    std::vector<at::Tensor> reduced;
    for (std::size_t first = 0; first < parts.size(); first += count) {
      at::Tensor value = parts[first];
      for (std::size_t i = 1; i < count; ++i) value = combine(value, parts[first + i], ops[axis]);
      reduced.push_back(ops[axis] == ReduceOp::kAvg ? value.div(static_cast<double>(count)) : value);
    }
    parts = std::move(reduced);
  }
  return parts.front().to(dtype);
}

/// Positions of the ranks that agree with `position` on all axes but `axes`, in row-major order over `axes`.
Sizes peers_along(const MeshView& view, std::int64_t position, const Sizes& axes) {
  Sizes coordinate = view.coordinate(position);
  Sizes result = {0};
  const auto& shape = view.mesh.shape();
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    const bool free = std::find(axes.begin(), axes.end(), static_cast<std::int64_t>(axis)) != axes.end();
    Sizes next;
    for (const std::int64_t prefix : result) {
      for (std::int64_t c = free ? 0 : coordinate[axis]; c < (free ? shape[axis] : coordinate[axis] + 1); ++c) {
        next.push_back(prefix * shape[axis] + c);
      }
    }
    result = std::move(next);
  }
  return result;
}

/// What this rank has received, by position in the mesh; undefined where nothing was due.
std::vector<at::Tensor> all_to_all(const MeshView& view, const std::vector<at::Tensor>& outgoing, const Sizes& incoming,
                                   const at::Tensor& like) {
  const Comm group = view.group();
  const auto& ranks = view.mesh.ranks();
  Sizes position_of;  // by group rank
  for (const int rank : group.ranks()) position_of.push_back(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  Sizes input_sizes, output_sizes;
  std::vector<at::Tensor> input;
  for (const std::int64_t position : position_of) {
    const auto& part = outgoing[at_index(position)];
    input_sizes.push_back(part.defined() ? part.numel() : 0);
    if (part.defined()) input.push_back(part);
    output_sizes.push_back(incoming[at_index(position)]);
  }
  const auto total = std::accumulate(output_sizes.begin(), output_sizes.end(), std::int64_t{0});
  const at::Tensor received = at::empty({total}, like.options());
  const at::Tensor sent = input.empty() ? at::empty({0}, like.options()) : at::cat(input);
  group.all_to_all_single(received, sent, output_sizes, input_sizes, {.label = "redistribute"}).wait();
  std::vector<at::Tensor> result(outgoing.size());
  std::int64_t start = 0;
  for (std::size_t i = 0; i < position_of.size(); ++i) {
    result[at_index(position_of[i])] = received.narrow(0, start, output_sizes[i]);
    start += output_sizes[i];
  }
  return result;
}

}  // namespace

std::int64_t numel_of(const Region& region) {
  return std::accumulate(region.begin(), region.end(), std::int64_t{0},
                         [](std::int64_t sum, const Box& box) { return sum + box.numel(); });
}

MeshView::MeshView(std::string_view op, DeviceMesh mesh_value) : mesh(std::move(mesh_value)) {
  check_value(mesh.defined(), op, "the mesh is undefined");
  const auto mine = mesh.get_coordinate();
  check_value(mine.has_value(), op, "this rank is not part of ", mesh.to_string());
  for (std::size_t axis = 0; axis < mine->size(); ++axis) position = position * mesh.shape()[axis] + (*mine)[axis];
}

std::vector<std::int64_t> MeshView::coordinate(std::int64_t at) const {
  const auto& shape = mesh.shape();
  Sizes result(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    result[axis] = at % shape[axis];
    at /= shape[axis];
  }
  return result;
}

Comm MeshView::group() const { return mesh.ndim() == 1 ? mesh.get_group(0) : mesh.flatten().get_group(0); }

void copy_own(const Region& have, const Region& want, const at::Tensor& local, const at::Tensor& result) {
  for_each_shared(have, want,
                  [&](const Box& part, const Box& from, std::int64_t from_start, const Box& to, std::int64_t to_start) {
                    view_of(result, to_start, to, part).copy_(view_of(local, from_start, from, part));
                  });
}

bool is_local(const MeshView& view, const Exchange& exchange) {
  if (!exchange.partial_axes.empty()) return false;
  for (std::int64_t position = 0; position < view.size(); ++position) {
    const Region want = exchange.want(position);
    if (shared_numel(exchange.have(position), want) != numel_of(want)) return false;
  }
  return true;
}

at::Tensor run_exchange(const MeshView& view, const Exchange& exchange, const at::Tensor& local) {
  const Region have = exchange.have(view.position);
  const Region want = exchange.want(view.position);
  const at::Tensor result = at::empty({numel_of(want)}, local.options());
  if (is_local(view, exchange)) {
    copy_own(have, want, local, result);
    return result;
  }
  const Sizes peers = peers_along(view, view.position, exchange.axes);
  std::vector<at::Tensor> outgoing(at_index(view.size()));
  std::vector<Region> theirs(at_index(view.size()));
  Sizes incoming(at_index(view.size()), 0);
  for (const std::int64_t peer : peers) {
    theirs[at_index(peer)] = exchange.have(peer);
    if (peer == view.position) continue;
    outgoing[at_index(peer)] = pack(have, exchange.want(peer), local);
    incoming[at_index(peer)] = shared_numel(theirs[at_index(peer)], want);
  }
  std::vector<at::Tensor> parts = all_to_all(view, outgoing, incoming, local);
  if (exchange.partial_axes.empty()) {
    copy_own(have, want, local, result);
    for (const std::int64_t peer : peers) {
      if (peer != view.position) unpack(theirs[at_index(peer)], want, parts[at_index(peer)], result);
    }
    return result;
  }
  parts[at_index(view.position)] = pack(have, want, local);
  Sizes sizes;
  for (const std::int64_t axis : exchange.partial_axes) sizes.push_back(view.mesh.shape()[at_index(axis)]);
  for (const std::int64_t peer : peers) {
    // Contributors to the same elements differ along the partial axes only; the first of them stands for all.
    const Sizes contributors = peers_along(view, peer, exchange.partial_axes);
    if (contributors.front() != peer || parts[at_index(peer)].numel() == 0) continue;
    std::vector<at::Tensor> contributions;
    for (const std::int64_t contributor : contributors) contributions.push_back(parts[at_index(contributor)]);
    unpack(theirs[at_index(peer)], want, reduce(std::move(contributions), sizes, exchange.partial_ops), result);
  }
  return result;
}

at::Tensor run_scatter(const MeshView& view, std::int64_t root, const Box& everything, const RegionOf& want,
                       const at::Tensor& local) {
  const Region mine = want(view.position);
  std::vector<at::Tensor> outgoing(at_index(view.size()));
  Sizes incoming(at_index(view.size()), 0);
  if (view.position == root) {
    for (std::int64_t peer = 0; peer < view.size(); ++peer) {
      if (peer != root) outgoing[at_index(peer)] = pack({everything}, want(peer), local);
    }
  } else {
    incoming[at_index(root)] = numel_of(mine);
  }
  const auto parts = all_to_all(view, outgoing, incoming, local);
  const at::Tensor result = at::empty({numel_of(mine)}, local.options());
  if (view.position == root) {
    copy_own({everything}, mine, local, result);
  } else {
    unpack({everything}, mine, parts[at_index(root)], result);
  }
  return result;
}

}  // namespace hyper_parallel
