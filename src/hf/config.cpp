// config.json.
#include <hyper_parallel/hf/config.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "ckpt/file.h"
#include "ckpt/strict_json.h"
#include "hf/json_reader.h"

namespace hyper_parallel::hf {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxConfigBytes = 16 << 20;
constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;

/// Fields of one object.
class Fields : public JsonReader {
 public:
  Fields(const json& object, std::string file) : JsonReader(std::move(file)), object_(object) {}

  [[nodiscard]] const json* find(const char* name) const { return JsonReader::find(object_, name); }
  [[nodiscard]] bool boolean(const char* name, bool otherwise) const { return flag(object_, name, otherwise); }
  [[nodiscard]] std::string text(const char* name, const std::string& otherwise) const {
    return JsonReader::text(object_, name, otherwise);
  }
  std::int64_t integer(const char* name, std::optional<std::int64_t> otherwise, std::int64_t min,
                       std::int64_t max = kMaxSize) const {
    const json* value = find(name);
    if (value == nullptr) return or_missing(name, otherwise);
    const bool fits = value->is_number_integer() && (!value->is_number_unsigned() || value->get<std::uint64_t>() <= INT64_MAX);
    if (!fits || value->get<std::int64_t>() < min || value->get<std::int64_t>() > max)
      refuse(name, " is ", value->dump(), ", want an integer of ", min, " to ", max);
    return value->get<std::int64_t>();
  }
  double number(const char* name, std::optional<double> otherwise, double min = 0) const {
    const json* value = find(name);
    if (value == nullptr) return or_missing(name, otherwise);
    const double got = value->is_number() ? value->get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!(got > min) || got > 1e30) refuse(name, " is ", value->dump(), ", want a number > ", min);
    return got;
  }
  std::vector<std::int64_t> integers(const char* name) const {
    const json* value = find(name);
    std::vector<std::int64_t> result;
    if (value == nullptr) return result;
    for (const json& item : value->is_array() ? *value : json::array({*value})) {
      if (!item.is_number_unsigned() || item.get<std::uint64_t>() > static_cast<std::uint64_t>(kMaxSize))
        refuse(name, " has ", item.dump(), ", want integers of 0 to ", kMaxSize);
      result.push_back(item.get<std::int64_t>());
    }
    return result;
  }

 private:
  template <class T>
  T or_missing(const char* name, const std::optional<T>& otherwise) const {
    if (!otherwise) refuse("has no ", name);
    return *otherwise;
  }

  const json& object_;
};

double yarn_scale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

/// \param rope rope_parameters or rope_scaling
RopeScaling parse_rope(const Fields& rope, std::int64_t max_position) {
  RopeScaling result;
  result.type = rope.text("rope_type", rope.text("type", "default"));
  static const std::vector<std::string> kTypes = {"default", "linear", "dynamic", "llama3", "yarn"};
  rope.want(std::ranges::find(kTypes, result.type) != kTypes.end(), "rope_type is \"", result.type,
            "\", want default, linear, dynamic, llama3 or yarn");
  rope.want(rope.number("partial_rotary_factor", 1.0) == 1.0, "partial_rotary_factor is not 1, which this library does not have");
  if (result.type == "default") return result;
  const std::int64_t original = rope.integer("original_max_position_embeddings", max_position, 1);
  if (result.type == "llama3" || result.type == "yarn") result.original_max_position_embeddings = original;
  const bool derived = result.type == "yarn" && rope.find("factor") == nullptr;
  result.factor = derived ? static_cast<double>(max_position) / static_cast<double>(original) : rope.number("factor", {});
  if (result.type == "llama3") {
    result.low_freq_factor = rope.number("low_freq_factor", {});
    result.high_freq_factor = rope.number("high_freq_factor", {});
    if (result.high_freq_factor <= result.low_freq_factor)
      rope.refuse("high_freq_factor is ", result.high_freq_factor, ", want more than low_freq_factor ", result.low_freq_factor);
  }
  if (result.type == "yarn") {
    result.beta_fast = rope.number("beta_fast", 32.0);
    result.beta_slow = rope.number("beta_slow", 1.0);
    result.truncate = rope.boolean("truncate", true);
    if (rope.find("attention_factor") != nullptr) {
      result.attention_factor = rope.number("attention_factor", {});
    } else if (rope.find("mscale") != nullptr && rope.find("mscale_all_dim") != nullptr) {
      const double scale = yarn_scale(result.factor, rope.number("mscale", {}, -1e30));
      const double all = yarn_scale(result.factor, rope.number("mscale_all_dim", {}, -1e30));
      const bool used = rope.number("mscale", {}, -1e30) != 0 && rope.number("mscale_all_dim", {}, -1e30) != 0;
      if (used) result.attention_factor = scale / all;
    }
  }
  return result;
}

void parse_experts(const Fields& fields, Config& config) {
  config.num_experts = fields.find("num_local_experts") != nullptr ? fields.integer("num_local_experts", {}, 1, 1 << 20)
                                                                   : fields.integer("num_experts", {}, 1, 1 << 20);
  config.num_experts_per_tok = fields.integer("num_experts_per_tok", {}, 1, config.num_experts);
  config.moe_intermediate_size = fields.integer("moe_intermediate_size", {}, 1);
  config.norm_topk_prob = fields.boolean("norm_topk_prob", false);
  config.router_aux_loss_coef = fields.number("router_aux_loss_coef", 0.001, -1e-30);
  config.decoder_sparse_step = fields.integer("decoder_sparse_step", 1, 1);
  config.mlp_only_layers = fields.integers("mlp_only_layers");
}

void check_supported(const Fields& fields, const Config& config) {
  fields.want(fields.text("hidden_act", "silu") == "silu", "hidden_act is \"", fields.text("hidden_act", "silu"),
              "\", want silu");
  fields.want(!fields.boolean("mlp_bias", false), "mlp_bias is true, which this library does not have");
  const bool sliding = fields.boolean("use_sliding_window", false) && fields.find("sliding_window") != nullptr;
  fields.want(!sliding, "use_sliding_window is true, which this library does not have");
  fields.want(fields.number("partial_rotary_factor", 1.0) == 1.0,
              "partial_rotary_factor is not 1, which this library does not have");
  const json* quantized = fields.find("quantization_config");
  fields.want(quantized == nullptr, "has a quantization_config, want weights that are not quantized");
  if (config.num_attention_heads % config.num_key_value_heads != 0)
    fields.refuse("num_key_value_heads is ", config.num_key_value_heads, ", want a divisor of num_attention_heads ",
                  config.num_attention_heads);
  if (config.head_dim % 2 != 0) fields.refuse("head_dim is ", config.head_dim, ", want an even number");
}

json rope_json(const Config& config) {
  const RopeScaling& rope = config.rope_scaling;
  json result = {{"rope_type", rope.type}};
  if (rope.type != "default") result["factor"] = rope.factor;
  if (rope.original_max_position_embeddings > 0)
    result["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (rope.type == "llama3") {
    result["low_freq_factor"] = rope.low_freq_factor;
    result["high_freq_factor"] = rope.high_freq_factor;
  }
  if (rope.type == "yarn") {
    result["beta_fast"] = rope.beta_fast;
    result["beta_slow"] = rope.beta_slow;
    result["truncate"] = rope.truncate;
    if (rope.attention_factor > 0) result["attention_factor"] = rope.attention_factor;
  }
  return result;
}

}  // namespace

std::string_view to_string(Family family) {
  switch (family) {
    case Family::kLlama:
      return "llama";
    case Family::kQwen3:
      return "qwen3";
    case Family::kQwen3Moe:
      return "qwen3_moe";
  }
  return "?";
}

bool Config::has_experts(std::int64_t layer) const {
  return family == Family::kQwen3Moe && (layer + 1) % decoder_sparse_step == 0 &&
         std::ranges::find(mlp_only_layers, layer) == mlp_only_layers.end();
}

Config parse_config(std::string_view text, const std::string& file) {
  const json all = ckpt::parse_strictly(text, file);
  if (!all.is_object()) throw CheckpointError(concat("[hf] ", file, ": is no JSON object"));
  const Fields fields(all, file);
  Config config;
  const std::string model_type = fields.text("model_type", "");
  bool known = false;
  for (const Family family : {Family::kLlama, Family::kQwen3, Family::kQwen3Moe}) {
    if (model_type != to_string(family)) continue;
    config.family = family;
    known = true;
  }
  fields.want(known, "model_type is \"", model_type, "\", want llama, qwen3 or qwen3_moe");
  const bool llama = config.family == Family::kLlama;
  config.vocab_size = fields.integer("vocab_size", {}, 1);
  config.hidden_size = fields.integer("hidden_size", {}, 1);
  config.intermediate_size = fields.integer("intermediate_size", {}, 1);
  config.num_hidden_layers = fields.integer("num_hidden_layers", {}, 1, 1 << 20);
  config.num_attention_heads = fields.integer("num_attention_heads", {}, 1);
  config.num_key_value_heads = fields.integer("num_key_value_heads", config.num_attention_heads, 1);
  config.head_dim = fields.integer("head_dim", llama ? config.hidden_size / config.num_attention_heads : 128, 1);
  config.max_position_embeddings = fields.integer("max_position_embeddings", llama ? 2048 : 32768, 1);
  config.rms_norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.attention_bias = fields.boolean("attention_bias", false);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", false);
  config.initializer_range = fields.number("initializer_range", 0.02, -1e-30);
  config.dtype = fields.text("dtype", fields.text("torch_dtype", "float32"));
  config.rope_theta = fields.number("rope_theta", 10000.0);
  for (const char* name : {"rope_parameters", "rope_scaling"}) {
    const json* rope = fields.find(name);
    if (rope == nullptr) continue;
    if (!rope->is_object()) fields.refuse(name, " is ", rope->dump(), ", want an object");
    const Fields inner(*rope, concat(file, " (", name, ')'));
    config.rope_scaling = parse_rope(inner, config.max_position_embeddings);
    config.rope_theta = inner.number("rope_theta", config.rope_theta);
    break;
  }
  if (config.family == Family::kQwen3Moe) parse_experts(fields, config);
  const auto token = [&](const char* name) -> std::optional<std::int64_t> {
    if (fields.find(name) == nullptr) return std::nullopt;
    return fields.integer(name, {}, -1);
  };
  config.bos_token_id = token("bos_token_id");
  config.pad_token_id = token("pad_token_id");
  config.eos_token_ids = fields.integers("eos_token_id");
  check_supported(fields, config);
  return config;
}

Config read_config(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  return parse_config(ckpt::read_text(file, kMaxConfigBytes), file.string());
}

std::string config_json(const Config& config) {
  const char* architecture = config.family == Family::kLlama   ? "LlamaForCausalLM"
                             : config.family == Family::kQwen3 ? "Qwen3ForCausalLM"
                                                               : "Qwen3MoeForCausalLM";
  json rope = rope_json(config);
  json all = {{"architectures", {architecture}},
              {"attention_bias", config.attention_bias},
              {"attention_dropout", 0.0},
              {"dtype", config.dtype},
              {"head_dim", config.head_dim},
              {"hidden_act", "silu"},
              {"hidden_size", config.hidden_size},
              {"initializer_range", config.initializer_range},
              {"intermediate_size", config.intermediate_size},
              {"max_position_embeddings", config.max_position_embeddings},
              {"model_type", to_string(config.family)},
              {"num_attention_heads", config.num_attention_heads},
              {"num_hidden_layers", config.num_hidden_layers},
              {"num_key_value_heads", config.num_key_value_heads},
              {"rms_norm_eps", config.rms_norm_eps},
              {"rope_theta", config.rope_theta},
              {"tie_word_embeddings", config.tie_word_embeddings},
              {"torch_dtype", config.dtype},
              {"use_cache", true},
              {"vocab_size", config.vocab_size}};
  // What transformers 4 reads.
  all["rope_scaling"] = config.rope_scaling.type == "default" ? json() : rope;
  rope["rope_theta"] = config.rope_theta;
  all["rope_parameters"] = rope;
  all["bos_token_id"] = config.bos_token_id ? json(*config.bos_token_id) : json();
  all["pad_token_id"] = config.pad_token_id ? json(*config.pad_token_id) : json();
  all["eos_token_id"] = config.eos_token_ids.empty()       ? json()
                        : config.eos_token_ids.size() == 1 ? json(config.eos_token_ids[0])
                                                           : json(config.eos_token_ids);
  if (config.family == Family::kLlama) {
    all["mlp_bias"] = false;
    all["pretraining_tp"] = 1;
  } else {
    all["use_sliding_window"] = false;
    all["sliding_window"] = json();
  }
  if (config.family == Family::kQwen3Moe) {
    all["num_experts"] = config.num_experts;
    all["num_experts_per_tok"] = config.num_experts_per_tok;
    all["moe_intermediate_size"] = config.moe_intermediate_size;
    all["norm_topk_prob"] = config.norm_topk_prob;
    all["router_aux_loss_coef"] = config.router_aux_loss_coef;
    all["decoder_sparse_step"] = config.decoder_sparse_step;
    all["mlp_only_layers"] = config.mlp_only_layers;
    all["output_router_logits"] = false;
  }
  std::string text = all.dump(2) + "\n";
  (void)parse_config(text, "config.json");  // its checks
  return text;
}

std::vector<ckpt::TensorSpec> tensors_of(const Config& c, ckpt::Dtype dtype) {
  std::vector<ckpt::TensorSpec> result;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    result.push_back({std::move(name), dtype, std::move(shape)});
  };
  const std::int64_t q = c.num_attention_heads * c.head_dim, kv = c.num_key_value_heads * c.head_dim;
  const auto add_mlp = [&](const std::string& begin, std::int64_t hidden) {
    add(begin + "gate_proj.weight", {hidden, c.hidden_size});
    add(begin + "up_proj.weight", {hidden, c.hidden_size});
    add(begin + "down_proj.weight", {c.hidden_size, hidden});
  };
  add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (std::int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    const std::string begin = concat("model.layers.", layer, '.');
    add(begin + "input_layernorm.weight", {c.hidden_size});
    const std::pair<const char*, std::vector<std::int64_t>> matrices[] = {{"q_proj", {q, c.hidden_size}},
                                                                          {"k_proj", {kv, c.hidden_size}},
                                                                          {"v_proj", {kv, c.hidden_size}},
                                                                          {"o_proj", {c.hidden_size, q}}};
    for (const auto& [name, shape] : matrices) {
      add(concat(begin, "self_attn.", name, ".weight"), shape);
      if (c.attention_bias) add(concat(begin, "self_attn.", name, ".bias"), {shape[0]});
    }
    if (c.family != Family::kLlama) {
      add(begin + "self_attn.q_norm.weight", {c.head_dim});
      add(begin + "self_attn.k_norm.weight", {c.head_dim});
    }
    add(begin + "post_attention_layernorm.weight", {c.hidden_size});
    if (c.has_experts(layer)) {
      add(begin + "mlp.gate.weight", {c.num_experts, c.hidden_size});
      for (std::int64_t e = 0; e < c.num_experts; ++e) add_mlp(concat(begin, "mlp.experts.", e, '.'), c.moe_intermediate_size);
    } else {
      add_mlp(begin + "mlp.", c.intermediate_size);
    }
  }
  add("model.norm.weight", {c.hidden_size});
  if (!c.tie_word_embeddings) add("lm_head.weight", {c.vocab_size, c.hidden_size});
  return result;
}

}  // namespace hyper_parallel::hf
