#pragma once
// The steps of a run that are traced: [train] trace and trace_steps.
#include <cstdint>
#include <filesystem>
#include <string>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Records from the first to the last wanted step. What is still being recorded when it goes is written then, so that a run which
/// fails leaves its trace.
class TraceWindow {
 public:
  TraceWindow() = default;  ///< nothing wanted
  /// ValueError: the file is the same for all of `world` ranks.
  TraceWindow(const Config& config, const std::filesystem::path& folder, int world);
  TraceWindow(const TraceWindow&) = delete;
  TraceWindow(TraceWindow&& other) noexcept;
  TraceWindow& operator=(const TraceWindow&) = delete;
  TraceWindow& operator=(TraceWindow&& other) noexcept;
  ~TraceWindow();

  [[nodiscard]] bool wanted() const { return !path_.empty(); }
  [[nodiscard]] bool begins_at(std::int64_t step) const { return wanted() && step == first_; }
  [[nodiscard]] bool ends_at(std::int64_t step) const { return recording_ && step == last_; }
  /// Local. Errors are those of trace::start.
  void start();
  /// Does nothing unless it records. Local. Errors are those of trace::stop.
  void stop();
  /// For the user: which file, or why there is none.
  [[nodiscard]] std::string summary() const;

 private:
  std::string path_;
  std::int64_t first_ = 0, last_ = 0;
  bool recording_ = false;
  bool started_ = false;
};

}  // namespace hyper_parallel::train
