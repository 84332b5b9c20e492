#pragma once
// DTensor: a tensor that lies in parts on the ranks of a mesh.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/layout.h>
#include <hyper_parallel/dtensor/placement.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hyper_parallel {

struct FromLocalOptions {
  /// Shape of the whole tensor. Without it the ranks exchange their local shapes (collective) and the one shape that fits them
  /// all is taken.
  std::optional<std::vector<std::int64_t>> shape = {};
};

struct DistributeOptions {
  /// Position in the mesh (row-major) of the rank whose tensor is distributed: collective. Default: every rank passes the whole
  /// tensor and takes its part of it without communication.
  std::optional<std::int64_t> src_data_rank = {};
};

/// A tensor of which every rank of a mesh holds a part: local tensor, mesh, layout and global shape.
///
/// A value for parameters, gradients, state and redistribution; it has no operators, and nothing here is recorded by autograd.
/// Copies share the local tensor. Any dtype and number of dimensions, uneven and empty parts. Thread safety: like at::Tensor, per
/// rank.
class HP_API DTensor {
 public:
  DTensor() = default;

  /// Takes `local` as this rank's part (no copy). Local when `options.shape` is given, otherwise collective over the mesh.
  ///
  /// `local` must have the local shape that layout and shape give this rank (a part of a scalar may also have shape ()).
  /// ValueError: another shape or number of dimensions, placements that do not fit, a rank outside the mesh. Without a shape:
  /// local tensors that fit no common shape (on all ranks), and RaggedShard over two or more dimensions, from whose parts the
  /// shape cannot be told.
  [[nodiscard]] static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                          const std::vector<Placement>& placements, const FromLocalOptions& options = {});
  /// The same with a layout that exists already. Local.
  [[nodiscard]] static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, const Layout& layout,
                                          std::vector<std::int64_t> shape);

  [[nodiscard]] bool defined() const noexcept { return layout_.defined(); }
  /// This rank's part: contiguous when it came from distribute_tensor or redistribute. Shares memory with this value.
  [[nodiscard]] const at::Tensor& to_local() const { return local_; }
  [[nodiscard]] const DeviceMesh& device_mesh() const { return mesh_; }
  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const std::vector<Placement>& placements() const { return layout_.placements(); }
  [[nodiscard]] const std::vector<std::int64_t>& shape() const { return shape_; }  ///< of the whole tensor
  [[nodiscard]] std::int64_t dim() const { return static_cast<std::int64_t>(shape_.size()); }
  [[nodiscard]] std::int64_t numel() const;  ///< of the whole tensor
  [[nodiscard]] at::ScalarType scalar_type() const { return local_.scalar_type(); }
  /// The rectangles of the whole tensor that this rank holds, in the order of the local tensor's elements.
  [[nodiscard]] std::vector<Box> boxes() const;
  /// "DTensor([8, 3], Layout(dp=2: Shard(dim=0)))"
  [[nodiscard]] std::string to_string() const;

  /// The same tensor laid out another way on the same mesh. Collective over the mesh, unless every rank holds all that it needs;
  /// then local.
  ///
  /// Each element goes straight from one owner to each rank that wants it and lacks it: one all-to-all of exactly those elements.
  /// Between replicas the owner with the receiver's own coordinates on the replicated axes sends.
  ///
  /// Partial values are reduced in order of coordinates, in fp32 for fp16 and bf16, later mesh axes first: within the same
  /// exchange if the new layout cuts all axes that were partial, otherwise each rank reduces an equal share first. An axis that
  /// stays partial is left alone where the order of operations allows. An axis that becomes partial keeps the value at coordinate
  /// 0 and holds the neutral element elsewhere (avg, min, max: the value everywhere).
  ///
  /// Equal layouts: returns a copy of this handle. ValueError: placements that do not fit the tensor, averages of integers.
  [[nodiscard]] DTensor redistribute(const std::vector<Placement>& placements) const;
  [[nodiscard]] DTensor redistribute(const Layout& layout) const;
  /// The whole tensor on every rank. Collective, as redistribute to Replicate() everywhere.
  [[nodiscard]] at::Tensor full_tensor() const;

 private:
  DTensor(at::Tensor local, DeviceMesh mesh, Layout layout, std::vector<std::int64_t> shape);

  at::Tensor local_;
  DeviceMesh mesh_;
  Layout layout_;
  std::vector<std::int64_t> shape_;

  friend HP_API DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                          const std::vector<Placement>& placements, const DistributeOptions& options);
};

/// Cuts a whole tensor over a mesh. The local tensor is a contiguous copy. Local, or collective with `options.src_data_rank`.
///
/// Every rank passes a tensor of the same shape and dtype on the mesh's device; only the source rank's values count if there is
/// one. Partial placements keep the value at coordinate 0 as redistribute does. ValueError: placements that do not fit, source
/// out of range, a rank outside the mesh.
[[nodiscard]] HP_API DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                               const std::vector<Placement>& placements, const DistributeOptions& options = {});

}  // namespace hyper_parallel
