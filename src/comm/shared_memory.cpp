#include "comm/shared_memory.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {
namespace {

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

constexpr std::size_t kIdLength = 32;

// Ranks that are threads of one process share the owner's mapping: less virtual memory, and sanitizers see one address per word.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Mapping>> mappings;
};

Registry& registry() {
  static auto* const instance = new Registry;  // never destroyed: mappings may outlive static objects
  return *instance;
}

[[noreturn]] void refuse(const std::string& what) { throw SharedMemoryError(concat(what, ": ", std::strerror(errno))); }

std::string random_id() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::random_device device;
  std::string id;
  for (std::size_t i = 0; i < kIdLength; ++i) id += kDigits[device() % 16];
  return id;
}

// Beyond the limit the system does not refuse, it ends the process (SIGXFSZ).
void check_file_size_limit(std::size_t bytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur) return;
  throw SharedMemoryError(
      concat("cannot reserve ", bytes >> 20, " MiB: files are limited to ", limit.rlim_cur >> 10, " KiB (ulimit -f)"));
}

std::shared_ptr<Mapping> find_mapping(const SharedFileAddress& address) {
  if (address.pid != ::getpid()) return nullptr;
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.mappings.find(address.id);
  return found == all.mappings.end() ? nullptr : found->second.lock();
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Mapping::Mapping(FileDescriptor file, std::size_t bytes, bool writable) : file_(std::move(file)), bytes_(bytes) {
  const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  data_ = ::mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, file_.get(), 0);
  if (data_ == MAP_FAILED) refuse(concat("cannot map ", bytes >> 20, " MiB"));
  ::madvise(data_, bytes, MADV_DONTDUMP);  // a core file of the reserved range would fill the disk
}

bool ask_for_huge_pages(void* data, std::size_t bytes) noexcept { return ::madvise(data, bytes, MADV_HUGEPAGE) == 0; }

Mapping::~Mapping() { ::munmap(data_, bytes_); }

std::string SharedFileAddress::to_text() const { return concat(pid, ' ', fd, ' ', bytes, ' ', id); }

SharedFileAddress SharedFileAddress::from_text(const std::string& text) {
  SharedFileAddress out;
  std::istringstream in(text);
  in >> out.pid >> out.fd >> out.bytes >> out.id;
  if (!in || out.pid <= 0 || out.fd < 0 || out.id.size() != kIdLength) {
    throw SharedMemoryError(concat("no address of a shared file: \"", text, '"'));
  }
  return out;
}

SharedFile make_shared_file(const char* name, std::size_t bytes) {
  check_file_size_limit(bytes);
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = ::memfd_create(name, kFlags | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(name, kFlags);  // before Linux 6.3
  if (fd < 0) refuse("memfd_create");
  FileDescriptor owned(fd);
  if (::fchmod(fd, S_IRUSR | S_IWUSR) != 0) refuse("fchmod of a memfd");
  if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) refuse(concat("cannot reserve ", bytes >> 20, " MiB"));
  // A file that shrank under a mapping would end the process that reads there.
  if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) refuse("sealing a memfd");
  SharedFile file{std::make_shared<Mapping>(std::move(owned), bytes, true), {::getpid(), fd, bytes, random_id()}};
  std::memcpy(file.mapping->data(), file.address.id.data(), kIdLength);
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.mappings, [](const auto& entry) { return entry.second.expired(); });
  all.mappings.emplace(file.address.id, file.mapping);
  return file;
}

std::shared_ptr<Mapping> map_shared_file(const SharedFileAddress& address, bool writable, bool separate) {
  if (!separate) {
    if (auto mine = find_mapping(address)) return mine;
  }
  const auto path = concat("/proc/", address.pid, "/fd/", address.fd);
  FileDescriptor fd(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (!fd.valid()) refuse("cannot open " + path);
  struct stat about {};
  if (::fstat(fd.get(), &about) != 0) refuse("cannot examine " + path);
  const bool fits = S_ISREG(about.st_mode) && about.st_uid == ::geteuid() && std::cmp_equal(about.st_size, address.bytes);
  if (!fits) throw SharedMemoryError(path + " is not the announced file");
  auto mapping = std::make_shared<Mapping>(std::move(fd), address.bytes, writable);
  if (std::memcmp(mapping->data(), address.id.data(), kIdLength) != 0) {
    throw SharedMemoryError(path + " is the file of another run");
  }
  return mapping;
}

bool is_own_file(const SharedFileAddress& address) { return find_mapping(address) != nullptr; }

}  // namespace hyper_parallel
