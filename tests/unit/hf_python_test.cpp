// Models and tokenizers of Hugging Face against the Python packages transformers and tokenizers.
#include <filesystem>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hyper_parallel/hf/model.h>
#include <hyper_parallel/hf/tokenizer.h>
#include <hyper_parallel/train/hf_config.h>
#include <hyper_parallel/train/llama.h>

#include "support/rank_threads.h"
#include "support/temp_folder.h"
#include "support/whole_state.h"
#include "unit/hf_peer.h"

namespace hyper_parallel::testing {
namespace {

using ::testing::HasSubstr;

/// Tokens and logits that a folder comes with.
struct Expected {
  explicit Expected(const std::filesystem::path& file) {
    const ckpt::SafetensorsFile values(file);
    const ckpt::TensorEntry &t = values.at("tokens"), &l = values.at("logits");
    tokens = torch::empty(t.shape, torch::kLong);
    logits = torch::empty(l.shape, torch::kFloat);
    values.read(t, 0, {static_cast<std::byte*>(tokens.data_ptr()), tokens.nbytes()});
    values.read(l, 0, {static_cast<std::byte*>(logits.data_ptr()), logits.nbytes()});
  }
  torch::Tensor tokens, logits;
};

void write_expected(const std::filesystem::path& file, const torch::Tensor& tokens, const torch::Tensor& logits) {
  ckpt::SafetensorsWriter writer(
      file, {{"tokens", ckpt::Dtype::kI64, tokens.sizes().vec()}, {"logits", ckpt::Dtype::kF32, logits.sizes().vec()}});
  writer.write("tokens", {static_cast<const std::byte*>(tokens.const_data_ptr()), tokens.nbytes()});
  writer.write("logits", {static_cast<const std::byte*>(logits.const_data_ptr()), logits.nbytes()});
  writer.finish();
}

void expect_their_logits(train::Llama& model, const std::filesystem::path& folder) {
  ckpt::StateDict state = whole_state(*model);
  const ckpt::LoadResult result = hf::load_model(folder, state);
  EXPECT_EQ(result.bytes_read, result.bytes_owned) << folder;
  const Expected expected(folder / "expected.safetensors");
  const torch::NoGradGuard no_grad;
  const torch::Tensor got = model->forward(expected.tokens);
  const double worst = (got - expected.logits).abs().max().item<double>();
  EXPECT_LT(worst, 2e-4) << folder << ", logits of " << expected.logits.abs().mean().item<double>();
  EXPECT_GT(expected.logits.std().item<double>(), 0.5) << folder;
}

TEST(HfPython, LogitsOfItsModels) {
  const TempFolder folder;
  ASSERT_EQ(run_hf_peer({"models", folder.path().string()}), 0);
  int dense = 0, experts = 0;
  run_ranks(1, [&] {
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      const hf::Config config = hf::read_config(entry.path());
      train::Llama model(train::model_config_of(config));
      expect_their_logits(model, entry.path());
      ++(config.family == hf::Family::kQwen3Moe ? experts : dense);
    }
  });
  EXPECT_EQ(dense, 11);
  EXPECT_EQ(experts, 2);
}

/// Changes every parameter, norms and biases among them.
void shake(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(9);
  for (auto& parameter : module.parameters()) parameter.normal_(parameter.dim() == 1 ? 0.7 : 0.0, 0.25);
}

TEST(HfPython, OpensWhatWeSave) {
  const TempFolder folder;
  train::ModelConfig llama{
      .dim = 32, .n_layers = 2, .n_heads = 4, .n_kv_heads = 2, .ffn_dim = 40, .vocab_size = 300, .max_seq_len = 48};
  train::ModelConfig qwen = llama;
  qwen.qk_norm = qwen.attention_bias = qwen.tied = true;
  qwen.head_dim = 12;
  train::ModelConfig dynamic = llama;
  dynamic.rope_scaling = "dynamic";
  dynamic.rope_factor = 3;
  dynamic.rope_original_len = 16;
  train::ModelConfig yarn = llama;
  yarn.rope_scaling = "yarn";
  yarn.rope_factor = 4;
  yarn.rope_original_len = 12;
  train::ModelConfig moe = llama;
  moe.qk_norm = true;
  moe.n_experts = 4;
  moe.top_k = 2;
  moe.expert_ffn_dim = 20;
  moe.moe_every = 2;
  const std::map<std::string, train::ModelConfig> models = {
      {"llama", llama}, {"qwen", qwen}, {"dynamic", dynamic}, {"yarn", yarn}, {"moe", moe}};
  run_ranks(1, [&] {
    for (const auto& [name, config] : models) {
      train::Llama model(config);
      shake(*model);
      const torch::Tensor tokens = torch::randint(config.vocab_size, {2, 33}, torch::kLong);
      hf::save_model(folder / name, whole_state(*model), train::hf_config_of(config), {.max_file_bytes = 30'000});
      const torch::NoGradGuard no_grad;
      write_expected(folder / (name + ".expected"), tokens, model->forward(tokens).contiguous());
    }
  });
  std::vector<std::string> arguments = {"logits"};
  for (const auto& [name, config] : models) arguments.push_back(folder.file(name));
  EXPECT_EQ(run_hf_peer(arguments), 0);
}

TEST(HfPython, AutoClassesOpenAModelOfBytes) {
  const TempFolder folder;
  run_ranks(1, [&] {
    const train::ModelConfig config{.dim = 16, .n_layers = 1, .n_heads = 2, .ffn_dim = 24, .max_seq_len = 32};
    train::Llama model(config);
    hf::save_model(folder / "bytes", whole_state(*model), train::hf_config_of(config),
                   {.dtype = ckpt::Dtype::kBF16,
                    .files = {{"tokenizer.json", hf::byte_tokenizer_json()},
                              {"tokenizer_config.json", "{\"tokenizer_class\": \"PreTrainedTokenizerFast\"}"}}});
  });
  std::string output;
  ASSERT_EQ(run_hf_peer({"open", folder.file("bytes"), "a b\xc3\xa9"}, &output), 0);
  EXPECT_THAT(output, HasSubstr("tokens [97, 32, 98, 195, 169] dtype torch.bfloat16"));
}

std::vector<std::int64_t> ids_of(const nlohmann::json& list) { return list.get<std::vector<std::int64_t>>(); }

TEST(HfPython, TokensOfItsTokenizers) {
  const TempFolder folder;
  ASSERT_EQ(run_hf_peer({"tokenizers", folder.path().string()}), 0);
  std::size_t compared = 0;
  for (const char* name : {"llama3", "qwen", "gpt2", "prefix", "digits", "removed"}) {
    const hf::Tokenizer tokenizer = hf::Tokenizer::load(folder / concat(name, ".json"));
    const nlohmann::json all = nlohmann::json::parse(file_text(folder / concat(name, ".cases.json")));
    EXPECT_EQ(tokenizer.vocab_size(), all["size"].get<std::int64_t>()) << name;
    int wrong = 0;
    for (const auto& one : all["cases"]) {
      const std::string text = one["text"];
      const std::vector<std::int64_t> ids = tokenizer.encode(text), want = ids_of(one["ids"]);
      const bool same = ids == want && tokenizer.encode(text, {.add_special_tokens = false}) == ids_of(one["plain"]) &&
                        tokenizer.decode(want) == one["decoded"].get<std::string>() &&
                        tokenizer.decode(want, {.skip_special_tokens = true}) == one["skipped"].get<std::string>();
      ++compared;
      if (!same && ++wrong <= 3)
        ADD_FAILURE() << name << ": " << nlohmann::json(text) << "\n got " << nlohmann::json(ids) << "\nwant " << one["ids"]
                      << "\n got " << nlohmann::json(tokenizer.decode(want)) << "\nwant " << one["decoded"];
    }
    for (const auto& one : all["sequences"]) {
      if (tokenizer.decode(ids_of(one["ids"])) != one["decoded"].get<std::string>() && ++wrong <= 3)
        ADD_FAILURE() << name << ": decoded " << one["ids"] << "\n got " << nlohmann::json(tokenizer.decode(ids_of(one["ids"])))
                      << "\nwant " << one["decoded"];
    }
    EXPECT_EQ(wrong, 0) << name;
  }
  EXPECT_GT(compared, 9000U);
}

}  // namespace
}  // namespace hyper_parallel::testing
