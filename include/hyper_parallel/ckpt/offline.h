#pragma once
// What can be done with checkpoints without the program that wrote them: by one process, in bounded memory.
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/ckpt/source.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::ckpt {

/// Called every so often with the bytes done and those of the whole; what it throws ends the work.
using OnProgress = std::function<void(std::uint64_t done, std::uint64_t all)>;

struct RewriteOptions {
  int ranks = 1;  ///< files of the result: every tensor is cut along its first dimension into as many ceil chunks
  /// Only tensors whose names begin with this; it is taken off. What comes in its place is `add_prefix`.
  std::string prefix = {};
  std::string add_prefix = {};
  std::optional<Dtype> dtype = {};        ///< floating point tensors are converted to it; others stay as they are
  std::string extra = {};                 ///< JSON text to keep with a checkpoint
  bool overwrite = false;                 ///< replace a folder of the same kind without other files, once the new one is complete
  std::uint64_t buffer_bytes = 16 << 20;  ///< memory for values, besides that of a conversion
  OnProgress progress = {};
};

/// Writes the tensors of `source` as a checkpoint for ckpt::load, as so many ranks would that had cut every tensor along its
/// first dimension. Local. The folder appears as a whole or not at all.
///
/// ValueError, nothing is written: ranks < 1, no tensor with the prefix, a folder that is in the way, `extra` that is no JSON,
/// dtypes that cannot be converted. CheckpointError: files that cannot be read or written; for checkpoints, a checksum that
/// differs where a whole piece was read in one go is left to ckpt::verify.
HP_API void write_checkpoint_of(const Source& source, const std::filesystem::path& target, const RewriteOptions& options = {});

/// The same as a folder for torch.distributed.checkpoint's HuggingFaceStorageReader:
/// shard-00001-model-00001-of-00001.safetensors, one for each rank, with the place of each part in its metadata. `extra` is not
/// kept.
HP_API void write_dcp_of(const Source& source, const std::filesystem::path& target, const RewriteOptions& options = {});

/// How two tensors of one name differ.
struct Difference {
  enum class Kind { kOnlyFirst, kOnlySecond, kShape, kDtype, kValues };
  std::string name;
  Kind kind = Kind::kValues;
  std::string text;        ///< in words
  std::int64_t count = 0;  ///< of elements that differ
  /// Largest distance; infinite where one is NaN or infinite and the other is not, or elements have no distance.
  double max_abs = 0;
};

struct DiffOptions {
  /// Floating point numbers and integers are equal if |a - b| <= atol + rtol * |b|; of integers |a - b| is exact. NaN equals NaN.
  /// Anything else (booleans, complex numbers, packed types, 8 bit types besides F8_E4M3 and F8_E5M2) is equal bit for bit.
  double atol = 0;
  double rtol = 0;
  bool compare_dtypes = true;  ///< other dtypes are a difference; otherwise values are compared all the same
  std::uint64_t buffer_bytes = 16 << 20;
  OnProgress progress = {};
};

/// What differs between the tensors of two sources, by name. Local. Reads both in boxes of buffer_bytes. CheckpointError: files
/// that cannot be read. ValueError: atol or rtol negative or NaN.
[[nodiscard]] HP_API std::vector<Difference> diff(const Source& first, const Source& second, const DiffOptions& options = {});

/// Reads every byte of a source; what is wrong, in words. Checkpoints are compared with their checksums (ckpt::verify); elsewhere
/// files say only how long they are. Local. CheckpointError: nothing is there, it is pickled, it is none of the kinds, or a
/// checkpoint of another format version.
[[nodiscard]] HP_API std::vector<std::string> verify_source(const std::filesystem::path& path, const OnProgress& progress = {});

}  // namespace hyper_parallel::ckpt
