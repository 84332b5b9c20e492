#pragma once
// The training run behind hp-train.
#include <filesystem>
#include <string>
#include <vector>

#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/metrics.h>

namespace hyper_parallel::train {

/// What a run ends with; equal on all ranks but for `history`, which only rank 0 fills.
struct TrainResult {
  int world = 1;
  std::int64_t steps = 0;
  std::int64_t tokens = 0;
  double seconds = 0;         ///< of the loop, validations included
  double tokens_per_s = 0;    ///< of all ranks together, validations left out
  double val_loss_start = 0;  ///< NaN without a validation split
  double val_loss_end = 0;
  std::filesystem::path dir;  ///< config.toml, metrics.jsonl, loss.svg, samples.txt, result.txt
  std::vector<StepMetrics> history;
};

/// "world=2 val_loss_start=5.5702 val_loss_end=1.4000 tokens_per_s=20000", as in result.txt.
[[nodiscard]] std::string to_string(const TrainResult& result);

/// Trains the decoder that `config` describes, sharded over all ranks of `world`, and writes the run's files on rank 0.
///
/// Collective over the world. AgreedError or ValueError on all ranks alike for what is wrong with configuration, data or files;
/// CommError when a peer fails.
TrainResult run_training(const Config& config, const World& world);

}  // namespace hyper_parallel::train
