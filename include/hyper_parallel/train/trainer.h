#pragma once
// The training run behind hp-train.
#include <chrono>
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
  std::int64_t resumed = 0;          ///< the step from which it went on; 0: from the beginning
  bool stopped = false;              ///< SIGTERM ended it before its end: there is a checkpoint of `steps`, and no result
  std::filesystem::path checkpoint;  ///< the last one that was saved; empty: none
  std::filesystem::path dir;         ///< config.toml, metrics.jsonl, loss.svg, samples.txt, result.txt
  std::vector<StepMetrics> history;
};

/// "world=2 val_loss_start=5.5702 val_loss_end=1.4000 tokens_per_s=20000", as in result.txt. Without a validation split
/// "world=2 loss_end=1.4012 tokens_per_s=20000", with the loss of the last step that `history` has.
[[nodiscard]] std::string to_string(const TrainResult& result);

struct RunOptions {
  /// Go on from the last checkpoint of the run, on any number of ranks; begin anew if there is none.
  bool resume = false;
  /// How long to wait for another run that writes to the same folders, which may be about to end; at most half of
  /// parallel.timeout_seconds.
  std::chrono::milliseconds patience{5000};
};

/// Trains the decoder that `config` describes, sharded over all ranks of `world`, and writes the run's files on rank 0.
///
/// With [checkpoint] every, it saves model, optimizer, averages, loss scale, position in the data, random states and times. A
/// resumed run goes on as if nothing had happened: bit for bit on as many ranks, up to rounding on others. SIGTERM to any rank
/// makes all of them save after the step that is under way, and return.
///
/// Rank 0 holds the folder of the run, and that of its checkpoints, for the lifetime of the call: a file ".lock" in each.
///
/// Collective over the world. AgreedError or ValueError on all ranks alike for what is wrong with configuration, data or files,
/// checkpoints included, and for folders that another run holds; CommError when a peer fails.
TrainResult run_training(const Config& config, const World& world, const RunOptions& options = {});

}  // namespace hyper_parallel::train
