// The header of a safetensors file: text to values, values to text.
#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include <hyper_parallel/ckpt/safetensors.h>

#include "ckpt/sizes.h"

namespace hyper_parallel::ckpt {
namespace {

using nlohmann::json;

constexpr std::uint64_t kPrefix = 8;  // length of the header, little-endian

struct DtypeRow {
  std::string_view name;
  std::int64_t bits;
};
constexpr std::array<DtypeRow, 22> kDtypes = {
    {{"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
     {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
     {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
     {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}}};

/// Counts the characters that the parser took, so that messages can say where it is.
class CountingIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator() = default;
  CountingIterator(const char* at, std::uint64_t* count) : at_(at), count_(count) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*count_;
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator old = *this;
    ++*this;
    return old;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }

 private:
  const char* at_ = nullptr;
  std::uint64_t* count_ = nullptr;
};

/// What the JSON parser calls: checks structure and types, collects the tensors. Every error throws.
class HeaderHandler {
 public:
  HeaderHandler(SafetensorsHeader& header, const std::string& file, const std::uint64_t& count)
      : header_(header), file_(file), count_(count) {}

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(json::number_integer_t value) { return unexpected(concat("the number ", value)); }
  bool number_float(json::number_float_t, const std::string& text) { return unexpected(concat("the number ", text)); }
  bool binary(json::binary_t&) { return unexpected("binary data"); }

  bool number_unsigned(json::number_unsigned_t value) {
    if (state_ == State::kShape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        return unexpected(concat("the size ", value));
      entry_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (state_ == State::kOffsets && offsets_.size() < 2) {
      offsets_.push_back(value);
    } else {
      return unexpected(concat("the number ", value));
    }
    return true;
  }

  bool string(std::string& text) {
    if (state_ == State::kMetadata) {
      header_.metadata.emplace(key_, std::move(text));
    } else if (state_ == State::kTensor && field_ == "dtype") {
      const std::optional<Dtype> dtype = dtype_of(text);
      if (!dtype) fail("dtype is \"", text, "\", which is none of the format");
      entry_.dtype = *dtype;
    } else {
      return unexpected("a string");
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (state_ == State::kOutside) {
      state_ = State::kTop;
    } else if (state_ == State::kTop) {
      state_ = name_ == "__metadata__" ? State::kMetadata : State::kTensor;
      keys_.clear();
      entry_ = {};
      entry_.name = name_;
      offsets_.clear();
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(std::string& text) {
    if (state_ == State::kTop) {
      name_ = std::move(text);
      if (!names_.insert(name_).second) fail("is there twice");
      return true;
    }
    if (!keys_.insert(text).second) fail("has \"", text, "\" twice");
    if (state_ == State::kMetadata) {
      key_ = std::move(text);
      return true;
    }
    field_ = std::move(text);
    if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets")
      fail("has \"", field_, "\", want dtype, shape and data_offsets only");
    return true;
  }

  bool end_object() {
    if (state_ == State::kTop) {
      state_ = State::kOutside;
      return true;
    }
    if (state_ == State::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!keys_.contains(field)) fail("has no ", field);
      }
      if (offsets_.size() != 2) fail("has ", offsets_.size(), " data_offsets, want 2");
      finish_tensor();
    }
    state_ = State::kTop;
    return true;
  }

  bool start_array(std::size_t) {
    if (state_ != State::kTensor || field_ == "dtype") return unexpected("an array");
    state_ = field_ == "shape" ? State::kShape : State::kOffsets;
    return true;
  }
  bool end_array() {
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception& error) {
    // The parser's own words start with its name and a code in brackets.
    std::string_view text = error.what();
    if (const auto bracket = text.find("] "); bracket != std::string_view::npos) text.remove_prefix(bracket + 2);
    throw CheckpointError(concat("[safetensors] ", file_, ": header is no JSON or not UTF-8 (offset ",
                                 kPrefix + (position > 0 ? position - 1 : 0), "): ", text));
  }

 private:
  enum class State { kOutside, kTop, kMetadata, kTensor, kShape, kOffsets };

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw CheckpointError(concat("[safetensors] ", file_, ": ", name_ == "__metadata__" ? "" : "tensor ", name_, ' ', args...,
                                 " (header, offset ", kPrefix + count_, ')'));
  }
  bool unexpected(const std::string& what) const {
    if (state_ == State::kOutside || (state_ == State::kTop && names_.empty()))
      throw CheckpointError(concat("[safetensors] ", file_, ": header has ", what, ", want an object"));
    if (state_ == State::kMetadata) fail("has ", what, " for \"", key_, "\", want a string");
    if (state_ == State::kTop) fail("is ", what, ", want an object");
    if (state_ == State::kShape) fail("has ", what, " in shape, want sizes of 0 to 2^63 - 1");
    if (state_ == State::kOffsets) fail("has ", what, " in data_offsets, want two offsets");
    fail("has ", what, " for ", field_, field_ == "dtype" ? ", want a string" : ", want an array");
  }

  void finish_tensor() {
    const std::optional<std::uint64_t> bytes = bytes_of(entry_);
    const std::uint64_t begin = offsets_[0], end = offsets_[1];
    if (!bytes) fail("has a shape whose bytes overflow or do not fill whole bytes");
    if (begin > end) fail("has data_offsets ", begin, " to ", end, ", want them ascending");
    if (end - begin != *bytes) fail("has ", end - begin, " bytes in data_offsets, want ", *bytes, " for its dtype and shape");
    if (end > header_.file_size - header_.data_begin)
      fail("has data_offsets up to ", end, ", but the file ends after ", header_.file_size - header_.data_begin,
           " bytes of data");
    entry_.begin = header_.data_begin + begin;
    entry_.end = header_.data_begin + end;
    header_.tensors.push_back(std::move(entry_));
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  const std::uint64_t& count_;
  State state_ = State::kOutside;
  std::string name_, key_, field_;
  std::set<std::string, std::less<>> names_, keys_;
  TensorEntry entry_;
  std::vector<std::uint64_t> offsets_;
};

/// Bytes of tensors have neither overlaps nor holes.
void check_order(SafetensorsHeader& header, const std::string& file) {
  std::stable_sort(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t at = header.data_begin;
  const std::string* before = nullptr;
  for (const TensorEntry& tensor : header.tensors) {
    if (tensor.begin != at) {
      throw CheckpointError(concat("[safetensors] ", file, ": tensor ", tensor.name, " begins at offset ", tensor.begin,
                                   ", want ", at, tensor.begin < at ? ": it overlaps " : ": there is a hole after ",
                                   before == nullptr ? "the header" : *before));
    }
    at = tensor.end;
    before = &tensor.name;
  }
  if (at != header.file_size) {
    throw CheckpointError(
        concat("[safetensors] ", file, ": ", header.file_size - at, " bytes from offset ", at, " on belong to no tensor"));
  }
  for (std::size_t i = 0; i < header.tensors.size(); ++i) header.positions.emplace(header.tensors[i].name, i);
}

std::string json_string(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::exception&) {
    throw ValueError("[safetensors] a name or metadata is not UTF-8");
  }
}

}  // namespace

std::string_view to_string(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].name; }

std::optional<Dtype> dtype_of(std::string_view name) {
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].name == name) return static_cast<Dtype>(i);
  }
  return {};
}

std::int64_t bits_of(Dtype dtype) { return kDtypes[static_cast<std::size_t>(dtype)].bits; }

std::optional<std::uint64_t> bytes_of(const TensorSpec& tensor) {
  std::uint64_t bits = static_cast<std::uint64_t>(bits_of(tensor.dtype));
  for (const std::int64_t size : tensor.shape) {
    if (size < 0 || __builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return {};
  }
  if (bits % 8 != 0) return {};
  return bits / 8;
}

const TensorEntry* SafetensorsHeader::find(std::string_view name) const {
  const auto found = positions.find(name);
  return found == positions.end() ? nullptr : &tensors[found->second];
}

SafetensorsHeader parse_header(std::string_view bytes, std::uint64_t file_size, const std::string& file) {
  const auto refuse = [&](const auto&... args) { throw CheckpointError(concat("[safetensors] ", file, ": ", args...)); };
  if (file_size < kPrefix || bytes.size() < kPrefix) refuse("has ", file_size, " bytes, want at least 8");
  std::uint64_t length = 0;
  for (std::size_t i = kPrefix; i-- > 0;) length = length << 8 | static_cast<unsigned char>(bytes[i]);
  if (length > kMaxHeaderBytes) refuse("header has ", length, " bytes (offset 0), want at most ", kMaxHeaderBytes);
  if (length > file_size - kPrefix) refuse("header has ", length, " bytes (offset 0), but the file ends at ", file_size);
  check_internal(bytes.size() >= kPrefix + length, "safetensors", "parse_header got ", bytes.size(), " bytes");
  bytes = bytes.substr(kPrefix, length);
  if (bytes.empty() || bytes[0] != '{') refuse("header does not begin with '{' (offset 8)");
  // The parser takes a NUL for the end of the text.
  if (const auto nul = bytes.find('\0'); nul != std::string_view::npos)
    refuse("header has a NUL byte (offset ", kPrefix + nul, ')');

  SafetensorsHeader header;
  header.data_begin = kPrefix + length;
  header.file_size = file_size;
  std::uint64_t count = 0;
  HeaderHandler handler(header, file, count);
  json::sax_parse(CountingIterator(bytes.data(), &count), CountingIterator(bytes.data() + bytes.size(), &count), &handler);
  check_order(header, file);
  return header;
}

std::pair<SafetensorsHeader, std::string> make_header(std::vector<TensorSpec> tensors,
                                                      const std::map<std::string, std::string>& metadata) {
  constexpr std::string_view kOp = "safetensors";
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name; });
  SafetensorsHeader header;
  header.metadata = metadata;
  std::string text = "{";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      text += concat(text.back() == '{' ? "" : ",", json_string(key), ':', json_string(value));
    text += '}';
  }
  std::uint64_t at = 0;
  for (TensorSpec& tensor : tensors) {
    check_value(tensor.name != "__metadata__", kOp, "a tensor is named __metadata__, which the format reserves");
    const std::optional<std::uint64_t> bytes = bytes_of(tensor);
    TensorEntry entry{std::move(tensor), at, at};
    check_value(bytes && !__builtin_add_overflow(at, *bytes, &entry.end), kOp, "tensor ", entry.name,
                " has negative sizes, more bytes than can be counted, or packed elements that do not fill bytes");
    at = entry.end;
    text +=
        concat(text.size() == 1 ? "" : ",", json_string(entry.name), ":{\"dtype\":\"", to_string(entry.dtype), "\",\"shape\":[");
    for (const std::int64_t size : entry.shape) text += concat(text.back() == '[' ? "" : ",", size);
    text += concat("],\"data_offsets\":[", entry.begin, ',', entry.end, "]}");
    const bool is_new = header.positions.emplace(entry.name, header.tensors.size()).second;
    check_value(is_new, kOp, "tensor ", entry.name, " is there twice");
    header.tensors.push_back(std::move(entry));
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  check_value(text.size() <= kMaxHeaderBytes, kOp, "the header has ", text.size(), " bytes, want at most ", kMaxHeaderBytes);

  std::string prefix(kPrefix, '\0');
  for (std::size_t i = 0; i < kPrefix; ++i) prefix[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  text.insert(0, prefix);
  header.data_begin = text.size();
  header.file_size = header.data_begin + at;
  for (TensorEntry& tensor : header.tensors) {
    tensor.begin += header.data_begin;
    tensor.end += header.data_begin;
  }
  return {std::move(header), std::move(text)};
}

}  // namespace hyper_parallel::ckpt
