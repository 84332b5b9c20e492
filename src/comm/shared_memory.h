#pragma once
// Anonymous memory that other processes of the same user can map: a memfd, reached through /proc/<pid>/fd. It has no name in any
// file system, and the kernel frees it with the last process that has it, however that process ends.
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace hyper_parallel {

/// What the system said when it refused.
class SharedMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    FileDescriptor before(std::exchange(fd_, std::exchange(other.fd_, -1)));
    return *this;
  }
  ~FileDescriptor();
  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] bool valid() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A range of virtual memory over a shared file, unmapped at the end.
class Mapping {
 public:
  /// Maps the first `bytes` of `file`. SharedMemoryError when the system refuses.
  Mapping(FileDescriptor file, std::size_t bytes, bool writable);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  [[nodiscard]] char* data() const noexcept { return static_cast<char*>(data_); }
  [[nodiscard]] std::size_t size() const noexcept { return bytes_; }
  /// The file, from which parts can be mapped elsewhere.
  [[nodiscard]] int file() const noexcept { return file_.get(); }
  /// For a file of which no part will be mapped any more, by this process or another.
  void close_file() noexcept { file_ = FileDescriptor(); }

 private:
  FileDescriptor file_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Asks for huge pages where the system allows them; false (and errno) where it knows none.
bool ask_for_huge_pages(void* data, std::size_t bytes) noexcept;

/// Where another process finds a file, and how it knows that it is the right one.
struct SharedFileAddress {
  int pid = 0;
  int fd = -1;
  std::size_t bytes = 0;
  std::string id;  ///< random; the file starts with it

  [[nodiscard]] std::string to_text() const;
  /// SharedMemoryError when `text` is no address.
  static SharedFileAddress from_text(const std::string& text);
};

/// A file of this process: its writable mapping. The first kSharedFileHeader bytes hold the id.
struct SharedFile {
  std::shared_ptr<Mapping> mapping;
  SharedFileAddress address;
};
constexpr std::size_t kSharedFileHeader = 64;

/// Makes a file of `bytes`, a multiple of the page size. It occupies no memory until it is written, its size is sealed and only
/// this user may open it. SharedMemoryError when the system refuses.
SharedFile make_shared_file(const char* name, std::size_t bytes);

/// Maps a peer's file. Within one process all get the same mapping, the owner's, unless `separate`. SharedMemoryError when it
/// cannot be opened or is another file.
std::shared_ptr<Mapping> map_shared_file(const SharedFileAddress& address, bool writable, bool separate = false);

/// Whether `address` is a file that this process made and that is still there.
bool is_own_file(const SharedFileAddress& address);

}  // namespace hyper_parallel
