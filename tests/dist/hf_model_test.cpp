// Hugging Face model folders by ranks: what each reads and writes, any mesh and layout, and what is refused on all of them.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/hf/model.h>
#include <hyper_parallel/train/hf_config.h>
#include <hyper_parallel/train/shard_llama.h>

#include "support/message_of.h"
#include "support/parallel_layers.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"
#include "support/whole_state.h"

namespace hyper_parallel::hf {
namespace {

namespace fs = std::filesystem;
using namespace hyper_parallel::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

const train::ModelConfig kModel{
    .dim = 20, .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .ffn_dim = 23, .vocab_size = 41, .head_dim = 6, .qk_norm = true};

struct Setting {
  std::vector<int64_t> mesh;
  ShardLayout layout;
};
const std::vector<Setting> kSettings = {{{1}, ShardLayout::kPerParameter},
                                        {{2}, ShardLayout::kRagged},
                                        {{3}, ShardLayout::kPerParameter},
                                        {{2, 2}, ShardLayout::kRagged}};

/// Text of every file of a folder, by name.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> result;
  for (const auto& entry : fs::directory_iterator(folder)) result[entry.path().filename().string()] = file_text(entry.path());
  return result;
}

struct Sharded {
  explicit Sharded(const Setting& setting, std::uint64_t seed)
      : model(kModel, seed), root(train::fully_shard_llama(model, on_mesh(setting.mesh, setting.layout))) {
    state.add_model(root);
  }
  train::Llama model;
  HSDPModule root;
  ckpt::StateDict state;
};

TEST(HfModel, EverySettingWritesTheSameFilesAndReadsThem) {
  const TempFolder folder;
  for (std::size_t i = 0; i < kSettings.size(); ++i) {
    run_ranks(ranks_of(kSettings[i].mesh), [&] {
      Sharded run(kSettings[i], 7);
      save_model(folder / std::to_string(i), run.state, train::hf_config_of(kModel),
                 {.max_file_bytes = 9'000, .files = {{"notes.txt", "x"}}});
    });
  }
  const auto want = contents(folder / "0");
  EXPECT_GT(want.size(), 5U);
  EXPECT_TRUE(want.contains("model.safetensors.index.json"));
  for (std::size_t i = 1; i < kSettings.size(); ++i) EXPECT_TRUE(contents(folder / std::to_string(i)) == want) << i;
  train::Llama reference(kModel, 7);
  const Tensors values = parameters_of(*reference);
  for (const Setting& setting : kSettings) {
    run_ranks(ranks_of(setting.mesh), [&] {
      Sharded run(setting, 99);
      const ckpt::LoadResult result = load_model(folder / "0", run.state);
      EXPECT_EQ(result.bytes_read, result.bytes_owned);
      EXPECT_GT(result.bytes_read, 0);
      const Tensors got = full_parameters(run.root);
      ASSERT_EQ(got.size(), values.size());
      for (const auto& [name, value] : values) EXPECT_TRUE(torch::equal(got.at(name), value)) << name;
    });
  }
}

TEST(HfModel, AnotherDtypeAndTheSourceTwin) {
  const TempFolder folder;
  run_ranks(2, [&] {
    Sharded run({{2}, ShardLayout::kRagged}, 7);
    ckpt::save(folder / "step", run.state);
    save_model(folder / "ranks", run.state, train::hf_config_of(kModel), {.dtype = ckpt::Dtype::kBF16});
    Sharded again({{2}, ShardLayout::kPerParameter}, 8);
    EXPECT_THAT(message_of<ValueError>([&] { return load_model(folder / "ranks", again.state, {.convert_dtype = false}); }),
                HasSubstr("is BF16 there, want F32"));
    load_model(folder / "ranks", again.state);
    const Tensors got = full_parameters(again.root), want = full_parameters(run.root);
    for (const auto& [name, value] : want)
      EXPECT_TRUE(torch::equal(got.at(name), value.to(torch::kBFloat16).to(torch::kFloat))) << name;
  });
  // Written from files instead of by ranks, in tiny boxes.
  export_model(ckpt::Source(folder / "step"), folder / "files", train::hf_config_of(kModel),
               {.dtype = ckpt::Dtype::kBF16, .buffer_bytes = 100});
  EXPECT_TRUE(contents(folder / "files") == contents(folder / "ranks"));
  EXPECT_EQ(read_config(folder / "files").dtype, "bfloat16");
}

train::ModelConfig moe_model() {
  train::ModelConfig model = kModel;
  model.n_experts = 5;
  model.top_k = 2;
  model.expert_ffn_dim = 6;
  model.moe_every = 2;
  return model;
}

TEST(HfModel, ExpertsAreStackedHoweverTheyAreCut) {
  const TempFolder folder;
  const Config config = train::hf_config_of(moe_model());
  Tensors values;
  run_ranks(1, [&] {
    train::Llama model(moe_model(), 1);
    values = parameters_of(*model);
    save_model(folder / "whole", whole_state(*model), config);
  });
  for (const int world : {2, 3}) {
    for (const int64_t dim : {0, 1, 2}) {
      run_ranks(world, [&] {
        const DeviceMesh mesh = init_device_mesh("cpu", {get_world_size()});
        std::map<std::string, DTensor> parts, empty;
        ckpt::StateDict to_save, to_load;
        for (const auto& [name, value] : values) {
          const Placement placement = dim < value.dim() ? Shard(dim) : Shard(0);
          to_save.add("model." + name, distribute_tensor(value, mesh, {placement}));
          empty.emplace(name, distribute_tensor(torch::zeros_like(value), mesh, {placement}));
          to_load.add("model." + name, empty.at(name));
        }
        save_model(folder / concat("cut", world, dim), to_save, config);
        const ckpt::LoadResult result = load_model(folder / "whole", to_load);
        EXPECT_EQ(result.bytes_read, result.bytes_owned);
        for (const auto& [name, value] : values) EXPECT_TRUE(torch::equal(empty.at(name).full_tensor(), value)) << name;
      });
      EXPECT_TRUE(contents(folder / concat("cut", world, dim)) == contents(folder / "whole")) << world << ' ' << dim;
    }
  }
}

TEST(HfModel, ExpertsOverRanksGiveTheSameLogits) {
  const TempFolder folder;
  const Config config = train::hf_config_of(moe_model());
  torch::manual_seed(3);
  const torch::Tensor tokens = torch::randint(config.vocab_size, {2, 9}, torch::kLong);
  torch::Tensor want;
  run_ranks(1, [&] {
    train::Llama model(moe_model(), 2);
    save_model(folder / "moe", whole_state(*model), config);
    const torch::NoGradGuard no_grad;
    want = model->forward(tokens);
  });
  run_ranks(2, [&] {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"ep"});
    train::Llama model(moe_model(), 3, train::LlamaParallel{.ep = mesh});
    ckpt::StateDict state;
    for (const auto& item : model->named_parameters()) {
      const bool cut = item.key().find(".experts.") != std::string::npos;
      std::vector<int64_t> shape = item.value().sizes().vec();
      if (cut) shape[0] = config.num_experts;
      const std::vector<Placement> placements = {cut ? Shard(0) : Replicate()};
      state.add("model." + item.key(), DTensor::from_local(item.value().detach(), mesh, placements, {.shape = shape}));
    }
    const ckpt::LoadResult result = load_model(folder / "moe", state);
    EXPECT_EQ(result.bytes_read, result.bytes_owned);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(model->forward(tokens), want, 1e-5, 1e-6));
  });
}

/// Error of a load on all of two ranks, which must be the same.
template <class E>
std::string load_error(const fs::path& folder, const LoadOptions& options = {}) {
  std::array<std::string, 2> messages;
  run_ranks(2, [&](int rank) {
    Sharded run({{2}, ShardLayout::kRagged}, 7);
    const Tensors before = full_parameters(run.root);
    messages[static_cast<std::size_t>(rank)] = message_of<E>([&] { return load_model(folder, run.state, options); });
    const Tensors after = full_parameters(run.root);
    for (const auto& [name, value] : before) EXPECT_TRUE(torch::equal(after.at(name), value)) << name;
  });
  EXPECT_EQ(messages[0], messages[1]);
  return messages[0];
}

TEST(HfModel, FoldersThatAreRefused) {
  const TempFolder folder;
  run_ranks(1, [&] {
    Sharded run({{1}, ShardLayout::kPerParameter}, 7);
    save_model(folder / "good", run.state, train::hf_config_of(kModel), {.max_file_bytes = 9'000});
  });
  const auto changed = [&](const char* name, const char* file, const std::string& from, const std::string& to) {
    fs::copy(folder / "good", folder / name);
    std::string text = file_text(folder.path() / name / file);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    set_file_text(folder.path() / name / file, text.replace(at, from.size(), to));
    return folder / name;
  };
  const char* const index = "model.safetensors.index.json";
  EXPECT_THAT(load_error<CheckpointError>(changed("up", index, "\"model-00001", "\"../good/model-00001")),
              HasSubstr("want a plain name inside its folder"));
  EXPECT_THAT(load_error<CheckpointError>(changed("absolute", index, "\"model-00001", "\"/model-00001")),
              HasSubstr("want a plain name"));
  EXPECT_THAT(load_error<ValueError>(changed("name", index, "    \"model.norm.weight\": \"", "    \"model.x\": \"")),
              HasSubstr("model.x"));
  EXPECT_THAT(load_error<CheckpointError>(folder / "nothing"), HasSubstr("config.json: cannot open"));
  fs::create_directory(folder / "pickle");
  fs::copy(folder.path() / "good" / "config.json", folder / "pickle");
  set_file_text(folder.path() / "pickle" / "pytorch_model.bin", "PK");
  EXPECT_THAT(load_error<CheckpointError>(folder / "pickle"), HasSubstr("its pytorch_model.bin is pickled, which is not opened"));
  EXPECT_THAT(load_error<CheckpointError>(folder / "pickle"), HasSubstr("save_pretrained"));
  run_ranks(1, [&] {
    train::ModelConfig tied = kModel;
    tied.tied = true;
    train::Llama other(tied, 1);
    save_model(folder / "tied", whole_state(*other), train::hf_config_of(tied));
  });
  EXPECT_THAT(load_error<ValueError>(folder / "tied"), HasSubstr("missing: model.lm_head.weight"));
}

TEST(HfModel, SavesThatAreRefused) {
  const TempFolder folder;
  std::array<std::string, 2> messages;
  const auto error = [&](const Config& config, const SaveOptions& options, const fs::path& path) {
    run_ranks(2, [&](int rank) {
      Sharded run({{2}, ShardLayout::kRagged}, 7);
      messages[static_cast<std::size_t>(rank)] = message_of<ValueError>([&] {
        save_model(path, run.state, config, options);
        return 0;
      });
    });
    EXPECT_EQ(messages[0], messages[1]);
    return messages[0];
  };
  Config config = train::hf_config_of(kModel);
  Config other = config;
  other.family = Family::kLlama;
  EXPECT_THAT(error(other, {}, folder / "a"), HasSubstr("layers.0.self_attn.q_norm.weight has no place in a llama model"));
  other = config;
  other.num_hidden_layers = 3;
  EXPECT_THAT(error(other, {}, folder / "a"), HasSubstr("model.layers.2.input_layernorm.weight is missing"));
  other = config;
  other.intermediate_size = 24;
  EXPECT_THAT(error(other, {}, folder / "a"), HasSubstr("mlp.down_proj.weight is [0:20, 0:23], want [0:20, 0:24]"));
  EXPECT_THAT(error(config, {.files = {{"../x", ""}}}, folder / "a"), HasSubstr("\"../x\" is no name for a file"));
  EXPECT_THAT(error(config, {.dtype = ckpt::Dtype::kI32}, folder / "a"), HasSubstr("want a floating point type"));
  EXPECT_FALSE(fs::exists(folder / "a"));
  fs::create_directory(folder / "there");
  set_file_text(folder.path() / "there" / "mine.txt", "mine");
  EXPECT_THAT(error(config, {}, folder / "there"), HasSubstr("is there already"));
  EXPECT_THAT(error(config, {.overwrite = true}, folder / "there"),
              HasSubstr("holds something else than a folder with config.json"));
  EXPECT_EQ(contents(folder / "there").size(), 1U);
  EXPECT_EQ(error(config, {}, folder / "again"), "nothing thrown");
  EXPECT_THAT(error(config, {}, folder / "again"), HasSubstr("is there already"));
  EXPECT_EQ(error(config, {.dtype = ckpt::Dtype::kF16, .overwrite = true}, folder / "again"), "nothing thrown");
  EXPECT_EQ(read_config(folder / "again").dtype, "float16");
  const ckpt::Source source = open_model(folder / "again");
  EXPECT_EQ(message_of<ValueError>([&] {
              check_model(source, config);
              return 0;
            }),
            "nothing thrown");
  EXPECT_THAT(
      message_of<ValueError>([&] {
        check_model(source, other);
        return 0;
      }),
      AllOf(HasSubstr("again: does not fit its config: "), HasSubstr("mlp.down_proj.weight is [0:20, 0:23], want [0:20, 0:24]")));
  // Nor is what others have put beside the weights, though other saves write such files.
  for (const char* name : {"generation_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer_config.json"}) {
    set_file_text(folder / "again" / name, "mine");
    EXPECT_THAT(error(config, {.overwrite = true}, folder / "again"),
                HasSubstr(concat("holds ", name, " besides what would be")));
    EXPECT_EQ(file_text(folder / "again" / name), "mine");
    EXPECT_EQ(error(config, {.files = {{name, "new"}}, .overwrite = true}, folder / "again"), "nothing thrown");
    EXPECT_EQ(file_text(folder / "again" / name), "new");
    fs::remove(folder / "again" / name);
  }
}

TEST(HfModel, ExpertsThatAreMissing) {
  const TempFolder folder;
  fs::create_directory(folder / "moe");
  const Config config = train::hf_config_of(moe_model());
  set_file_text(folder / "moe/config.json", config_json(config));
  const auto open = [&](const std::vector<ckpt::TensorSpec>& specs) {
    ckpt::SafetensorsWriter writer(folder / "moe/model.safetensors", specs);
    for (const auto& spec : specs)
      writer.write(spec.name, std::vector<std::byte>(static_cast<std::size_t>(4 * spec.shape[0] * spec.shape[1])));
    writer.finish();
    return message_of<CheckpointError>([&] { return open_model(folder / "moe"); });
  };
  const std::string begin = "model.layers.1.mlp.experts.";
  EXPECT_THAT(
      open({{begin + "0.up_proj.weight", ckpt::Dtype::kF32, {2, 3}}, {begin + "2.up_proj.weight", ckpt::Dtype::kF32, {2, 3}}}),
      HasSubstr("model.layers.1.mlp.experts.up_proj has 2 experts, the last is 2, want 3"));
  EXPECT_THAT(
      open({{begin + "0.up_proj.weight", ckpt::Dtype::kF32, {2, 3}}, {begin + "1.up_proj.weight", ckpt::Dtype::kF32, {3, 2}}}),
      HasSubstr("does not fit the other experts"));
}

}  // namespace
}  // namespace hyper_parallel::hf
