#pragma once
// Moves the elements of a distributed tensor between the ranks of a mesh.
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/dtensor/box.h>
#include <hyper_parallel/dtensor/placement.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

/// Boxes whose elements, one box after the other and row-major in each, make up a rank's local tensor.
using Region = std::vector<Box>;
/// Region of the rank at a row-major position of the mesh.
using RegionOf = std::function<Region(std::int64_t position)>;

[[nodiscard]] std::int64_t numel_of(const Region& region);

/// A mesh as seen from this rank.
struct MeshView {
  DeviceMesh mesh;
  std::int64_t position = 0;  ///< of this rank, row-major

  /// ValueError of `op` when the mesh is undefined or does not hold this rank.
  MeshView(std::string_view op, DeviceMesh mesh);
  [[nodiscard]] std::int64_t size() const { return mesh.size(); }
  [[nodiscard]] std::vector<std::int64_t> coordinate(std::int64_t at) const;
  /// The group of all ranks of the mesh: collective when it is used for the first time.
  [[nodiscard]] Comm group() const;
};

/// What moves in one exchange.
struct Exchange {
  RegionOf have;  ///< before: what each rank holds
  RegionOf want;  ///< after: what each rank shall hold
  /// Mesh axes along which `have` differs. A rank receives only from ranks that agree with it on all other axes.
  std::vector<std::int64_t> axes;
  /// Those of `axes` along which ranks hold contributions to the same elements, ascending, and how to reduce along each.
  std::vector<std::int64_t> partial_axes;
  std::vector<ReduceOp> partial_ops;
};

/// Collective over the mesh: one all-to-all. `local` is flat and contiguous; so is the result.
[[nodiscard]] at::Tensor run_exchange(const MeshView& view, const Exchange& exchange, const at::Tensor& local);
/// Collective over the mesh: the rank at `root` holds everything and sends each rank what it wants. `local` is read on the root
/// only, elsewhere it gives dtype and device.
[[nodiscard]] at::Tensor run_scatter(const MeshView& view, std::int64_t root, const Box& everything, const RegionOf& want,
                                     const at::Tensor& local);
/// True when every rank holds what it wants, so that nothing needs to be sent. Same answer on all ranks.
[[nodiscard]] bool is_local(const MeshView& view, const Exchange& exchange);
/// The part of an exchange that needs no peers: elements that this rank has and wants. `local` and `result` are flat and
/// contiguous.
void copy_own(const Region& have, const Region& want, const at::Tensor& local, const at::Tensor& result);
}  // namespace hyper_parallel
