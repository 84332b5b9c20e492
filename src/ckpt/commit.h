#pragma once
// A folder that appears as a whole or not at all. Torch-free; called by one rank.
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/export.h>

namespace hyper_parallel::ckpt {

/// Absolute, without a slash at the end. ValueError: no name.
[[nodiscard]] std::filesystem::path target_path(const std::filesystem::path& path);
/// Where it is written until it is complete.
[[nodiscard]] std::filesystem::path partial_path(const std::filesystem::path& target);

/// Folders that replace each other.
struct FolderKind {
  std::string mark;                ///< the file that makes a folder one of them
  std::vector<std::string> names;  ///< of all its files; '#' stands for digits
};
[[nodiscard]] HP_API const FolderKind& checkpoint_folder();

/// Why a folder of this kind must not take the place of what is at `target`: in words that follow its name; empty if it may.
/// Nothing, an empty folder, and one of the same kind without any other file may be replaced; links to them may not.
[[nodiscard]] HP_API std::string in_the_way(const std::filesystem::path& target, const FolderKind& kind);

/// Makes the partial folder, anew if an attempt was broken off. ValueError: something is in the way, see SaveOptions::overwrite.
void begin_commit(const std::filesystem::path& target, bool overwrite, const FolderKind& kind = checkpoint_folder(),
                  std::string_view op = "ckpt.save");
/// Brings the partial folder to the disk and gives it its name.
void finish_commit(const std::filesystem::path& target, const FolderKind& kind = checkpoint_folder());
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
