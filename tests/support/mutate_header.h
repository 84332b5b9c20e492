#pragma once
// Damaged safetensors files, the same in every run, and what must hold for whatever comes of them.
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/ckpt/safetensors.h>

namespace hyper_parallel::testing {

/// Parses a file that may be anything. True: it is valid, and what was read of it is consistent; false: CheckpointError.
/// Another exception passes, and an inconsistency is an InternalError.
inline bool parse_anything(std::string_view file) {
  ckpt::SafetensorsHeader header;
  try {
    header = ckpt::parse_header(file, file.size(), "fuzz");
  } catch (const CheckpointError&) {
    return false;
  }
  std::uint64_t at = header.data_begin;
  std::vector<ckpt::TensorSpec> specs;
  for (const ckpt::TensorEntry& tensor : header.tensors) {
    auto bits = static_cast<std::uint64_t>(ckpt::bits_of(tensor.dtype));
    bool fits = true;
    for (const std::int64_t size : tensor.shape) fits = fits && !__builtin_mul_overflow(bits, size, &bits);
    check_internal(fits && tensor.begin == at && bits == tensor.bytes() * 8, "fuzz", tensor.name);
    check_internal(header.find(tensor.name) == &tensor, "fuzz", "not found: ", tensor.name);
    at = tensor.end;
    specs.push_back(tensor);
  }
  check_internal(at == file.size(), "fuzz", "bytes are left over");
  const auto [again, text] = ckpt::make_header(specs, header.metadata);
  check_internal(ckpt::parse_header(text, again.file_size, "again").tensors.size() == specs.size(), "fuzz",
                 "does not round-trip");
  return true;
}

/// Valid files to begin with.
inline std::vector<std::string> files_to_mutate() {
  using ckpt::Dtype;
  std::vector<std::string> files;
  const auto add = [&](std::vector<ckpt::TensorSpec> specs, const std::map<std::string, std::string>& metadata = {}) {
    auto [header, text] = ckpt::make_header(std::move(specs), metadata);
    files.push_back(text + std::string(header.file_size - header.data_begin, 'x'));
  };
  add({});
  add({{"a", Dtype::kF32, {2, 3}}});
  add({{"a", Dtype::kF32, {2, 3}}, {"b", Dtype::kU8, {5}}, {"c", Dtype::kI64, {}}, {"d", Dtype::kBF16, {0, 4}}},
      {{"format", "pt"}});
  add({{"x.weight", Dtype::kF4, {4}}, {"x.bias", Dtype::kC64, {1, 1}}, {"\xc3\xa9", Dtype::kBool, {1}}},
      {{"k", "v"}, {"", "\"\\"}});
  return files;
}

/// One to four random changes to one of the files: to bytes, numbers, structure, names, lengths.
inline std::string mutate(const std::vector<std::string>& files, std::mt19937& random) {
  static constexpr std::array<std::string_view, 32> kPieces = {"0",
                                                               "1",
                                                               "-1",
                                                               "18446744073709551615",
                                                               "18446744073709551616",
                                                               "9223372036854775807",
                                                               "9223372036854775808",
                                                               "1e3",
                                                               "0.0",
                                                               "[",
                                                               "]",
                                                               "{",
                                                               "}",
                                                               ",",
                                                               ":",
                                                               "\"",
                                                               "null",
                                                               "true",
                                                               "\\u0000",
                                                               "\\ud800",
                                                               "\xff",
                                                               "\xed\xa0\x80",
                                                               "\xef\xbb\xbf",
                                                               "[]",
                                                               "\"dtype\":\"U8\",",
                                                               "\"shape\":[0],",
                                                               "\"data_offsets\":[0,0],",
                                                               "\"__metadata__\":{},",
                                                               "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
                                                               " ",
                                                               "/**/",
                                                               "[[[[[[[["};
  std::string file = files[random() % files.size()];
  const unsigned changes = 1 + random() % 4;
  for (unsigned i = 0; i < changes && !file.empty(); ++i) {
    const std::size_t at = random() % file.size();
    const std::size_t length = 1 + random() % std::min<std::size_t>(12, file.size() - at);
    switch (random() % 9) {
      case 0:
        file[at] = static_cast<char>(random());
        break;
      case 1:
        file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
        break;
      case 2:
        file.erase(at, length);
        break;
      case 3:
        file.insert(at, file.substr(random() % file.size(), length));
        break;
      case 4:
        file.insert(at, kPieces[random() % kPieces.size()]);
        break;
      case 5:
        file.replace(at, length, kPieces[random() % kPieces.size()]);
        break;
      case 6:
        file.resize(at);
        break;
      case 7:
        file[random() % std::min<std::size_t>(8, file.size())] = static_cast<char>(random() % 3 == 0 ? random() : 0);
        break;
      default: {  // one digit
        const std::size_t digit = file.find_first_of("0123456789", at);
        if (digit != std::string::npos) file[digit] = static_cast<char>('0' + random() % 10);
      }
    }
  }
  if (file.size() >= 8 && random() % 2 == 0) {  // a length that fits again, so that more than the length is looked at
    const std::size_t end = file.rfind('}');
    const std::uint64_t size = end == std::string::npos || end < 8 ? file.size() - 8 : end + 1 - 8;
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(size >> (8 * i) & 0xff);
  }
  return file;
}

}  // namespace hyper_parallel::testing
