#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hyper_parallel::hf {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Bytes of the well-formed UTF-8 sequence that `text` begins with; 0: there is none.
[[nodiscard]] std::size_t utf8_length(std::string_view text);
/// Where `text` stops to be UTF-8.
[[nodiscard]] std::optional<std::size_t> first_not_utf8(std::string_view text);
/// `bytes` as UTF-8: every longest beginning of a sequence that goes on wrongly becomes U+FFFD.
[[nodiscard]] std::string utf8_lossy(std::string_view bytes);
[[nodiscard]] std::string normalize(std::string_view text, NormalForm form);
/// Bytes of white space (Unicode's White_Space) at the beginning and at the end of UTF-8.
[[nodiscard]] std::size_t spaces_at_begin(std::string_view text);
[[nodiscard]] std::size_t spaces_at_end(std::string_view text);

/// The character that stands for a byte in byte-level vocabularies, in UTF-8.
[[nodiscard]] std::string_view char_of_byte(unsigned char byte);
/// The bytes that a token stands for; nullopt: it has other characters.
[[nodiscard]] std::optional<std::string> bytes_of_chars(std::string_view token);

}  // namespace hyper_parallel::hf
