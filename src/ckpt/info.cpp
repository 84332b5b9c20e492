// checkpoint.json, and the check of a whole checkpoint.
#include "ckpt/info.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "ckpt/crc32c.h"
#include "ckpt/file.h"
#include "ckpt/plan.h"
#include "ckpt/runs.h"
#include "ckpt/sizes.h"
#include "ckpt/strict_json.h"

namespace hyper_parallel::ckpt {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "hyper_parallel.checkpoint";
/// How the text begins: its own checksum, of the text with zeros in its place.
constexpr std::string_view kBegin = "{\"checksum\":\"";
constexpr std::uint64_t kMaxInfoBytes = std::uint64_t{1} << 32;

std::string hex(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

/// Reads values out of JSON whose structure nobody has checked.
class InfoReader {
 public:
  explicit InfoReader(std::string file) : file_(std::move(file)) {}

  template <class... Args>
  [[noreturn]] void refuse(const Args&... args) const {
    throw CheckpointError(concat("[ckpt] ", file_, ": ", args...));
  }
  const json& field(const json& object, const char* name) const {
    if (!object.is_object() || !object.contains(name)) refuse("has no \"", name, "\" where one belongs");
    return object[name];
  }
  std::string text(const json& value) const {
    if (!value.is_string()) refuse("has ", value.dump(), ", want a string");
    return value.get<std::string>();
  }
  std::int64_t number(const json& value, std::int64_t max) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(max))
      refuse("has ", value.dump(), ", want an integer of 0 to ", max);
    return value.get<std::int64_t>();
  }
  const json& list(const json& value) const {
    if (!value.is_array()) refuse("has ", value.dump(), ", want a list");
    return value;
  }
  std::vector<std::int64_t> sizes(const json& value) const {
    std::vector<std::int64_t> result;
    for (const json& size : list(value)) result.push_back(number(size, INT64_MAX));
    return result;
  }

  CheckpointInfo::Tensor tensor(const std::string& name, const json& value, std::size_t files) const {
    CheckpointInfo::Tensor result;
    const std::optional<Dtype> dtype = dtype_of(text(field(value, "dtype")));
    if (!dtype) refuse("tensor ", name, " has dtype ", field(value, "dtype").dump(), ", which safetensors files do not have");
    result.dtype = *dtype;
    result.shape = sizes(field(value, "shape"));
    result.layout = text(field(value, "layout"));
    const TensorSpec spec{name, result.dtype, result.shape};
    if (!bytes_of(spec)) refuse("tensor ", name, " has a shape whose bytes overflow");
    std::vector<Box> boxes;
    for (const json& row : list(field(value, "pieces"))) {
      if (list(row).size() != 4) refuse("tensor ", name, " has a piece of ", row.size(), " values, want 4");
      CheckpointInfo::Piece& piece = result.pieces.emplace_back();
      if (files == 0) refuse("has pieces but no files");
      piece.file = static_cast<std::size_t>(number(row[0], static_cast<std::int64_t>(files) - 1));
      piece.box = {sizes(row[1]), sizes(row[2])};
      piece.crc32c = static_cast<std::uint32_t>(number(row[3], UINT32_MAX));
      bool inside = piece.box.offset.size() == spec.shape.size() && piece.box.size.size() == spec.shape.size();
      for (std::size_t d = 0; inside && d < spec.shape.size(); ++d)
        inside = piece.box.offset[d] <= spec.shape[d] && piece.box.size[d] <= spec.shape[d] - piece.box.offset[d];
      if (!inside) refuse("tensor ", name, " has a piece ", row.dump(), " outside of its shape");
      piece.key = piece_key(spec, piece.box);
      boxes.push_back(piece.box);
    }
    if (!make_up(boxes, spec.shape)) refuse("tensor ", name, " has pieces that overlap or leave holes");
    return result;
  }

 private:
  std::string file_;
};

void check_own_checksum(const InfoReader& reader, std::string text) {
  const std::size_t at = kBegin.size();
  if (!text.starts_with(kBegin) || text.size() < at + 8) reader.refuse("does not begin with its checksum");
  const std::string want = text.substr(at, 8);
  text.replace(at, 8, 8, '0');
  const std::string got = hex(crc32c(std::as_bytes(std::span(text))));
  if (got != want) reader.refuse("has checksum ", got, ", want ", want, ": it is damaged");
}

}  // namespace

std::string info_text(const CheckpointInfo& info) {
  json tensors = json::object();
  for (const auto& [name, tensor] : info.tensors) {
    json pieces = json::array();
    for (const CheckpointInfo::Piece& piece : tensor.pieces)
      pieces.push_back({piece.file, piece.box.offset, piece.box.size, piece.crc32c});
    tensors[name] = {{"dtype", to_string(tensor.dtype)}, {"shape", tensor.shape}, {"layout", tensor.layout}, {"pieces", pieces}};
  }
  json files = json::array();
  for (const CheckpointInfo::File& file : info.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  const json all = {
      {"checksum", "00000000"},  {"extra", json::parse(info.extra)}, {"files", files}, {"format", kFormat}, {"tensors", tensors},
      {"version", info.version}, {"world_size", info.world_size}};
  std::string text = all.dump();
  check_internal(text.starts_with(kBegin), "ckpt", "the checksum is not the first field");
  text.replace(kBegin.size(), 8, hex(crc32c(std::as_bytes(std::span(text)))));
  return text;
}

std::string check_extra(std::string_view op, const std::string& text) {
  if (text.empty()) return "null";
  try {
    return json::parse(text).dump();
  } catch (const json::exception& error) {
    throw ValueError(concat('[', op, "] extra is no JSON: ", error.what()));
  }
}

CheckpointInfo read_info(const std::filesystem::path& path) {
  const std::filesystem::path file = path / kInfoFile;
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored))
    throw CheckpointError(concat("[ckpt] ", path.string(), ": is no checkpoint, it has no ", kInfoFile));
  const std::string text = read_text(file, kMaxInfoBytes);
  const InfoReader reader(file.string());
  const json all = parse_strictly(text, file.string());
  if (!all.is_object() || !all.contains("format") || reader.text(all["format"]) != kFormat)
    reader.refuse("has another format, want ", kFormat);
  CheckpointInfo info;
  info.version = static_cast<int>(reader.number(reader.field(all, "version"), 1'000'000));
  if (info.version != kFormatVersion)
    throw VersionError(concat("[ckpt] ", file.string(), ": has format version ", info.version, ", want ", kFormatVersion,
                              ": it was written by another release"));
  check_own_checksum(reader, text);
  info.world_size = static_cast<int>(reader.number(reader.field(all, "world_size"), INT32_MAX));
  info.extra = reader.field(all, "extra").dump();
  std::set<std::string> names;
  for (const json& row : reader.list(reader.field(all, "files"))) {
    CheckpointInfo::File& entry = info.files.emplace_back();
    entry.name = reader.text(reader.field(row, "name"));
    entry.bytes = static_cast<std::uint64_t>(reader.number(reader.field(row, "bytes"), INT64_MAX));
    check_plain_name(entry.name, file.string());
    if (!names.insert(entry.name).second) reader.refuse("names the file ", entry.name, " twice");
  }
  const json& tensors = reader.field(all, "tensors");
  if (!tensors.is_object()) reader.refuse("has tensors that are no object");
  for (const auto& [name, value] : tensors.items()) info.tensors.emplace(name, reader.tensor(name, value, info.files.size()));
  return info;
}

std::vector<std::string> verify(const std::filesystem::path& path) { return verify_showing(path, {}); }

std::vector<std::string> verify_showing(const std::filesystem::path& path, const OnProgress& progress) {
  std::vector<std::string> problems;
  const auto attempt = [&](const auto& check) {
    try {
      check();
      return true;
    } catch (const CheckpointError& error) {
      problems.emplace_back(error.what());
      return false;
    }
  };
  CheckpointInfo info;
  if (!attempt([&] { info = read_info(path); })) return problems;
  std::vector<std::optional<SafetensorsFile>> files(info.files.size());
  for (std::size_t i = 0; i < files.size(); ++i) attempt([&] { files[i].emplace(path / info.files[i].name); });
  std::uint64_t done = 0, all = 0;
  for (const auto& [name, tensor] : info.tensors) all += bytes_of({name, tensor.dtype, tensor.shape}).value_or(0);
  std::vector<std::byte> buffer(1 << 20);
  for (const auto& [name, tensor] : info.tensors) {
    for (const CheckpointInfo::Piece& piece : tensor.pieces) {
      const std::optional<SafetensorsFile>& file = files[piece.file];
      if (!file) continue;
      attempt([&] {
        const TensorEntry& entry = piece_entry(*file, tensor, piece);
        PartialCrc32c crc;
        for (std::uint64_t at = 0; at < entry.bytes();) {
          const std::span<std::byte> chunk = std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), entry.bytes() - at));
          file->read(entry, at, chunk);
          crc.add(at, chunk);
          at += chunk.size();
          done += chunk.size();
          if (progress) progress(done, all);
        }
        check_piece(*file, entry, PartialCrc32c::finish(crc.contribution(entry.bytes()), entry.bytes()), piece.crc32c);
      });
    }
  }
  return problems;
}

const TensorEntry& piece_entry(const SafetensorsFile& file, const CheckpointInfo::Tensor& tensor,
                               const CheckpointInfo::Piece& piece) {
  const TensorEntry& entry = file.at(piece.key);
  if (entry.dtype != tensor.dtype || entry.shape != piece.box.size)
    throw CheckpointError(concat("[ckpt] ", file.path().string(), ": tensor ", piece.key, " is ", to_string(entry.dtype), ' ',
                                 whole_box(entry.shape).to_string(), ", want ", to_string(tensor.dtype), ' ',
                                 whole_box(piece.box.size).to_string(), " as ", kInfoFile, " says"));
  return entry;
}

void check_piece(const SafetensorsFile& file, const TensorEntry& entry, std::uint32_t got, std::uint32_t want) {
  if (got == want) return;
  throw CheckpointError(concat("[ckpt] ", file.path().string(), ": tensor ", entry.name, " has checksum ", hex(got), ", want ",
                               hex(want), ": its bytes ", entry.begin, " to ", entry.end, " are damaged"));
}

}  // namespace hyper_parallel::ckpt
