#include <hyper_parallel/train/memory_plan.h>

namespace hyper_parallel::train {
namespace {

std::int64_t bytes_of(const std::string& dtype) { return dtype == "float32" ? 4 : 2; }

std::int64_t kv_dim(const ModelConfig& m) { return m.dim / m.n_heads * (m.n_kv_heads > 0 ? m.n_kv_heads : m.n_heads); }

// Elements that plain autograd keeps of one token: per block the inputs of both norms and of their products (10 dim in all), keys
// and values, and the four tensors of the SwiGLU; a block that is computed again keeps its input alone, and one of those is back
// at a time; then the logits in the compute dtype, their log-softmax and its gradient.
std::int64_t activation_bytes(const Config& config, std::int64_t tokens) {
  const ModelConfig& m = config.model;
  const std::int64_t width = bytes_of(config.precision.param_dtype);
  const std::int64_t block = 10 * m.dim + 2 * kv_dim(m) + 4 * m.ffn_dim;
  const std::int64_t every = checkpoint_every(config.train.activation_checkpoint);
  const std::int64_t again = every == 0 ? 0 : (m.n_layers + every - 1) / every;
  const std::int64_t kept = (m.n_layers - again) * block + again * m.dim + (again > 0 ? block : 0);
  return tokens * (kept * width + m.vocab_size * (width + 8));
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
  return engine.shards + engine.gradients + engine.pool + engine.optimizer_state + activations;
}

std::int64_t optimizer_bytes(const Config& config) {
  const ModelConfig& m = config.model;
  const OptimConfig& o = config.optim;
  const std::int64_t count = parameter_count(m);
  const std::int64_t averages = o.ema_decay > 0 ? 4 * count : 0;
  const std::int64_t matrices = m.n_layers * (2 * m.dim * m.dim + 2 * m.dim * kv_dim(m) + 3 * m.dim * m.ffn_dim);
  std::int64_t elements = 2 * count;
  if (o.optimizer == "sgd") elements = o.momentum > 0 ? count : 0;
  if (o.optimizer == "muon") elements -= matrices;  // one momentum instead of two moments
  return bytes_of(o.state_dtype) * elements + averages;
}

MemoryPlan plan_memory(const Config& config, const BatchPlan& batches, const EngineBytes& engine) {
  MemoryPlan plan{.engine = engine};
  plan.activations = activation_bytes(config, batches.micro_batch * config.data.seq_len);
  return plan;
}

}  // namespace hyper_parallel::train
