#pragma once
// The checkpoints of a run: what is in them, and how a run goes on from one.
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/train/config.h>

#include "train/updater.h"

namespace hyper_parallel::train {

/// How far a run has come.
struct Position {
  std::int64_t step = 0;     ///< steps that are done
  std::int64_t windows = 0;  ///< of the training order, consumed
  double elapsed = 0;        ///< seconds of the loop so far, validations included
  double warmup_seconds = 0, training_seconds = 0;
  double val_loss_start = std::numeric_limits<double>::quiet_NaN();
};

/// Saves and restores everything that a run consists of. All members are collective over the world but for due and path_of;
/// AgreedError on all ranks alike. Thread safety: one thread at a time.
class RunCheckpoints {
 public:
  /// Local. \param run_dir folder of the run
  RunCheckpoints(const Config& config, const World& world, const std::filesystem::path& run_dir);

  /// The step of the last checkpoint that is there, by what rank 0 sees.
  [[nodiscard]] std::optional<std::int64_t> latest() const;
  /// Restores the checkpoint of `step`. Refuses one of a run that was configured another way, naming both places.
  /// \param text_bytes size of the text
  [[nodiscard]] Position restore(std::int64_t step, const HSDPModule& root, Updater& updater, std::int64_t text_bytes);
  /// Whether a save is due after `step`. \param last it is the last one of the run
  [[nodiscard]] bool due(std::int64_t step, bool last) const;
  /// The first save of a run that was not restored renames a folder of checkpoints that is there.
  /// \param at_once returns when it is complete, whatever the configuration says
  void save(const Position& position, const HSDPModule& root, const Updater& updater, std::int64_t text_bytes, bool at_once);
  /// Waits for the save in progress.
  void finish();

  [[nodiscard]] std::filesystem::path path_of(std::int64_t step) const { return checkpointer_.path_of(step); }
  /// "every 100 steps to runs/demo/checkpoints, the last 2 are kept; buffer of about 1.2 MB a rank"; empty if only SIGTERM saves.
  [[nodiscard]] std::string describe(const HSDPModule& root, const Updater& updater) const;
  /// "step 100 of runs/demo/checkpoints, saved by 2 rank(s)", of what was restored.
  [[nodiscard]] const std::string& restored() const { return restored_; }

 private:
  /// Of this rank's random numbers where the saved ones are of another number of ranks.
  [[nodiscard]] std::uint64_t named_seed(std::int64_t step) const;
  /// Checkpoints of an earlier run are no checkpoints of this one, whatever their steps are. Local.
  void set_aside() const;
  [[nodiscard]] ckpt::StateDict state_to_save(const HSDPModule& root, const Updater& updater) const;

  const Config& config_;
  World world_;
  std::filesystem::path folder_;
  ckpt::Checkpointer checkpointer_;
  std::string restored_;
  bool began_ = false;  // with a save
};

}  // namespace hyper_parallel::train
