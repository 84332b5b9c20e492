#pragma once
// DeviceMesh: ranks arranged in a box with named axes. Torch-free; groups come from the `comm` module.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

class Comm;   // comm/comm.h
class World;  // comm/world.h

/// Ranks of a world arranged in a box with named axes; a cheap, immutable value.
///
/// Axis 0 varies slowest. A mesh belongs to the World that made it and can be asked for the process group along each axis.
/// Thread safety: const members from the rank's own threads; `get_group` is internally locked.
class HP_API DeviceMesh {
 public:
  /// An empty handle ("no mesh"); only `defined` and comparison may be called.
  DeviceMesh() = default;

  [[nodiscard]] bool defined() const noexcept { return impl_ != nullptr; }
  [[nodiscard]] const std::string& device_type() const;  ///< "cpu", "cuda"
  [[nodiscard]] std::int64_t ndim() const;
  [[nodiscard]] const std::vector<std::int64_t>& shape() const;
  [[nodiscard]] const std::vector<std::string>& mesh_dim_names() const;  ///< empty strings are never present
  /// Global ranks, row-major over `shape()`.
  [[nodiscard]] const std::vector<int>& ranks() const;
  [[nodiscard]] std::int64_t size() const;                   ///< number of ranks
  [[nodiscard]] std::int64_t size(std::int64_t axis) const;  ///< negative axes count from the end
  /// Position of axis `name`; ValueError lists the axes when it is unknown.
  [[nodiscard]] std::int64_t axis(std::string_view name) const;
  /// This rank's coordinate, nullopt when it is not part of the mesh.
  [[nodiscard]] std::optional<std::vector<std::int64_t>> get_coordinate() const;
  [[nodiscard]] int get_local_rank(std::int64_t axis = 0) const;
  [[nodiscard]] int get_local_rank(std::string_view axis) const;

  /// The sub-mesh of one axis, or of several in mesh order, that contains this rank. ValueError: unknown, repeated or re-ordered
  /// names.
  [[nodiscard]] DeviceMesh operator[](std::string_view name) const;
  [[nodiscard]] DeviceMesh operator[](const std::vector<std::string>& names) const;
  /// A 1-D mesh over all ranks of this one. The default name joins the axis names with '_'.
  [[nodiscard]] DeviceMesh flatten(std::string_view name = {}) const;
  /// Joins sub-meshes of one root mesh: disjoint axis names in root order.
  [[nodiscard]] static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);
  /// Wraps groups that exist, one per axis. `ranks` are global ranks, row-major over `shape`.
  [[nodiscard]] static DeviceMesh from_group(const std::vector<Comm>& groups, std::string_view device_type,
                                             const std::vector<std::int64_t>& shape, const std::vector<int>& ranks,
                                             const std::vector<std::string>& names);
  /// Arranges some ranks of `world` in a box: `ranks` are global ranks, row-major over `shape`. Local.
  [[nodiscard]] static DeviceMesh from_ranks(const World& world, std::string_view device_type,
                                             const std::vector<std::int64_t>& shape, const std::vector<int>& ranks,
                                             const std::vector<std::string>& names);
  /// The process group along `axis` that contains this rank. Created on first use, by its members only: collective among them.
  [[nodiscard]] Comm get_group(std::int64_t axis = 0) const;
  [[nodiscard]] Comm get_group(std::string_view axis) const;

  [[nodiscard]] const World& world() const;
  [[nodiscard]] std::string to_string() const;  ///< e.g. "DeviceMesh(cpu, dp_replicate=2, dp_shard=4)"

  /// Value equality: device type, shape, names and ranks.
  friend HP_API bool operator==(const DeviceMesh& a, const DeviceMesh& b);

  struct Impl;  // src/mesh
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Arranges all ranks of the calling thread's world in a box: product of `shape` must be the world size. Local (no
/// communication).
///
/// \param device_type "cpu" or "cuda"
/// \param names one unique, non-empty name per axis; default {"dp"} for one axis, otherwise required
[[nodiscard]] HP_API DeviceMesh init_device_mesh(std::string_view device_type, const std::vector<std::int64_t>& shape,
                                                 const std::vector<std::string>& names = {});

}  // namespace hyper_parallel
