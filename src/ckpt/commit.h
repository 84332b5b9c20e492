#pragma once
// A folder that appears as a whole or not at all. Torch-free; called by one rank.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hyper_parallel::ckpt {

/// Absolute, without a slash at the end. ValueError: no name.
[[nodiscard]] std::filesystem::path target_path(const std::filesystem::path& path);
/// Where it is written until it is complete.
[[nodiscard]] std::filesystem::path partial_path(const std::filesystem::path& target);

inline constexpr const char* kCheckpointMark = "checkpoint.json";  ///< the file that makes a folder a checkpoint

/// Makes the partial folder, anew if an attempt was broken off. ValueError: something is in the way, see SaveOptions::overwrite.
/// \param mark only a folder with this file is replaced
void begin_commit(const std::filesystem::path& target, bool overwrite, const std::string& mark = kCheckpointMark,
                  std::string_view op = "ckpt.save");
/// Brings the partial folder to the disk and gives it its name.
void finish_commit(const std::filesystem::path& target, const std::string& mark = kCheckpointMark);
/// Removes the partial folder; errors are passed over.
void abandon_commit(const std::filesystem::path& target) noexcept;

[[nodiscard]] std::string step_name(std::int64_t step);
/// Steps of the complete checkpoints in a folder, ascending; none if there is no such folder.
[[nodiscard]] std::vector<std::int64_t> steps_in(const std::filesystem::path& folder);
/// Removes all but `keep` checkpoints: `newest` and those of the highest steps stay. Removes what removals that were broken off
/// have left. An interrupted removal leaves no half of a checkpoint under its name.
void keep_last(const std::filesystem::path& folder, std::size_t keep, std::int64_t newest);
/// Removes what saves that were broken off have left; errors are passed over.
void clean_folder(const std::filesystem::path& folder) noexcept;

}  // namespace hyper_parallel::ckpt
