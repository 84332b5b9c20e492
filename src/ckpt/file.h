#pragma once
// Files and folders, with errors that name them.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace hyper_parallel::ckpt {

/// An open file. Every error is a CheckpointError with path and offset. Thread safety: any thread.
class File {
 public:
  enum class Mode { kRead, kCreate, kModify };
  File(std::filesystem::path path, Mode mode);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] std::uint64_t size() const;
  /// All of `out`: a shorter file is an error.
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  void write(std::uint64_t offset, std::span<const std::byte> bytes) const;
  void resize(std::uint64_t size) const;
  void sync() const;
  void close();  ///< some file systems report errors of writing only here

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// A whole file mapped for reading.
class FileMapping {
 public:
  explicit FileMapping(const File& file);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

[[nodiscard]] std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes);
/// Makes what was created, renamed or removed in a folder last.
void sync_folder(const std::filesystem::path& path);
/// std::filesystem operations with our errors.
void make_folders(const std::filesystem::path& path);
void make_folder(const std::filesystem::path& path);
void remove_tree(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
/// Swaps two folders in one step; where the file system cannot, `to` is gone for a moment.
void exchange_paths(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace hyper_parallel::ckpt
