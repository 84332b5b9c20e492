#include "hf/unicode.h"

#include <utf8proc.h>

#include <array>
#include <cstdlib>
#include <map>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::hf {
namespace {

/// How many bytes a sequence has by its first one, and what the second may be; 0: no sequence begins so.
struct Lead {
  std::size_t length = 0;
  unsigned char low = 0x80, high = 0xbf;
};
Lead lead_of(unsigned char first) {
  if (first < 0x80) return {1};
  if (first >= 0xc2 && first <= 0xdf) return {2};
  if (first == 0xe0) return {3, 0xa0, 0xbf};
  if (first == 0xed) return {3, 0x80, 0x9f};
  if (first >= 0xe1 && first <= 0xef) return {3};
  if (first == 0xf0) return {4, 0x90, 0xbf};
  if (first >= 0xf1 && first <= 0xf3) return {4};
  if (first == 0xf4) return {4, 0x80, 0x8f};
  return {};
}

/// Bytes of `text` that are the beginning of a sequence; the sequence is whole if they are as many as its first byte says.
std::size_t good_prefix(std::string_view text, const Lead& lead) {
  if (lead.length == 0) return 0;
  std::size_t count = 1;
  for (; count < lead.length && count < text.size(); ++count) {
    const auto byte = static_cast<unsigned char>(text[count]);
    const bool fits = count == 1 ? byte >= lead.low && byte <= lead.high : byte >= 0x80 && byte <= 0xbf;
    if (!fits) break;
  }
  return count;
}

std::string utf8_of(std::uint32_t code) {
  std::array<utf8proc_uint8_t, 4> bytes{};
  const auto length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code), bytes.data());
  return {reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(length)};
}

struct ByteChars {
  std::array<std::string, 256> of_byte;
  std::map<std::string, unsigned char, std::less<>> of_char;
};

/// Printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on, in their order (GPT-2).
const ByteChars& byte_chars() {
  static const ByteChars kChars = [] {
    ByteChars chars;
    std::uint32_t next = 0x100;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool itself = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
      chars.of_byte[byte] = utf8_of(itself ? byte : next++);
      chars.of_char[chars.of_byte[byte]] = static_cast<unsigned char>(byte);
    }
    return chars;
  }();
  return kChars;
}

bool is_space(std::string_view sequence) {
  utf8proc_int32_t code = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(sequence.data()), static_cast<utf8proc_ssize_t>(sequence.size()),
                   &code);
  if ((code >= 0x09 && code <= 0x0d) || code == 0x85) return true;
  const utf8proc_category_t category = utf8proc_category(code);
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

}  // namespace

std::size_t utf8_length(std::string_view text) {
  if (text.empty()) return 0;
  const Lead lead = lead_of(static_cast<unsigned char>(text[0]));
  return lead.length > 0 && good_prefix(text, lead) == lead.length ? lead.length : 0;
}

std::optional<std::size_t> first_not_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

std::string utf8_lossy(std::string_view bytes) {
  std::string result;
  result.reserve(bytes.size());
  while (!bytes.empty()) {
    const Lead lead = lead_of(static_cast<unsigned char>(bytes[0]));
    const std::size_t good = good_prefix(bytes, lead);
    if (lead.length > 0 && good == lead.length) {
      result += bytes.substr(0, good);
    } else {
      result += "\xef\xbf\xbd";
    }
    bytes.remove_prefix(good == 0 ? 1 : good);
  }
  return result;
}

std::string normalize(std::string_view text, NormalForm form) {
  int options = UTF8PROC_STABLE;
  options |= form == NormalForm::kNfc || form == NormalForm::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (form == NormalForm::kNfkc || form == NormalForm::kNfkd) options |= UTF8PROC_COMPAT;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &result,
                   static_cast<utf8proc_option_t>(options));
  if (length < 0) throw Error(concat("[hf] cannot normalize a text: ", utf8proc_errmsg(length)));
  std::string normal(reinterpret_cast<const char*>(result), static_cast<std::size_t>(length));
  std::free(result);  // as utf8proc asks for
  return normal;
}

std::size_t spaces_at_begin(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = utf8_length(text.substr(at));
    if (length == 0 || !is_space(text.substr(at, length))) break;
    at += length;
  }
  return at;
}

std::size_t spaces_at_end(std::string_view text) {
  std::size_t end = text.size();
  while (end > 0) {
    std::size_t begin = end - 1;
    while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) --begin;
    if (!is_space(text.substr(begin, end - begin))) break;
    end = begin;
  }
  return text.size() - end;
}

std::string_view char_of_byte(unsigned char byte) { return byte_chars().of_byte[byte]; }

std::optional<std::string> bytes_of_chars(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const std::size_t length = utf8_length(token);
    const auto found = byte_chars().of_char.find(token.substr(0, length));
    if (length == 0 || found == byte_chars().of_char.end()) return std::nullopt;
    bytes += static_cast<char>(found->second);
    token.remove_prefix(length);
  }
  return bytes;
}

}  // namespace hyper_parallel::hf
