#pragma once
// Configuration of hp-train: one struct per TOML section. Torch-free.
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::train {

/// [model]: shape of the Llama-style decoder.
struct ModelConfig {
  std::int64_t dim = 128;
  std::int64_t n_layers = 4;
  std::int64_t n_heads = 4;
  std::int64_t n_kv_heads = 0;  ///< 0: as many as n_heads
  std::int64_t ffn_dim = 352;
  std::int64_t vocab_size = 256;
  std::int64_t max_seq_len = 256;
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;
  bool tied = false;            ///< the output projection is the embedding's weight
  std::int64_t head_dim = 0;    ///< 0: dim / n_heads
  bool qk_norm = false;         ///< queries and keys are normalized head by head, before they are rotated (Qwen3)
  bool attention_bias = false;  ///< of the four projections of attention
  /// How rotary angles are stretched: "none", "linear", "dynamic" (by the length of the sequence), "llama3", "yarn"
  std::string rope_scaling = "none";
  double rope_factor = 1.0;
  std::int64_t rope_original_len = 0;  ///< context of the first training; 0: max_seq_len
  double rope_low_freq_factor = 1.0;   ///< llama3
  double rope_high_freq_factor = 4.0;  ///< llama3
  double rope_beta_fast = 32.0;        ///< yarn
  double rope_beta_slow = 1.0;         ///< yarn
  double rope_attention_factor = 0.0;  ///< yarn: multiplies cosines and sines; 0: 0.1 ln(rope_factor) + 1
  bool rope_truncate = true;           ///< yarn: the bounds of the ramp are whole numbers

  // Mixture of experts; without experts the other values must stay as they are.
  std::int64_t n_experts = 0;       ///< 0: every block has one MLP of ffn_dim
  std::int64_t top_k = 0;           ///< experts that a token visits (Hugging Face: num_experts_per_tok)
  std::int64_t expert_ffn_dim = 0;  ///< hidden width of an expert (moe_intermediate_size)
  std::int64_t shared_ffn_dim = 0;  ///< of the expert that every token visits (shared_expert_intermediate_size); 0: none
  std::int64_t moe_every = 1;       ///< block i has experts where i + 1 is a multiple (decoder_sparse_step)
  std::string router = "softmax";   ///< "softmax" over all experts, or "sigmoid" of each
  bool norm_topk_prob = true;       ///< the weights of a token's experts sum to 1, times route_scale
  double route_scale = 1.0;
  double aux_loss_weight = 0;    ///< of the balancing loss (router_aux_loss_coef); 0: none
  double bias_update_speed = 0;  ///< of the balancing bias; 0: none
};

/// Width of a head: head_dim, or what dim and n_heads give.
[[nodiscard]] std::int64_t head_dim_of(const ModelConfig& model);

/// Whether block `layer` has experts. Local.
[[nodiscard]] inline bool has_experts(const ModelConfig& model, std::int64_t layer) {
  return model.n_experts > 0 && (layer + 1) % model.moe_every == 0;
}

/// [data]: where the text comes from and how it is cut.
struct DataConfig {
  std::string path;  ///< a file, or a folder that is read recursively in sorted order
  std::int64_t seq_len = 128;
  double validation_fraction = 0.02;  ///< of the tokens, taken from the end; 0: no validation
};

/// [train]: how long and with which batches.
struct LoopConfig {
  std::int64_t seed = 1;
  std::int64_t batch_size = 16;       ///< sequences in one optimizer step, all ranks together
  std::int64_t micro_batch_size = 0;  ///< sequences in one forward of one rank; 0: no gradient accumulation
  std::int64_t max_steps = 1000;      ///< 0: no limit, then max_seconds must be set
  double max_seconds = 0;             ///< 0: no limit. Includes the validations inside the loop
  std::int64_t eval_every = 100;      ///< steps between validations; 0: only at start and end
  std::int64_t eval_windows = 64;     ///< sequences of one validation, all ranks together
  /// Decoder blocks that keep only their input and are computed again in backward: "none", "block" (all), "block:N" (every N-th,
  /// from the first on).
  std::string activation_checkpoint = "none";
  std::string trace;                ///< file of a trace in the folder of the run, %r: rank; empty: none
  std::string trace_steps = "3-5";  ///< which steps it covers: one, first-last, or all
};

/// Every how many blocks one is recomputed, from the text of train.activation_checkpoint: 0 for "none", 1 for "block", N for
/// "block:N". Local. ValueError: another text.
[[nodiscard]] std::int64_t checkpoint_every(const std::string& activation_checkpoint);

/// [optim]: the optimizer, its schedule, and gradient clipping.
struct OptimConfig {
  std::string optimizer = "adamw";  ///< "adamw", "sgd", or "muon": Muon for the matrices of the blocks, AdamW for the rest
  double lr = 3e-4;
  std::string schedule = "cosine";  ///< "cosine", "linear", "constant", "wsd"
  double min_lr_ratio = 0.1;        ///< the schedule ends at lr * min_lr_ratio
  double decay_share = 0.2;         ///< wsd: share of the run after the warm-up in which the rate falls
  std::int64_t warmup_steps = 50;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double momentum = 0.95;  ///< SGD and Muon
  bool nesterov = true;    ///< SGD and Muon
  double weight_decay = 0.1;
  double clip_norm = 1.0;               ///< 0: measure the gradient norm only
  std::string state_dtype = "float32";  ///< of the optimizer's state: "float32", "bfloat16"
  double ema_decay = 0;                 ///< validate and write texts with averages of the weights; 0: with the weights
};

/// [parallel]: how the ranks share the model.
struct ParallelConfig {
  std::int64_t dp_replicate = 1;
  std::int64_t dp_shard = -1;      ///< -1: all that the others leave
  std::int64_t tp = 1;             ///< ranks that cut matrices, heads and vocabulary; they see the same sequences
  std::int64_t cp = 1;             ///< ranks that share each sequence
  std::int64_t ep = 1;             ///< ranks that share out the experts: consecutive ones, of any of the other axes
  bool sequence_parallel = false;  ///< between the matrices that tp cuts, each of its ranks has a part of the sequence
  std::string layout = "ragged";
  bool reshard_after_forward = true;
  std::int64_t reshard_ranks =
      0;                        ///< cut the weights over so many consecutive ranks after forward; 0: over all of the shard axis
  double memory_budget_mb = 0;  ///< keep weights gathered after forward while the engine stays within it; 0: no budget
  std::int64_t zero_level = 0;  ///< 1, 2 or 3: sets reshard_after_forward and accumulation; 0: as these say
  std::string accumulation =
      "local";  ///< of micro-batches: "local", "partial" (one all-reduce for each step), "each" (reduce each)
  std::int64_t replicate_below = 0;  ///< parameters of fewer bytes stay whole on every rank
  double bucket_mb = 0;              ///< largest collective of a unit; 0: no limit
  bool comm_fusion = true;           ///< layout per_parameter: one collective for a unit, or one for each parameter
  bool late_waits = false;           ///< reductions of micro-batches are waited for in the last backward of a step only
  std::string replica_init =
      "none";            ///< of HSDP at the start: "none", "check" (replicas must be equal), "broadcast" (replica 0's weights)
  bool offload = false;  ///< shards, gradients and optimizer state in host memory
  double timeout_seconds = 300;  ///< of every collective
};

/// How micro-batches accumulate: what zero_level means, otherwise what `accumulation` says.
[[nodiscard]] std::string accumulation_of(const ParallelConfig& parallel);

/// [precision]: dtypes of compute and of gradient reduction: "float32", "bfloat16", "float16". Master weights are float32.
struct PrecisionConfig {
  std::string param_dtype = "float32";
  std::string reduce_dtype = "float32";
  bool main_grad = false;  ///< reduced gradients are kept in float32 beside the parameters
  double loss_scale = 0;   ///< first one, adapted to overflows later; 0: 65536 with float16, and none without
};

/// [checkpoint]: saves from which hp-train --resume goes on.
struct CheckpointConfig {
  std::int64_t every = 0;      ///< steps between saves, and one at the end; 0: only when SIGTERM asks for one
  std::int64_t keep_last = 2;  ///< so many remain; 0: all
  bool async = true;           ///< written in the background, while training goes on
  std::string dir;             ///< holds step-00000100, ...; empty: checkpoints in the folder of the run
};

/// [log]: what is written where.
struct LogConfig {
  std::string dir = "runs";
  std::string name = "hp-train";  ///< results go to dir/name
  std::int64_t every = 1;         ///< steps between lines; metrics.jsonl gets every step
};

/// [sample]: text written after training.
struct SampleConfig {
  std::vector<std::string> prompts;
  std::int64_t tokens = 200;
  double temperature = 0.8;  ///< 0: always the most likely token
  std::int64_t top_k = 0;    ///< 0: all tokens
};

/// Everything that a run depends on; a plain value.
struct Config {
  ModelConfig model;
  DataConfig data;
  LoopConfig train;
  OptimConfig optim;
  ParallelConfig parallel;
  PrecisionConfig precision;
  CheckpointConfig checkpoint;
  LogConfig log;
  SampleConfig sample;

  /// "file:line", "command line" or "default" of each "section.key" that was set.
  std::map<std::string, std::string> sources;
  /// Where `key` ("section.key") got its value, for messages.
  [[nodiscard]] std::string where(const std::string& key) const;
};

/// One settable value, for help texts and tables.
struct FieldInfo {
  std::string section;
  std::string key;
  std::string value;  ///< as TOML
  std::string help;
};

/// All values of `config` in the order of the file.
[[nodiscard]] std::vector<FieldInfo> describe(const Config& config);
/// `config` as a TOML document that load_config reads back to an equal value.
[[nodiscard]] std::string to_toml(const Config& config);

/// "section.key" and the text of its value.
using Override = std::pair<std::string, std::string>;

/// Reads `file` (empty: only defaults), applies `overrides` in order and validates the result. A zero_level gives its values to
/// what it stands for, so that the result says what will happen.
///
/// Local. ValueError with `(file:line)`: unreadable file, syntax, unknown section or key, wrong type, value out of range, values
/// that contradict each other.
[[nodiscard]] Config load_config(const std::filesystem::path& file, const std::vector<Override>& overrides = {});
/// Like load_config on the text of a document; `name` stands for the file in messages.
[[nodiscard]] Config parse_config(const std::string& text, const std::string& name, const std::vector<Override>& overrides = {});

/// The first and the last step that train.trace_steps names, from 1. ValueError: not of the form "3", "3-5" or "all".
[[nodiscard]] std::pair<std::int64_t, std::int64_t> traced_steps(const Config& config);

/// Whether the loss is scaled: with float16, or when precision.loss_scale asks for it.
[[nodiscard]] bool scales_loss(const Config& config);

/// How the ranks are arranged, and how a step is divided over them.
struct BatchPlan {
  std::int64_t dp_replicate = 1;
  std::int64_t dp_shard = 1;
  std::int64_t cp = 1;
  std::int64_t tp = 1;
  std::int64_t ep = 1;
  std::int64_t micro_batch = 1;                                                      ///< sequences of one forward on one rank
  std::int64_t accumulation = 1;                                                     ///< forwards of one step
  [[nodiscard]] std::int64_t data_ranks() const { return dp_replicate * dp_shard; }  ///< those that have different sequences
  [[nodiscard]] std::int64_t world() const { return data_ranks() * cp * tp; }
  [[nodiscard]] std::int64_t expert_shard() const { return dp_shard * cp * tp / ep; }  ///< ranks that share one group's experts
};

/// Resolves the automatic values against the world. Local. ValueError: the axes or reshard_ranks do not fit the world, the batch
/// does not divide.
[[nodiscard]] BatchPlan plan_batches(const Config& config, int world);

}  // namespace hyper_parallel::train
