#include <hyper_parallel/train/tokenizer.h>

namespace hyper_parallel::train {
namespace {

// Length of the well-formed UTF-8 sequence at `text[i]`, 0 when there is none.
std::size_t utf8_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned char first = byte(i);
  const std::size_t length = first < 0x80                    ? 1
                             : first >= 0xc2 && first < 0xe0 ? 2
                             : first >= 0xe0 && first < 0xf0 ? 3
                             : first >= 0xf0 && first < 0xf5 ? 4
                                                             : 0;
  if (length == 0 || i + length > text.size()) return 0;
  for (std::size_t k = i + 1; k < i + length; ++k)
    if (byte(k) < 0x80 || byte(k) > 0xbf) return 0;
  const unsigned char second = length > 1 ? byte(i + 1) : 0;
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool outside = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return overlong || outside ? 0 : length;
}

}  // namespace

std::vector<std::int64_t> ByteTokenizer::encode(std::string_view text) {
  std::vector<std::int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const std::int64_t> tokens) {
  std::string text;
  text.reserve(tokens.size());
  for (const std::int64_t token : tokens) text.push_back(token >= 0 && token < kVocabSize ? static_cast<char>(token) : '?');
  return text;
}

std::string printable(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool control = length == 1 && (byte == 0x7f || (byte < 0x20 && byte != '\n' && byte != '\t'));
    const bool c1 = length == 2 && byte == 0xc2 && static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (length == 0 || control || c1)
      out += '?';
    else
      out += text.substr(i, length);
    i += length == 0 ? 1 : length;
  }
  return out;
}

}  // namespace hyper_parallel::train
