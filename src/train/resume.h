#pragma once
// The checkpoints of a run: what is in them, and how a run goes on from one.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/corpus.h>

#include "train/folder_lock.h"
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

/// By what a run knows its text again.
struct TextMark {
  std::int64_t bytes = 0;
  std::uint32_t crc32c = 0;
};
/// Collective: each rank reads its part of the text.
[[nodiscard]] TextMark identify(const Corpus& corpus, const Comm& comm);

/// Saves and restores everything that a run consists of. All members are collective over the world but for begin, due and
/// path_of; AgreedError on all ranks alike. Thread safety: one thread at a time.
class RunCheckpoints {
 public:
  /// Local. \param run_dir folder of the run
  RunCheckpoints(const Config& config, const World& world, const std::filesystem::path& run_dir, const TextMark& text);

  /// Makes the folder of the run and holds it, on rank 0, against other runs; likewise that of the checkpoints, if the
  /// configuration asks for any: a folder that cannot be written is found before training. \param patience see FolderLock
  void claim(std::chrono::milliseconds patience);
  /// The step of the last checkpoint that is there, by what rank 0 sees. Folders of later steps that are none, or one of another
  /// step, are noted.
  [[nodiscard]] std::optional<std::int64_t> latest();
  /// Sets this rank's random numbers for a run from the beginning: by train.seed, the rank, and the number of ranks. Local.
  void begin() const;
  /// Restores the checkpoint of `step`. Refuses one of another text, and of a run that was configured another way where that
  /// would change the model or the meaning of its state, naming both places. Other changes are noted.
  [[nodiscard]] Position restore(std::int64_t step, const HSDPModule& root, Updater& updater);
  /// Whether a save is due after `step`. \param last it is the last one of the run
  [[nodiscard]] bool due(std::int64_t step, bool last) const;
  /// The first save of a run that was not restored renames a folder of checkpoints that is there; what else is in the way of a
  /// save is renamed, too.
  /// \param at_once returns when it is complete, whatever the configuration says
  void save(const Position& position, const HSDPModule& root, const Updater& updater, bool at_once);
  /// Waits for the save in progress.
  void finish();

  [[nodiscard]] std::filesystem::path path_of(std::int64_t step) const { return checkpointer_.path_of(step); }
  /// "every 100 steps to runs/demo/checkpoints, the last 2 are kept, written in the background"; empty if only SIGTERM saves.
  /// Local.
  [[nodiscard]] std::string describe() const;
  /// "step 100 of runs/demo/checkpoints, saved by 2 rank(s)", of what was restored.
  [[nodiscard]] const std::string& restored() const { return restored_; }
  /// What a user should know about it, line by line: "changed: optim.lr 0.01 -> 0.02". Those of rank 0 count.
  [[nodiscard]] const std::vector<std::string>& notes() const { return notes_; }

 private:
  /// Of this rank's random numbers at the beginning, and where the saved ones are of another number of ranks.
  [[nodiscard]] std::uint64_t named_seed(std::int64_t step) const;
  /// Why the checkpoint in the folder of `step` is none of that step, in words that follow its name; empty if it is, and if it
  /// cannot be told. Local.
  [[nodiscard]] std::string other_step(std::int64_t step) const;
  /// Checkpoints of an earlier run are no checkpoints of this one, whatever their steps are; nor are those of another step than
  /// their folder's, which must not count as the last ones. Local.
  void set_aside();
  /// Holds the folder of the checkpoints, unless it is held. Local.
  void claim_saves();
  /// Renames what is at the place of a step and is no checkpoint, or holds other files, too. Local.
  void make_way(std::int64_t step) const;
  /// Throws or notes what `saved` says otherwise.
  void check_settings(const nlohmann::json& saved, const std::filesystem::path& path);
  void check_text(const nlohmann::json& saved, const std::filesystem::path& path) const;
  [[nodiscard]] ckpt::StateDict state_to_save(const HSDPModule& root, const Updater& updater) const;

  const Config& config_;
  World world_;
  std::filesystem::path run_dir_, folder_;
  TextMark text_;
  std::chrono::milliseconds patience_{0};
  FolderLock run_lock_, lock_;  // let go of after the save in progress
  ckpt::Checkpointer checkpointer_;
  std::string restored_;
  std::vector<std::string> notes_;
  bool began_ = false;  // with a save
};

}  // namespace hyper_parallel::train
