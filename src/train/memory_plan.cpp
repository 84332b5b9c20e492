#include <hyper_parallel/train/memory_plan.h>

#include <algorithm>

namespace hyper_parallel::train {
namespace {

std::int64_t bytes_of(const std::string& dtype) { return dtype == "float32" ? 4 : 2; }

std::int64_t kv_dim(const ModelConfig& m) { return head_dim_of(m) * (m.n_kv_heads > 0 ? m.n_kv_heads : m.n_heads); }
std::int64_t q_dim(const ModelConfig& m) { return head_dim_of(m) * m.n_heads; }

// Norms and biases of a block.
std::int64_t vectors_of(const ModelConfig& m) {
  const std::int64_t biases = m.attention_bias ? q_dim(m) + 2 * kv_dim(m) + m.dim : 0;
  return 2 * m.dim + (m.qk_norm ? 2 * head_dim_of(m) : 0) + biases;
}

std::int64_t experts_of(const ModelConfig& m) { return m.n_experts * 3 * m.dim * m.expert_ffn_dim; }

// The matrices of a block but for routers and stacks of experts.
std::int64_t plain_matrices(const ModelConfig& m, std::int64_t layer) {
  const std::int64_t attention = 2 * m.dim * q_dim(m) + 2 * m.dim * kv_dim(m);
  return attention + 3 * m.dim * (has_experts(m, layer) ? m.shared_ffn_dim : m.ffn_dim);
}

std::int64_t router_of(const ModelConfig& m, std::int64_t layer) { return has_experts(m, layer) ? m.n_experts * m.dim : 0; }

/// What `ranks` cut, at most.
std::int64_t cut(std::int64_t n, std::int64_t ranks) { return (n + ranks - 1) / ranks; }

// Elements that plain autograd keeps of one token of one block: the inputs of both norms and of their products (8 dim in all),
// queries and what attention gives, keys and values, what the norms of queries and keys read, and the four tensors of the SwiGLU.
// With experts, for each of the top_k that a token visits: its row on the way in and out, and the SwiGLU; ranks of tp have a part
// of the tokens, those of ep as many rows as they have sent if the experts are balanced. Keys and values are gathered over cp.
std::int64_t block_elements(const ModelConfig& m, const BatchPlan& batches, bool sequence_parallel, std::int64_t layer) {
  const std::int64_t tp = batches.tp;
  const std::int64_t stream = sequence_parallel ? cut(6 * m.dim, tp) + 2 * m.dim : 8 * m.dim;
  const std::int64_t attention = cut(2 * q_dim(m) + (m.qk_norm ? q_dim(m) + kv_dim(m) : 0), tp) +
                                 cut(2 * kv_dim(m) * (batches.cp > 1 ? batches.cp + 1 : 1), tp);
  if (!has_experts(m, layer)) return stream + attention + cut(4 * m.ffn_dim, tp);
  return stream + attention + cut(4 * m.shared_ffn_dim, tp) + cut(m.top_k * (4 * m.dim + 4 * m.expert_ffn_dim), tp) + m.n_experts;
}

// A block that is computed again keeps its input alone, and one of those is back at a time; then the logits in the compute dtype,
// their log-softmax and its gradient.
std::int64_t activation_bytes(const Config& config, const BatchPlan& batches) {
  const ModelConfig& m = config.model;
  const std::int64_t width = bytes_of(config.precision.param_dtype);
  const std::int64_t tokens = batches.micro_batch * cut(config.data.seq_len, batches.cp);
  const std::int64_t every = checkpoint_every(config.train.activation_checkpoint);
  const bool sequence_parallel = config.parallel.sequence_parallel;
  std::int64_t kept = 0, largest = 0;
  for (std::int64_t i = 0; i < m.n_layers; ++i) {
    const std::int64_t block = block_elements(m, batches, sequence_parallel, i);
    const bool again = every > 0 && i % every == 0;
    kept += again ? (sequence_parallel ? cut(m.dim, batches.tp) : m.dim) : block;
    if (again) largest = std::max(largest, block);
  }
  return tokens * ((kept + largest) * width + cut(m.vocab_size, batches.tp) * (width + 8));
}

}  // namespace

std::vector<UnitSize> llama_units(const ModelConfig& m) {
  std::vector<UnitSize> units;
  const std::int64_t embedding = m.vocab_size * m.dim;
  if (m.tied)
    units.push_back({"(root)", embedding + m.dim});
  else
    units.push_back({"embed_tokens", embedding});
  for (std::int64_t i = 0; i < m.n_layers; ++i) {
    const std::string name = concat("layers.", i);
    units.push_back({name, vectors_of(m) + plain_matrices(m, i) + router_of(m, i)});
    if (has_experts(m, i)) units.push_back({name + ".mlp.experts", experts_of(m)});
  }
  if (!m.tied) units.push_back({"norm, lm_head", embedding + m.dim});
  return units;
}

std::int64_t parameter_count(const ModelConfig& model) {
  std::int64_t count = 0;
  for (const UnitSize& unit : llama_units(model)) count += unit.numel;
  return count;
}

std::int64_t MemoryPlan::total() const {
  return engine.shards + engine.gradients + engine.pool + engine.optimizer_state + engine.staging + activations;
}

std::int64_t optimizer_bytes(const Config& config) {
  const ModelConfig& m = config.model;
  const OptimConfig& o = config.optim;
  const std::int64_t count = parameter_count(m);
  const std::int64_t averages = o.ema_decay > 0 ? 4 * count : 0;
  std::int64_t matrices = 0;
  for (std::int64_t i = 0; i < m.n_layers; ++i) matrices += plain_matrices(m, i);
  std::int64_t elements = 2 * count;
  if (o.optimizer == "sgd") elements = o.momentum > 0 ? count : 0;
  if (o.optimizer == "muon") elements -= matrices;  // one momentum instead of two moments
  return bytes_of(o.state_dtype) * elements + averages;
}

MemoryPlan plan_memory(const Config& config, const BatchPlan& batches, const EngineBytes& engine) {
  MemoryPlan plan{.engine = engine};
  plan.activations = activation_bytes(config, batches);
  return plan;
}

}  // namespace hyper_parallel::train
