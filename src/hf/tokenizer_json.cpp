// tokenizer.json.
#include <algorithm>
#include <utility>

#include <nlohmann/json.hpp>

#include "ckpt/strict_json.h"
#include "hf/json_reader.h"
#include "hf/tokenizer_impl.h"

namespace hyper_parallel::hf {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxId = std::int64_t{1} << 31;
/// What ByteLevel cuts at by itself (GPT-2).
constexpr const char* kByteLevelPattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Reads one file into an Impl.
class Reader : private JsonReader {
 public:
  Reader(Tokenizer::Impl& impl, std::string file) : JsonReader(std::move(file)), impl_(impl) {}

  void read(const json& all) {
    if (!all.is_object()) refuse("is no JSON object");
    for (const char* name : {"truncation", "padding"}) want(is_null(all, name), name, " is set, which is not supported");
    read_model(object(all, "model"));
    read_normalizer(all, "normalizer");
    read_added_tokens(all);
    if (is_null(all, "pre_tokenizer")) unsupported("has no pre_tokenizer, want one that ends with ByteLevel");
    read_pre_tokenizer(object(all, "pre_tokenizer"));
    want(byte_level_, "the pre_tokenizer does not end with ByteLevel");
    want(!is_null(all, "decoder") && text(object(all, "decoder"), "type") == "ByteLevel", "the decoder is not ByteLevel");
    if (!is_null(all, "post_processor")) read_post_processor(object(all, "post_processor"));
  }

 private:
  template <class... Args>
  [[noreturn]] void unsupported(const Args&... what) const {
    throw ValueError(concat("[hf] ", file(), ": ", what...));
  }

  static bool is_null(const json& from, const char* name) { return find(from, name) == nullptr; }
  std::int64_t id(const json& value, const std::string& token) const {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() >= static_cast<std::uint64_t>(kMaxId))
      refuse("token ", json(token).dump(), " has id ", value.dump(), ", want an integer of 0 to ", kMaxId - 1);
    return value.get<std::int64_t>();
  }

  void read_model(const json& model) {
    want(is_null(model, "type") || text(model, "type") == "BPE", "the model is not BPE");
    want(is_null(model, "dropout") || model["dropout"] == 0.0, "dropout is ", model.value("dropout", json()).dump(),
         ", want null");
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      want(is_null(model, name) || model[name] == "", name, " is set, which byte-level models do not have");
    want(!flag(model, "byte_fallback", false), "byte_fallback is true, want byte-level BPE");
    impl_.whole_first = flag(model, "ignore_merges", false);
    for (const auto& [token, value] : object(model, "vocab").items()) {
      if (!impl_.bpe.add_token(token, id(value, token))) refuse("has the id ", value.dump(), " twice");
    }
    for (const json& merge : list(model, "merges")) read_merge(merge);
    impl_.bpe.finish();
    want(is_null(model, "unk_token") || impl_.bpe.covers_bytes(), "unk_token is set and bytes are missing in the vocabulary");
  }

  void read_merge(const json& merge) {
    std::pair<std::string, std::string> pair;
    if (merge.is_string()) {
      const std::string both = merge.get<std::string>();
      const std::size_t space = both.find(' ');
      if (space == std::string::npos || both.find(' ', space + 1) != std::string::npos)
        refuse("has the merge ", merge.dump(), ", want two tokens with a space between them");
      pair = {both.substr(0, space), both.substr(space + 1)};
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      pair = {merge[0].get<std::string>(), merge[1].get<std::string>()};
    } else {
      refuse("has the merge ", merge.dump(), ", want two tokens");
    }
    if (const auto missing = impl_.bpe.add_merge(pair.first, pair.second))
      refuse("has the merge ", merge.dump(), ", but no token ", json(*missing).dump());
  }

  void read_normalizer(const json& from, const char* name) {
    if (is_null(from, name)) return;
    read_normalizer(object(from, name));
  }
  void read_normalizer(const json& normalizer) {
    const std::string type = text(normalizer, "type");
    static const std::pair<const char*, NormalForm> kForms[] = {
        {"NFC", NormalForm::kNfc}, {"NFD", NormalForm::kNfd}, {"NFKC", NormalForm::kNfkc}, {"NFKD", NormalForm::kNfkd}};
    for (const auto& [form, value] : kForms) {
      if (type != form) continue;
      impl_.normalizers.push_back(value);
      return;
    }
    want(type == "Sequence", "the normalizer ", json(type).dump(), " is not supported, want NFC, NFD, NFKC or NFKD");
    for (const json& inner : list(normalizer, "normalizers")) read_normalizer(inner);
  }

  void read_added_tokens(const json& all) {
    if (is_null(all, "added_tokens")) return;
    for (const json& entry : list(all, "added_tokens")) {
      AddedToken token;
      token.content = text(entry, "content");
      token.id = id(entry.value("id", json()), token.content);
      token.left_strip = flag(entry, "lstrip", false);
      token.right_strip = flag(entry, "rstrip", false);
      token.special = flag(entry, "special", false);
      token.normalized = flag(entry, "normalized", !token.special);
      want(!flag(entry, "single_word", false), "added token ", json(token.content).dump(),
           " is a single_word, which is not supported");
      if (token.content.empty()) refuse("has an added token without text");
      const auto in_model = impl_.bpe.id_of(token.content);
      const std::string* same_id = impl_.bpe.token_of(token.id);
      if ((in_model && *in_model != token.id) || (same_id != nullptr && *same_id != token.content))
        refuse("added token ", json(token.content).dump(), " has id ", token.id, ", which the vocabulary sees otherwise");
      impl_.added.push_back(std::move(token));
    }
    for (AddedToken& token : impl_.added) {
      token.shown = token.content;
      if (!impl_.added_by_content.emplace(token.content, &token).second || !impl_.added_by_id.emplace(token.id, &token).second)
        refuse("has added token ", json(token.content).dump(), " or its id ", token.id, " twice");
      if (token.special) impl_.special.insert(token.content);
      if (!token.normalized) {
        impl_.raw.add(token.content, &token);
        continue;
      }
      for (const NormalForm form : impl_.normalizers) token.shown = normalize(token.shown, form);
      impl_.normalized.add(token.shown, &token);
    }
    impl_.raw.finish();
    impl_.normalized.finish();
  }

  void read_pre_tokenizer(const json& step) {
    const std::string type = text(step, "type");
    if (type == "Sequence") {
      for (const json& inner : list(step, "pretokenizers")) read_pre_tokenizer(inner);
      return;
    }
    want(!byte_level_, "the pre_tokenizer has ", type, " behind ByteLevel");
    if (type == "ByteLevel") {
      byte_level_ = true;
      if (flag(step, "add_prefix_space", true)) impl_.pre_tokenizer.emplace_back(PrefixStep{});
      if (flag(step, "use_regex", true)) impl_.pre_tokenizer.emplace_back(SplitStep{Regex(kByteLevelPattern, file())});
    } else if (type == "Digits") {
      const bool each = flag(step, "individual_digits", false);
      impl_.pre_tokenizer.emplace_back(SplitStep{Regex(each ? "\\p{N}" : "\\p{N}+", file())});
    } else if (type == "Split") {
      const std::string behavior = text(step, "behavior");
      want(behavior == "Isolated" || behavior == "Removed", "Split has behavior ", json(behavior).dump(),
           ", want Isolated or Removed");
      const json& pattern = object(step, "pattern");
      const bool regex = pattern.contains("Regex");
      Regex compiled = regex ? Regex(text(pattern, "Regex"), file()) : Regex::literal(text(pattern, "String"), file());
      impl_.pre_tokenizer.emplace_back(SplitStep{std::move(compiled), behavior == "Removed", flag(step, "invert", false)});
    } else {
      unsupported("the pre_tokenizer ", json(type).dump(), " is not supported, want ByteLevel, Split or Digits");
    }
  }

  void read_post_processor(const json& processor) {
    const std::string type = text(processor, "type");
    if (type == "ByteLevel") return;  // changes offsets only
    if (type == "Sequence") {
      for (const json& inner : list(processor, "processors")) read_post_processor(inner);
      return;
    }
    want(type == "TemplateProcessing", "the post_processor ", json(type).dump(),
         " is not supported, want ByteLevel or TemplateProcessing");
    const json& special = object(processor, "special_tokens");
    std::vector<std::int64_t> before, behind;
    bool seen = false;
    for (const json& part : list(processor, "single")) {
      if (!part.is_object() || part.size() != 1) refuse("the template has ", part.dump(), ", want a token or a sequence");
      if (part.contains("Sequence")) {
        want(!seen && text(object(part, "Sequence"), "id") == "A", "the template has the text more than once");
        seen = true;
        continue;
      }
      const std::string name = text(object(part, "SpecialToken"), "id");
      for (const json& value : list(object(special, name.c_str()), "ids")) (seen ? behind : before).push_back(id(value, name));
    }
    want(seen, "the template has no text");
    impl_.before.insert(impl_.before.begin(), before.begin(), before.end());
    impl_.behind.insert(impl_.behind.end(), behind.begin(), behind.end());
  }

  Tokenizer::Impl& impl_;
  bool byte_level_ = false;
};

}  // namespace

std::shared_ptr<Tokenizer::Impl> parse_tokenizer(std::string_view text, const std::string& file) {
  const json all = ckpt::parse_strictly(text, file);
  auto impl = std::make_shared<Tokenizer::Impl>();
  Reader(*impl, file).read(all);
  return impl;
}

}  // namespace hyper_parallel::hf
