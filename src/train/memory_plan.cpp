#include <hyper_parallel/train/memory_plan.h>

#include <algorithm>

namespace hyper_parallel::train {
namespace {

constexpr std::int64_t kMaster = 4;  // bytes of float32: master weights, gradients, moments

std::int64_t bytes_of(const std::string& dtype) { return dtype == "bfloat16" ? 2 : 4; }

std::int64_t kv_dim(const ModelConfig& m) { return m.dim / m.n_heads * (m.n_kv_heads > 0 ? m.n_kv_heads : m.n_heads); }

// Elements that plain autograd keeps of one token: per block the inputs of both norms and of their products (10 dim in all), keys
// and values, and the four tensors of the SwiGLU; then the logits in the compute dtype, their log-softmax and its gradient.
std::int64_t activation_bytes(const Config& config, std::int64_t tokens) {
  const ModelConfig& m = config.model;
  const std::int64_t width = bytes_of(config.precision.param_dtype);
  const std::int64_t block = 10 * m.dim + 2 * kv_dim(m) + 4 * m.ffn_dim;
  return tokens * (m.n_layers * block * width + m.vocab_size * (width + 8));
}

}  // namespace

std::vector<UnitSize> llama_units(const ModelConfig& m) {
  std::vector<UnitSize> units;
  const std::int64_t embedding = m.vocab_size * m.dim;
  const std::int64_t block = 2 * m.dim + 2 * m.dim * m.dim + 2 * m.dim * kv_dim(m) + 3 * m.dim * m.ffn_dim;
  if (m.tied)
    units.push_back({"(root)", embedding + m.dim});
  else
    units.push_back({"embed_tokens", embedding});
  for (std::int64_t i = 0; i < m.n_layers; ++i) units.push_back({concat("layers.", i), block});
  if (!m.tied) units.push_back({"norm, lm_head", embedding + m.dim});
  return units;
}

std::int64_t parameter_count(const ModelConfig& model) {
  std::int64_t count = 0;
  for (const UnitSize& unit : llama_units(model)) count += unit.numel;
  return count;
}

std::int64_t MemoryPlan::total() const {
  return parameter_shards + gradient_shards + optimizer_state + gathered_units + reduce_buffers + activations;
}

MemoryPlan plan_memory(const Config& config, const BatchPlan& batches) {
  const std::vector<UnitSize> units = llama_units(config.model);
  const std::int64_t world = batches.dp_shard;
  const std::int64_t width = bytes_of(config.precision.param_dtype);
  std::int64_t shard = 0, all = 0, largest = 0, neighbours = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    shard += (units[i].numel + world - 1) / world;
    all += units[i].numel;
    largest = std::max(largest, units[i].numel);
    neighbours = std::max(neighbours, units[i].numel + (i + 1 < units.size() ? units[i + 1].numel : 0));
  }
  // A tied weight stays gathered from the first use to the last.
  if (config.model.tied && units.size() > 2) neighbours = units[0].numel + 2 * units[1].numel;

  MemoryPlan plan;
  plan.parameter_shards = shard * kMaster;
  plan.gradient_shards = shard * kMaster;
  plan.optimizer_state = 2 * shard * kMaster;
  const bool gathers = world > 1 || width != kMaster;
  if (gathers) plan.gathered_units = (config.parallel.reshard_after_forward ? std::min(neighbours, all) : all) * width;
  // What goes out, and on more than one rank what comes in.
  plan.reduce_buffers = largest * width * (world > 1 ? 2 : 1);
  plan.activations = activation_bytes(config, batches.micro_batch * config.data.seq_len);
  return plan;
}

}  // namespace hyper_parallel::train
