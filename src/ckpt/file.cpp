#include "ckpt/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::ckpt {
namespace {

template <class... Args>
[[noreturn]] void fail(const std::filesystem::path& path, const Args&... args) {
  throw CheckpointError(concat("[ckpt] ", path.string(), ": ", args...));
}

std::string reason(int error) { return std::system_category().message(error); }

}  // namespace

File::File(std::filesystem::path path, Mode mode) : path_(std::move(path)) {
  int flags = O_RDONLY | O_CLOEXEC;
  if (mode == Mode::kCreate) flags = O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC;
  if (mode == Mode::kModify) flags = O_RDWR | O_CLOEXEC;
  do {
    descriptor_ = ::open(path_.c_str(), flags, 0666);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) fail(path_, mode == Mode::kCreate ? "cannot create: " : "cannot open: ", reason(errno));
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(std::exchange(descriptor_, -1));
    fail(path_, "is no regular file");
  }
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::uint64_t File::size() const {
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) fail(path_, "cannot tell the size: ", reason(errno));
  return static_cast<std::uint64_t>(info.st_size);
}

void File::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path_, "cannot read ", out.size(), " bytes at offset ", offset, ": ", reason(errno));
    if (count == 0) fail(path_, "ends at offset ", offset, ", want ", out.size(), " more bytes: it was cut");
    offset += static_cast<std::uint64_t>(count);
    out = out.subspan(static_cast<std::size_t>(count));
  }
}

void File::write(std::uint64_t offset, std::span<const std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(path_, "cannot write ", bytes.size(), " bytes at offset ", offset, ": ", reason(errno));
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void File::resize(std::uint64_t size) const {
  int result = 0;
  do {
    result = ::ftruncate(descriptor_, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail(path_, "cannot set the size to ", size, " bytes: ", reason(errno));
}

void File::sync() const {
  if (::fsync(descriptor_) != 0) fail(path_, "cannot bring it to the disk: ", reason(errno));
}

void File::close() {
  if (descriptor_ >= 0 && ::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR)
    fail(path_, "cannot close: ", reason(errno));
}

FileMapping::FileMapping(const File& file) : size_(file.size()) {
  if (size_ == 0) return;
  void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (memory == MAP_FAILED) fail(file.path(), "cannot map ", size_, " bytes: ", reason(errno));
  data_ = static_cast<const std::byte*>(memory);
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::string read_text(const std::filesystem::path& path, std::uint64_t max_bytes) {
  const File file(path, File::Mode::kRead);
  const std::uint64_t size = file.size();
  if (size > max_bytes) fail(path, "has ", size, " bytes, want at most ", max_bytes);
  std::string text(size, '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  File file(path, File::Mode::kCreate);
  file.write(0, std::as_bytes(std::span(text)));
  file.sync();
  file.close();
}

void sync_folder(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail(path, "cannot open the folder: ", reason(errno));
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (error != 0 && error != EINVAL) fail(path, "cannot bring the folder to the disk: ", reason(error));  // EINVAL: needs none
}

void make_folders(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail(path, "cannot create the folder: ", error.message());
}

void make_folder(const std::filesystem::path& path) {
  if (::mkdir(path.c_str(), 0777) != 0) fail(path, "cannot create the folder: ", reason(errno));
}

void remove_tree(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail(path, "cannot remove: ", error.message());
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(from, "cannot rename to ", to.string(), ": ", reason(errno));
}

void exchange_paths(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) fail(from, "cannot exchange with ", to.string(), ": ", reason(errno));
  const std::filesystem::path aside = from.string() + ".old";
  remove_tree(aside);
  rename_path(to, aside);
  rename_path(from, to);
  rename_path(aside, from);
}

}  // namespace hyper_parallel::ckpt
