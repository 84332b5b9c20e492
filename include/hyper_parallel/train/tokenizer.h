#pragma once
// Byte-level tokenizer. Torch-free.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hyper_parallel::train {

/// Every byte is a token: any text works, nothing is out of vocabulary, and a loss in nats per token is one in nats per byte.
/// Thread safety: stateless.
class ByteTokenizer {
 public:
  static constexpr std::int64_t kVocabSize = 256;
  [[nodiscard]] static std::vector<std::int64_t> encode(std::string_view text);
  /// Tokens outside 0..255 become '?'.
  [[nodiscard]] static std::string decode(std::span<const std::int64_t> tokens);
};

/// `text` made safe for a terminal: control characters other than newline and tab, and bytes that are no valid UTF-8, become '?'.
[[nodiscard]] std::string printable(std::string_view text);

}  // namespace hyper_parallel::train
