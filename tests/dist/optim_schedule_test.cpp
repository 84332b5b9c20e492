// Learning-rate schedules by their formulas, and the scheduler on our optimizers and torch's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "dist/optim_support.h"
#include "support/message_of.h"

namespace hyper_parallel::testing {
namespace {

using optim::LrSchedule;
using optim::LrScheduler;
using optim::LrShape;
using ::testing::HasSubstr;

TEST(LrSchedule, Shapes) {
  const auto factors = [](const LrSchedule& schedule, const std::vector<int64_t>& steps) {
    std::vector<double> result;
    for (const int64_t step : steps) result.push_back(schedule.factor(step));
    return result;
  };
  const auto near = [](const std::vector<double>& got, const std::vector<double>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
  };
  const std::vector<int64_t> steps = {0, 1, 3, 4, 29, 54, 79, 104, 1000};
  const auto at = [&](LrShape shape) {
    return factors({.shape = shape, .warmup_steps = 4, .total_steps = 104, .min_ratio = 0.1, .decay_share = 0.5}, steps);
  };
  const double root = std::sqrt(0.5);
  near(at(LrShape::kConstant), {0.25, 0.5, 1, 1, 1, 1, 1, 1, 1});
  near(at(LrShape::kLinear), {0.25, 0.5, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1});
  near(at(LrShape::kCosine), {0.25, 0.5, 1, 1, 0.1 + 0.45 * (1 + root), 0.55, 0.1 + 0.45 * (1 - root), 0.1, 0.1});
  near(at(LrShape::kWsd), {0.25, 0.5, 1, 1, 1, 1, 0.55, 0.1, 0.1});
  near(factors({.shape = LrShape::kInverseSqrt, .warmup_steps = 4, .min_ratio = 0.1}, {0, 3, 4, 15, 63, 100000}),
       {0.25, 1, std::sqrt(4.0 / 5), 0.5, 0.25, 0.1});
  near(factors({.shape = LrShape::kLinear, .total_steps = 10}, {0, 5, 10}), {1, 0.5, 0});
  near(factors({.shape = LrShape::kCosine, .warmup_steps = 4, .total_steps = 4, .min_ratio = 0.1}, {3, 4}), {1, 0.1});
}

TEST(LrSchedule, NamesAndErrors) {
  EXPECT_EQ(optim::lr_shape("constant"), LrShape::kConstant);
  EXPECT_EQ(optim::lr_shape("linear"), LrShape::kLinear);
  EXPECT_EQ(optim::lr_shape("cosine"), LrShape::kCosine);
  EXPECT_EQ(optim::lr_shape("wsd"), LrShape::kWsd);
  EXPECT_EQ(optim::lr_shape("inverse_sqrt"), LrShape::kInverseSqrt);
  EXPECT_THAT(value_error([] { return optim::lr_shape("step"); }), HasSubstr("[lr_schedule] schedule is step, want constant"));
  const auto invalid = [](const LrSchedule& schedule) { return value_error([&] { return schedule.factor(0); }); };
  EXPECT_THAT(invalid({.total_steps = 0}), HasSubstr("total_steps is 0"));
  EXPECT_THAT(invalid({.warmup_steps = -1, .total_steps = 1}), HasSubstr("warmup_steps is -1"));
  EXPECT_THAT(invalid({.total_steps = -1}), HasSubstr("total_steps is -1"));
  EXPECT_THAT(invalid({.total_steps = 1, .min_ratio = 2}), HasSubstr("min_ratio is 2"));
  EXPECT_THAT(invalid({.shape = LrShape::kWsd, .total_steps = 1, .decay_share = 0}), HasSubstr("decay_share is 0"));
  EXPECT_THAT(value_error([] { return LrSchedule{.shape = LrShape::kInverseSqrt}.after_warmup(0.5); }),
              HasSubstr("inverse_sqrt by share of the run"));
}

TEST(LrScheduler, SetsTheRatesOfAllGroups) {
  run_ranks(1, [] {
    nn::Linear layer(4, 4);
    const HSDPModule root = fully_shard(layer, on_all());
    optim::AdamW ours(root, {.lr = 0.1, .groups = {{.names = {"bias"}, .lr = 0.4}}});
    auto parameters = layer->parameters();
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (auto [parameter, lr] : {std::pair{parameters[1], 0.4}, std::pair{parameters[0], 0.1}})
      groups.emplace_back(std::vector<torch::Tensor>{parameter}, std::make_unique<torch::optim::SGDOptions>(lr));
    torch::optim::SGD torchs(groups, torch::optim::SGDOptions(0.7));
    const LrSchedule schedule{.shape = LrShape::kLinear, .warmup_steps = 2, .total_steps = 6};
    LrScheduler one(ours, schedule), two(torchs, schedule);
    for (const double factor : {0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0}) {
      for (const auto& rates : {ours.lrs(), one.last_lrs(), two.last_lrs()}) {
        ASSERT_EQ(rates.size(), 2U);
        EXPECT_DOUBLE_EQ(rates[0], 0.4 * factor);
        EXPECT_DOUBLE_EQ(rates[1], 0.1 * factor);
      }
      one.step(), two.step();
    }

    optim::AdamW fresh(root, {.lr = 9, .groups = {{.names = {"bias"}, .lr = 9}}});
    LrScheduler resumed(fresh, schedule);
    resumed.load_state({.step = 3, .initial_lrs = one.state().initial_lrs});
    EXPECT_EQ(fresh.lrs(), (std::vector<double>{0.4 * 0.75, 0.1 * 0.75}));
    resumed.step();
    EXPECT_EQ(resumed.last_step(), 4);
    EXPECT_EQ(fresh.lrs(), (std::vector<double>{0.2, 0.05}));

    optim::Muon muon(root, {.lr = 0.02, .adamw = {.lr = 0.001}});
    LrScheduler three(muon, [](int64_t step) { return 1.0 / static_cast<double>(step + 1); });
    three.step();
    EXPECT_EQ(muon.lrs(), (std::vector<double>{0.01, 0.0005}));

    EXPECT_THAT(value_error([&] {
                  resumed.load_state({.step = -1, .initial_lrs = {1, 1}});
                }),
                HasSubstr("[LrScheduler] step is -1"));
    EXPECT_THAT(value_error([&] { resumed.load_state({.step = 1, .initial_lrs = {1}}); }), HasSubstr("1 initial rates, want 2"));
    EXPECT_THAT(value_error([&] { LrScheduler(muon, LrScheduler::Factor{}); }), HasSubstr("no factor"));
    EXPECT_THAT(value_error([&] { LrScheduler(muon, LrSchedule{.total_steps = -1}); }), HasSubstr("total_steps is -1"));
  });
}

}  // namespace
}  // namespace hyper_parallel::testing
