#pragma once
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include <hyper_parallel/hf/tokenizer.h>

#include "hf/bpe.h"
#include "hf/regex.h"
#include "hf/unicode.h"

namespace hyper_parallel::hf {

/// A token that is found in the text before anything else.
struct AddedToken {
  std::string content;
  std::string shown;  ///< what its id stands for: the content, normalized if it is looked for in normalized text
  std::int64_t id = 0;
  bool left_strip = false, right_strip = false;  ///< takes the white space beside it
  bool normalized = false;                       ///< looked for in the normalized text
  bool special = false;
};

/// Added tokens by their first byte, longer ones first.
class AddedTokens {
 public:
  void add(std::string pattern, const AddedToken* token);
  void finish();
  struct Piece {
    std::size_t begin = 0, end = 0;
    const AddedToken* token = nullptr;  ///< nullptr: text
  };
  /// The tokens in a text and what lies between them: of several that begin at a place, the longest.
  [[nodiscard]] std::vector<Piece> split(std::string_view text) const;

 private:
  std::array<std::vector<std::pair<std::string, const AddedToken*>>, 256> by_byte_;
};

/// Cuts pieces of text into smaller ones.
struct SplitStep {
  Regex regex;
  bool removed = false;  ///< matches are dropped
  bool inverted = false;
};
/// Puts a space before pieces that have none.
struct PrefixStep {};
using PreTokenizer = std::vector<std::variant<SplitStep, PrefixStep>>;

struct Tokenizer::Impl {
  Bpe bpe;
  bool whole_first = false;
  std::vector<AddedToken> added;  // not changed once the pointers below are there
  AddedTokens raw, normalized;    // found in the text as it is, and in the normalized one
  std::unordered_map<std::string, const AddedToken*> added_by_content;
  std::unordered_map<std::int64_t, const AddedToken*> added_by_id;
  std::set<std::string> special;
  std::vector<NormalForm> normalizers;
  PreTokenizer pre_tokenizer;
  std::vector<std::int64_t> before, behind;  // what the template puts around a text
};

/// Reads tokenizer.json.
[[nodiscard]] std::shared_ptr<Tokenizer::Impl> parse_tokenizer(std::string_view text, const std::string& file);

}  // namespace hyper_parallel::hf
