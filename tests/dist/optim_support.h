#pragma once
// Gradients that do not come from a backward: the same whole tensors for every number of ranks, cut like the parameters.
#include <stdexcept>
#include <string>
#include <vector>

#include "support/rank_threads.h"
#include "support/small_net.h"

namespace hyper_parallel::testing {

/// The whole gradient of a parameter in a step: matrices of full rank.
inline torch::Tensor whole_gradient(const std::string& name, const std::vector<int64_t>& shape, int step) {
  int phase = 31 * step;
  for (const char c : name) phase = (phase * 7 + c) % 1009;
  const int64_t numel = c10::multiply_integers(shape);
  return torch::sin(torch::arange(numel, torch::kDouble).square() * 0.37 + phase).to(torch::kFloat).view(shape);
}

/// Gives every leaf of the tree its part of whole_gradient, in `dtype`, as a reduction into main gradients would.
inline void set_gradients(const fsdp::UnitHandle& root, int step, torch::Dtype dtype = torch::kFloat) {
  std::map<std::string, torch::Tensor> leaves;
  for (auto& group : root.groups()) {
    for (auto& parameter : group.parameters) leaves[parameter.name] = parameter.sharded;
  }
  for (auto& [name, tensor] : root.named_dtensors()) {
    if (!leaves.at(name).requires_grad()) continue;
    const auto whole = whole_gradient(name, tensor.shape(), step).to(dtype);
    leaves.at(name).mutable_grad() =
        distribute_tensor(whole, tensor.device_mesh(), tensor.placements()).to_local().view(leaves.at(name).sizes());
  }
}

/// Writes `value` into one gradient of one rank, of a parameter whose name begins with `prefix`.
inline void spoil(const fsdp::UnitHandle& root, int rank, float value, const std::string& prefix = "") {
  if (get_rank() != rank) return;
  for (auto& group : root.groups()) {
    for (auto& parameter : group.parameters) {
      if (parameter.numel > 0 && parameter.grad.defined() && parameter.name.starts_with(prefix))
        return void(parameter.grad.view(-1)[0] = value);
    }
  }
  throw std::logic_error("nothing to spoil on this rank");
}

/// The same gradients for whole tensors.
inline void set_whole_gradients(Tensors& whole, int step, torch::Dtype dtype = torch::kFloat) {
  for (auto& [name, tensor] : whole) tensor.mutable_grad() = whole_gradient(name, tensor.sizes().vec(), step).to(dtype);
}

inline std::vector<torch::Tensor> as_leaves(Tensors& whole) {
  std::vector<torch::Tensor> list;
  for (auto& [name, tensor] : whole) list.push_back(tensor.set_requires_grad(true));
  return list;
}

/// What rank 0 computes with `body(root)` on a sharded small net, for every mesh and layout.
template <class Body>
void on_every_mesh(const std::vector<std::vector<int64_t>>& meshes, Body&& body) {
  for (const std::vector<int64_t>& mesh : meshes) {
    run_ranks(ranks_of(mesh), [&](int rank) {
      for (const auto layout : kLayouts) {
        Net net = make_net();
        body(shard_net(net, on_mesh(mesh, layout)), rank,
             concat("mesh ", at::IntArrayRef(mesh), " layout ", static_cast<int>(layout)));
      }
    });
  }
}

inline const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {3}, {4}, {2, 1}, {2, 2}};

/// Expects the same bits.
inline void expect_same_bits(const Tensors& got, const Tensors& want, const std::string& where) {
  ASSERT_EQ(got.size(), want.size()) << where;
  for (const auto& [name, tensor] : want) EXPECT_TRUE(torch::equal(got.at(name), tensor)) << name << ", " << where;
}

}  // namespace hyper_parallel::testing
