#include "hf/bpe.h"

#include <algorithm>
#include <queue>

#include "hf/unicode.h"

namespace hyper_parallel::hf {

bool Bpe::add_token(const std::string& token, std::int64_t id) {
  largest_id_ = std::max(largest_id_, id);
  return ids_.emplace(token, id).second && tokens_.emplace(id, token).second;
}

std::optional<std::string> Bpe::add_merge(const std::string& left, const std::string& right) {
  for (const std::string& token : {left, right, left + right}) {
    if (!ids_.contains(token)) return token;
  }
  merges_.insert_or_assign({ids_.at(left), ids_.at(right)}, Merge{next_rank_++, ids_.at(left + right)});
  return std::nullopt;
}

void Bpe::finish() {
  for (std::size_t byte = 0; byte < 256; ++byte)
    of_byte_[byte] = id_of(char_of_byte(static_cast<unsigned char>(byte))).value_or(-1);
}

bool Bpe::covers_bytes() const { return std::ranges::find(of_byte_, -1) == of_byte_.end(); }

const Bpe::Merge* Bpe::merge_of(std::int64_t left, std::int64_t right) const {
  const auto found = merges_.find({left, right});
  return found == merges_.end() ? nullptr : &found->second;
}

std::optional<std::int64_t> Bpe::id_of(std::string_view token) const {
  const auto found = ids_.find(token);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

const std::string* Bpe::token_of(std::int64_t id) const {
  const auto found = tokens_.find(id);
  return found == tokens_.end() ? nullptr : &found->second;
}

void Bpe::encode(std::string_view bytes, bool whole_first, std::vector<std::int64_t>& tokens) const {
  if (whole_first) {
    std::string chars;
    for (const char byte : bytes) chars += char_of_byte(static_cast<unsigned char>(byte));
    if (const auto id = id_of(chars)) {
      tokens.push_back(*id);
      return;
    }
  }
  // A list of symbols, and the merges that neighbours could make, the best first. What has changed since is passed over.
  struct Symbol {
    std::int64_t id = 0;
    std::ptrdiff_t before = 0, behind = 0;
    bool gone = false;
  };
  struct Candidate {
    std::uint32_t rank = 0;
    std::ptrdiff_t at = 0;
    std::int64_t id = 0, left = 0, right = 0;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  std::vector<Symbol> symbols;
  for (const char byte : bytes) {
    const std::int64_t id = of_byte_[static_cast<unsigned char>(byte)];
    const auto at = static_cast<std::ptrdiff_t>(symbols.size());
    if (id >= 0) symbols.push_back({id, at - 1, at + 1});
  }
  const auto count = static_cast<std::ptrdiff_t>(symbols.size());
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  const auto symbol = [&](std::ptrdiff_t at) -> Symbol& { return symbols[static_cast<std::size_t>(at)]; };
  const auto consider = [&](std::ptrdiff_t at) {
    if (at < 0 || symbol(at).behind >= count) return;
    const std::int64_t left = symbol(at).id, right = symbol(symbol(at).behind).id;
    if (const Merge* merge = merge_of(left, right)) queue.push({merge->rank, at, merge->id, left, right});
  };
  for (std::ptrdiff_t at = 0; at + 1 < count; ++at) consider(at);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbol(best.at);
    if (left.gone || left.id != best.left || left.behind >= count || symbol(left.behind).id != best.right) continue;
    Symbol& right = symbol(left.behind);
    left.id = best.id;
    left.behind = right.behind;
    right.gone = true;
    if (left.behind < count) symbol(left.behind).before = best.at;
    consider(left.before);
    consider(best.at);
  }
  for (const Symbol& one : symbols) {
    if (!one.gone) tokens.push_back(one.id);
  }
}

}  // namespace hyper_parallel::hf
