#include <hyper_parallel/train/corpus.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

namespace hyper_parallel::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, const std::string& what, std::string_view where) {
  throw ValueError(
      concat("[data] ", path.string(), ": ", what, ", want a readable text file or folder (data.path: ", where, ")"));
}

// A read-only mapping of a whole file; unmapped on destruction.
class MappedFile {
 public:
  MappedFile(const fs::path& path, std::string_view where) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(path, std::strerror(errno), where);
    struct stat info = {};
    if (::fstat(fd, &info) == 0 && info.st_size > 0) {
      size_ = static_cast<std::size_t>(info.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    const int error = errno;
    ::close(fd);
    if (data_ == MAP_FAILED) fail(path, std::strerror(error), where);
  }
  ~MappedFile() {
    if (data_ != nullptr && data_ != MAP_FAILED) ::munmap(data_, size_);
  }
  MappedFile(MappedFile&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&&) = delete;

  [[nodiscard]] std::span<const unsigned char> bytes() const { return {static_cast<const unsigned char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

std::vector<fs::path> list_files(const fs::path& path, std::string_view where) {
  std::error_code error;
  if (path.empty()) throw ValueError(concat("[data] data.path is not set, want a text file or folder (", where, ")"));
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail(path, error ? error.message() : "no such file or folder", where);
  if (fs::is_regular_file(status)) return {path};
  if (!fs::is_directory(status)) fail(path, "neither a file nor a folder", where);
  std::vector<fs::path> files;
  for (fs::recursive_directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    if (it->is_regular_file(error)) files.push_back(it->path());
  if (error) fail(path, error.message(), where);
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

struct Corpus::Impl {
  std::vector<MappedFile> files;
  std::vector<std::int64_t> ends;  // running totals of bytes
};

Corpus Corpus::open(const fs::path& path, std::string_view where) {
  auto impl = std::make_shared<Impl>();
  std::int64_t total = 0;
  for (const fs::path& file : list_files(path, where)) {
    MappedFile mapped(file, where);
    if (mapped.bytes().empty()) continue;
    total += static_cast<std::int64_t>(mapped.bytes().size());
    impl->files.push_back(std::move(mapped));
    impl->ends.push_back(total);
  }
  if (total == 0) fail(path, "empty", where);
  Corpus corpus;
  corpus.impl_ = std::move(impl);
  return corpus;
}

std::int64_t Corpus::size() const { return impl_->ends.back(); }
std::int64_t Corpus::files() const { return static_cast<std::int64_t>(impl_->files.size()); }

void Corpus::read(std::int64_t offset, std::span<std::int64_t> out) const {
  check_value(offset >= 0 && static_cast<std::int64_t>(out.size()) <= size() - offset, "data", "read of ", out.size(),
              " bytes at ", offset, ", want them inside ", size());
  for (std::size_t done = 0; done < out.size();) {
    const std::span<const std::byte> bytes = bytes_at(offset + static_cast<std::int64_t>(done));
    const std::size_t count = std::min(out.size() - done, bytes.size());
    std::ranges::transform(bytes.first(count), out.begin() + static_cast<std::ptrdiff_t>(done),
                           [](std::byte byte) { return std::to_integer<std::int64_t>(byte); });
    done += count;
  }
}

std::span<const std::byte> Corpus::bytes_at(std::int64_t offset) const {
  check_value(offset >= 0 && offset < size(), "data", "offset is ", offset, ", want one inside ", size());
  const std::vector<std::int64_t>& ends = impl_->ends;
  const auto file = static_cast<std::size_t>(std::ranges::upper_bound(ends, offset) - ends.begin());
  return std::as_bytes(impl_->files[file].bytes()).last(static_cast<std::size_t>(ends[file] - offset));
}

}  // namespace hyper_parallel::train
