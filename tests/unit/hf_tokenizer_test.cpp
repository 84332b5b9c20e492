// Byte-level BPE: what a file may say, and damaged files. hf_python_test compares with the package tokenizers.
#include <hyper_parallel/hf/tokenizer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/message_of.h"
#include "support/mutate_json.h"
#include "support/temp_folder.h"

namespace hyper_parallel::hf {
namespace {

using hyper_parallel::testing::message_of;
using hyper_parallel::testing::TempFolder;
using hyper_parallel::testing::value_error;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

json merges() { return json::parse(hyper_parallel::testing::json_files_to_mutate()[0]); }
Tokenizer parse(const json& file) { return Tokenizer::parse(file.dump(), "t.json"); }

std::string refused(const std::string& pointer, const json& value) {
  json file = merges();
  file[json::json_pointer(pointer)] = value;
  return message_of<CheckpointError>([&] { return parse(file); });
}
std::string unsupported(const std::string& pointer, const json& value) {
  json file = merges();
  file[json::json_pointer(pointer)] = value;
  return value_error([&] { return parse(file); });
}

TEST(HfTokenizer, Bytes) {
  const Tokenizer bytes = Tokenizer::parse(byte_tokenizer_json(), "bytes");
  EXPECT_EQ(bytes.vocab_size(), 256);
  std::string all;
  std::vector<std::int64_t> want;
  for (int i = 0; i < 128; ++i) {
    all += static_cast<char>(i);
    want.push_back(i);
  }
  EXPECT_EQ(bytes.encode(all), want);
  EXPECT_EQ(bytes.decode(want), all);
  EXPECT_THAT(bytes.encode("\xc3\xa9"), ElementsAre(195, 169));
  EXPECT_TRUE(bytes.encode("").empty());
  EXPECT_EQ(bytes.decode(std::vector<std::int64_t>{195, 40, 240, 159, 152, 300, -1}), "\xef\xbf\xbd(\xef\xbf\xbd");
}

TEST(HfTokenizer, MergesTemplateAndAddedTokens) {
  const Tokenizer tokenizer = parse(merges());
  EXPECT_EQ(tokenizer.vocab_size(), 259);
  EXPECT_THAT(tokenizer.encode("abcab"), ElementsAre(258, 32, 257, 256));
  EXPECT_THAT(tokenizer.encode("abcab", {.add_special_tokens = false}), ElementsAre(32, 257, 256));
  EXPECT_THAT(tokenizer.encode("a  <s> b", {.add_special_tokens = false}), ElementsAre(32, 97, 258, 32, 98));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("abc")), "<s> abc");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("abc"), {.skip_special_tokens = true}), " abc");
  EXPECT_EQ(tokenizer.id_of("abc"), 257);
  EXPECT_EQ(tokenizer.id_of("<s>"), 258);
  EXPECT_EQ(tokenizer.id_of("xyz"), std::nullopt);
  EXPECT_EQ(tokenizer.token_of(257), "abc");
  EXPECT_EQ(tokenizer.token_of(999), std::nullopt);
  EXPECT_THAT(value_error([&] { return tokenizer.encode("ab\xff"); }), HasSubstr("is not UTF-8 from byte 2 on"));
}

TEST(HfTokenizer, WhatIsRefused) {
  EXPECT_THAT(refused("/model/vocab/ab", 257), HasSubstr("has the id 257 twice"));
  EXPECT_THAT(refused("/model/vocab/ab", -1), HasSubstr("has id -1, want an integer of 0 to"));
  EXPECT_THAT(refused("/model/merges/0", "a x y"), HasSubstr("want two tokens with a space between them"));
  EXPECT_THAT(refused("/model/merges/0", "b a"), HasSubstr("but no token \"ba\""));
  EXPECT_THAT(refused("/model/merges/0", 5), HasSubstr("has the merge 5, want two tokens"));
  EXPECT_THAT(refused("/model/vocab", 5), HasSubstr("has no object \"vocab\""));
  EXPECT_THAT(refused("/added_tokens/0/id", 5), HasSubstr("added token \"<s>\" has id 5, which the vocabulary sees otherwise"));
  EXPECT_THAT(refused("/added_tokens/0/content", ""), HasSubstr("an added token without text"));
  EXPECT_THAT(refused("/pre_tokenizer/pretokenizers/0/pattern/Regex", "(a"), HasSubstr("\"(a\" is no regular expression"));
  EXPECT_THAT(refused("/post_processor/single/0", json::object()), HasSubstr("the template has {}"));
  EXPECT_THAT(message_of<CheckpointError>([] { return Tokenizer::parse("{", "t"); }), HasSubstr("is no JSON"));
  EXPECT_THAT(unsupported("/model/type", "WordPiece"), HasSubstr("the model is not BPE"));
  EXPECT_THAT(unsupported("/model/dropout", 0.1), HasSubstr("dropout is 0.1, want null"));
  EXPECT_THAT(unsupported("/model/byte_fallback", true), HasSubstr("byte_fallback"));
  EXPECT_THAT(unsupported("/model/continuing_subword_prefix", "##"), HasSubstr("continuing_subword_prefix"));
  EXPECT_THAT(unsupported("/truncation", json::object()), HasSubstr("truncation is set"));
  EXPECT_THAT(unsupported("/padding", json::object()), HasSubstr("padding is set"));
  EXPECT_THAT(unsupported("/normalizer/type", "Lowercase"), HasSubstr("the normalizer \"Lowercase\" is not supported"));
  EXPECT_THAT(unsupported("/pre_tokenizer/pretokenizers/0/behavior", "Contiguous"), HasSubstr("want Isolated or Removed"));
  EXPECT_THAT(unsupported("/pre_tokenizer/pretokenizers/1/type", "Metaspace"), HasSubstr("\"Metaspace\" is not supported"));
  EXPECT_THAT(unsupported("/pre_tokenizer/pretokenizers/2", {{"type", "Digits"}}), HasSubstr("does not end with ByteLevel"));
  EXPECT_THAT(unsupported("/decoder/type", "Metaspace"), HasSubstr("the decoder is not ByteLevel"));
  EXPECT_THAT(unsupported("/post_processor/type", "BertProcessing"), HasSubstr("\"BertProcessing\" is not supported"));
  EXPECT_THAT(unsupported("/added_tokens/0/single_word", true), HasSubstr("is a single_word"));
  const TempFolder folder;
  EXPECT_THAT(message_of<CheckpointError>([&] { return Tokenizer::load(folder.path()); }),
              HasSubstr("tokenizer.json: cannot open"));
}

TEST(HfTokenizer, LongPiecesTakeNoSquareOfTheTime) {
  const Tokenizer tokenizer = parse(merges());
  const std::vector<std::int64_t> tokens = tokenizer.encode(std::string(1'000'000, 'a') + "b", {.add_special_tokens = false});
  ASSERT_EQ(tokens.size(), 1'000'001U);
  EXPECT_EQ(tokens.back(), 256);
}

TEST(HfFuzz, DamagedFilesAreRefusedOrValid) {
  const std::vector<std::string> files = hyper_parallel::testing::json_files_to_mutate();
  for (const std::string& file : files) ASSERT_TRUE(hyper_parallel::testing::read_json_anything(file));
  std::mt19937 random(2026);
  int valid = 0;
  constexpr int kRounds = 10'000;
  for (int i = 0; i < kRounds; ++i) {
    const std::string file = hyper_parallel::testing::mutate_json(files, random);
    try {
      valid += hyper_parallel::testing::read_json_anything(file) ? 1 : 0;
    } catch (const std::exception& error) {
      FAIL() << "round " << i << ": " << error.what() << "\n" << file;
    }
  }
  EXPECT_GT(valid, kRounds / 50);
  EXPECT_LT(valid, kRounds / 2);
}

}  // namespace
}  // namespace hyper_parallel::hf
