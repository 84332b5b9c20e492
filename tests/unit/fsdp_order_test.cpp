// The learned orders, without tensors.
#include <gtest/gtest.h>

#include "fsdp/backward_plan.h"
#include "fsdp/learned_order.h"

namespace hyper_parallel::fsdp {
namespace {

using Kind = BackwardEvent::Kind;

std::vector<std::optional<int>> pass(LearnedOrder& order, const std::vector<int>& visits) {
  std::vector<std::optional<int>> next;
  order.begin();
  for (const int unit : visits) next.push_back(order.visit(unit));
  order.finish();
  return next;
}

TEST(LearnedOrder, PredictsFromTheSecondPass) {
  LearnedOrder order;
  EXPECT_EQ(pass(order, {0, 1, 2}), (std::vector<std::optional<int>>{{}, {}, {}}));
  EXPECT_EQ(pass(order, {0, 1, 2}), (std::vector<std::optional<int>>{1, 2, {}}));
}

TEST(LearnedOrder, UnitsMayRepeat) {
  LearnedOrder order;
  pass(order, {0, 1, 0, 2});
  EXPECT_EQ(pass(order, {0, 1, 0, 2}), (std::vector<std::optional<int>>{1, 0, 2, {}}));
}

TEST(LearnedOrder, ChangeIsNoticedAndLearned) {
  LearnedOrder order;
  pass(order, {0, 1, 2});
  EXPECT_EQ(pass(order, {0, 2, 1}), (std::vector<std::optional<int>>{1, {}, {}}));
  EXPECT_EQ(pass(order, {0, 2, 1}), (std::vector<std::optional<int>>{{}, {}, {}})) << "not two in a row yet";
  EXPECT_EQ(pass(order, {0, 2, 1}), (std::vector<std::optional<int>>{2, 1, {}}));
  EXPECT_EQ(pass(order, {0}), (std::vector<std::optional<int>>{2})) << "who knows that it ends here";
  EXPECT_EQ(pass(order, {0, 2}), (std::vector<std::optional<int>>{{}, {}}));
}

TEST(LearnedOrder, AbandonedPassTeachesNothing) {
  LearnedOrder order;
  pass(order, {0, 1, 2});
  order.begin();
  order.visit(0);
  order.abandon();
  EXPECT_EQ(pass(order, {0, 1, 2}), (std::vector<std::optional<int>>{1, 2, {}}));
}

std::vector<BackwardEvent> none() { return {}; }

TEST(BackwardPlan, SkippedEventsComeInOrder) {
  BackwardPlan plan;
  std::vector<BackwardEvent> skipped;
  const auto note = [&](const BackwardEvent& event) { skipped.push_back(event); };
  const std::vector<BackwardEvent> expected = {
      {Kind::kGather, 2}, {Kind::kReduce, 2}, {Kind::kGather, 1}, {Kind::kReduce, 1}, {Kind::kGather, 0}};
  plan.begin([&] { return expected; });
  plan.reach({Kind::kGather, 1}, note);
  EXPECT_EQ(skipped, (std::vector<BackwardEvent>{{Kind::kGather, 2}, {Kind::kReduce, 2}}));
  plan.reach({Kind::kReduce, 7}, note);  // not expected: nothing is skipped for it
  EXPECT_EQ(skipped.size(), 2U);
  plan.reach_end(note);
  EXPECT_EQ(skipped.size(), 4U);
}

/// A unit that was caught up with and then got its gradient after all is expected at its real place the next time.
TEST(BackwardPlan, AnotherOrderThanExpectedIsLearned) {
  BackwardPlan plan;
  const auto catch_up = [&](const BackwardEvent& event) { plan.record_skipped(event); };
  plan.begin([] {
    return std::vector<BackwardEvent>{{Kind::kGather, 2}, {Kind::kReduce, 2}, {Kind::kGather, 1}, {Kind::kReduce, 1}};
  });
  for (const BackwardEvent& event : {BackwardEvent{Kind::kGather, 1}, {Kind::kGather, 2}, {Kind::kReduce, 2}, {Kind::kReduce, 1}})
    plan.reach(event, catch_up);
  plan.finish();
  std::vector<BackwardEvent> order;
  plan.begin(none);
  plan.reach_end([&](const BackwardEvent& event) { order.push_back(event); });
  EXPECT_EQ(order, (std::vector<BackwardEvent>{{Kind::kGather, 1}, {Kind::kGather, 2}, {Kind::kReduce, 2}, {Kind::kReduce, 1}}));
}

TEST(BackwardPlan, NextGatherOnlyOnceLearned) {
  BackwardPlan plan;
  const auto ignore = [](const BackwardEvent&) {};
  const auto run = [&] {
    std::vector<std::optional<int>> next;
    plan.begin(none);
    for (const BackwardEvent& event :
         {BackwardEvent{Kind::kGather, 1}, {Kind::kReduce, 1}, {Kind::kGather, 0}, {Kind::kReduce, 0}}) {
      plan.reach(event, ignore);
      next.push_back(plan.next_gather());
    }
    plan.finish();
    return next;
  };
  EXPECT_EQ(run(), (std::vector<std::optional<int>>{{}, {}, {}, {}}));
  EXPECT_EQ(run(), (std::vector<std::optional<int>>{0, 0, {}, {}}));
}

}  // namespace
}  // namespace hyper_parallel::fsdp
