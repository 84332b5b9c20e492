// Several safetensors files with an index, as Hugging Face models have them.
#include <cstdio>
#include <utility>

#include <nlohmann/json.hpp>

#include <hyper_parallel/ckpt/safetensors.h>

#include "ckpt/file.h"
#include "ckpt/sizes.h"
#include "ckpt/strict_json.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

/// File of each tensor.
std::map<std::string, std::string> read_index(const std::filesystem::path& path) {
  const nlohmann::json index = parse_strictly(read_text(path, kMaxHeaderBytes), path.string());
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(concat("[safetensors] ", path.string(), ": ", what));
  };
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) refuse("has no object weight_map");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string()) refuse(concat("weight_map has no file name for tensor ", tensor));
    check_plain_name(file.get<std::string>(), path.string());
    files.emplace(tensor, file.get<std::string>());
  }
  return files;
}

}  // namespace

SafetensorsSet::SafetensorsSet(const std::filesystem::path& path) : path_(path) {
  std::vector<SafetensorsFile> files;
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const bool indexed = folder && std::filesystem::exists(path / kIndex, ignored);
  if (!indexed) {
    if (folder && !std::filesystem::exists(path / kSingle, ignored))
      throw CheckpointError(concat("[safetensors] ", path.string(), ": has neither ", kIndex, " nor ", kSingle));
    files.emplace_back(folder ? path / kSingle : path);
    files_ = std::make_shared<const std::vector<SafetensorsFile>>(std::move(files));
    const SafetensorsFile& file = files_->front();
    for (const TensorEntry& tensor : file.header().tensors) tensors_.emplace(tensor.name, Place{&file, &tensor});
    return;
  }
  const std::map<std::string, std::string> index = read_index(path / kIndex);
  std::map<std::string, std::size_t> positions;
  for (const auto& [tensor, name] : index) {
    if (positions.emplace(name, files.size()).second) files.emplace_back(path / name);
  }
  files_ = std::make_shared<const std::vector<SafetensorsFile>>(std::move(files));
  for (const auto& [tensor, name] : index) {
    const SafetensorsFile& file = (*files_)[positions.at(name)];
    tensors_.emplace(tensor, Place{&file, &file.at(tensor)});
  }
  // What the index hides would be lost without a word where the tensors are written anew.
  for (const SafetensorsFile& file : *files_) {
    for (const TensorEntry& tensor : file.header().tensors) {
      const auto found = tensors_.find(tensor.name);
      if (found == tensors_.end() || found->second.file != &file)
        throw CheckpointError(concat("[safetensors] ", file.path().string(), ": has tensor ", tensor.name, ", which ", kIndex,
                                     found == tensors_.end() ? " does not list" : " has in another file"));
    }
  }
}

SafetensorsSet::Place SafetensorsSet::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw CheckpointError(concat("[safetensors] ", path_.string(), ": has no tensor ", name));
  return found->second;
}

ShardedFiles shard_files(const std::vector<TensorSpec>& tensors, std::uint64_t max_bytes) {
  constexpr std::string_view kOp = "safetensors";
  check_value(max_bytes > 0, kOp, "max_bytes is 0, want at least 1");
  (void)make_header(tensors);  // its checks
  ShardedFiles result;
  std::uint64_t used = 0, total = 0;
  for (const TensorSpec& tensor : tensors) {
    const std::uint64_t bytes = *bytes_of(tensor);
    if (result.files.empty() || (used > 0 && bytes > max_bytes - std::min(used, max_bytes))) {
      result.files.emplace_back();
      used = 0;
    }
    result.files.back().tensors.push_back(tensor);
    used += bytes;
    total += bytes;
  }
  if (result.files.size() < 2) {
    if (result.files.empty()) result.files.emplace_back();
    result.files[0].name = kSingle;
    return result;
  }
  nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", nlohmann::json::object()}};
  for (std::size_t i = 0; i < result.files.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, result.files.size());
    result.files[i].name = name;
    for (const TensorSpec& tensor : result.files[i].tensors) index["weight_map"][tensor.name] = name;
  }
  result.index = index.dump(2) + "\n";
  return result;
}

}  // namespace hyper_parallel::ckpt
