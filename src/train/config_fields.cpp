#include "train/config_fields.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace hyper_parallel::train {
namespace {

constexpr double kMaxSize = 1 << 30;

Rule at_least(double min) { return {.min = min, .max = kMaxSize}; }
Rule real(double min, double max) { return {.min = min, .max = max}; }
Rule positive() { return {.min = 0, .above = true}; }
Rule one_of(std::vector<std::string_view> choices) { return {.choices = std::move(choices)}; }

void add_rope(std::vector<Field>& fields, ModelConfig& m) {
  fields.push_back({"model", "rope_scaling", &m.rope_scaling, "how rotary angles are stretched to longer contexts",
                    one_of({"none", "linear", "dynamic", "llama3", "yarn"})});
  fields.push_back({"model", "rope_factor", &m.rope_factor, "by how much", {.min = 1, .max = 1e6}});
  fields.push_back({"model", "rope_original_len", &m.rope_original_len,
                    "context of the first training (0: max_seq_len; dynamic, llama3, yarn)", at_least(0)});
  fields.push_back({"model", "rope_low_freq_factor", &m.rope_low_freq_factor, "llama3: longer waves are stretched", positive()});
  fields.push_back({"model", "rope_high_freq_factor", &m.rope_high_freq_factor, "llama3: shorter waves are not", positive()});
  fields.push_back({"model", "rope_beta_fast", &m.rope_beta_fast, "yarn: faster rotations are not stretched", positive()});
  fields.push_back({"model", "rope_beta_slow", &m.rope_beta_slow, "yarn: slower rotations are", positive()});
  fields.push_back({"model", "rope_attention_factor", &m.rope_attention_factor,
                    "yarn: multiplies cosines and sines (0: 0.1 ln(rope_factor) + 1)", real(0, 1e6)});
  fields.push_back({"model", "rope_truncate", &m.rope_truncate, "yarn: the bounds of the ramp are whole numbers"});
}

void add_model(std::vector<Field>& fields, ModelConfig& m) {
  fields.push_back({"model", "dim", &m.dim, "width of the residual stream", at_least(1)});
  fields.push_back({"model", "n_layers", &m.n_layers, "decoder blocks", at_least(1)});
  fields.push_back({"model", "n_heads", &m.n_heads, "query heads", at_least(1)});
  fields.push_back({"model", "n_kv_heads", &m.n_kv_heads, "key and value heads (0: as many as n_heads)", at_least(0)});
  fields.push_back({"model", "ffn_dim", &m.ffn_dim, "inner width of the SwiGLU", at_least(1)});
  fields.push_back({"model", "vocab_size", &m.vocab_size, "tokens (the byte tokenizer needs 256)", at_least(1)});
  fields.push_back({"model", "max_seq_len", &m.max_seq_len, "longest context", at_least(1)});
  fields.push_back({"model", "rope_theta", &m.rope_theta, "base of the rotary embedding", positive()});
  fields.push_back({"model", "norm_eps", &m.norm_eps, "added to the mean square in RMSNorm", positive()});
  fields.push_back({"model", "tied", &m.tied, "embedding and output projection share one weight"});
  fields.push_back({"model", "head_dim", &m.head_dim, "width of a head (0: dim / n_heads)", at_least(0)});
  fields.push_back({"model", "qk_norm", &m.qk_norm, "normalize queries and keys, head by head"});
  fields.push_back({"model", "attention_bias", &m.attention_bias, "biases in the projections of attention"});
  add_rope(fields, m);
}

void add_experts(std::vector<Field>& fields, ModelConfig& m) {
  fields.push_back({"model", "n_experts", &m.n_experts, "mixture of experts: how many a block has (0: one MLP)", at_least(0)});
  fields.push_back({"model", "top_k", &m.top_k, "experts that a token visits", at_least(0)});
  fields.push_back({"model", "expert_ffn_dim", &m.expert_ffn_dim, "inner width of an expert", at_least(0)});
  fields.push_back(
      {"model", "shared_ffn_dim", &m.shared_ffn_dim, "inner width of the expert that every token visits (0: none)", at_least(0)});
  fields.push_back({"model", "moe_every", &m.moe_every, "every how many blocks one has experts, the last of them", at_least(1)});
  fields.push_back({"model", "router", &m.router, "scores of the experts", one_of({"softmax", "sigmoid"})});
  fields.push_back({"model", "norm_topk_prob", &m.norm_topk_prob, "the weights of a token's experts sum to 1"});
  fields.push_back({"model", "route_scale", &m.route_scale, "factor of these weights", positive()});
  fields.push_back({"model", "aux_loss_weight", &m.aux_loss_weight, "factor of the balancing loss (0: none)", real(0, 1e3)});
  fields.push_back({"model", "bias_update_speed", &m.bias_update_speed, "step of the bias that balances the experts (0: no bias)",
                    real(0, 1)});
}

void add_data_and_train(std::vector<Field>& fields, DataConfig& d, LoopConfig& t) {
  fields.push_back({"data", "path", &d.path, "text file, or folder that is read recursively"});
  fields.push_back({"data", "seq_len", &d.seq_len, "tokens in one training sequence", at_least(1)});
  fields.push_back({"data", "validation_fraction", &d.validation_fraction, "share of the text kept for validation, from its end",
                    real(0, 0.9)});
  fields.push_back({"train", "seed", &t.seed, "of initial weights, data order and samples", at_least(0)});
  fields.push_back({"train", "batch_size", &t.batch_size, "sequences in one step, all ranks together", at_least(1)});
  fields.push_back({"train", "micro_batch_size", &t.micro_batch_size,
                    "sequences in one forward of one rank (0: no gradient accumulation)", at_least(0)});
  fields.push_back({"train", "max_steps", &t.max_steps, "optimizer steps (0: until max_seconds)", at_least(0)});
  fields.push_back(
      {"train", "max_seconds", &t.max_seconds, "time budget; the schedule anneals within it (0: none)", real(0, 1e9)});
  fields.push_back({"train", "eval_every", &t.eval_every, "steps between validations (0: only at start and end)", at_least(0)});
  fields.push_back({"train", "eval_windows", &t.eval_windows, "sequences of one validation", at_least(1)});
  fields.push_back({"train", "activation_checkpoint", &t.activation_checkpoint,
                    "blocks to compute again in backward: none, block (all) or block:N (every N-th)"});
  fields.push_back({"train", "trace", &t.trace, "trace file in the folder of the run, %r is the rank (empty: no trace)"});
  fields.push_back({"train", "trace_steps", &t.trace_steps, "steps that the trace covers: 3, 3-5 or all"});
}

void add_optim(std::vector<Field>& fields, OptimConfig& o) {
  fields.push_back({"optim", "optimizer", &o.optimizer, "muon: Muon for the matrices of the blocks, AdamW for the rest",
                    one_of({"adamw", "sgd", "muon"})});
  fields.push_back({"optim", "lr", &o.lr, "peak learning rate", {.min = 0, .max = 1e3, .above = true}});
  fields.push_back({"optim", "schedule", &o.schedule, "how the rate falls after the warm-up (wsd: constant, then straight down)",
                    one_of({"cosine", "linear", "constant", "wsd"})});
  fields.push_back({"optim", "min_lr_ratio", &o.min_lr_ratio, "the schedule ends at lr times this", real(0, 1)});
  fields.push_back({"optim",
                    "decay_share",
                    &o.decay_share,
                    "wsd: share of the run after the warm-up in which the rate falls",
                    {.min = 0, .max = 1, .above = true}});
  fields.push_back({"optim", "warmup_steps", &o.warmup_steps, "steps of linear warm-up", at_least(0)});
  fields.push_back({"optim", "beta1", &o.beta1, "AdamW: decay of the first moment", real(0, 0.999999)});
  fields.push_back({"optim", "beta2", &o.beta2, "AdamW: decay of the second moment", real(0, 0.999999)});
  fields.push_back({"optim", "eps", &o.eps, "AdamW: added to the root of the second moment", positive()});
  fields.push_back({"optim", "momentum", &o.momentum, "SGD and Muon: decay of the momentum", real(0, 0.999999)});
  fields.push_back({"optim", "nesterov", &o.nesterov, "SGD and Muon: look ahead along the momentum"});
  fields.push_back({"optim", "weight_decay", &o.weight_decay, "of the matrices (decoupled, but for SGD)", real(0, 10)});
  fields.push_back({"optim", "clip_norm", &o.clip_norm, "largest gradient norm (0: no clipping)", real(0, 1e9)});
  fields.push_back({"optim", "state_dtype", &o.state_dtype, "dtype of the optimizer's state", one_of({"float32", "bfloat16"})});
  fields.push_back({"optim", "ema_decay", &o.ema_decay,
                    "validate and write texts with averages of the weights (0: with the weights)", real(0, 1)});
}

void add_parallel_and_precision(std::vector<Field>& fields, ParallelConfig& p, PrecisionConfig& d) {
  fields.push_back({"parallel", "dp_replicate", &p.dp_replicate, "copies of the sharded model (HSDP when > 1)", at_least(1)});
  fields.push_back({"parallel", "dp_shard", &p.dp_shard, "ranks that share one copy (-1: all that are left)", at_least(-1)});
  fields.push_back({"parallel", "tp", &p.tp, "ranks that cut matrices, heads and vocabulary", at_least(1)});
  fields.push_back({"parallel", "cp", &p.cp, "ranks that share each sequence", at_least(1)});
  fields.push_back({"parallel", "ep", &p.ep, "ranks that share out the experts, among all that share one copy", at_least(1)});
  fields.push_back(
      {"parallel", "sequence_parallel", &p.sequence_parallel, "the ranks of tp have parts of the sequence where nothing is cut"});
  fields.push_back({"parallel", "layout", &p.layout, "how a unit is cut", one_of({"ragged", "per_parameter"})});
  fields.push_back({"parallel", "reshard_after_forward", &p.reshard_after_forward,
                    "free the gathered weights after forward: less memory, one more gather"});
  fields.push_back({"parallel", "reshard_ranks", &p.reshard_ranks,
                    "cut them over so many consecutive ranks instead (0: over all that share one copy)", at_least(0)});
  fields.push_back({"parallel", "memory_budget_mb", &p.memory_budget_mb,
                    "keep them after forward as long as the engine fits in (0: no budget)", real(0, 1e9)});
  fields.push_back({"parallel",
                    "zero_level",
                    &p.zero_level,
                    "ZeRO level 1, 2 or 3 instead of reshard_after_forward and accumulation (0: as these say)",
                    {.min = 0, .max = 3}});
  fields.push_back({"parallel", "accumulation", &p.accumulation,
                    "of micro-batches: local, partial (all-reduce once a step), each (reduce each)",
                    one_of({"local", "partial", "each"})});
  fields.push_back(
      {"parallel", "replicate_below", &p.replicate_below, "parameters of fewer bytes stay whole on every rank", at_least(0)});
  fields.push_back({"parallel", "bucket_mb", &p.bucket_mb, "largest collective of a unit (0: no limit)", real(0, 1e6)});
  fields.push_back(
      {"parallel", "comm_fusion", &p.comm_fusion, "layout per_parameter: one collective for a unit, or one for each parameter"});
  fields.push_back(
      {"parallel", "late_waits", &p.late_waits, "wait for reductions of micro-batches in the last backward of a step only"});
  fields.push_back({"parallel", "replica_init", &p.replica_init,
                    "of replicas at the start: none, check (they must be equal), broadcast (the first one's weights)",
                    one_of({"none", "check", "broadcast"})});
  fields.push_back({"parallel", "offload", &p.offload, "shards, gradients and optimizer state in host memory"});
  fields.push_back(
      {"parallel", "timeout_seconds", &p.timeout_seconds, "of every collective", {.min = 0, .max = 1e6, .above = true}});
  fields.push_back({"precision", "param_dtype", &d.param_dtype, "dtype of compute", one_of({"float32", "bfloat16", "float16"})});
  fields.push_back(
      {"precision", "reduce_dtype", &d.reduce_dtype, "dtype of gradient reduction", one_of({"float32", "bfloat16", "float16"})});
  fields.push_back({"precision", "main_grad", &d.main_grad, "keep reduced gradients in float32 beside the parameters"});
  fields.push_back({"precision", "loss_scale", &d.loss_scale,
                    "first loss scale, adapted to overflows later (0: 65536 with float16, none without)", real(0, 1e30)});
}

void add_checkpoint(std::vector<Field>& fields, CheckpointConfig& c) {
  fields.push_back(
      {"checkpoint", "every", &c.every, "steps between saves, and one at the end (0: only on SIGTERM)", at_least(0)});
  fields.push_back({"checkpoint", "keep_last", &c.keep_last, "so many saves remain (0: all)", at_least(0)});
  fields.push_back({"checkpoint", "async", &c.async, "write in the background, while training goes on"});
  fields.push_back({"checkpoint", "dir", &c.dir, "where saves are kept (empty: checkpoints in the folder of the run)"});
}

void add_output(std::vector<Field>& fields, LogConfig& l, SampleConfig& s) {
  fields.push_back({"log", "dir", &l.dir, "where runs are kept", {.not_empty = true}});
  fields.push_back({"log", "name", &l.name, "name of this run: a folder in log.dir", {.not_empty = true}});
  fields.push_back({"log", "every", &l.every, "steps between lines", at_least(1)});
  fields.push_back({"sample", "prompts", &s.prompts, "a text is written after each of these at the end"});
  fields.push_back({"sample", "tokens", &s.tokens, "length of each text", at_least(1)});
  fields.push_back({"sample", "temperature", &s.temperature, "0: always the most likely token", real(0, 100)});
  fields.push_back({"sample", "top_k", &s.top_k, "draw from the k most likely tokens (0: from all)", at_least(0)});
}

std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      out += fmt::format("\\{}", c);
    else if (c == '\n')
      out += "\\n";
    else if (c == '\t')
      out += "\\t";
    else if (byte < 0x20 || byte == 0x7f)
      out += fmt::format("\\u{:04X}", byte);
    else
      out += c;
  }
  return out + '"';
}

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

}  // namespace

std::vector<Field> fields_of(Config& config) {
  std::vector<Field> fields;
  add_model(fields, config.model);
  add_experts(fields, config.model);
  add_data_and_train(fields, config.data, config.train);
  add_optim(fields, config.optim);
  add_parallel_and_precision(fields, config.parallel, config.precision);
  add_checkpoint(fields, config.checkpoint);
  add_output(fields, config.log, config.sample);
  return fields;
}

std::string to_toml_value(const Field& field) {
  return std::visit(Overloaded{
                        [](const std::int64_t* v) { return fmt::format("{}", *v); },
                        [](const double* v) { return fmt::format("{}", *v); },
                        [](const bool* v) { return fmt::format("{}", *v); },
                        [](const std::string* v) { return toml_string(*v); },
                        [](const std::vector<std::string>* v) {
                          std::vector<std::string> items;
                          for (const std::string& item : *v) items.push_back(toml_string(item));
                          return fmt::format("[{}]", fmt::join(items, ", "));
                        },
                    },
                    field.value);
}

std::string wanted(const Field& field, bool limits) {
  const Rule& rule = field.rule;
  auto range = [&](std::string_view what, double limit) {
    std::string text(what);
    if (rule.min > -limit) text += fmt::format(" {} {}", rule.above ? ">" : ">=", rule.min);
    if (rule.max < limit || limits) text += fmt::format("{} <= {}", rule.min > -limit ? " and" : "", rule.max);
    return text;
  };
  return std::visit(Overloaded{
                        [&](const std::int64_t*) { return range("an integer", kMaxSize); },
                        [&](const double*) { return range("a number", std::numeric_limits<double>::max()); },
                        [](const bool*) { return std::string("true or false"); },
                        [&](const std::string*) {
                          if (!rule.choices.empty()) return fmt::format("one of {}", fmt::join(rule.choices, ", "));
                          return std::string(rule.not_empty ? "a text that is not empty" : "a text in quotes");
                        },
                        [](const std::vector<std::string>*) { return std::string("a list of texts in quotes"); },
                    },
                    field.value);
}

void check_rule(const Field& field, const std::string& where) {
  const Rule& rule = field.rule;
  auto in_range = [&](double v) { return v >= rule.min && v <= rule.max && !(rule.above && v <= rule.min); };
  const bool fine = std::visit(Overloaded{
                                   [&](const std::int64_t* v) { return in_range(static_cast<double>(*v)); },
                                   [&](const double* v) { return in_range(*v); },
                                   [](const bool*) { return true; },
                                   [&](const std::string* v) {
                                     bool known = rule.choices.empty();
                                     for (const auto choice : rule.choices) known = known || choice == *v;
                                     return known && !(rule.not_empty && v->empty());
                                   },
                                   [](const std::vector<std::string>*) { return true; },
                               },
                               field.value);
  const auto* integer = std::get_if<std::int64_t*>(&field.value);
  const bool above = integer != nullptr && static_cast<double>(**integer) > rule.max;
  check_value(fine, "config", field.name(), " = ", to_toml_value(field), ", want ", wanted(field, above), " (", where, ")");
}

}  // namespace hyper_parallel::train
