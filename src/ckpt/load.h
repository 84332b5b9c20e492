#pragma once
// Loading from anything that is described as pieces of tensors in safetensors files.
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include <hyper_parallel/ckpt/checkpoint.h>

namespace hyper_parallel::ckpt {

/// Where a load reads from.
struct PieceSource {
  std::string_view op;                   ///< for messages
  std::function<CheckpointInfo()> info;  ///< called once on every rank, which all get the same
  bool checkpoint = true;                ///< there are checksums, and shapes in the files are those of the pieces
};

/// ckpt::load with another source. Collective; errors are those of ckpt::load.
LoadResult load_pieces(const std::filesystem::path& path, StateDict& state, const LoadOptions& options,
                       const PieceSource& source);

}  // namespace hyper_parallel::ckpt
