#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace hyper_parallel::hf {

/// Byte pair encoding (Sennrich et al. 2016) over the characters that stand for bytes. Thread safety: any thread, once it is
/// filled.
class Bpe {
 public:
  /// false: the token or its id is there already.
  bool add_token(const std::string& token, std::int64_t id);
  /// Tokens `left` and `right` become one; earlier ones go before later ones. \return what is not in the vocabulary, if anything
  /// is
  std::optional<std::string> add_merge(const std::string& left, const std::string& right);
  /// Call when all tokens are there.
  void finish();
  /// Whether every byte has a token.
  [[nodiscard]] bool covers_bytes() const;

  /// Appends the tokens of a piece of text, given as its bytes. \param whole_first a piece that is a token as a whole is not
  /// taken apart
  void encode(std::string_view bytes, bool whole_first, std::vector<std::int64_t>& tokens) const;

  [[nodiscard]] std::optional<std::int64_t> id_of(std::string_view token) const;
  [[nodiscard]] const std::string* token_of(std::int64_t id) const;
  [[nodiscard]] std::int64_t largest_id() const { return largest_id_; }  ///< -1: no tokens

 private:
  struct Merge {
    std::uint32_t rank = 0;
    std::int64_t id = 0;
  };
  struct PairHash {
    std::size_t operator()(const std::pair<std::int64_t, std::int64_t>& pair) const {
      return static_cast<std::size_t>(static_cast<std::uint64_t>(pair.first) * 0x9e3779b97f4a7c15ULL) ^
             static_cast<std::size_t>(pair.second);
    }
  };
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  [[nodiscard]] const Merge* merge_of(std::int64_t left, std::int64_t right) const;

  std::unordered_map<std::string, std::int64_t, TextHash, std::equal_to<>> ids_;
  std::unordered_map<std::int64_t, std::string> tokens_;
  std::unordered_map<std::pair<std::int64_t, std::int64_t>, Merge, PairHash> merges_;
  std::array<std::int64_t, 256> of_byte_{};
  std::uint32_t next_rank_ = 0;
  std::int64_t largest_id_ = -1;
};

}  // namespace hyper_parallel::hf
