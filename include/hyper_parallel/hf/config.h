#pragma once
// config.json of a Hugging Face model folder: Llama and Qwen3, dense and with experts. Torch-free.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::hf {

enum class Family {
  kLlama,     ///< model_type "llama"
  kQwen3,     ///< "qwen3": queries and keys are normalized head by head
  kQwen3Moe,  ///< "qwen3_moe"
};
[[nodiscard]] HP_API std::string_view to_string(Family family);  ///< the model_type

/// How rotary angles are stretched beyond the context that a model was first trained with.
struct RopeScaling {
  /// "default", "linear" (Chen et al. 2023), "dynamic" (NTK-aware, by the length of the sequence), "llama3", "yarn" (Peng et al.
  /// 2023)
  std::string type = "default";
  double factor = 1.0;
  /// llama3 and yarn: length of the first training; 0: max_position_embeddings.
  std::int64_t original_max_position_embeddings = 0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  ///< llama3
  double beta_fast = 32.0, beta_slow = 1.0;              ///< yarn
  double attention_factor = 0.0;                         ///< yarn: multiplies cosines and sines; 0: 0.1 ln(factor) + 1
  bool truncate = true;                                  ///< yarn: the bounds of the ramp are whole numbers
  friend bool operator==(const RopeScaling&, const RopeScaling&) = default;
};

/// What config.json says, under its names. Defaults are those of a small Llama.
struct Config {
  Family family = Family::kLlama;
  std::int64_t vocab_size = 32000;
  std::int64_t hidden_size = 4096;
  std::int64_t intermediate_size = 11008;  ///< of dense feed-forward layers
  std::int64_t num_hidden_layers = 32;
  std::int64_t num_attention_heads = 32;
  std::int64_t num_key_value_heads = 32;
  std::int64_t head_dim = 128;
  std::int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling = {};
  bool attention_bias = false;  ///< of q, k, v and o
  bool tie_word_embeddings = false;
  double initializer_range = 0.02;
  std::string dtype = "float32";  ///< of the weights in the folder
  // kQwen3Moe
  std::int64_t num_experts = 0;
  std::int64_t num_experts_per_tok = 0;
  std::int64_t moe_intermediate_size = 0;
  bool norm_topk_prob = false;
  double router_aux_loss_coef = 0.001;
  std::int64_t decoder_sparse_step = 1;            ///< every so many layers has experts
  std::vector<std::int64_t> mlp_only_layers = {};  ///< these have none
  // Tokens, for generation; absent: unknown.
  std::optional<std::int64_t> bos_token_id = {}, pad_token_id = {};
  std::vector<std::int64_t> eos_token_ids = {};

  /// Whether layer `layer` has experts instead of a dense feed-forward.
  [[nodiscard]] HP_API bool has_experts(std::int64_t layer) const;
  friend bool operator==(const Config&, const Config&) = default;
};

/// The configuration in a text. Both ways to write rotary embeddings are read: rope_parameters (transformers 5) and rope_theta
/// with rope_scaling. Local. \param file stands for the text in messages CheckpointError: no JSON, a field of another type or out
/// of range, sizes that do not fit each other. ValueError: a model that this library does not have: another model_type,
/// hidden_act or rope type, mlp_bias, sliding windows, partial rotary embeddings.
[[nodiscard]] HP_API Config parse_config(std::string_view text, const std::string& file);
/// The configuration of the model in a folder. CheckpointError: there is none; see parse_config.
[[nodiscard]] HP_API Config read_config(const std::filesystem::path& folder);
/// Text of config.json, as transformers 5 writes it and reads it (4.x reads the rotary parameters of the older fields, which are
/// there, too). ValueError: see parse_config.
[[nodiscard]] HP_API std::string config_json(const Config& config);

/// The tensors that a folder of this model has, with their shapes, in the order of the layers; of dtype `dtype`. Local.
[[nodiscard]] HP_API std::vector<ckpt::TensorSpec> tensors_of(const Config& config, ckpt::Dtype dtype = ckpt::Dtype::kF32);

}  // namespace hyper_parallel::hf
