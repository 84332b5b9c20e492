#pragma once
// safetensors files: reading with ranges and boxes, writing in any order and from several threads or ranks. Torch-free.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::ckpt {

/// Element types of the format, in its order: files are laid out by descending type, so that everything is aligned.
enum class Dtype {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64
};

[[nodiscard]] HP_API std::string_view to_string(Dtype dtype);  ///< as in files: "BF16"
[[nodiscard]] HP_API std::optional<Dtype> dtype_of(std::string_view name);
[[nodiscard]] HP_API std::int64_t bits_of(Dtype dtype);  ///< of one element; 4 and 6 for kF4 and kF6..., which are packed

/// A tensor that a file holds or is to hold.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;
};

/// A tensor of a file: its bytes are [begin, end) of the file, row-major and little-endian.
struct TensorEntry : TensorSpec {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  [[nodiscard]] std::uint64_t bytes() const { return end - begin; }
};

/// What stands at the beginning of a file.
struct HP_API SafetensorsHeader {
  std::vector<TensorEntry> tensors;  ///< in the order of their bytes, which have neither overlaps nor holes
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;  ///< where the bytes of the first tensor are
  std::uint64_t file_size = 0;
  std::map<std::string, std::size_t, std::less<>> positions;  ///< in `tensors`, by name

  /// nullptr: there is none.
  [[nodiscard]] const TensorEntry* find(std::string_view name) const;
};

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  ///< limit of the format

/// The header of a file, checked completely against the size of the file. Local.
///
/// \param bytes the beginning of the file: all of the header, more does no harm
/// \param file stands for the file in messages
/// CheckpointError with file, tensor and offset: more than 100 MB, cut, no JSON object, not UTF-8, a key given twice, fields that
/// are missing, unknown or of another type, unknown dtype, sizes that do not fit the shape or overflow, overlaps, holes, bytes
/// that belong to no tensor.
[[nodiscard]] HP_API SafetensorsHeader parse_header(std::string_view bytes, std::uint64_t file_size, const std::string& file);

/// The header that a file with these tensors has, and its text; the same as the Python package writes: tensors by descending
/// dtype, then by name, padded with spaces to a multiple of 8. Local. ValueError: a name twice or "__metadata__", negative sizes,
/// sizes that overflow, elements that do not fill bytes, text that is not UTF-8, more than 100 MB.
[[nodiscard]] HP_API std::pair<SafetensorsHeader, std::string> make_header(
    std::vector<TensorSpec> tensors, const std::map<std::string, std::string>& metadata = {});

/// One file, open for reading. A cheap handle; copies share the counter. All members are local. Thread safety: any thread.
///
/// The file must not be changed while it is open. CheckpointError from all that reads: the system reports an error (with file and
/// offset), the file has become shorter.
class HP_API SafetensorsFile {
 public:
  /// Reads and checks the header. CheckpointError: see parse_header; the file cannot be opened.
  explicit SafetensorsFile(const std::filesystem::path& path);

  [[nodiscard]] const std::filesystem::path& path() const;
  [[nodiscard]] const SafetensorsHeader& header() const;
  /// CheckpointError: there is no such tensor.
  [[nodiscard]] const TensorEntry& at(std::string_view name) const;

  /// The bytes of a tensor, mapped into memory: nothing is copied or read before it is touched. They live as long as the file is
  /// open, and an I/O error while they are touched is a signal (SIGBUS), not an exception.
  [[nodiscard]] std::span<const std::byte> bytes(const TensorEntry& tensor) const;
  /// Reads bytes [offset, offset + out.size()) of a tensor. ValueError: outside of it.
  void read(const TensorEntry& tensor, std::uint64_t offset, std::span<std::byte> out) const;
  /// The same through the mapping: cheaper for many short ranges, with the errors of `bytes`.
  void copy(const TensorEntry& tensor, std::uint64_t offset, std::span<std::byte> out) const;
  /// Reads the elements of `box` into `out`, row-major, and no other bytes; boxes of many short runs through the mapping.
  /// ValueError: a box outside of the tensor, another size than the box has, packed elements that do not begin or end at bytes.
  void read_box(const TensorEntry& tensor, const Box& box, std::span<std::byte> out) const;
  /// Bytes of tensors that were read through this handle and its copies, other than by `bytes`.
  [[nodiscard]] std::int64_t bytes_read() const;

  struct Impl;  // src/ckpt

 private:
  std::shared_ptr<Impl> impl_;
};

struct WriterOptions {
  std::map<std::string, std::string> metadata = {};
  /// The file exists already, made by another writer with the same tensors and metadata; it is checked. Each of them writes a
  /// part.
  bool join = false;
  /// `finish` does not ask whether every byte was written, since others write the rest.
  bool partial = false;
};

/// One file, open for writing: the header first, then tensors in any order, whole or in parts. All members are local.
///
/// Thread safety: `write` and `write_box` from any threads. An unfinished file is left as it is by the destructor.
class HP_API SafetensorsWriter {
 public:
  /// Makes the file (an existing one is overwritten), with its header and full size. ValueError: see make_header.
  /// CheckpointError: it cannot be made; with `join`, it has another header.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors, const WriterOptions& options = {});
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

  [[nodiscard]] const SafetensorsHeader& header() const;
  /// Writes bytes [offset, offset + bytes.size()) of a tensor. ValueError: no such tensor, outside of it, bytes that were written
  /// before. CheckpointError: the system reports an error (with file and offset).
  void write(std::string_view name, std::span<const std::byte> bytes, std::uint64_t offset = 0);
  /// Writes the elements of `box`, which are row-major in `bytes`. Errors: those of `write`; see SafetensorsFile::read_box.
  void write_box(std::string_view name, const Box& box, std::span<const std::byte> bytes);
  /// Brings everything to the disk and closes the file. ValueError: bytes of a tensor were not written (unless `partial`), called
  /// twice.
  void finish();

  struct Impl;  // src/ckpt

 private:
  std::unique_ptr<Impl> impl_;
};

/// The tensors of several files, found by name, as Hugging Face models have them. Local. Thread safety: any thread.
class HP_API SafetensorsSet {
 public:
  /// \param path a file; or a folder with model.safetensors.index.json or model.safetensors. Of an indexed folder, the files that
  /// the index names are there, with all of their tensors.
  /// CheckpointError: nothing of that, a bad index (no JSON, a name twice, a file that is no plain name inside the folder), a
  /// tensor that its file does not have, or that the index does not list for its file; see SafetensorsFile.
  explicit SafetensorsSet(const std::filesystem::path& path);

  struct Place {
    const SafetensorsFile* file = nullptr;
    const TensorEntry* tensor = nullptr;
  };
  [[nodiscard]] const std::map<std::string, Place, std::less<>>& tensors() const { return tensors_; }
  /// CheckpointError: there is no such tensor.
  [[nodiscard]] Place at(std::string_view name) const;
  [[nodiscard]] const std::vector<SafetensorsFile>& files() const { return *files_; }

 private:
  std::filesystem::path path_;
  std::shared_ptr<const std::vector<SafetensorsFile>> files_;
  std::map<std::string, Place, std::less<>> tensors_;
};

/// Names of files and which tensors go into each.
struct ShardedFiles {
  struct File {
    std::string name;  ///< "model-00001-of-00003.safetensors"; a single one is "model.safetensors"
    std::vector<TensorSpec> tensors;
  };
  std::vector<File> files;
  std::string index;  ///< text of model.safetensors.index.json; empty for a single file, which needs none
};

/// Deals tensors out to files of at most `max_bytes` of tensors each, in the order given; a larger tensor gets a file of its own.
/// Local. ValueError: max_bytes < 1; see make_header.
[[nodiscard]] HP_API ShardedFiles shard_files(const std::vector<TensorSpec>& tensors, std::uint64_t max_bytes);

/// Writes `text` to `path` and brings it to the disk. For model.safetensors.index.json. Local. CheckpointError.
HP_API void write_text(const std::filesystem::path& path, std::string_view text);

}  // namespace hyper_parallel::ckpt
