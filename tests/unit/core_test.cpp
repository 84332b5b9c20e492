#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>

namespace hyper_parallel {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST(Error, ValueErrorNamesOperationAndValues) {
  check_value(true, "op", "unused");
  try {
    check_value(false, "fully_shard", "mesh has ", 3, " dims, want 1 or 2");
    FAIL() << "nothing thrown";
  } catch (const ValueError& error) {
    EXPECT_STREQ(error.what(), "[fully_shard] mesh has 3 dims, want 1 or 2");
  }
}

TEST(Error, InternalErrorSaysSo) {
  check_internal(true, "op", "unused");
  try {
    check_internal(false, "buffer", "offset ", -1);
    FAIL() << "nothing thrown";
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(), "[buffer] internal: offset -1");
  }
}

TEST(Error, KindsFormTheDocumentedTree) {
  EXPECT_TRUE((std::is_base_of_v<Error, ValueError>));
  EXPECT_TRUE((std::is_base_of_v<Error, InternalError>));
  EXPECT_TRUE((std::is_base_of_v<Error, CheckpointError>));
  EXPECT_TRUE((std::is_base_of_v<CommError, TimeoutError>));
  const TimeoutError error("[all_reduce] no answer", {"all_reduce", "layers.4", "world", 17, 4, 1});
  EXPECT_EQ(static_cast<const CommError&>(error).failure().sequence, 17U);
}

std::string logged(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, WritesOneLineWithLevelAndRank) {
  log::set_level(log::Level::kInfo);
  log::set_rank(3);
  EXPECT_THAT(logged([] { log::info("step ", 7); }), ContainsRegex("^[0-9:.]+ hyper_parallel info \\[rank 3\\] step 7\n$"));
  log::set_rank(-1);
  EXPECT_THAT(logged([] { log::error("bad"); }), ContainsRegex("^[0-9:.]+ hyper_parallel error bad\n$"));
  log::set_level(log::Level::kWarn);
}

TEST(Log, LowerLevelsAreSilent) {
  log::set_level(log::Level::kWarn);
  EXPECT_EQ(logged([] {
              log::debug("a");
              log::info("b");
            }),
            "");
  EXPECT_THAT(logged([] { log::warn("c"); }), HasSubstr("warn c"));
  log::set_level(log::Level::kOff);
  EXPECT_FALSE(log::enabled(log::Level::kError));
  EXPECT_EQ(logged([] { log::error("d"); }), "");
  log::set_level(log::Level::kWarn);
}

}  // namespace
}  // namespace hyper_parallel
