// Where tensors are read from.
#include <hyper_parallel/ckpt/source.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <fstream>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/commit.h"
#include "ckpt/info.h"
#include "ckpt/plan.h"
#include "ckpt/runs.h"
#include "ckpt/strict_json.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "ckpt.Source";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";

bool looks_pickled(const std::filesystem::path& file) {
  static const std::set<std::string> kSuffixes = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp"};
  if (kSuffixes.contains(file.extension().string())) return true;
  std::array<char, 4> first{};
  std::ifstream(file, std::ios::binary).read(first.data(), first.size());
  // A zip archive, as torch.save writes it, or a pickle of protocol 2 to 5.
  const bool zip = std::memcmp(first.data(), "PK\3\4", 4) == 0;
  const bool pickle = first[0] == '\x80' && first[1] >= 2 && first[1] <= 5 && file.extension() != ".safetensors";
  return zip || pickle;
}

/// The pieces of a folder in which every file says where its tensors lie: torch.distributed.checkpoint's sharding information.
CheckpointInfo info_of_dcp(const std::filesystem::path& folder, const std::vector<std::string>& names) {
  CheckpointInfo info;
  info.world_size = static_cast<int>(names.size());
  info.extra = "null";
  for (const std::string& name : names) {
    const SafetensorsFile file(folder / name);
    const auto refuse = [&](const auto&... what) {
      throw CheckpointError(concat("[ckpt] ", file.path().string(), ": ", what...));
    };
    const auto text = file.header().metadata.find(kShardingInfo);
    if (text == file.header().metadata.end()) refuse("has no ", kShardingInfo, " like the other files of its folder");
    const nlohmann::json sharding = parse_strictly(text->second, concat(file.path().string(), " (", kShardingInfo, ')'));
    for (const TensorEntry& entry : file.header().tensors) {
      Box box{{}, entry.shape};
      const bool listed = sharding.is_object() && sharding.contains(entry.name) && sharding[entry.name].is_object() &&
                          sharding[entry.name].contains("saved_offsets") && sharding[entry.name]["saved_offsets"].is_array();
      if (!listed) refuse(kShardingInfo, " has no saved_offsets of tensor ", entry.name);
      for (const nlohmann::json& offset : sharding[entry.name]["saved_offsets"]) {
        if (!offset.is_number_unsigned() || offset.get<std::uint64_t>() > (std::uint64_t{1} << 60))
          refuse(kShardingInfo, " has offset ", offset.dump(), " for tensor ", entry.name);
        box.offset.push_back(offset.get<std::int64_t>());
      }
      if (box.offset.size() != entry.shape.size())
        refuse(kShardingInfo, " has ", box.offset.size(), " offsets for tensor ", entry.name, ", want ", entry.shape.size());
      auto [found, fresh] = info.tensors.emplace(entry.name, CheckpointInfo::Tensor{entry.dtype, {}, "", {}});
      CheckpointInfo::Tensor& tensor = found->second;
      if (fresh) tensor.shape.assign(entry.shape.size(), 0);
      if (tensor.dtype != entry.dtype || tensor.shape.size() != entry.shape.size())
        refuse("has tensor ", entry.name, " with another dtype or number of dimensions than other files");
      for (std::size_t d = 0; d < tensor.shape.size(); ++d)
        tensor.shape[d] = std::max(tensor.shape[d], box.offset[d] + box.size[d]);
      tensor.pieces.push_back({info.files.size(), entry.name, std::move(box), 0});
    }
    info.files.push_back({name, file.header().file_size});
  }
  for (auto& [name, tensor] : info.tensors) {
    std::vector<Box> boxes;
    for (const CheckpointInfo::Piece& piece : tensor.pieces) boxes.push_back(piece.box);
    if (!make_up(boxes, tensor.shape))
      throw CheckpointError(concat("[ckpt] ", folder.string(), ": tensor ", name, " has pieces that overlap or leave holes"));
    tensor.layout = concat(boxes.size(), boxes.size() == 1 ? " piece" : " pieces");
  }
  return info;
}

/// Names of the safetensors files of a folder, ascending.
std::vector<std::string> safetensors_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

/// Whether a file begins as safetensors files do: a length that fits into it, and an object.
bool begins_like_safetensors(const std::filesystem::path& file) {
  std::array<unsigned char, 9> first{};
  std::ifstream in(file, std::ios::binary);
  if (!in.read(reinterpret_cast<char*>(first.data()), first.size())) return false;
  std::uint64_t length = 0;
  for (std::size_t i = 8; i-- > 0;) length = length << 8 | first[i];
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(file, error);
  return !error && first[8] == '{' && length <= kMaxHeaderBytes && length <= size - 8;
}

/// Where the checkpoints of a run are, for one who points to its folder.
std::string hint(const std::filesystem::path& folder) {
  for (const std::filesystem::path& place : {folder, folder / "checkpoints"}) {
    const std::vector<std::int64_t> steps = steps_in(place);
    if (!steps.empty()) return concat("; its last checkpoint is ", (place / step_name(steps.back())).string());
  }
  return {};
}

/// CheckpointError: files of a checkpoint without the one that says where everything is.
void refuse_torso(const std::filesystem::path& folder, const std::vector<std::string>& names) {
  const bool ranks = std::ranges::any_of(names, [](const std::string& name) { return name.starts_with("rank-"); });
  std::error_code ignored;
  for (const char* other : {"model.safetensors", "model.safetensors.index.json"}) {
    if (!ranks || std::filesystem::exists(folder / other, ignored)) return;
  }
  throw CheckpointError(concat("[ckpt] ", folder.string(), ": has files of a checkpoint but no ", kInfoFile));
}

bool is_dcp(const std::filesystem::path& folder, const std::vector<std::string>& names) {
  return !names.empty() && SafetensorsFile(folder / names.front()).header().metadata.contains(kShardingInfo);
}

}  // namespace

std::string_view to_string(SourceKind kind) {
  switch (kind) {
    case SourceKind::kCheckpoint:
      return "checkpoint";
    case SourceKind::kSafetensors:
      return "safetensors";
    case SourceKind::kDcp:
      return "torch.distributed.checkpoint";
  }
  return "?";
}

CheckpointInfo info_of_set(const std::filesystem::path& folder, const SafetensorsSet& set) {
  CheckpointInfo info;
  info.extra = "null";
  std::map<const SafetensorsFile*, std::size_t> numbers;
  for (const SafetensorsFile& file : set.files()) {
    numbers[&file] = info.files.size();
    info.files.push_back({file.path().lexically_relative(folder).string(), file.header().file_size});
  }
  for (const auto& [name, place] : set.tensors())
    info.tensors[name] = {
        place.tensor->dtype, place.tensor->shape, "whole", {{numbers.at(place.file), name, whole_box(place.tensor->shape), 0}}};
  return info;
}

void refuse_pickle(const std::filesystem::path& path) {
  constexpr std::string_view kWhy =
      "pickled, which is not opened, since reading a pickle can run any code; load it in Python and save it as safetensors: "
      "save_pretrained of transformers 5 does, safetensors.torch.save_file, or HuggingFaceStorageWriter of "
      "torch.distributed.checkpoint";
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    if (looks_pickled(path)) throw CheckpointError(concat("[ckpt] ", path.string(), ": is ", kWhy));
    return;
  }
  if (!std::filesystem::is_directory(path, ignored) || !safetensors_in(path).empty()) return;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    if (entry.path().filename() == ".metadata" || (entry.is_regular_file(ignored) && looks_pickled(entry.path())))
      throw CheckpointError(concat("[ckpt] ", path.string(), ": its ", entry.path().filename().string(), " is ", kWhy));
  }
}

void refuse_foreign(const std::filesystem::path& path) {
  std::error_code ignored;
  const auto refuse = [&](const auto&... what) { throw CheckpointError(concat("[ckpt] ", path.string(), ": ", what...)); };
  if (!std::filesystem::exists(path, ignored)) refuse("does not exist");
  refuse_pickle(path);
  if (std::filesystem::is_directory(path, ignored)) {
    const bool known = std::filesystem::exists(path / kInfoFile, ignored) || !safetensors_in(path).empty() ||
                       std::filesystem::exists(path / "model.safetensors.index.json", ignored);
    if (!known) refuse("holds neither ", kInfoFile, " nor safetensors files", hint(path));
    return;
  }
  if (!std::filesystem::is_regular_file(path, ignored)) refuse("is neither a folder nor a file");
  if (path.extension() != ".safetensors" && !begins_like_safetensors(path))
    refuse("is no safetensors file, want one, or the folder of a checkpoint or model");
}

struct Source::Impl {
  SourceKind kind = SourceKind::kSafetensors;
  std::filesystem::path path, folder;
  CheckpointInfo info;
  std::mutex mutex;
  std::vector<std::optional<SafetensorsFile>> files;

  const SafetensorsFile& file(std::size_t number) {
    const std::lock_guard lock(mutex);
    files.resize(info.files.size());
    std::optional<SafetensorsFile>& file = files[number];
    if (!file) {
      file.emplace(folder / info.files[number].name);
      if (file->header().file_size != info.files[number].bytes)
        throw CheckpointError(concat("[ckpt] ", file->path().string(), ": has ", file->header().file_size, " bytes, want ",
                                     info.files[number].bytes));
    }
    return *file;
  }
};

Source::Source(const std::filesystem::path& path) : impl_(std::make_shared<Impl>()) {
  impl_->path = impl_->folder = path;
  std::error_code ignored;
  refuse_foreign(path);
  if (std::filesystem::exists(path / kInfoFile, ignored)) {
    impl_->kind = SourceKind::kCheckpoint;
    impl_->info = read_info(path);
    return;
  }
  const bool folder = std::filesystem::is_directory(path, ignored);
  if (!folder) impl_->folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const std::vector<std::string> names = folder ? safetensors_in(path) : std::vector<std::string>{};
  if (is_dcp(path, names)) {
    impl_->kind = SourceKind::kDcp;
    impl_->info = info_of_dcp(path, names);
    return;
  }
  refuse_torso(path, names);
  impl_->info = info_of_set(impl_->folder, SafetensorsSet(path));
}

Source::Source(const std::filesystem::path& path, SourceKind kind, CheckpointInfo info) : impl_(std::make_shared<Impl>()) {
  impl_->path = impl_->folder = path;
  impl_->kind = kind;
  impl_->info = std::move(info);
}

SourceKind Source::kind() const { return impl_->kind; }
const std::filesystem::path& Source::path() const { return impl_->path; }
const std::filesystem::path& Source::folder() const { return impl_->folder; }
const CheckpointInfo& Source::info() const { return impl_->info; }

const CheckpointInfo::Tensor& Source::at(const std::string& name) const {
  const auto found = impl_->info.tensors.find(name);
  if (found == impl_->info.tensors.end()) throw CheckpointError(concat("[ckpt] ", path().string(), ": has no tensor ", name));
  return found->second;
}

void Source::read(const std::string& name, const Box& box, std::span<std::byte> out) const {
  const CheckpointInfo::Tensor& tensor = at(name);
  const Box whole = whole_box(tensor.shape);
  const std::optional<Box> inside = intersect(box, whole);
  const bool empty = box.numel() == 0 && box.size.size() == tensor.shape.size();
  check_value(empty || (inside && *inside == box), kOp, name, ": ", box.to_string(), " is not inside ", whole.to_string());
  const auto bits = static_cast<std::uint64_t>(bits_of(tensor.dtype));
  const std::uint64_t want = static_cast<std::uint64_t>(box.numel()) * bits;
  check_value(want == 8 * out.size(), kOp, name, ": ", box.to_string(), " has ", want, " bits, got memory of ", out.size(),
              " bytes");
  if (empty) return;
  for (const CheckpointInfo::Piece& piece : tensor.pieces) {
    const std::optional<Box> shared = intersect(box, piece.box);
    if (!shared) continue;
    const SafetensorsFile& file = impl_->file(piece.file);
    const TensorEntry& entry = file.at(piece.key);
    if (entry.dtype != tensor.dtype || entry.bytes() * 8 != static_cast<std::uint64_t>(piece.box.numel()) * bits)
      throw CheckpointError(concat("[ckpt] ", file.path().string(), ": tensor ", piece.key, " has ", entry.bytes(), " bytes of ",
                                   to_string(entry.dtype), ", want ", piece.box.to_string(), " of ", to_string(tensor.dtype)));
    for_each_run(piece.box, box, *shared, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
      const std::uint64_t begin = static_cast<std::uint64_t>(from) * bits, target = static_cast<std::uint64_t>(to) * bits;
      const std::uint64_t length = static_cast<std::uint64_t>(count) * bits;
      check_value(begin % 8 == 0 && target % 8 == 0 && length % 8 == 0, kOp, name, ": ", box.to_string(),
                  " has packed elements that share bytes with others");
      const std::span<std::byte> part = out.subspan(target / 8, length / 8);
      if (better_mapped(part.size(), static_cast<std::uint64_t>(shared->numel()) * bits / 8)) {
        file.copy(entry, begin / 8, part);
      } else {
        file.read(entry, begin / 8, part);
      }
    });
  }
}

std::int64_t Source::bytes_read() const {
  const std::lock_guard lock(impl_->mutex);
  std::int64_t bytes = 0;
  for (const std::optional<SafetensorsFile>& file : impl_->files) bytes += file ? file->bytes_read() : 0;
  return bytes;
}

}  // namespace hyper_parallel::ckpt
