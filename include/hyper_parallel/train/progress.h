#pragma once
// What the user sees while a run goes on. Torch-free.
#include <cstdint>
#include <cstdio>
#include <string>

#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/memory_plan.h>
#include <hyper_parallel/train/metrics.h>

namespace hyper_parallel::train {

/// "1.5 GB", "12.3 MB", "640 B" (powers of 1000).
[[nodiscard]] std::string format_bytes(std::int64_t bytes);
/// "2:05", "1:02:05".
[[nodiscard]] std::string format_seconds(double seconds);
/// "1,234,567".
[[nodiscard]] std::string format_count(std::int64_t count);

/// The table of all settings; what is not a default is marked with its source.
[[nodiscard]] std::string settings_table(const Config& config);
/// Parameters and the memory plan of one rank.
[[nodiscard]] std::string memory_table(const Config& config, const BatchPlan& batches, const EngineBytes& engine);
/// The one line of a step.
[[nodiscard]] std::string step_line(const StepMetrics& metrics, std::int64_t max_steps);

/// Writes to standard output on rank 0 and stays silent elsewhere: lines, and on a terminal a progress bar under them.
/// Thread safety: one thread at a time.
class Progress {
 public:
  /// `every`: steps between lines. The bar is drawn when `out` is a terminal.
  Progress(bool enabled, std::int64_t every, std::int64_t max_steps, std::FILE* out = stdout);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void print(const std::string& text);  ///< one or more whole lines
  /// `fraction`: how much of the run is done, 0..1; `last`: write the line whatever `every` says.
  void step(const StepMetrics& metrics, double fraction, bool last);
  void close();  ///< removes the bar

 private:
  void erase_bar();
  bool enabled_;
  bool terminal_;
  bool bar_shown_ = false;
  std::int64_t every_;
  std::int64_t max_steps_;
  std::FILE* out_;
};

}  // namespace hyper_parallel::train
