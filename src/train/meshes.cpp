#include "train/meshes.h"

#include <hyper_parallel/comm/world.h>

namespace hyper_parallel::train {
namespace {

/// ([replicate,] shard, source): replicate only where there are replicas, source only where `with_source`.
DeviceMesh box(std::int64_t replicas, std::int64_t shards, std::int64_t source, const std::vector<std::string>& names,
               bool with_source) {
  std::vector<std::int64_t> shape;
  std::vector<std::string> used;
  const auto add = [&](std::int64_t size, const std::string& name) {
    shape.push_back(size);
    used.push_back(name);
  };
  if (replicas > 1) add(replicas, names[0]);
  add(shards, names[1]);
  if (with_source) add(source, names[2]);
  return init_device_mesh("cpu", shape, used);
}

DeviceMesh without_last(const DeviceMesh& mesh) {
  std::vector<std::string> names = mesh.mesh_dim_names();
  names.pop_back();
  return mesh[names];
}

}  // namespace

TrainMeshes make_meshes(const Config& config, const BatchPlan& plan) {
  const ModelConfig& m = config.model;
  TrainMeshes meshes;
  meshes.data_rank = static_cast<int>(current_world().rank() / (plan.cp * plan.tp));
  const std::vector<std::string> dense = {"dp_replicate", plan.cp > 1 ? "dp_shard_cp" : "dp_shard", "tp"};
  const DeviceMesh whole = box(plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp, dense, plan.tp > 1);
  meshes.dense = plan.tp > 1 ? without_last(whole) : whole;
  if (plan.tp > 1) meshes.model.tp = whole["tp"];
  if (plan.cp > 1) meshes.model.cp = init_device_mesh("cpu", {plan.data_ranks(), plan.cp, plan.tp}, {"dp", "cp", "tp"})["cp"];
  meshes.model.sequence_parallel = config.parallel.sequence_parallel;
  if (m.n_experts == 0) return meshes;

  const DeviceMesh experts =
      box(plan.dp_replicate, plan.expert_shard(), plan.ep, {"edp_replicate", "edp_shard", "ep"}, plan.ep > 1);
  meshes.experts = plan.ep > 1 ? without_last(experts) : experts;
  if (plan.ep > 1) meshes.model.ep = experts["ep"];
  if (plan.world() > 1 && (m.aux_loss_weight > 0 || m.bias_update_speed > 0))
    meshes.model.balance = init_device_mesh("cpu", {plan.world()}, {"balance"});
  return meshes;
}

}  // namespace hyper_parallel::train
