// Tensor, sequence, context and expert parallelism in hp-train: every arrangement of the ranks gives the loss curve of one rank.
#include <cmath>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>

#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/train/generate.h>
#include <hyper_parallel/train/memory_plan.h>
#include <hyper_parallel/train/shard_llama.h>

#include "dist/train_run.h"
#include "train/meshes.h"

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::run_ranks;

using Overrides = std::vector<Override>;

Overrides operator+(Overrides a, const Overrides& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// "tp=2 dp_replicate=2" in [parallel].
Overrides ranks(const std::string& text) {
  Overrides overrides;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    const auto equals = word.find('=');
    overrides.emplace_back("parallel." + word.substr(0, equals), word.substr(equals + 1));
  }
  return overrides;
}

const Overrides kExperts = {{"model.n_experts", "5"},       {"model.top_k", "2"},     {"model.expert_ffn_dim", "24"},
                            {"model.shared_ffn_dim", "10"}, {"model.moe_every", "2"}, {"model.aux_loss_weight", "0.05"}};
const Overrides kSigmoid = {{"model.n_experts", "4"},        {"model.top_k", "2"},         {"model.expert_ffn_dim", "16"},
                            {"model.router", "sigmoid"},     {"model.route_scale", "1.5"}, {"model.bias_update_speed", "0.01"},
                            {"model.norm_topk_prob", "true"}};

struct Case {
  int world;
  std::string ranks;
  Overrides more = {};
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << c.world << " ranks, " << c.ranks;
  for (const auto& [key, value] : c.more) out << ' ' << key << '=' << value;
  return out;
}

class TrainParallel : public TrainRun {
 protected:
  /// Runs of one rank with `model` and, step by step, the batches that all ranks of a case compute together.
  void expect_curve_of_one_rank(const Overrides& model, const std::vector<Case>& cases, double tolerance = 2e-5) {
    std::map<std::int64_t, TrainResult> alone;  // by accumulation: the balancing loss is one of micro-batches
    for (const Case& c : cases) {
      SCOPED_TRACE(c);
      const Config of_case = config("many", model + ranks(c.ranks) + c.more);
      const std::int64_t accumulation = plan_batches(of_case, c.world).accumulation;
      auto one = alone.find(accumulation);
      if (one == alone.end()) {
        const Overrides micro = {{"train.micro_batch_size", std::to_string(12 / accumulation)}};
        one = alone.emplace(accumulation, train(config("one", model + micro), 1)).first;
      }
      const TrainResult many = train(of_case, c.world);
      expect_same_curve(many, one->second, tolerance);
      EXPECT_EQ(many.tokens, one->second.tokens);
      for (std::size_t i = 0; i < many.history.size() && i < one->second.history.size(); ++i) {
        ASSERT_EQ(many.history[i].aux_loss.has_value(), one->second.history[i].aux_loss.has_value());
        if (many.history[i].aux_loss) {
          EXPECT_NEAR(*many.history[i].aux_loss, *one->second.history[i].aux_loss, tolerance);
        }
      }
    }
  }
};

TEST_F(TrainParallel, TensorAndSequenceParallel) {
  expect_curve_of_one_rank({}, {{2, "tp=2"},
                                {2, "tp=2 sequence_parallel=true"},
                                {3, "tp=3"},  // heads, key heads, hidden width, vocabulary and sequence do not divide
                                {3, "tp=3 sequence_parallel=true"},
                                {5, "tp=5 sequence_parallel=true"},  // more ranks than heads
                                {4, "tp=2"},
                                {4, "tp=2 sequence_parallel=true layout=per_parameter"},
                                {4, "tp=2 dp_replicate=2"},
                                {8, "tp=2 dp_replicate=2 sequence_parallel=true"}});
}

TEST_F(TrainParallel, ContextParallel) {
  expect_curve_of_one_rank({}, {{2, "cp=2"},
                                {3, "cp=3"},  // 16 tokens in 6 chunks: 3 3 3 3 3 1
                                {4, "cp=2"},
                                {4, "cp=2 dp_replicate=2"},
                                {4, "cp=2 tp=2 sequence_parallel=true"},
                                {6, "cp=3 tp=2 sequence_parallel=true"},
                                {8, "cp=2 tp=2 dp_replicate=2"}});
}

TEST_F(TrainParallel, Experts) {
  expect_curve_of_one_rank(kExperts, {{2, ""},
                                      {2, "ep=2"},
                                      {4, "ep=4"},  // 5 experts: 2 2 1 0
                                      {4, "ep=2"},
                                      {4, "ep=2 dp_replicate=2"},
                                      {2, "tp=2"},
                                      {2, "tp=2 ep=2"},
                                      {3, "tp=3 ep=3 sequence_parallel=true"},
                                      {4, "tp=2 ep=2 sequence_parallel=true"},
                                      {4, "tp=2 ep=4"},
                                      {4, "cp=2 ep=2"},
                                      {4, "cp=2 ep=4"},
                                      {8, "dp_replicate=2 cp=2 tp=2 ep=2"},
                                      {8, "cp=2 tp=2 ep=4 sequence_parallel=true"}});
}

TEST_F(TrainParallel, ExpertsBalancedByBias) {
  expect_curve_of_one_rank(kSigmoid, {{2, "ep=2"}, {4, "ep=4"}, {4, "tp=2 ep=2"}, {4, "cp=2 ep=2"}});
}

/// Whatever else is set, in combination with each axis.
TEST_F(TrainParallel, WithEveryOtherSetting) {
  const Overrides micro = {{"train.micro_batch_size", "3"}};
  const std::vector<Overrides> settings = {
      {{"train.activation_checkpoint", "block"}},
      {{"parallel.accumulation", "each"}},
      {{"parallel.accumulation", "partial"}, {"parallel.layout", "per_parameter"}},
      {{"parallel.zero_level", "2"}, {"parallel.late_waits", "true"}},
      {{"parallel.zero_level", "3"}, {"train.activation_checkpoint", "block:2"}},
      {{"parallel.replicate_below", "200"}, {"parallel.bucket_mb", "0.01"}},
      {{"parallel.layout", "per_parameter"}, {"parallel.comm_fusion", "false"}},
      {{"precision.main_grad", "true"}, {"parallel.offload", "true"}},
      {{"precision.loss_scale", "1024"}},
      {{"parallel.replica_init", "check"}},
  };
  const std::vector<std::pair<std::string, Overrides>> arrangements = {
      {"tp=2 sequence_parallel=true", {}}, {"tp=2 ep=2", kExperts}, {"cp=2 ep=4", kExperts}};
  for (const auto& [axes, model] : arrangements) {
    std::vector<Case> cases;
    for (const Overrides& more : settings) cases.push_back({4, axes, micro + more});
    expect_curve_of_one_rank(model, cases);
  }
  // Room for some of the blocks.
  expect_curve_of_one_rank({}, {{4, "tp=2 memory_budget_mb=0.25"}, {6, "tp=3 memory_budget_mb=0.25"}});
}

TEST_F(TrainParallel, ReshardOverAPartOfTheRanks) {
  expect_curve_of_one_rank(kExperts, {{4, "ep=2 reshard_ranks=2"}, {8, "tp=2 ep=2 reshard_ranks=2"}});
}

TEST_F(TrainParallel, TiedWeights) {
  expect_curve_of_one_rank({{"model.tied", "true"}},
                           {{2, "tp=2"}, {3, "tp=3 sequence_parallel=true"}, {4, "tp=2 cp=2 sequence_parallel=true"}});
}

/// What Qwen3 has beside Llama: norms of heads, whose gradients are summands over tp, another width of heads, biases.
TEST_F(TrainParallel, NormsOfHeadsAndBiases) {
  const Overrides model = {{"model.qk_norm", "true"}, {"model.head_dim", "10"}, {"model.attention_bias", "true"}};
  expect_curve_of_one_rank(model, {{2, "tp=2"},
                                   {3, "tp=3 sequence_parallel=true"},
                                   {4, "tp=2 layout=per_parameter sequence_parallel=true"},
                                   {4, "cp=2 tp=2"},
                                   {2, "cp=2"}});
  expect_curve_of_one_rank(kExperts + model, {{4, "tp=2 ep=4"}});
}

TEST_F(TrainParallel, Optimizers) {
  for (const char* optimizer : {"muon", "sgd"}) {
    const Overrides model = {{"optim.optimizer", optimizer}, {"optim.ema_decay", "0.5"}};
    expect_curve_of_one_rank(model, {{2, "tp=2"}, {3, "tp=3"}, {4, "tp=2 layout=per_parameter"}, {4, "cp=2"}}, 5e-5);
    expect_curve_of_one_rank(kExperts + model, {{4, "tp=2 ep=2"}}, 5e-5);
  }
}

TEST_F(TrainParallel, LowPrecision) {
  const Overrides half = {{"precision.param_dtype", "float16"}, {"precision.loss_scale", "1024"}};
  const Overrides bf16 = {{"precision.param_dtype", "bfloat16"}};
  for (const Overrides& precision : {half, bf16}) {
    expect_curve_of_one_rank({}, {{4, "tp=2 sequence_parallel=true", precision}, {4, "cp=2", precision}}, 3e-2);
    expect_curve_of_one_rank(kExperts, {{4, "tp=2 ep=2", precision}}, 5e-2);
  }
}

TEST_F(TrainParallel, TextsAreThoseOfOneRank) {
  const Overrides texts = {
      {"sample.prompts", "['line ', 'a']"}, {"sample.tokens", "20"}, {"sample.temperature", "0"}, {"train.max_steps", "30"}};
  const auto samples = [&](const std::string& name) {
    std::ifstream in(dir_ / "runs" / name / "samples.txt");
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  train(config("one", kExperts + texts), 1);
  ASSERT_THAT(samples("one"), HasSubstr("--- sample 2 ---\na"));
  for (const char* axes : {"tp=2 ep=2 sequence_parallel=true", "cp=2", "ep=4"}) {
    train(config("many", kExperts + texts + ranks(axes)), 4);
    EXPECT_EQ(samples("many"), samples("one")) << axes;
  }
}

/// Weights, optimizer state and the balancing bias go from one arrangement to another; nothing is lost or done twice.
TEST_F(TrainParallel, ACheckpointGoesOnInAnotherArrangement) {
  const Overrides model =
      kSigmoid +
      Overrides{{"model.qk_norm", "true"}, {"optim.ema_decay", "0.5"}, {"checkpoint.every", "3"}, {"checkpoint.keep_last", "0"}};
  const TrainResult whole = train(config("moved", model + ranks("ep=2")), 2);
  for (const Case& c :
       {Case{4, "tp=2 ep=4 sequence_parallel=true"}, {1, ""}, {4, "cp=2 ep=2 layout=per_parameter"}, {3, "tp=3"}}) {
    SCOPED_TRACE(c);
    for (const char* later : {"step-00000006", "step-00000008"}) fs::remove_all(dir_ / "runs/moved/checkpoints" / later);
    const TrainResult moved = train(config("moved", model + ranks(c.ranks)), c.world, {.resume = true});
    EXPECT_EQ(moved.resumed, 3);
    expect_same_curve(moved, whole, 2e-5);
  }
}

/// Bit for bit the weights that one rank draws, through fully_shard and without it.
TEST(InitLlama, GivesEveryArrangementTheSameWeights) {
  for (const char* axes : {"tp=3", "tp=2", "ep=2", "tp=2 ep=4", "cp=2 ep=2", "dp_replicate=2 tp=2 ep=2"}) {
    SCOPED_TRACE(axes);
    for (const bool tied : {false, true}) {
      const Overrides model = {{"model.dim", "32"},     {"model.n_heads", "4"},  {"model.n_kv_heads", "2"},
                               {"model.n_layers", "2"}, {"model.ffn_dim", "40"}, {"model.tied", tied ? "true" : "false"}};
      const Config config = parse_config("", "test.toml", model + kSigmoid + ranks(axes));
      const int world = std::string(axes) == "tp=3" ? 3 : std::string(axes).starts_with("dp_replicate") ? 8 : 4;
      Llama whole(config.model, 7);
      run_ranks(world, [&] {
        const TrainMeshes meshes = make_meshes(config, plan_batches(config, world));
        Llama model_without_memory{nullptr}, cut(config.model, 7, meshes.model);
        {
          const MetaInit no_memory;
          model_without_memory = Llama(config.model, std::uint64_t{0}, meshes.model);
        }
        const auto cuts = parallel::parameter_cuts(cut);
        for (const auto& item : cut->named_parameters()) {
          const at::Tensor part = parallel::local_part(cuts.at(item.key()), whole->named_parameters()[item.key()]);
          EXPECT_TRUE(at::equal(item.value(), part)) << item.key();
        }
        FullyShardOptions options{.mesh = meshes.dense};
        options.shard_layout = ShardLayout::kRagged;
        const HSDPModule root = fully_shard_llama(model_without_memory, options, meshes.experts);
        init_llama(model_without_memory, root, 7);
        std::set<std::string> names;
        for (const auto& [name, parameter] : root.named_dtensors()) {
          names.insert(name);
          EXPECT_TRUE(at::equal(parameter.full_tensor(), whole->named_parameters()[name])) << name;
        }
        EXPECT_EQ(names.size(), whole->named_parameters().size());
        EXPECT_EQ(model_without_memory->layers[0]->moe->router->expert_bias.abs().sum().item<float>(), 0);
      });
    }
  }
}

/// What a rank holds is what the plan says, and tp and ep divide it.
TEST_F(TrainParallel, TheMemoryPlanCountsWhatIsCut) {
  const auto bytes = [&](const Overrides& more, int world) {
    const Config c = config("m", kExperts + more);
    std::int64_t shards = 0;
    run_ranks(world, [&](int rank) {
      const TrainMeshes meshes = make_meshes(c, plan_batches(c, world));
      Llama model(c.model, std::uint64_t{0}, meshes.model);
      const HSDPModule root = fully_shard_llama(model, {.mesh = meshes.dense}, meshes.experts);
      if (rank == 0) shards = root.plan_memory().shards;
    });
    return shards;
  };
  const ModelConfig m = config("m", kExperts).model;
  std::int64_t experts = 0, whole = 0;
  for (const UnitSize& unit : llama_units(m)) {
    whole += unit.numel;
    if (unit.name.ends_with("experts")) experts += unit.numel;
  }
  EXPECT_EQ(whole, parameter_count(m));
  EXPECT_EQ(experts, 5 * 3 * 32 * 24);  // one block of three
  EXPECT_EQ(bytes({}, 1), 4 * whole);
  // 3 of 5 experts on the first rank of two; everything else in halves.
  EXPECT_NEAR(bytes(ranks("ep=2"), 2), 4.0 * (experts * 3.0 / 5 + (whole - experts) / 2.0), 4.0 * whole / 100);
  // Norms and routers are on both ranks.
  EXPECT_NEAR(bytes(ranks("tp=2 ep=2"), 2), 4.0 * (experts * 3.0 / 5 + (whole - experts) / 2.0), 4.0 * whole / 50);
}

TEST_F(TrainParallel, MistakesAreAgreedOn) {
  EXPECT_EQ(agreed_message(config("x", ranks("tp=3")), 4),
            "[parallel] dp_replicate * cp * tp = 1 * 1 * 3, want a divisor of the world size 4 (command line)");
  EXPECT_THAT(agreed_message(config("x", kExperts + ranks("ep=3")), 4), HasSubstr("[parallel] ep = 3, want a divisor"));
  EXPECT_THAT(agreed_message(config("x", ranks("cp=2") + Overrides{{"train.batch_size", "3"}}), 4),
              HasSubstr("[train] batch_size = 3"));
}

}  // namespace
}  // namespace hyper_parallel::train
