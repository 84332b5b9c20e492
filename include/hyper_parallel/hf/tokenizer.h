#pragma once
// Byte-level BPE as tokenizer.json describes it (Llama 3, Qwen, GPT-2). Torch-free.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::hf {

struct EncodeOptions {
  bool add_special_tokens = true;  ///< those that the file's template puts around a text
};

struct DecodeOptions {
  bool skip_special_tokens = false;
};

/// Text to tokens and back, the same as the Python package `tokenizers` does it. A cheap handle. Thread safety: any thread.
///
/// What a file may have: model BPE without dropout, byte fallback, prefixes and suffixes; normalizers NFC, NFD, NFKC and NFKD;
/// pre-tokenizers ByteLevel, Split (isolated or removed) and Digits, the last of them ByteLevel; decoder ByteLevel;
/// post-processors ByteLevel and TemplateProcessing; any added tokens but those of whole words. Of all these also sequences. No
/// truncation or padding.
class HP_API Tokenizer {
 public:
  /// \param path tokenizer.json, or the folder that has it. CheckpointError: it is missing, no JSON, or damaged: fields of other
  /// types, ids given twice, merges of unknown tokens, bad regular expressions. ValueError: something that is not supported.
  [[nodiscard]] static Tokenizer load(const std::filesystem::path& path);
  /// The same for the text of a file; `file` stands for it in messages.
  [[nodiscard]] static Tokenizer parse(std::string_view text, const std::string& file);

  /// Tokens of a text. ValueError: text that is not UTF-8. Error: a regular expression gives up.
  [[nodiscard]] std::vector<std::int64_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Text of tokens; unknown ones are left out, bytes that are no UTF-8 become U+FFFD.
  [[nodiscard]] std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions& options = {}) const;

  [[nodiscard]] std::int64_t vocab_size() const;  ///< one more than the largest id, added tokens among them
  [[nodiscard]] std::optional<std::int64_t> id_of(std::string_view token) const;  ///< as the file spells it
  [[nodiscard]] std::optional<std::string> token_of(std::int64_t id) const;

  struct Impl;  // src/hf

 private:
  explicit Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

/// Text of a tokenizer.json whose tokens are the 256 bytes: what hp-train's byte tokenizer is to other tools.
[[nodiscard]] HP_API std::string byte_tokenizer_json();

}  // namespace hyper_parallel::hf
