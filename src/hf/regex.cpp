#include "hf/regex.h"

#include <oniguruma.h>

#include <algorithm>

#include <hyper_parallel/core/error.h>

#include "hf/unicode.h"

namespace hyper_parallel::hf {
namespace {

const OnigUChar* bytes(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

std::string message_of(int code, OnigErrorInfo* info = nullptr) {
  OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int length = info == nullptr ? onig_error_code_to_str(text, code) : onig_error_code_to_str(text, code, info);
  return {reinterpret_cast<const char*>(text), static_cast<std::size_t>(length)};
}

}  // namespace

struct Regex::Compiled {
  OnigRegex regex = nullptr;
  Compiled() = default;
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;
  ~Compiled() {
    if (regex != nullptr) onig_free(regex);
  }
};

Regex::Regex(const std::string& pattern, const std::string& file) {
  static const int ready = [] {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    return onig_initialize(encodings, 1);
  }();
  if (ready != ONIG_NORMAL) throw Error(concat("[hf] Oniguruma does not start: ", message_of(ready)));
  auto compiled = std::make_shared<Compiled>();
  OnigErrorInfo info{};
  const int result = onig_new(&compiled->regex, bytes(pattern), bytes(pattern) + pattern.size(), ONIG_OPTION_NONE,
                              ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
  if (result != ONIG_NORMAL)
    throw CheckpointError(concat("[hf] ", file, ": \"", pattern, "\" is no regular expression: ", message_of(result, &info)));
  compiled_ = std::move(compiled);
}

Regex Regex::literal(std::string_view text, const std::string& file) {
  std::string pattern;
  for (const char c : text) {
    if (std::string_view("\\^$.|?*+()[]{}-#&~ \t\n").find(c) != std::string_view::npos) pattern += '\\';
    pattern += c;
  }
  return {pattern, file};
}

std::vector<Regex::Span> Regex::split(std::string_view text) const {
  std::vector<Span> spans;
  const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(onig_region_new(),
                                                                  [](OnigRegion* r) { onig_region_free(r, 1); });
  const OnigUChar *begin = bytes(text), *end = begin + text.size();
  std::size_t from = 0, last = 0;  // where to search; end of the last match
  while (from <= text.size()) {
    const int found = onig_search(compiled_->regex, begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE);
    if (found == ONIG_MISMATCH) break;
    if (found < 0) throw Error(concat("[hf] a regular expression of the tokenizer gives up: ", message_of(found)));
    const auto first = static_cast<std::size_t>(region->beg[0]), behind = static_cast<std::size_t>(region->end[0]);
    if (first > last) spans.push_back({last, first, false});
    if (behind > first) spans.push_back({first, behind, true});
    last = behind;
    // An empty match is passed over.
    from =
        behind > first ? behind : behind + std::max<std::size_t>(1, behind < text.size() ? utf8_length(text.substr(behind)) : 1);
  }
  if (last < text.size()) spans.push_back({last, text.size(), false});
  return spans;
}

}  // namespace hyper_parallel::hf
