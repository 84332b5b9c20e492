#pragma once
// The commands of hp-ckpt. Each returns the exit code; errors are exceptions.
#include <cstdint>
#include <filesystem>
#include <string>

#include <hyper_parallel/ckpt/source.h>

#include "command_line.h"

namespace hyper_parallel::apps {

int inspect(const CkptCommand& command);
int verify(const CkptCommand& command);
int convert(const CkptCommand& command);
int diff(const CkptCommand& command);
int reshard(const CkptCommand& command);

/// Whether `path` is a folder with config.json and no checkpoint of ours: a Hugging Face model.
[[nodiscard]] bool is_model_folder(const std::filesystem::path& path);
[[nodiscard]] std::int64_t bytes_of(const ckpt::CheckpointInfo::Tensor& tensor);
/// "1 file", "2 files".
[[nodiscard]] std::string counted(std::size_t count, const char* what);

}  // namespace hyper_parallel::apps
