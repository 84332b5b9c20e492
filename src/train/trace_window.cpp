#include "train/trace_window.h"

#include <exception>
#include <limits>
#include <tuple>
#include <utility>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/core/log.h>
#include <hyper_parallel/core/trace.h>

namespace hyper_parallel::train {

TraceWindow::TraceWindow(const Config& config, const std::filesystem::path& folder, int world) {
  if (config.train.trace.empty()) return;
  check_value(world == 1 || config.train.trace.find("%r") != std::string::npos, "config", "train.trace = \"", config.train.trace,
              "\" has no %r, want it: all ", world, " ranks would write the same file (", config.where("train.trace"), ")");
  path_ = (folder / config.train.trace).string();
  std::tie(first_, last_) = traced_steps(config);
}

TraceWindow::TraceWindow(TraceWindow&& other) noexcept { *this = std::move(other); }

TraceWindow& TraceWindow::operator=(TraceWindow&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(first_, other.first_);
  std::swap(last_, other.last_);
  std::swap(recording_, other.recording_);
  std::swap(started_, other.started_);
  return *this;
}

TraceWindow::~TraceWindow() {
  try {
    stop();
  } catch (const std::exception& error) {
    log::error(error.what());
  }
}

void TraceWindow::start() {
  trace::start(path_);
  recording_ = started_ = true;
}

void TraceWindow::stop() {
  if (std::exchange(recording_, false)) trace::stop();
}

std::string TraceWindow::summary() const {
  if (!started_) return concat("none: the run ended before step ", first_);
  if (last_ == std::numeric_limits<std::int64_t>::max()) return concat(path_, ", all steps");
  return concat(path_, ", steps ", first_, " to ", last_);
}

}  // namespace hyper_parallel::train
