#include "ckpt/commit.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include <hyper_parallel/core/error.h>

#include "ckpt/file.h"
#include "ckpt/info.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kRemoved = ".removed-";

/// Whether `name` is `pattern`, in which '#' stands for digits.
bool fits(std::string_view name, std::string_view pattern) {
  for (const char c : pattern) {
    const std::size_t length = c == '#'              ? std::min(name.find_first_not_of("0123456789"), name.size())
                               : name.starts_with(c) ? 1
                                                     : 0;
    if (length == 0) return false;
    name.remove_prefix(length);
  }
  return name.empty();
}

/// The first name in a folder that none of its kind has; empty if there is none.
std::string foreign_name(const std::filesystem::path& folder, const FolderKind& kind) {
  std::vector<std::string> foreign;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool known = std::ranges::any_of(kind.names, [&](const std::string& pattern) { return fits(name, pattern); });
    std::error_code ignored;
    if (!known || !std::filesystem::is_regular_file(entry->symlink_status(ignored))) foreign.push_back(name);
  }
  return foreign.empty() ? std::string() : std::ranges::min(foreign);
}

}  // namespace

std::filesystem::path target_path(const std::filesystem::path& path) {
  check_value(!path.empty(), "ckpt.save", "the path is \"\", want a folder");
  std::filesystem::path target = std::filesystem::absolute(path).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  check_value(target.has_filename(), "ckpt.save", "\"", path.string(), "\" is no name for a folder");
  return target;
}

std::filesystem::path partial_path(const std::filesystem::path& target) {
  return target.parent_path() / concat('.', target.filename().string(), ".partial");
}

const FolderKind& checkpoint_folder() {
  static const FolderKind kind{kInfoFile, {kInfoFile, "rank-#.safetensors"}};
  return kind;
}

std::string in_the_way(const std::filesystem::path& target, const FolderKind& kind) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::symlink_status(target, ignored);
  if (!std::filesystem::exists(status)) return {};
  // The folder would take the place of the link, on the file system of the link.
  if (std::filesystem::is_symlink(status))
    return concat("is a link to ", std::filesystem::read_symlink(target, ignored).string());
  if (std::filesystem::is_directory(status) && std::filesystem::is_empty(target, ignored)) return {};
  if (!std::filesystem::exists(target / kind.mark, ignored))
    return concat(std::filesystem::is_directory(target, ignored) ? "holds" : "is", " something else than ",
                  kind.mark == kInfoFile ? "a checkpoint" : concat("a folder with ", kind.mark));
  const std::string foreign = foreign_name(target, kind);
  return foreign.empty() ? foreign : concat("holds ", foreign, " besides what would be written");
}

void begin_commit(const std::filesystem::path& target, bool overwrite, const FolderKind& kind, std::string_view op) {
  std::error_code ignored;
  const bool there = std::filesystem::exists(target, ignored) && !std::filesystem::is_empty(target, ignored);
  check_value(!there || overwrite, op, target.string(), " is there already, want another name or overwrite = true");
  const std::string why = in_the_way(target, kind);
  check_value(why.empty(), op, target.string(), ' ', why, ", which is not overwritten");
  make_folders(target.parent_path());
  if (std::filesystem::exists(partial_path(target), ignored)) remove_tree(partial_path(target));
  make_folder(partial_path(target));
}

void finish_commit(const std::filesystem::path& target, const FolderKind& kind) {
  const std::filesystem::path partial = partial_path(target);
  sync_folder(partial);
  std::error_code ignored;
  if (std::filesystem::exists(target / kind.mark, ignored)) {
    exchange_paths(partial, target);
    sync_folder(target.parent_path());
    remove_tree(partial);
  } else {
    rename_path(partial, target);
    sync_folder(target.parent_path());
  }
}

void abandon_commit(const std::filesystem::path& target) noexcept {
  std::error_code ignored;
  std::filesystem::remove_all(partial_path(target), ignored);
}

std::string step_name(std::int64_t step) {
  char text[32];
  std::snprintf(text, sizeof(text), "step-%08lld", static_cast<long long>(step));
  return text;
}

std::vector<std::int64_t> steps_in(const std::filesystem::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(folder, error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kStep)) continue;
    std::int64_t step = 0;
    const char* end = name.data() + name.size();
    const auto [rest, problem] = std::from_chars(name.data() + kStep.size(), end, step);
    std::error_code ignored;
    if (problem == std::errc() && rest == end && step >= 0 && name == step_name(step) &&
        std::filesystem::exists(entry->path() / kInfoFile, ignored))
      steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void keep_last(const std::filesystem::path& folder, std::size_t keep, std::int64_t newest) {
  std::vector<std::filesystem::path> removed;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with(kRemoved)) removed.push_back(entry.path());
  }
  std::vector<std::int64_t> steps = steps_in(folder);
  if (const auto found = std::ranges::find(steps, newest); found != steps.end()) std::rotate(found, found + 1, steps.end());
  for (std::size_t i = 0; i + keep < steps.size(); ++i) {
    const std::string name = step_name(steps[i]);
    removed.push_back(folder / concat(kRemoved, name));
    rename_path(folder / name, removed.back());
  }
  for (const std::filesystem::path& path : removed) remove_tree(path);
}

void clean_folder(const std::filesystem::path& folder) noexcept {
  std::error_code error;
  std::vector<std::filesystem::path> left;
  for (auto entry = std::filesystem::directory_iterator(folder, error); !error && entry != std::filesystem::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.starts_with(concat('.', kStep)) && name.ends_with(".partial")) left.push_back(entry->path());
  }
  for (const std::filesystem::path& path : left) std::filesystem::remove_all(path, error);
}

}  // namespace hyper_parallel::ckpt
