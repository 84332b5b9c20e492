#pragma once
// Damaged tokenizer.json and config.json files, the same in every run, and what must hold for whatever comes of them.
#include <array>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include <hyper_parallel/hf/config.h>
#include <hyper_parallel/hf/tokenizer.h>

namespace hyper_parallel::testing {

/// Reads a file that may be anything as tokenizer and as configuration. True: one of them took it, and what was read is
/// consistent; false: CheckpointError or ValueError. Another exception passes, and an inconsistency is an InternalError.
inline bool read_json_anything(std::string_view file) {
  bool valid = false;
  try {
    const hf::Config config = hf::parse_config(file, "fuzz");
    check_internal(hf::parse_config(hf::config_json(config), "again").hidden_size == config.hidden_size, "fuzz",
                   "does not round-trip");
    valid = true;
  } catch (const CheckpointError&) {
  } catch (const ValueError&) {
  }
  try {
    const hf::Tokenizer tokenizer = hf::Tokenizer::parse(file, "fuzz");
    for (const std::string_view text : {"", "a bc, don't 12\n\n x<s>", "\xc3\xa9\xe6\x97\xa5 \xf0\x9f\x98\x80"}) {
      for (const std::int64_t id : tokenizer.encode(text)) check_internal(id >= 0, "fuzz", "token ", id);
      (void)tokenizer.decode(tokenizer.encode(text));
    }
    valid = true;
  } catch (const CheckpointError&) {
  } catch (const ValueError&) {
  }
  return valid;
}

/// Valid files to begin with.
inline std::vector<std::string> json_files_to_mutate() {
  using nlohmann::json;
  const json bytes = json::parse(hf::byte_tokenizer_json());
  json merges = bytes;
  merges["model"]["vocab"]["ab"] = 256;
  merges["model"]["vocab"]["abc"] = 257;
  merges["model"]["merges"] = {"a b", "ab c"};
  merges["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", "\\p{L}+|\\s+(?!\\S)"}}}, {"behavior", "Isolated"}, {"invert", false}},
        {{"type", "Digits"}, {"individual_digits", true}},
        {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"use_regex", true}}}}};
  merges["normalizer"] = {{"type", "NFC"}};
  merges["added_tokens"] = {{{"id", 258},
                             {"content", "<s>"},
                             {"special", true},
                             {"lstrip", true},
                             {"rstrip", true},
                             {"normalized", false},
                             {"single_word", false}}};
  merges["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {258}}, {"tokens", {"<s>"}}}}}}};
  hf::Config moe;
  moe.family = hf::Family::kQwen3Moe;
  moe.num_experts = 4;
  moe.num_experts_per_tok = 2;
  moe.moe_intermediate_size = 8;
  moe.rope_scaling = {.type = "yarn", .factor = 2, .original_max_position_embeddings = 64};
  return {merges.dump(), hf::config_json(moe), hf::config_json({})};
}

/// One to three random changes to one of the files.
inline std::string mutate_json(const std::vector<std::string>& files, std::mt19937& random) {
  static constexpr std::array<std::string_view, 24> kPieces = {"null",
                                                               "true",
                                                               "-1",
                                                               "1e999",
                                                               "18446744073709551616",
                                                               "0",
                                                               "[]",
                                                               "{}",
                                                               "\"\"",
                                                               "\"NFC\"",
                                                               "\"ByteLevel\"",
                                                               "(",
                                                               "[",
                                                               "*",
                                                               "\\\\p{",
                                                               "\\ud800",
                                                               "\"type\"",
                                                               ",",
                                                               ":",
                                                               "}",
                                                               "]",
                                                               "\"",
                                                               "\xff",
                                                               "2147483648"};
  const auto below = [&](std::size_t n) {
    return n == 0 ? std::size_t{0} : std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  std::string file = files[below(files.size())];
  for (std::size_t changes = 1 + below(3); changes > 0; --changes) {
    const std::size_t at = below(file.size());
    switch (below(5)) {
      case 0:
        file[at] = static_cast<char>(below(256));
        break;
      case 1:
        file.erase(at, 1 + below(8));
        break;
      case 2:
        file.insert(at, kPieces[below(kPieces.size())]);
        break;
      case 3: {  // a value becomes another
        const std::size_t colon = file.find(':', at);
        if (colon == std::string::npos) break;
        const std::size_t end = file.find_first_of(",}]", colon);
        if (end != std::string::npos) file.replace(colon + 1, end - colon - 1, kPieces[below(kPieces.size())]);
        break;
      }
      default:
        file.resize(at);
    }
  }
  return file;
}

}  // namespace hyper_parallel::testing
