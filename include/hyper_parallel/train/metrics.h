#pragma once
// metrics.jsonl: one JSON object per line. Torch-free.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::train {

/// What one optimizer step reports.
struct StepMetrics {
  std::int64_t step = 0;    ///< from 1
  std::int64_t tokens = 0;  ///< consumed so far, all ranks
  double epoch = 0;
  double loss = 0;                      ///< mean over the global batch, nats per token
  std::optional<double> aux_loss = {};  ///< balancing loss of the experts, weighted; not part of `loss`
  double grad_norm = 0;                 ///< before clipping; not finite: the loss scale was too large and the step left out
  double loss_scale = 1;
  double lr = 0;
  double tokens_per_s = 0;  ///< of all ranks together
  double step_ms = 0;
  std::int64_t memory = 0;  ///< resident bytes, largest of all ranks
  double elapsed_s = 0;
  double eta_s = 0;
};

/// Writes metrics.jsonl, flushed line by line so that a run can be watched. Thread safety: one thread at a time.
class MetricsFile {
 public:
  MetricsFile() = default;  ///< writes nothing: ranks other than 0
  /// Truncates `file`. Error when it cannot be written.
  explicit MetricsFile(const std::filesystem::path& file);
  void write(const StepMetrics& metrics);
  void write_validation(std::int64_t step, double loss, double seconds);

 private:
  void line(const std::string& text);
  std::filesystem::path path_;
  std::ofstream out_;
};

/// Resident memory of this process in bytes; 0 where the system does not tell.
[[nodiscard]] std::int64_t resident_bytes();

}  // namespace hyper_parallel::train
