#pragma once
// One run at a time in a folder.
#include <chrono>
#include <filesystem>
#include <string>

namespace hyper_parallel::train {

/// Holds a folder by an flock on the file ".lock" in it, which names the process for people. The kernel lets go of it when the
/// process ends, however it does; the file stays. Thread safety: one thread at a time.
class FolderLock {
 public:
  FolderLock() = default;  ///< holds nothing
  /// Makes the folder if there is none, and waits up to `patience` for a process that holds it, which may be about to end. File
  /// systems that know no flock are not locked, which is logged. Error: another holds it, the folder cannot be made, or no file
  /// be written in it. \param setting what names the folder, for messages
  FolderLock(const std::filesystem::path& folder, const std::string& setting, std::chrono::milliseconds patience);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;
  ~FolderLock();

  [[nodiscard]] bool held() const { return descriptor_ >= 0; }
  static constexpr const char* kFile = ".lock";

 private:
  int descriptor_ = -1;
};

}  // namespace hyper_parallel::train
