#pragma once
// Reading the tensors of whatever holds them in safetensors files, one box at a time.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::ckpt {

/// What a path can hold.
enum class SourceKind {
  kCheckpoint,   ///< a folder that ckpt::save wrote
  kSafetensors,  ///< a safetensors file; a folder with model.safetensors or model.safetensors.index.json, as Hugging Face has
                 ///< them
  kDcp,          ///< a folder that torch.distributed.checkpoint's HuggingFaceStorageWriter wrote with save_distributed=True
};
[[nodiscard]] HP_API std::string_view to_string(SourceKind kind);

/// CheckpointError if `path` is a pickle (.bin, .pt, ...) or a folder whose weights are pickled: reading one can run any code.
/// The message says what to use. Local; looks at names and first bytes only.
HP_API void refuse_pickle(const std::filesystem::path& path);

/// The tensors of a file or folder by name, whoever cut them into pieces. A cheap handle; copies share the open files. All
/// members are local. Thread safety: any thread.
class HP_API Source {
 public:
  /// CheckpointError: nothing of the above, pickled weights (see refuse_pickle), damage, names outside of the folder, pieces that
  /// overlap or leave holes.
  explicit Source(const std::filesystem::path& path);
  /// The same tensors under other names, or other tensors of the same pieces: `info` says which. Pieces have the bytes of their
  /// tensor in the file, whose shape may differ. Files are those of folder `path`.
  Source(const std::filesystem::path& path, SourceKind kind, CheckpointInfo info);

  [[nodiscard]] SourceKind kind() const;
  [[nodiscard]] const std::filesystem::path& path() const;
  [[nodiscard]] const std::filesystem::path& folder() const;  ///< of its files
  /// Checksums are those of checkpoints; 0 elsewhere.
  [[nodiscard]] const CheckpointInfo& info() const;
  /// CheckpointError: there is no such tensor.
  [[nodiscard]] const CheckpointInfo::Tensor& at(const std::string& name) const;
  /// Reads the elements of `box` of a tensor into `out`, row-major, and no other bytes. Opens files as they are needed.
  /// ValueError: a box outside of the tensor, another size than the box has, packed elements that share bytes with others.
  /// CheckpointError: no such tensor; a missing, cut or damaged file.
  void read(const std::string& name, const Box& box, std::span<std::byte> out) const;
  [[nodiscard]] std::int64_t bytes_read() const;  ///< of tensors

  struct Impl;  // src/ckpt

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace hyper_parallel::ckpt
