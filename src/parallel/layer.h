#pragma once
// What the parallel layers have in common: ranges of features, and the ways into and out of a parallel region.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/mesh/device_mesh.h>
#include <hyper_parallel/parallel/cut.h>
#include <hyper_parallel/parallel/functions.h>
#include <hyper_parallel/parallel/linear.h>

#include "parallel/transfer.h"

namespace hyper_parallel::parallel {

/// The chunk of `rank` when `n` are cut as Shard cuts them.
inline FeatureRange chunk_of(std::int64_t n, int ranks, int rank) {
  const std::int64_t chunk = (n + ranks - 1) / ranks;
  return {std::min(n, rank * chunk), std::min(n, (rank + 1) * chunk)};
}

/// The group along the axis of a layer; undefined without mesh. ValueError: more than one axis.
inline Comm group_of(const char* op, const DeviceMesh& mesh) {
  if (!mesh.defined()) return {};
  check_value(mesh.ndim() == 1, op, mesh.to_string(), " has ", mesh.ndim(), " axes, want one: pass mesh[\"tp\"]");
  return mesh.get_group();
}

/// Entries for a parameter: none without mesh.
inline std::vector<AxisCut> axis_cut(const DeviceMesh& mesh, const Placement& placement, bool partial_gradient = false) {
  if (!mesh.defined()) return {};
  return {{mesh, placement, partial_gradient}};
}

/// Lengths of the ranks' parts of a sequence: all as long as x without `length`, else its ceil chunks.
inline std::vector<std::int64_t> sequence_chunks(const Comm& comm, std::int64_t length) {
  return length == 0 ? std::vector<std::int64_t>() : ceil_chunks(length, size_of(comm));
}

struct SequenceParallel {
  bool enabled = false;
  std::int64_t dim = 1;
};
template <class Options>
SequenceParallel sequence_of(const Options& options) {
  return {options.sequence_parallel, options.sequence_dim};
}

/// Into a region where each rank computes with its own weights: what all ranks need of x.
inline at::Tensor enter(const at::Tensor& x, const Comm& comm, const SequenceParallel& sequence, std::int64_t length,
                        const char* label) {
  if (!sequence.enabled) return identity_all_reduce(x, comm, label);
  return all_gather_reduce_scatter(x, comm, {sequence.dim, sequence_chunks(comm, length), label});
}

/// Out of it: the sum of what the ranks have computed, whole or this rank's part of the sequence.
inline at::Tensor leave(const at::Tensor& x, const Comm& comm, const SequenceParallel& sequence, const char* label) {
  if (!sequence.enabled) return all_reduce_identity(x, comm, label);
  return reduce_scatter_all_gather(x, comm, {sequence.dim, {}, label});
}

}  // namespace hyper_parallel::parallel
