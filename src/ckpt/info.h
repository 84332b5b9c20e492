#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/ckpt/offline.h>

namespace hyper_parallel::ckpt {

inline constexpr const char* kInfoFile = "checkpoint.json";
inline constexpr int kFormatVersion = 1;

/// A checkpoint of another format version: not a damaged one.
class VersionError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// Text of checkpoint.json, with a checksum of itself.
[[nodiscard]] std::string info_text(const CheckpointInfo& info);
/// ValueError unless `text` is JSON (or empty). \return it, or "null"
[[nodiscard]] std::string check_extra(std::string_view op, const std::string& text);

/// verify, telling how many bytes have been compared.
[[nodiscard]] std::vector<std::string> verify_showing(const std::filesystem::path& path, const OnProgress& progress);

/// CheckpointError: nothing is at `path`, it is pickled, or nothing about it looks like one of the kinds of sources. What is no
/// checkpoint is not a damaged one.
void refuse_foreign(const std::filesystem::path& path);

/// What the tensors of safetensors files are, each of them one piece. Names of files are relative to `folder`.
[[nodiscard]] CheckpointInfo info_of_set(const std::filesystem::path& folder, const SafetensorsSet& set);

/// Where a piece lies in its file. CheckpointError: it is not there, or another than checkpoint.json says.
[[nodiscard]] const TensorEntry& piece_entry(const SafetensorsFile& file, const CheckpointInfo::Tensor& tensor,
                                             const CheckpointInfo::Piece& piece);
/// CheckpointError unless the checksums are equal.
void check_piece(const SafetensorsFile& file, const TensorEntry& entry, std::uint32_t got, std::uint32_t want);

}  // namespace hyper_parallel::ckpt
