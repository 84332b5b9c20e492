#include "comm/torch_compat.h"

#include <csignal>
#include <mutex>

#include <c10/util/Logging.h>

#include <hyper_parallel/core/log.h>

namespace hyper_parallel {
namespace {

constexpr int kErrorsOnly = 2;  // INFO, WARNING, ERROR, FATAL count from 0

std::mutex mutex;
int quiet_count = 0;
int level_before = 0;

}  // namespace

QuietTorchLog::QuietTorchLog() {
  const std::lock_guard lock(mutex);
  if (quiet_count++ > 0) return;
  level_before = FLAGS_caffe2_log_level;
  if (!log::enabled(log::Level::kDebug) && level_before < kErrorsOnly) FLAGS_caffe2_log_level = kErrorsOnly;
}

QuietTorchLog::~QuietTorchLog() {
  const std::lock_guard lock(mutex);
  if (--quiet_count == 0) FLAGS_caffe2_log_level = level_before;
}

void ignore_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) != 0 || (now.sa_flags & SA_SIGINFO) != 0 || now.sa_handler != SIG_DFL) return;
  now.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &now, nullptr);
}

}  // namespace hyper_parallel
