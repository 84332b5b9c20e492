// config.json and the names of weights.
#include <hyper_parallel/hf/config.h>
#include <hyper_parallel/hf/model.h>

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/train/hf_config.h>

#include "support/message_of.h"

namespace hyper_parallel::hf {
namespace {

using hyper_parallel::testing::message_of;
using hyper_parallel::testing::value_error;
using nlohmann::json;
using ::testing::HasSubstr;

json small(const char* model_type = "llama") {
  return {{"model_type", model_type}, {"vocab_size", 96},         {"hidden_size", 32},       {"intermediate_size", 48},
          {"num_hidden_layers", 2},   {"num_attention_heads", 4}, {"num_key_value_heads", 2}};
}

std::string refused(json config, const char* field, const json& value) {
  config[field] = value;
  return message_of<CheckpointError>([&] { return parse_config(config.dump(), "config.json"); });
}
std::string unsupported(json config, const char* field, const json& value) {
  config[field] = value;
  return value_error([&] { return parse_config(config.dump(), "config.json"); });
}

TEST(HfConfig, DefaultsAndBothSpellingsOfRope) {
  const Config plain = parse_config(small().dump(), "f");
  EXPECT_EQ(plain.head_dim, 8);
  EXPECT_EQ(plain.max_position_embeddings, 2048);
  EXPECT_EQ(plain.rope_scaling, RopeScaling{});
  EXPECT_EQ(parse_config(small("qwen3").dump(), "f").head_dim, 128);
  const json scaling = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}, {"beta_fast", 16}};
  json old_way = small(), new_way = small();
  old_way["rope_theta"] = 5e5;
  old_way["rope_scaling"] = scaling;
  new_way["rope_parameters"] = scaling;
  new_way["rope_parameters"]["rope_theta"] = 5e5;
  const Config a = parse_config(old_way.dump(), "f"), b = parse_config(new_way.dump(), "f");
  EXPECT_EQ(a, b);
  EXPECT_EQ(a.rope_theta, 5e5);
  EXPECT_EQ(a.rope_scaling.beta_fast, 16);
  EXPECT_EQ(a.rope_scaling.original_max_position_embeddings, 512);
}

TEST(HfConfig, WrittenAndReadAgain) {
  for (const char* type : {"default", "linear", "dynamic", "llama3", "yarn"}) {
    for (const Family family : {Family::kLlama, Family::kQwen3, Family::kQwen3Moe}) {
      Config config;
      config.family = family;
      config.rope_scaling.type = type;
      if (std::string(type) != "default") config.rope_scaling.factor = 2.5;
      if (std::string(type) == "llama3" || std::string(type) == "yarn") config.rope_scaling.original_max_position_embeddings = 99;
      if (std::string(type) == "yarn") config.rope_scaling.attention_factor = 1.25;
      config.head_dim = 64;
      config.bos_token_id = 1;
      config.eos_token_ids = {2, 3};
      config.dtype = "bfloat16";
      if (family == Family::kQwen3Moe) {
        config.num_experts = 8;
        config.num_experts_per_tok = 2;
        config.moe_intermediate_size = 16;
        config.mlp_only_layers = {3};
      }
      EXPECT_EQ(parse_config(config_json(config), "f"), config) << type;
    }
  }
}

TEST(HfConfig, WhatIsRefused) {
  EXPECT_THAT(refused(small(), "vocab_size", "many"), HasSubstr("vocab_size is \"many\", want an integer"));
  EXPECT_THAT(refused(small(), "vocab_size", nullptr), HasSubstr("has no vocab_size"));
  EXPECT_THAT(refused(small(), "hidden_size", -3), HasSubstr("hidden_size is -3"));
  EXPECT_THAT(refused(small(), "hidden_size", 1e300), HasSubstr("hidden_size is 1e+300"));
  EXPECT_THAT(refused(small(), "num_hidden_layers", 18446744073709551615ULL), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(refused(small(), "num_key_value_heads", 3), HasSubstr("want a divisor of num_attention_heads 4"));
  EXPECT_THAT(refused(small(), "head_dim", 7), HasSubstr("head_dim is 7, want an even number"));
  EXPECT_THAT(refused(small(), "rms_norm_eps", 0), HasSubstr("rms_norm_eps is 0"));
  EXPECT_THAT(refused(small(), "rope_scaling", 3), HasSubstr("rope_scaling is 3, want an object"));
  EXPECT_THAT(refused(small(), "rope_scaling", {{"rope_type", "linear"}}), HasSubstr("has no factor"));
  EXPECT_THAT(refused(small("qwen3_moe"), "num_experts", 0), HasSubstr("num_experts is 0"));
  EXPECT_THAT(message_of<CheckpointError>([] { return parse_config("{\"a\":1,\"a\":2}", "here"); }), HasSubstr("\"a\" twice"));
  EXPECT_THAT(message_of<CheckpointError>([] { return parse_config("[]", "here"); }), HasSubstr("is no JSON object"));
  EXPECT_THAT(message_of<CheckpointError>([] { return read_config("/nowhere"); }), HasSubstr("/nowhere/config.json"));
  EXPECT_THAT(unsupported(small(), "model_type", "gpt2"), HasSubstr("model_type is \"gpt2\", want llama, qwen3 or qwen3_moe"));
  EXPECT_THAT(unsupported(small(), "mlp_bias", true), HasSubstr("mlp_bias"));
  EXPECT_THAT(unsupported(small(), "hidden_act", "gelu"), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(unsupported(small(), "partial_rotary_factor", 0.5), HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(unsupported(small(), "quantization_config", json::object()), HasSubstr("quantization_config"));
  EXPECT_THAT(unsupported(small(), "rope_scaling", {{"rope_type", "longrope"}}), HasSubstr("rope_type is \"longrope\""));
  json sliding = small("qwen3");
  sliding["sliding_window"] = 8;
  EXPECT_THAT(unsupported(sliding, "use_sliding_window", true), HasSubstr("use_sliding_window"));
}

TEST(HfConfig, NamesBothWays) {
  Config config = parse_config(small("llama").dump(), "f");
  config.family = Family::kQwen3Moe;
  config.attention_bias = true;
  config.num_experts = 3;
  config.num_experts_per_tok = 2;
  config.moe_intermediate_size = 10;
  config.mlp_only_layers = {0};
  std::map<std::string, std::set<std::int64_t>> experts;
  for (const ckpt::TensorSpec& spec : tensors_of(config)) {
    const OurName ours = name_of(spec.name);
    std::vector<std::int64_t> shape = spec.shape;
    if (ours.expert) {
      experts[ours.name].insert(*ours.expert);
      shape.insert(shape.begin(), 3);
    }
    const std::vector<Part> parts = parts_of(ours.name, shape);
    ASSERT_EQ(parts.size(), ours.expert ? 3U : 1U) << spec.name;
    EXPECT_EQ(parts[static_cast<std::size_t>(ours.expert.value_or(0))].key, spec.name);
    EXPECT_EQ(parts[static_cast<std::size_t>(ours.expert.value_or(0))].shape, spec.shape);
  }
  EXPECT_EQ(experts.size(), 3U);
  EXPECT_EQ(experts.at("layers.1.mlp.experts.down_proj"), (std::set<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(name_of("model.layers.0.mlp.gate.weight").name, "layers.0.mlp.router.weight");
  EXPECT_EQ(name_of("model.layers.0.mlp.gate_proj.weight").name, "layers.0.mlp.gate_proj.weight");
  EXPECT_EQ(name_of("model.layers.0.mlp.experts.x.up_proj.weight").expert, std::nullopt);
  EXPECT_THAT(value_error([] { return parts_of("layers.0.mlp.experts.up_proj", {3, 4}); }), HasSubstr("want (experts, out, in)"));
}

TEST(HfConfig, TheDecoderOfHpTrain) {
  train::ModelConfig model{.dim = 48, .n_layers = 3, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 56, .vocab_size = 300};
  EXPECT_EQ(train::hf_config_of(model).family, Family::kLlama);
  for (const char* scaling : {"none", "linear", "dynamic", "llama3", "yarn"}) {
    model.rope_scaling = scaling;
    model.rope_factor = std::string(scaling) == "none" ? 1 : 2;
    model.rope_original_len = std::string(scaling) == "none" || std::string(scaling) == "linear" ? 0 : 128;
    for (const bool qwen : {false, true}) {
      model.qk_norm = qwen;
      model.head_dim = qwen ? 20 : 0;
      model.tied = model.attention_bias = qwen;
      const train::ModelConfig again = train::model_config_of(parse_config(config_json(train::hf_config_of(model)), "f"));
      EXPECT_EQ(again.rope_scaling, model.rope_scaling);
      EXPECT_EQ(again.rope_factor, model.rope_factor);
      EXPECT_EQ(again.rope_original_len, model.rope_original_len) << scaling;
      EXPECT_EQ(again.max_seq_len, model.max_seq_len) << scaling;
      EXPECT_EQ(again.head_dim, model.head_dim);
      EXPECT_EQ(again.qk_norm, qwen);
      EXPECT_EQ(again.attention_bias, qwen);
      EXPECT_EQ(again.tied, qwen);
      EXPECT_EQ(again.n_kv_heads, 2);
    }
  }
  model.n_experts = 6;
  model.top_k = 2;
  model.expert_ffn_dim = 12;
  model.moe_every = 3;
  model.norm_topk_prob = false;
  model.aux_loss_weight = 0.01;
  Config experts = parse_config(config_json(train::hf_config_of(model)), "f");
  EXPECT_EQ(experts.family, Family::kQwen3Moe);
  const train::ModelConfig again = train::model_config_of(experts);
  EXPECT_EQ(again.n_experts, 6);
  EXPECT_EQ(again.top_k, 2);
  EXPECT_EQ(again.expert_ffn_dim, 12);
  EXPECT_EQ(again.moe_every, 3);
  EXPECT_FALSE(again.norm_topk_prob);
  EXPECT_EQ(again.aux_loss_weight, 0.01);
  for (std::int64_t layer = 0; layer < 7; ++layer) EXPECT_EQ(experts.has_experts(layer), train::has_experts(again, layer));
  experts.mlp_only_layers = {2};
  EXPECT_THAT(value_error([&] { return train::model_config_of(experts); }), HasSubstr("mlp_only_layers"));
  model.qk_norm = false;
  EXPECT_EQ(value_error([&] { return train::hf_config_of(model); }),
            "[hf] a model with experts is a Qwen3 MoE elsewhere: model.qk_norm = false, want true");
  model.shared_ffn_dim = 9;
  model.router = "sigmoid";
  EXPECT_THAT(value_error([&] { return train::hf_config_of(model); }),
              HasSubstr("model.qk_norm = false, want true; model.shared_ffn_dim = 9, want 0; model.router = \"sigmoid\", want "
                        "\"softmax\""));
  model.qk_norm = true;
  EXPECT_THAT(value_error([&] { return train::hf_config_of(model); }), ::testing::Not(HasSubstr("qk_norm")));
}

}  // namespace
}  // namespace hyper_parallel::hf
