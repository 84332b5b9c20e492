#include <hyper_parallel/train/hf_config.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <string>

namespace hyper_parallel::train {
namespace {

/// ValueError that names what a Qwen3 MoE has not.
void check_qwen3_moe(const ModelConfig& model) {
  std::string text;
  const auto want = [&](bool fine, const char* key, const auto& got, const char* wanted) {
    if (!fine) text += concat(text.empty() ? "" : "; ", "model.", key, " = ", got, ", want ", wanted);
  };
  want(model.qk_norm, "qk_norm", "false", "true");
  want(model.shared_ffn_dim == 0, "shared_ffn_dim", model.shared_ffn_dim, "0");
  want(model.router == "softmax", "router", concat('"', model.router, '"'), "\"softmax\"");
  want(model.route_scale == 1.0, "route_scale", model.route_scale, "1");
  want(model.bias_update_speed == 0, "bias_update_speed", model.bias_update_speed, "0");
  check_value(text.empty(), "hf", "a model with experts is a Qwen3 MoE elsewhere: ", text);
}

}  // namespace

ModelConfig model_config_of(const hf::Config& config) {
  const hf::RopeScaling& rope = config.rope_scaling;
  ModelConfig model;
  model.dim = config.hidden_size;
  model.n_layers = config.num_hidden_layers;
  model.n_heads = config.num_attention_heads;
  model.n_kv_heads = config.num_key_value_heads;
  model.ffn_dim = config.intermediate_size;
  model.vocab_size = config.vocab_size;
  model.max_seq_len = config.max_position_embeddings;
  model.rope_theta = config.rope_theta;
  model.norm_eps = config.rms_norm_eps;
  model.tied = config.tie_word_embeddings;
  model.head_dim = config.head_dim * config.num_attention_heads == config.hidden_size ? 0 : config.head_dim;
  model.qk_norm = config.family != hf::Family::kLlama;
  model.attention_bias = config.attention_bias;
  if (config.family == hf::Family::kQwen3Moe) {
    check_value(config.mlp_only_layers.empty(), "hf", "mlp_only_layers names layers, which the decoder of hp-train has not");
    model.n_experts = config.num_experts;
    model.top_k = config.num_experts_per_tok;
    model.expert_ffn_dim = config.moe_intermediate_size;
    model.moe_every = config.decoder_sparse_step;
    model.norm_topk_prob = config.norm_topk_prob;
    model.aux_loss_weight = config.router_aux_loss_coef;
  }
  if (rope.type == "default") return model;
  model.rope_scaling = rope.type;
  model.rope_factor = rope.factor;
  model.rope_original_len = rope.original_max_position_embeddings;
  if (rope.type == "dynamic") {
    model.rope_original_len = config.max_position_embeddings;
    model.max_seq_len =
        std::max<std::int64_t>(model.max_seq_len, std::llround(rope.factor * static_cast<double>(model.max_seq_len)));
  }
  model.rope_low_freq_factor = rope.low_freq_factor;
  model.rope_high_freq_factor = rope.high_freq_factor;
  model.rope_beta_fast = rope.beta_fast;
  model.rope_beta_slow = rope.beta_slow;
  model.rope_attention_factor = rope.attention_factor;
  model.rope_truncate = rope.truncate;
  return model;
}

hf::Config hf_config_of(const ModelConfig& model) {
  hf::Config config;
  config.family = model.qk_norm ? hf::Family::kQwen3 : hf::Family::kLlama;
  config.vocab_size = model.vocab_size;
  config.hidden_size = model.dim;
  config.intermediate_size = model.ffn_dim;
  config.num_hidden_layers = model.n_layers;
  config.num_attention_heads = model.n_heads;
  config.num_key_value_heads = model.n_kv_heads > 0 ? model.n_kv_heads : model.n_heads;
  config.head_dim = head_dim_of(model);
  config.max_position_embeddings = model.max_seq_len;
  config.rms_norm_eps = model.norm_eps;
  config.rope_theta = model.rope_theta;
  config.attention_bias = model.attention_bias;
  config.tie_word_embeddings = model.tied;
  if (model.n_experts > 0) {
    check_qwen3_moe(model);
    config.family = hf::Family::kQwen3Moe;
    config.num_experts = model.n_experts;
    config.num_experts_per_tok = model.top_k;
    config.moe_intermediate_size = model.expert_ffn_dim;
    config.decoder_sparse_step = model.moe_every;
    config.norm_topk_prob = model.norm_topk_prob;
    config.router_aux_loss_coef = model.aux_loss_weight;
  }
  if (model.rope_scaling == "none") return config;
  hf::RopeScaling& rope = config.rope_scaling;
  rope.type = model.rope_scaling;
  rope.factor = model.rope_factor;
  const std::int64_t original = model.rope_original_len > 0 ? model.rope_original_len : model.max_seq_len;
  if (rope.type == "dynamic") config.max_position_embeddings = original;
  if (rope.type == "llama3" || rope.type == "yarn") rope.original_max_position_embeddings = original;
  if (rope.type == "llama3") {
    rope.low_freq_factor = model.rope_low_freq_factor;
    rope.high_freq_factor = model.rope_high_freq_factor;
  }
  if (rope.type == "yarn") {
    rope.beta_fast = model.rope_beta_fast;
    rope.beta_slow = model.rope_beta_slow;
    rope.attention_factor = model.rope_attention_factor;
    rope.truncate = model.rope_truncate;
  }
  return config;
}

hf::Config hf_config_of_file(const std::filesystem::path& file) {
  if (file.extension() != ".json") return hf_config_of(load_config(file).model);
  std::ifstream in(file);
  check_value(in.is_open(), "hf", "cannot read ", file.string());
  return hf::parse_config(std::string(std::istreambuf_iterator<char>(in), {}), file.string());
}

}  // namespace hyper_parallel::train
