#pragma once
// Corpus: the bytes of a text file or folder, memory-mapped. Torch-free.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::train {

/// The bytes of one file, or of all regular files below a folder one after the other in sorted path order; mapped, not read.
///
/// Owns the mappings; a cheap value. The files must not shrink while it lives. Thread safety: const members from any thread.
class Corpus {
 public:
  /// Local. ValueError: missing, unreadable or empty path; `where` tells the user where the path was set.
  [[nodiscard]] static Corpus open(const std::filesystem::path& path, std::string_view where);

  [[nodiscard]] std::int64_t size() const;  ///< bytes
  [[nodiscard]] std::int64_t files() const;
  /// Copies bytes [offset, offset + out.size()), which must exist, as tokens.
  void read(std::int64_t offset, std::span<std::int64_t> out) const;
  /// The byte at `offset`, which must exist, and those that follow it in the same file.
  [[nodiscard]] std::span<const std::byte> bytes_at(std::int64_t offset) const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace hyper_parallel::train
