// What the settings of experts and ranks mean together, and for a world.
#include <string>
#include <utility>

#include "train/config_fields.h"

namespace hyper_parallel::train {
namespace {

void check_without_experts(const Config& c) {
  const ModelConfig& m = c.model;
  const ModelConfig plain;
  const std::pair<bool, const char*> settings[] = {{m.top_k != plain.top_k, "model.top_k"},
                                                   {m.expert_ffn_dim != plain.expert_ffn_dim, "model.expert_ffn_dim"},
                                                   {m.shared_ffn_dim != plain.shared_ffn_dim, "model.shared_ffn_dim"},
                                                   {m.moe_every != plain.moe_every, "model.moe_every"},
                                                   {m.router != plain.router, "model.router"},
                                                   {m.norm_topk_prob != plain.norm_topk_prob, "model.norm_topk_prob"},
                                                   {m.route_scale != plain.route_scale, "model.route_scale"},
                                                   {m.aux_loss_weight != plain.aux_loss_weight, "model.aux_loss_weight"},
                                                   {m.bias_update_speed != plain.bias_update_speed, "model.bias_update_speed"},
                                                   {c.parallel.ep != 1, "parallel.ep"}};
  for (const auto& [given, key] : settings) {
    check_value(!given, "config", key, " is about experts and model.n_experts = 0, want experts with it, or its default (",
                c.where(key), ", ", c.where("model.n_experts"), ")");
  }
}

/// The product of `factors` as it is written in messages, without those that are 1 behind the first two.
std::string product(const std::vector<std::pair<const char*, std::int64_t>>& factors) {
  std::string names, values;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const auto& [name, value] = factors[i];
    if (i >= 2 && value == 1) continue;
    names += concat(i == 0 ? "" : " * ", name);
    values += concat(i == 0 ? "" : " * ", value);
  }
  return concat(names, " = ", values);
}

/// The axes of the ranks.
BatchPlan plan_ranks(const Config& config, int world) {
  const ParallelConfig& p = config.parallel;
  BatchPlan plan{.dp_replicate = p.dp_replicate, .dp_shard = p.dp_shard, .cp = p.cp, .tp = p.tp, .ep = p.ep};
  const std::int64_t others = p.dp_replicate * p.cp * p.tp;
  if (p.dp_shard < 0) {
    const std::string what = p.cp * p.tp == 1 ? concat("dp_replicate = ", p.dp_replicate)
                                              : product({{"dp_replicate", p.dp_replicate}, {"cp", p.cp}, {"tp", p.tp}});
    const char* key = p.tp > 1 ? "parallel.tp" : p.cp > 1 ? "parallel.cp" : "parallel.dp_replicate";
    check_value(world % others == 0, "parallel", what, ", want a divisor of the world size ", world, " (", config.where(key),
                ")");
    plan.dp_shard = world / others;
  } else {
    check_value(plan.world() == world, "parallel",
                product({{"dp_replicate", p.dp_replicate}, {"dp_shard", p.dp_shard}, {"cp", p.cp}, {"tp", p.tp}}),
                ", want the world size ", world, " (", config.where("parallel.dp_shard"), ")");
  }
  const std::int64_t shards = plan.dp_shard * plan.cp, copy = shards * plan.tp;
  check_value(copy % plan.ep == 0, "parallel", "ep = ", plan.ep, ", want a divisor of ",
              product({{"dp_shard", plan.dp_shard}, {"cp", plan.cp}, {"tp", plan.tp}}), ", the ranks that share one copy (",
              config.where("parallel.ep"), ")");
  check_value(p.reshard_ranks == 0 || shards % p.reshard_ranks == 0, "parallel", "reshard_ranks = ", p.reshard_ranks,
              ", want a divisor of ",
              plan.cp == 1 ? concat("dp_shard = ", shards) : product({{"dp_shard", plan.dp_shard}, {"cp", plan.cp}}), " (",
              config.where("parallel.reshard_ranks"), ")");
  check_value(p.reshard_ranks == 0 || config.model.n_experts == 0 || plan.expert_shard() % p.reshard_ranks == 0, "parallel",
              "reshard_ranks = ", p.reshard_ranks, ", want a divisor of the ", plan.expert_shard(),
              " ranks that share the same experts, dp_shard * cp * tp / ep (", config.where("parallel.reshard_ranks"), ", ",
              config.where("parallel.ep"), ")");
  return plan;
}

}  // namespace

void check_experts(const Config& c) {
  const ModelConfig& m = c.model;
  check_value(!c.parallel.sequence_parallel || c.parallel.tp > 1, "config",
              "parallel.sequence_parallel = true with parallel.tp = 1, which leaves nothing to cut, want tp above 1 or false (",
              c.where("parallel.sequence_parallel"), ", ", c.where("parallel.tp"), ")");
  if (m.n_experts == 0) {
    check_without_experts(c);
    return;
  }
  check_value(m.top_k >= 1 && m.top_k <= m.n_experts, "config", "model.top_k = ", m.top_k,
              ", want at least 1 and at most model.n_experts = ", m.n_experts, " (", c.where("model.top_k"), ", ",
              c.where("model.n_experts"), ")");
  check_value(m.expert_ffn_dim >= 1, "config", "model.expert_ffn_dim = 0 with model.n_experts = ", m.n_experts,
              ", want the width of an expert (", c.where("model.expert_ffn_dim"), ", ", c.where("model.n_experts"), ")");
  check_value(m.moe_every <= m.n_layers, "config", "model.moe_every = ", m.moe_every,
              ", want at most model.n_layers = ", m.n_layers, ": no block would have experts (", c.where("model.moe_every"), ", ",
              c.where("model.n_layers"), ")");
  check_value(c.parallel.ep <= m.n_experts, "config", "parallel.ep = ", c.parallel.ep,
              ", want at most model.n_experts = ", m.n_experts, " (", c.where("parallel.ep"), ", ", c.where("model.n_experts"),
              ")");
  check_value(c.parallel.memory_budget_mb == 0 || c.parallel.tp * c.parallel.ep == 1, "config",
              "parallel.memory_budget_mb = ", c.parallel.memory_budget_mb, " with experts and parallel.",
              c.parallel.ep > 1 ? "ep = " : "tp = ", c.parallel.ep > 1 ? c.parallel.ep : c.parallel.tp,
              ": ranks that share weights hold different parts of others and would keep different ones, want no budget (",
              c.where("parallel.memory_budget_mb"), ", ", c.where(c.parallel.ep > 1 ? "parallel.ep" : "parallel.tp"), ")");
}

BatchPlan plan_batches(const Config& config, int world) {
  BatchPlan plan = plan_ranks(config, world);
  const std::int64_t batch = config.train.batch_size, ranks = plan.data_ranks();
  check_value(batch % ranks == 0, "train", "batch_size = ", batch, ", want a multiple of ",
              ranks == world ? concat("the world size ", world)
                             : product({{"dp_replicate", plan.dp_replicate}, {"dp_shard", plan.dp_shard}}),
              " (", config.where("train.batch_size"), ")");
  plan.micro_batch = config.train.micro_batch_size > 0 ? config.train.micro_batch_size : batch / ranks;
  check_value(batch % (plan.micro_batch * ranks) == 0, "train", "micro_batch_size = ", plan.micro_batch,
              ", want a divisor of the ", batch / ranks, " sequences of each rank (", config.where("train.micro_batch_size"),
              ")");
  plan.accumulation = batch / (plan.micro_batch * ranks);
  return plan;
}

}  // namespace hyper_parallel::train
