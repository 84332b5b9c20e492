// Text to tokens and back.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "ckpt/file.h"
#include "hf/tokenizer_impl.h"

namespace hyper_parallel::hf {
namespace {

constexpr std::uint64_t kMaxFileBytes = 256 << 20;

std::vector<std::string> pre_tokenize(const PreTokenizer& steps, std::string text) {
  std::vector<std::string> pieces = {std::move(text)};
  for (const auto& step : steps) {
    if (const auto* split = std::get_if<SplitStep>(&step)) {
      std::vector<std::string> smaller;
      for (const std::string& piece : pieces) {
        for (const Regex::Span& span : split->regex.split(piece)) {
          if (split->removed && span.match != split->inverted) continue;
          smaller.push_back(piece.substr(span.begin, span.end - span.begin));
        }
      }
      pieces = std::move(smaller);
    } else {
      for (std::string& piece : pieces) {
        if (!piece.starts_with(' ')) piece.insert(0, 1, ' ');
      }
    }
  }
  return pieces;
}

}  // namespace

void AddedTokens::add(std::string pattern, const AddedToken* token) {
  if (!pattern.empty()) by_byte_[static_cast<unsigned char>(pattern[0])].emplace_back(std::move(pattern), token);
}

void AddedTokens::finish() {
  for (auto& tokens : by_byte_)
    std::ranges::stable_sort(tokens, [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
}

std::vector<AddedTokens::Piece> AddedTokens::split(std::string_view text) const {
  std::vector<Piece> pieces;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto& tokens = by_byte_[static_cast<unsigned char>(text[at])];
    const auto found = std::ranges::find_if(tokens, [&](const auto& token) { return text.substr(at).starts_with(token.first); });
    if (found == tokens.end()) {
      ++at;
      continue;
    }
    const AddedToken& token = *found->second;
    std::size_t begin = at, end = at + found->first.size();
    at = end;
    if (token.left_strip) begin = std::max(done, begin - spaces_at_end(text.substr(0, begin)));
    if (token.right_strip) end += spaces_at_begin(text.substr(end));
    if (begin > done) pieces.push_back({done, begin, nullptr});
    pieces.push_back({begin, end, &token});
    done = end;
  }
  if (done < text.size()) pieces.push_back({done, text.size(), nullptr});
  return pieces;
}

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code ignored;
  const std::filesystem::path file = std::filesystem::is_directory(path, ignored) ? path / "tokenizer.json" : path;
  return parse(ckpt::read_text(file, kMaxFileBytes), file.string());
}

Tokenizer Tokenizer::parse(std::string_view text, const std::string& file) { return Tokenizer(parse_tokenizer(text, file)); }

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  const auto bad = first_not_utf8(text);
  check_value(!bad, "Tokenizer::encode", "the text is not UTF-8 from byte ", bad.value_or(0), " on");
  std::vector<std::int64_t> tokens;
  if (options.add_special_tokens) tokens = impl_->before;
  const auto encode_text = [&](std::string piece) {
    for (const std::string& word : pre_tokenize(impl_->pre_tokenizer, std::move(piece)))
      impl_->bpe.encode(word, impl_->whole_first, tokens);
  };
  for (const AddedTokens::Piece& outer : impl_->raw.split(text)) {
    if (outer.token != nullptr) {
      tokens.push_back(outer.token->id);
      continue;
    }
    std::string normal(text.substr(outer.begin, outer.end - outer.begin));
    for (const NormalForm form : impl_->normalizers) normal = normalize(normal, form);
    for (const AddedTokens::Piece& inner : impl_->normalized.split(normal)) {
      if (inner.token != nullptr) {
        tokens.push_back(inner.token->id);
      } else {
        encode_text(normal.substr(inner.begin, inner.end - inner.begin));
      }
    }
  }
  if (options.add_special_tokens) tokens.insert(tokens.end(), impl_->behind.begin(), impl_->behind.end());
  return tokens;
}

std::string Tokenizer::decode(std::span<const std::int64_t> tokens, const DecodeOptions& options) const {
  std::string bytes;
  for (const std::int64_t id : tokens) {
    const std::optional<std::string> token = token_of(id);
    if (!token || (options.skip_special_tokens && impl_->special.contains(*token))) continue;
    bytes += bytes_of_chars(*token).value_or(*token);
  }
  return utf8_lossy(bytes);
}

std::int64_t Tokenizer::vocab_size() const {
  std::int64_t largest = impl_->bpe.largest_id();
  for (const AddedToken& token : impl_->added) largest = std::max(largest, token.id);
  return largest + 1;
}

std::optional<std::int64_t> Tokenizer::id_of(std::string_view token) const {
  const auto found = impl_->added_by_content.find(std::string(token));
  return found != impl_->added_by_content.end() ? std::optional(found->second->id) : impl_->bpe.id_of(token);
}

std::optional<std::string> Tokenizer::token_of(std::int64_t id) const {
  const auto found = impl_->added_by_id.find(id);
  if (found != impl_->added_by_id.end()) return found->second->shown;
  const std::string* token = impl_->bpe.token_of(id);
  return token == nullptr ? std::nullopt : std::optional(*token);
}

std::string byte_tokenizer_json() {
  using nlohmann::json;
  json vocabulary = json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[std::string(char_of_byte(static_cast<unsigned char>(byte)))] = byte;
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  const json all = {{"version", "1.0"},
                    {"truncation", nullptr},
                    {"padding", nullptr},
                    {"added_tokens", json::array()},
                    {"normalizer", nullptr},
                    {"pre_tokenizer", byte_level},
                    {"post_processor", nullptr},
                    {"decoder", byte_level},
                    {"model",
                     {{"type", "BPE"},
                      {"dropout", nullptr},
                      {"unk_token", nullptr},
                      {"continuing_subword_prefix", nullptr},
                      {"end_of_word_suffix", nullptr},
                      {"fuse_unk", false},
                      {"byte_fallback", false},
                      {"ignore_merges", false},
                      {"vocab", vocabulary},
                      {"merges", json::array()}}}};
  return all.dump(2) + "\n";
}

}  // namespace hyper_parallel::hf
