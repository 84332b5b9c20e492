#pragma once
// The parts of a save, which run at once or in the background.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/ckpt/checkpoint.h>

#include "ckpt/plan.h"

namespace hyper_parallel::ckpt {

/// What all ranks know of a save before anything is written. Holds no tensors.
struct SavePlan {
  std::vector<GlobalTensor> tensors;
  std::vector<PlannedPiece> pieces;  ///< of all ranks
  std::vector<std::size_t> mine;     ///< positions in `pieces`, in the order of this rank's file
  std::string extra;
};

/// Collective. ValueError on all ranks alike.
/// \param prefix only names that begin with it
[[nodiscard]] SavePlan plan_save(const StateDict& state, const std::string& extra, const Comm& comm, const CommOptions& options,
                                 std::string_view prefix = {});

/// The bytes of piece plan.mine[i] in memory. They stay until the next call.
using PieceBytes = std::function<std::span<const std::byte>(std::size_t i)>;
/// Straight from the tensors; what is not contiguous on the CPU is copied, one tensor at a time.
[[nodiscard]] PieceBytes bytes_in_tensors(const SavePlan& plan, const StateDict& state);
[[nodiscard]] std::uint64_t bytes_of_mine(const SavePlan& plan);

/// Name of a rank's file.
[[nodiscard]] std::string file_name(int rank);
/// What it holds.
[[nodiscard]] std::vector<TensorSpec> specs_of(const SavePlan& plan, int rank);
/// What checkpoint.json says. \param checksums of each rank's pieces in the order of its file, 4 bytes each
[[nodiscard]] CheckpointInfo info_of(const SavePlan& plan, const std::vector<std::string>& checksums);

/// Writes and commits. Collective. Errors are the same on all ranks.
void write_checkpoint(const std::filesystem::path& target, const SavePlan& plan, const PieceBytes& bytes, bool overwrite,
                      const Comm& comm, const CommOptions& options);

}  // namespace hyper_parallel::ckpt
