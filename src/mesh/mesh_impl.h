#pragma once
// What a DeviceMesh points to. The `comm` module makes root meshes and reads the opaque pointers.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

/// The box that sub-meshes are cut from.
struct MeshRoot {
  std::string device_type;
  std::vector<std::int64_t> shape;
  std::vector<std::string> names;
  std::vector<int> ranks;                               ///< global ranks, row-major over `shape`
  int rank = 0;                                         ///< global rank of the caller
  std::optional<std::vector<std::int64_t>> coordinate;  ///< of the caller
  std::shared_ptr<const World> world;
  std::vector<std::shared_ptr<void>> groups;  ///< by axis, Comm::Impl; only where groups were given (from_group)

  /// Distance in `ranks` between neighbours along `axis`.
  [[nodiscard]] std::int64_t stride(std::int64_t axis) const;
};

/// A view of a root: each axis is one root axis, or several (outermost first) when it was flattened.
///
/// root (dp=2, cp=2, tp=2)          root["tp"]        root[{"dp","cp"}].flatten()
///   ranks 0 1 | 2 3 || 4 5 | 6 7   axes {{2}}        axes {{0, 1}}
/// The sub-mesh holds the ranks that share the caller's coordinate on every root axis that is not listed.
struct DeviceMesh::Impl {
  std::shared_ptr<const MeshRoot> root;
  std::vector<std::vector<std::int64_t>> axes;
  std::vector<std::string> names;
  std::vector<std::int64_t> shape;
  std::vector<int> ranks;
  std::optional<std::vector<std::int64_t>> coordinate;
};

/// Checks `shape`, `names` and `ranks` and makes the mesh that covers them. Errors are ValueErrors of operation `op`.
DeviceMesh make_root_mesh(std::string_view op, MeshRoot root);
/// Global ranks along `axis` of `mesh` through the caller, in axis order. ValueError when the caller is not in the mesh.
std::vector<int> line_ranks(std::string_view op, const DeviceMesh::Impl& mesh, std::int64_t axis);
/// `axis` counted from the front. ValueError when out of range.
std::int64_t normalize_axis(std::string_view op, const DeviceMesh::Impl& mesh, std::int64_t axis);

}  // namespace hyper_parallel
