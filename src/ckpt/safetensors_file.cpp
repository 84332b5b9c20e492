// safetensors files: reading and writing.
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <hyper_parallel/ckpt/safetensors.h>

#include "ckpt/file.h"
#include "ckpt/runs.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "safetensors";
constexpr std::size_t kSyncBytes = 16 << 20;

void check_range(const std::filesystem::path& file, const TensorEntry& tensor, std::uint64_t offset, std::uint64_t size) {
  check_value(offset <= tensor.bytes() && size <= tensor.bytes() - offset, kOp, "bytes ", offset, " to ", offset + size,
              " of tensor ", tensor.name, ", which has ", tensor.bytes(), " (", file.string(), ')');
}

/// f(offset in the tensor, offset in the box, bytes) for each run of a box.
template <class F>
void for_each_byte_run(const std::filesystem::path& file, const TensorEntry& tensor, const Box& box, std::size_t size, F&& f) {
  bool inside = box.offset.size() == tensor.shape.size() && box.size.size() == tensor.shape.size();
  for (std::size_t d = 0; inside && d < tensor.shape.size(); ++d) {
    inside = box.offset[d] >= 0 && box.size[d] >= 0 && box.offset[d] <= tensor.shape[d] &&
             box.size[d] <= tensor.shape[d] - box.offset[d];
  }
  const auto where = [&] { return concat("box ", box.to_string(), " of tensor ", tensor.name, " (", file.string(), ')'); };
  check_value(inside, kOp, where(), " is not inside its shape ", whole_box(tensor.shape).to_string());
  const auto bits = static_cast<std::uint64_t>(bits_of(tensor.dtype));
  const std::uint64_t box_bits = static_cast<std::uint64_t>(box.numel()) * bits;
  check_value(box_bits == 8 * size, kOp, where(), " has ", box_bits, " bits, got memory of ", size, " bytes");
  for_each_run(whole_box(tensor.shape), box, box, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::uint64_t begin = static_cast<std::uint64_t>(from) * bits, target = static_cast<std::uint64_t>(to) * bits;
    const std::uint64_t length = static_cast<std::uint64_t>(count) * bits;
    check_value(begin % 8 == 0 && target % 8 == 0 && length % 8 == 0, kOp, where(),
                " has packed elements that share bytes with others");
    f(begin / 8, target / 8, length / 8);
  });
}

}  // namespace

struct SafetensorsFile::Impl {
  explicit Impl(const std::filesystem::path& path) : file(path, File::Mode::kRead) {}
  const FileMapping& mapped() {
    std::call_once(once, [&] { mapping = std::make_unique<FileMapping>(file); });
    if (mapping->bytes().size() < header.file_size)
      throw CheckpointError(concat("[safetensors] ", file.path().string(), ": has become shorter while it was read"));
    return *mapping;
  }

  File file;
  SafetensorsHeader header;
  std::atomic<std::int64_t> bytes_read{0};
  std::once_flag once;
  std::unique_ptr<FileMapping> mapping;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : impl_(std::make_shared<Impl>(path)) {
  const std::uint64_t size = impl_->file.size();
  std::string text(std::min<std::uint64_t>(size, 8), '\0');
  impl_->file.read(0, std::as_writable_bytes(std::span(text)));
  std::uint64_t length = 0;
  for (std::size_t i = text.size(); i-- > 0;) length = length << 8 | static_cast<unsigned char>(text[i]);
  if (text.size() == 8 && length <= kMaxHeaderBytes && length <= size - 8) {
    text.resize(8 + length);
    impl_->file.read(8, std::as_writable_bytes(std::span(text)).subspan(8));
  }
  impl_->header = parse_header(text, size, path.string());
}

const std::filesystem::path& SafetensorsFile::path() const { return impl_->file.path(); }
const SafetensorsHeader& SafetensorsFile::header() const { return impl_->header; }
std::int64_t SafetensorsFile::bytes_read() const { return impl_->bytes_read; }

const TensorEntry& SafetensorsFile::at(std::string_view name) const {
  const TensorEntry* tensor = header().find(name);
  if (tensor == nullptr) throw CheckpointError(concat("[safetensors] ", path().string(), ": has no tensor ", name));
  return *tensor;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& tensor) const {
  return impl_->mapped().bytes().subspan(tensor.begin, tensor.bytes());
}

void SafetensorsFile::read(const TensorEntry& tensor, std::uint64_t offset, std::span<std::byte> out) const {
  check_range(path(), tensor, offset, out.size());
  impl_->file.read(tensor.begin + offset, out);
  impl_->bytes_read += static_cast<std::int64_t>(out.size());
}

void SafetensorsFile::copy(const TensorEntry& tensor, std::uint64_t offset, std::span<std::byte> out) const {
  check_range(path(), tensor, offset, out.size());
  if (out.empty()) return;
  std::memcpy(out.data(), impl_->mapped().bytes().data() + tensor.begin + offset, out.size());
  impl_->bytes_read += static_cast<std::int64_t>(out.size());
}

void SafetensorsFile::read_box(const TensorEntry& tensor, const Box& box, std::span<std::byte> out) const {
  for_each_byte_run(path(), tensor, box, out.size(), [&](std::uint64_t from, std::uint64_t to, std::uint64_t size) {
    const std::span<std::byte> target = out.subspan(to, size);
    if (better_mapped(size, out.size())) {
      copy(tensor, from, target);
    } else {
      read(tensor, from, target);
    }
  });
}

struct SafetensorsWriter::Impl {
  Impl(const std::filesystem::path& path, const WriterOptions& given)
      : file(path, given.join ? File::Mode::kModify : File::Mode::kCreate), options(given) {}

  /// Notes bytes [begin, end) of the file as written.
  void claim(const TensorEntry& tensor, std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    const std::lock_guard lock(mutex);
    check_value(!finished, kOp, "the file is finished already (", file.path().string(), ')');
    auto next = written.upper_bound(begin);
    const bool clash =
        (next != written.end() && next->first < end) || (next != written.begin() && std::prev(next)->second > begin);
    check_value(!clash, kOp, "bytes ", begin - tensor.begin, " to ", end - tensor.begin, " of tensor ", tensor.name,
                " are written a second time (", file.path().string(), ')');
    if (next != written.end() && next->first == end) {
      end = next->second;
      next = written.erase(next);
    }
    if (next != written.begin() && std::prev(next)->second == begin) {
      std::prev(next)->second = end;
    } else {
      written.emplace_hint(next, begin, end);
    }
  }

  /// The disk begins early, so that `finish` has less to wait for. Only a hint: errors show there.
  void wrote(std::size_t bytes) {
    if ((unsynced += bytes) < kSyncBytes) return;
    unsynced = 0;
    (void)::sync_file_range(file.descriptor(), 0, 0, SYNC_FILE_RANGE_WRITE);
  }

  File file;
  WriterOptions options;
  SafetensorsHeader header;
  std::mutex mutex;
  std::map<std::uint64_t, std::uint64_t> written;  // begin to end, in the file; neighbours are merged
  std::atomic<std::size_t> unsynced{0};
  bool finished = false;
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                                     const WriterOptions& options) {
  auto [header, text] = make_header(std::move(tensors), options.metadata);
  impl_ = std::make_unique<Impl>(path, options);
  if (options.join) {
    std::string there(text.size(), '\0');
    const std::uint64_t size = impl_->file.size();
    if (size == header.file_size) impl_->file.read(0, std::as_writable_bytes(std::span(there)));
    if (there != text)
      throw CheckpointError(concat("[safetensors] ", path.string(), ": has another header or size, want ", header.file_size,
                                   " bytes with the tensors of this writer"));
  } else {
    impl_->file.resize(header.file_size);
    impl_->file.write(0, std::as_bytes(std::span(text)));
  }
  impl_->header = std::move(header);
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

const SafetensorsHeader& SafetensorsWriter::header() const { return impl_->header; }

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes, std::uint64_t offset) {
  const TensorEntry* tensor = header().find(name);
  check_value(tensor != nullptr, kOp, "no tensor ", name, " was announced (", impl_->file.path().string(), ')');
  check_range(impl_->file.path(), *tensor, offset, bytes.size());
  const std::uint64_t begin = tensor->begin + offset;
  impl_->claim(*tensor, begin, begin + bytes.size());
  impl_->file.write(begin, bytes);
  impl_->wrote(bytes.size());
}

void SafetensorsWriter::write_box(std::string_view name, const Box& box, std::span<const std::byte> bytes) {
  const TensorEntry* tensor = header().find(name);
  check_value(tensor != nullptr, kOp, "no tensor ", name, " was announced (", impl_->file.path().string(), ')');
  for_each_byte_run(impl_->file.path(), *tensor, box, bytes.size(),
                    [&](std::uint64_t to, std::uint64_t from, std::uint64_t size) {
                      impl_->claim(*tensor, tensor->begin + to, tensor->begin + to + size);
                      impl_->file.write(tensor->begin + to, bytes.subspan(from, size));
                    });
}

void SafetensorsWriter::finish() {
  check_value(!impl_->finished, kOp, "the file is finished already (", impl_->file.path().string(), ')');
  if (!impl_->options.partial && header().file_size > header().data_begin) {
    std::uint64_t at = header().data_begin;
    if (const auto first = impl_->written.find(at); first != impl_->written.end()) at = first->second;
    if (at != header().file_size) {
      const auto tensor = std::ranges::find_if(header().tensors, [&](const TensorEntry& entry) { return entry.end > at; });
      check_value(false, kOp, "tensor ", tensor->name, " was not written from its byte ", at - tensor->begin, " on (",
                  impl_->file.path().string(), ')');
    }
  }
  impl_->file.sync();
  impl_->file.close();
  impl_->finished = true;
}

}  // namespace hyper_parallel::ckpt
