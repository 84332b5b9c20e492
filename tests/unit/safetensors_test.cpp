// safetensors files: what is read and written, what is refused.
#include <hyper_parallel/ckpt/safetensors.h>

#include <csignal>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "ckpt/crc32c.h"
#include "ckpt/runs.h"
#include "support/message_of.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::file_text;
using hyper_parallel::testing::message_of;
using hyper_parallel::testing::set_file_text;
using hyper_parallel::testing::TempFolder;
using hyper_parallel::testing::value_error;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::span<const std::byte> bytes_of_text(std::string_view text) { return std::as_bytes(std::span(text)); }

/// Length prefix, header and `data` zero bytes.
std::string file_with(const std::string& header, std::size_t data) {
  std::string prefix(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) prefix[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return prefix + header + std::string(data, '\0');
}

std::string refusal(const std::string& header, std::size_t data) {
  const std::string text = file_with(header, data);
  return message_of<CheckpointError>([&] { return parse_header(text, text.size(), "f.safetensors"); });
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(Safetensors, HeaderIsThatOfThePythonPackage) {
  const auto [header, text] =
      make_header({{"b", Dtype::kF32, {2, 3}}, {"a", Dtype::kF32, {}}, {"c", Dtype::kI64, {1}}, {"d", Dtype::kBool, {0, 7}}},
                  {{"format", "pt"}, {"note", "tab\t \"quoted\" \xc3\xa9 \x01"}});
  const std::string want =
      R"({"__metadata__":{"format":"pt","note":"tab\t \"quoted\" é \u0001"},"c":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[8,12]},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[12,36]},)"
      R"("d":{"dtype":"BOOL","shape":[0,7],"data_offsets":[36,36]}})";
  EXPECT_EQ(text.substr(8, want.size()), want);
  EXPECT_EQ(text.size() % 8, 0U);
  EXPECT_EQ(header.file_size, text.size() + 36);
  const SafetensorsHeader again = parse_header(text, header.file_size, "f");
  EXPECT_EQ(again.metadata, header.metadata);
  ASSERT_EQ(again.tensors.size(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(again.tensors[i].name, header.tensors[i].name);
    EXPECT_EQ(again.tensors[i].dtype, header.tensors[i].dtype);
    EXPECT_EQ(again.tensors[i].shape, header.tensors[i].shape);
    EXPECT_EQ(again.tensors[i].begin, header.tensors[i].begin);
    EXPECT_EQ(again.tensors[i].end, header.tensors[i].end);
  }
}

TEST(Safetensors, EveryDtype) {
  std::vector<TensorSpec> tensors;
  for (int i = 0; i <= static_cast<int>(Dtype::kU64); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(dtype_of(to_string(dtype)), dtype);
    tensors.push_back({concat("t", i), dtype, {4, 2}});
  }
  EXPECT_EQ(dtype_of("F128"), std::nullopt);
  const auto [header, text] = make_header(tensors);
  const SafetensorsHeader again = parse_header(text, header.file_size, "f");
  for (const TensorEntry& tensor : again.tensors) EXPECT_EQ(tensor.bytes(), static_cast<std::uint64_t>(bits_of(tensor.dtype)));
}

TEST(Safetensors, ValuesThatCannotBeWritten) {
  EXPECT_THAT(value_error([] {
                return make_header({{"a", Dtype::kU8, {1}}, {"a", Dtype::kU8, {2}}});
              }),
              HasSubstr("[safetensors] tensor a is there twice"));
  EXPECT_THAT(value_error([] { return make_header({{"__metadata__", Dtype::kU8, {1}}}); }), HasSubstr("__metadata__"));
  EXPECT_THAT(value_error([] { return make_header({{"a", Dtype::kU8, {-1}}}); }), HasSubstr("tensor a has negative sizes"));
  EXPECT_THAT(value_error([] { return make_header({{"a", Dtype::kF4, {3}}}); }), HasSubstr("do not fill bytes"));
  EXPECT_THAT(value_error([] {
                return make_header({{"a", Dtype::kF64, {1LL << 40, 1LL << 40}}});
              }),
              HasSubstr("more bytes than"));
  EXPECT_THAT(value_error([] { return make_header({{"\xff", Dtype::kU8, {1}}}); }), HasSubstr("not UTF-8"));
  EXPECT_THAT(value_error([] {
                return make_header({{"a", Dtype::kU8, {1LL << 62}},
                                    {"b", Dtype::kU8, {1LL << 62}},
                                    {"c", Dtype::kU8, {1LL << 62}},
                                    {"d", Dtype::kU8, {1LL << 62}}});
              }),
              HasSubstr("more bytes than"));
}

TEST(Safetensors, HeadersThatAreRefused) {
  const std::string good = one("U8", "[2]", "[0,2]");
  EXPECT_EQ(refusal(good, 2), "nothing thrown");
  EXPECT_EQ(refusal(good + "   ", 2), "nothing thrown");
  EXPECT_EQ(refusal("{}", 0), "nothing thrown");
  const struct {
    std::string header;
    std::size_t data;
    std::string message;
  } cases[] = {
      {"", 0, "header does not begin with '{' (offset 8)"},
      {" " + good, 2, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {good.substr(0, good.size() - 1), 2, "no JSON or not UTF-8 (offset"},
      {good + "x", 2, "no JSON or not UTF-8 (offset 61)"},
      {good + std::string(1, '\0'), 2, "NUL byte (offset 61)"},
      {R"({"a)"
       "\xff"
       R"(":{}})",
       0, "no JSON or not UTF-8 (offset 11)"},
      {R"({"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "no JSON or not UTF-8"},
      {good.substr(0, good.size() - 1) + "," + good.substr(1), 2, "tensor a is there twice (header, offset 64)"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ is there twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, R"(__metadata__ has "k" twice)"},
      {R"({"__metadata__":{"k":1}})", 0, R"(__metadata__ has the number 1 for "k", want a string)"},
      {R"({"__metadata__":{"k":{}}})", 0, R"(has an object for "k")"},
      {R"({"__metadata__":[]})", 0, "__metadata__ is an array, want an object"},
      {R"({"a":1})", 0, "tensor a is the number 1, want an object"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, R"(tensor a has "dtype" twice)"},
      {R"({"a":{"dtype":"U8","shape":[0]}})", 0, "tensor a has no data_offsets"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,0]}})", 0, "tensor a has no shape"},
      {R"({"a":{"shape":[0],"data_offsets":[0,0]}})", 0, "tensor a has no dtype"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"stride":[1]}})", 0, R"(has "stride", want dtype, shape)"},
      {one("u8", "[2]", "[0,2]"), 2, R"(dtype is "u8")"},
      {R"({"a":{"dtype":7,"shape":[0],"data_offsets":[0,0]}})", 0, "has the number 7 for dtype, want a string"},
      {R"({"a":{"dtype":["U8"],"shape":[0],"data_offsets":[0,0]}})", 0, "has an array for dtype"},
      {one("U8", "2", "[0,2]"), 2, "has the number 2 for shape, want an array"},
      {one("U8", "[-2]", "[0,2]"), 2, "has the number -2 in shape"},
      {one("U8", "[2.0]", "[0,2]"), 2, "has the number 2.0 in shape"},
      {one("U8", "[2e0]", "[0,2]"), 2, "has the number 2e0 in shape"},
      {one("U8", "[9223372036854775808]", "[0,2]"), 2, "has the size 9223372036854775808 in shape"},
      {one("U8", "[99999999999999999999999999]", "[0,2]"), 2, "has the number 99999999999999999999999999 in shape"},
      {one("U8", "[null]", "[0,2]"), 2, "has null in shape"},
      {one("U8", "[true]", "[0,2]"), 2, "has a boolean in shape"},
      {one("U8", R"(["2"])", "[0,2]"), 2, "has a string in shape"},
      {one("U8", "[[2]]", "[0,2]"), 2, "has an array in shape"},
      {one("F64", "[4294967296,4294967296]", "[0,0]"), 0, "bytes overflow"},
      {one("F4", "[3]", "[0,2]"), 2, "do not fill whole bytes"},
      {one("U8", "[2]", "[0]"), 2, "has 1 data_offsets, want 2"},
      {one("U8", "[2]", "[0,1,2]"), 2, "has the number 2 in data_offsets"},
      {one("U8", "[2]", "[2,0]"), 2, "has data_offsets 2 to 0"},
      {one("U8", "[2]", "[0,3]"), 3, "has 3 bytes in data_offsets, want 2"},
      {one("U8", "[2]", "[0,2]"), 1, "data_offsets up to 2, but the file ends after 1 bytes"},
      {one("U8", "[2]", "[18446744073709551613,18446744073709551615]"), 2, "has data_offsets up to 18446744073709551615"},
      {one("U8", "[2]", "[0,2]"), 5, "3 bytes from offset 63 on belong to no tensor"},
      {one("U8", "[2]", "[1,3]"), 3, "tensor a begins at offset 62, want 61: there is a hole after the header"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3,
       "tensor b begins at offset 114, want 115: it overlaps a"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})", 5,
       "there is a hole after a"},
  };
  for (const auto& bad : cases)
    EXPECT_THAT(refusal(bad.header, bad.data), AllOf(HasSubstr("[safetensors] f.safetensors: "), HasSubstr(bad.message)))
        << bad.header;
}

TEST(Safetensors, LengthsThatAreRefused) {
  const auto message = [](std::string text, std::uint64_t size) {
    return message_of<CheckpointError>([&] { return parse_header(text, size, "f"); });
  };
  EXPECT_THAT(message("", 0), HasSubstr("f: has 0 bytes, want at least 8"));
  EXPECT_THAT(message("1234567", 7), HasSubstr("has 7 bytes"));
  std::string huge = file_with("{}", 0);
  huge[3] = 6;  // 100,663,298 bytes
  EXPECT_THAT(message(huge, 1ULL << 40), HasSubstr("header has 100663298 bytes (offset 0), want at most 100000000"));
  huge[7] = '\xff';
  EXPECT_THAT(message(huge, 1ULL << 40), HasSubstr("want at most 100000000"));
  EXPECT_THAT(message(file_with(one("U8", "[2]", "[0,2]"), 0).substr(0, 30), 30),
              HasSubstr("header has 53 bytes (offset 0), but the file ends at 30"));
}

/// A file of U16 elements 0, 1, 2, ...
SafetensorsFile counting_file(const TempFolder& folder, const std::vector<std::int64_t>& shape) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(whole_box(shape).numel()));
  std::iota(values.begin(), values.end(), std::uint16_t{0});
  SafetensorsWriter writer(folder / "count.safetensors", {{"x", Dtype::kU16, shape}, {"first", Dtype::kF32, {3}}});
  const std::array first = {1.F, 2.F, 3.F};
  writer.write("first", std::as_bytes(std::span(first)));
  writer.write("x", std::as_bytes(std::span(values)));
  writer.finish();
  return SafetensorsFile(folder / "count.safetensors");
}

TEST(Safetensors, EveryBoxOfATensor) {
  const TempFolder folder;
  const std::vector<std::int64_t> shape = {3, 4, 5};
  const SafetensorsFile file = counting_file(folder, shape);
  const TensorEntry& x = file.at("x");
  std::int64_t read = 0;
  int boxes = 0;
  for (int code = 0; code < 4 * 5 * 6 * 4 * 5 * 6; ++code) {
    int rest = code;
    Box box;
    bool valid = true;
    for (const std::int64_t size : shape) {
      const int begin = rest % static_cast<int>(size + 1);
      rest /= static_cast<int>(size + 1);
      const int end = rest % static_cast<int>(size + 1);
      rest /= static_cast<int>(size + 1);
      valid = valid && begin <= end;
      box.offset.push_back(begin);
      box.size.push_back(end - begin);
    }
    if (!valid) continue;
    ++boxes;
    std::vector<std::uint16_t> got(static_cast<std::size_t>(box.numel()));
    file.read_box(x, box, std::as_writable_bytes(std::span(got)));
    std::size_t at = 0;
    for (std::int64_t i = box.offset[0]; i < box.offset[0] + box.size[0]; ++i)
      for (std::int64_t j = box.offset[1]; j < box.offset[1] + box.size[1]; ++j)
        for (std::int64_t k = box.offset[2]; k < box.offset[2] + box.size[2]; ++k)
          ASSERT_EQ(got[at++], i * 20 + j * 5 + k) << box.to_string();
    read += 2 * box.numel();
    ASSERT_EQ(file.bytes_read(), read) << "no other bytes are read";
  }
  EXPECT_EQ(boxes, 10 * 15 * 21);
}

TEST(Safetensors, RangesAndMemory) {
  const TempFolder folder;
  const SafetensorsFile file = counting_file(folder, {100, 200});
  const TensorEntry& x = file.at("x");
  std::array<std::uint16_t, 3> three{};
  file.read(x, 2 * 777, std::as_writable_bytes(std::span(three)));
  EXPECT_THAT(three, ::testing::ElementsAre(777, 778, 779));
  std::vector<std::uint16_t> rows(60 * 200);  // long enough to be read by a system call of its own
  file.read_box(x, {{30, 0}, {60, 200}}, std::as_writable_bytes(std::span(rows)));
  EXPECT_EQ(rows.front(), 6000);
  EXPECT_EQ(rows.back(), 17999);
  EXPECT_EQ(file.bytes_read(), 6 + 2 * 12000);
  const auto mapped = file.bytes(file.at("first"));
  float second = 0;
  std::memcpy(&second, mapped.data() + 4, 4);
  EXPECT_EQ(second, 2.F);
  EXPECT_EQ(file.bytes(x).size(), 40000U);

  EXPECT_THAT(value_error([&] { file.read(x, 39999, std::as_writable_bytes(std::span(three))); }),
              HasSubstr("bytes 39999 to 40005 of tensor x, which has 40000"));
  const auto box_error = [&](const Box& box) {
    return value_error([&] { file.read_box(x, box, std::as_writable_bytes(std::span(three))); });
  };
  EXPECT_THAT(box_error({{0, 199}, {1, 3}}), HasSubstr("box [0:1, 199:202] of tensor x"));
  EXPECT_THAT(box_error({{-1, 0}, {1, 3}}), HasSubstr("is not inside its shape [0:100, 0:200]"));
  EXPECT_THAT(box_error({{0}, {3}}), HasSubstr("is not inside its shape"));
  EXPECT_THAT(box_error({{0, 0}, {1, 4}}), HasSubstr("has 64 bits, got memory of 6 bytes"));
  EXPECT_THAT(message_of<CheckpointError>([&] { return file.at("y"); }), HasSubstr("count.safetensors: has no tensor y"));
}

TEST(Safetensors, PackedElements) {
  const TempFolder folder;
  SafetensorsWriter writer(folder / "f", {{"x", Dtype::kF4, {2, 4}}});
  writer.write("x", bytes_of_text("abcd"));
  writer.finish();
  const SafetensorsFile file(folder / "f");
  std::string out(2, '\0');
  file.read_box(file.at("x"), {{0, 2}, {2, 2}}, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, "bd");
  EXPECT_THAT(value_error([&] {
                file.read_box(file.at("x"), {{0, 1}, {2, 2}}, std::as_writable_bytes(std::span(out)));
              }),
              HasSubstr("share bytes"));
}

TEST(Safetensors, WrittenFromThreadsAndByBoxes) {
  const TempFolder folder;
  const std::vector<TensorSpec> tensors = {
      {"a", Dtype::kI32, {64, 48}}, {"b", Dtype::kU8, {1000}}, {"none", Dtype::kF64, {0, 3}}};
  SafetensorsWriter writer(folder / "f", tensors);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::int32_t> column(64 * 12);
      for (std::int32_t i = 0; i < 64 * 12; ++i) column[static_cast<std::size_t>(i)] = i / 12 * 48 + t * 12 + i % 12;
      writer.write_box("a", {{0, t * 12}, {64, 12}}, std::as_bytes(std::span(column)));
      const std::string text(250, static_cast<char>('a' + t));
      writer.write("b", bytes_of_text(text), static_cast<std::uint64_t>(t) * 250);
    });
  }
  for (std::thread& thread : threads) thread.join();
  writer.finish();
  const SafetensorsFile file(folder / "f");
  std::vector<std::int32_t> a(64 * 48), want(64 * 48);
  std::iota(want.begin(), want.end(), 0);
  file.read(file.at("a"), 0, std::as_writable_bytes(std::span(a)));
  EXPECT_EQ(a, want);
  EXPECT_EQ(static_cast<char>(file.bytes(file.at("b"))[999]), 'd');
}

TEST(Safetensors, WrittenByTwoWriters) {
  const TempFolder folder;
  const std::vector<TensorSpec> tensors = {{"a", Dtype::kU8, {6}}};
  SafetensorsWriter first(folder / "f", tensors, {.partial = true});
  EXPECT_THAT(message_of<CheckpointError>([&] {
                SafetensorsWriter(folder / "f", {{"a", Dtype::kU8, {7}}}, {.join = true});
              }),
              HasSubstr("has another header or size"));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                SafetensorsWriter(folder / "f", {{"b", Dtype::kU8, {6}}}, {.join = true});
              }),
              HasSubstr("has another header or size"));
  SafetensorsWriter second(folder / "f", tensors, {.join = true, .partial = true});
  second.write("a", bytes_of_text("def"), 3);
  first.write("a", bytes_of_text("abc"));
  first.finish();
  second.finish();
  EXPECT_THAT(file_text(folder / "f"), ::testing::EndsWith("abcdef"));
}

TEST(Safetensors, WritersMistakes) {
  const TempFolder folder;
  SafetensorsWriter writer(folder / "f", {{"a", Dtype::kU8, {6}}, {"b", Dtype::kU8, {2, 2}}});
  writer.write("a", bytes_of_text("abcd"), 1);
  EXPECT_THAT(value_error([&] { writer.write("c", {}); }), HasSubstr("no tensor c was announced"));
  EXPECT_THAT(value_error([&] { writer.write("a", bytes_of_text("xyz"), 4); }),
              HasSubstr("bytes 4 to 7 of tensor a, which has 6"));
  EXPECT_THAT(value_error([&] { writer.write("a", bytes_of_text("xy"), 4); }),
              HasSubstr("bytes 4 to 6 of tensor a are written a second time"));
  EXPECT_THAT(value_error([&] { writer.write("a", bytes_of_text("xy"), 0); }),
              HasSubstr("bytes 0 to 2 of tensor a are written a second time"));
  EXPECT_THAT(value_error([&] { writer.finish(); }), HasSubstr("tensor a was not written from its byte 0 on"));
  writer.write("a", bytes_of_text("0"), 0);
  EXPECT_THAT(value_error([&] { writer.finish(); }), HasSubstr("tensor a was not written from its byte 5 on"));
  writer.write("a", bytes_of_text("5"), 5);
  writer.write_box("b", {{0, 1}, {2, 1}}, bytes_of_text("24"));
  EXPECT_THAT(value_error([&] { writer.finish(); }), HasSubstr("tensor b was not written from its byte 0 on"));
  writer.write_box("b", {{0, 0}, {2, 1}}, bytes_of_text("13"));
  writer.finish();
  EXPECT_THAT(value_error([&] { writer.finish(); }), HasSubstr("finished already"));
  EXPECT_THAT(file_text(folder / "f"), ::testing::EndsWith("0abcd51234"));
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsWriter(folder / "no/f", {}); }), HasSubstr("no/f: cannot create: "));
}

TEST(Safetensors, AFullDiskIsAnErrorWithFileAndOffset) {
  const TempFolder folder;
  SafetensorsWriter writer(folder / "f", {{"a", Dtype::kU8, {1 << 20}}});
  const std::uint64_t data = writer.header().data_begin;
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{}, small{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  small = old;
  small.rlim_cur = 64 << 10;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text(1 << 20, 'x');
  const std::string message = message_of<CheckpointError>([&] { writer.write("a", bytes_of_text(text)); });
  const std::string no_file = message_of<CheckpointError>([&] {
    SafetensorsWriter(folder / "g", {{"a", Dtype::kU8, {1 << 20}}});
  });
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_THAT(message, HasSubstr(concat("f: cannot write ", (1 << 20) + data - (64 << 10), " bytes at offset 65536: ")));
  EXPECT_THAT(no_file, HasSubstr("g: cannot set the size to "));
}

TEST(Safetensors, FilesThatWereCutOrAreMissing) {
  const TempFolder folder;
  const SafetensorsFile file = counting_file(folder, {100, 200});
  const std::filesystem::path path = folder / "count.safetensors";
  std::vector<std::byte> out(40000);
  std::filesystem::resize_file(path, 20000);
  EXPECT_THAT(message_of<CheckpointError>([&] { file.read(file.at("x"), 0, out); }),
              HasSubstr("count.safetensors: ends at offset 20000"));
  EXPECT_THAT(message_of<CheckpointError>([&] { return file.bytes(file.at("x")); }), HasSubstr("has become shorter"));
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsFile{path}; }), HasSubstr("but the file ends after"));
  std::filesystem::resize_file(path, 40);
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsFile{path}; }), HasSubstr("but the file ends at 40"));
  std::filesystem::resize_file(path, 5);
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsFile{path}; }), HasSubstr("has 5 bytes, want at least 8"));
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsFile{folder / "none"}; }),
              HasSubstr("none: cannot open: No such file"));
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsFile{folder.path()}; }), HasSubstr("is no regular file"));
}

TEST(SafetensorsSet, FilesWithAnIndex) {
  const TempFolder folder;
  const std::vector<TensorSpec> tensors = {
      {"a", Dtype::kU8, {4}}, {"b", Dtype::kU8, {3}}, {"big", Dtype::kU8, {20}}, {"c", Dtype::kU8, {7}}};
  const ShardedFiles plan = shard_files(tensors, 7);
  ASSERT_EQ(plan.files.size(), 3U);
  EXPECT_EQ(plan.files[2].name, "model-00003-of-00003.safetensors");
  EXPECT_EQ(plan.index, R"({
  "metadata": {
    "total_size": 34
  },
  "weight_map": {
    "a": "model-00001-of-00003.safetensors",
    "b": "model-00001-of-00003.safetensors",
    "big": "model-00002-of-00003.safetensors",
    "c": "model-00003-of-00003.safetensors"
  }
}
)");
  for (const ShardedFiles::File& file : plan.files) {
    SafetensorsWriter writer(folder / file.name, file.tensors);
    for (const TensorSpec& tensor : file.tensors) {
      const std::string text(static_cast<std::size_t>(tensor.shape[0]), tensor.name[0]);
      writer.write(tensor.name, bytes_of_text(text));
    }
    writer.finish();
  }
  write_text(folder / "model.safetensors.index.json", plan.index);
  const SafetensorsSet set(folder.path());
  EXPECT_EQ(set.tensors().size(), 4U);
  EXPECT_EQ(set.files().size(), 3U);
  const SafetensorsSet::Place c = set.at("c");
  EXPECT_EQ(static_cast<char>(c.file->bytes(*c.tensor)[6]), 'c');
  EXPECT_THAT(message_of<CheckpointError>([&] { return set.at("d"); }), HasSubstr("has no tensor d"));

  const auto with_index = [&](const std::string& text) {
    set_file_text(folder / "model.safetensors.index.json", text);
    return message_of<CheckpointError>([&] { SafetensorsSet{folder.path()}; });
  };
  EXPECT_THAT(with_index(R"({"weight_map":{"x":"model-00001-of-00003.safetensors"}})"),
              HasSubstr("00001-of-00003.safetensors: has no tensor x"));
  EXPECT_THAT(with_index(R"({"weight_map":{"x":"model-00004-of-00003.safetensors"}})"), HasSubstr("cannot open"));
  for (const char* bad : {"../a", "/etc/passwd", "..", ".", "", "sub/a", "a\\\\b", "a\\u0000b"})
    EXPECT_THAT(with_index(concat(R"({"weight_map":{"x":")", bad, "\"}}")), HasSubstr("want a plain name inside its folder"))
        << bad;
  EXPECT_THAT(with_index(R"({"weight_map":{"x":"a","x":"b"}})"), HasSubstr(R"(has "x" twice in one object)"));
  EXPECT_THAT(with_index(R"({"weight_map":{"x":3}})"), HasSubstr("no file name for tensor x"));
  EXPECT_THAT(with_index(R"({"weight_map":[]})"), HasSubstr("has no object weight_map"));
  EXPECT_THAT(with_index("{"), HasSubstr("is no JSON or not UTF-8"));
  EXPECT_THAT(with_index(std::string("{}\0", 3)), HasSubstr("has a NUL byte (offset 2)"));
}

TEST(SafetensorsSet, OneFile) {
  const TempFolder folder;
  EXPECT_THAT(message_of<CheckpointError>([&] { SafetensorsSet{folder.path()}; }),
              HasSubstr("has neither model.safetensors.index.json nor"));
  const ShardedFiles plan = shard_files({{"a", Dtype::kU8, {4}}}, 100);
  ASSERT_EQ(plan.files.size(), 1U);
  EXPECT_TRUE(plan.index.empty());
  SafetensorsWriter writer(folder / plan.files[0].name, plan.files[0].tensors);
  writer.write("a", bytes_of_text("abcd"));
  writer.finish();
  EXPECT_EQ(SafetensorsSet(folder.path()).tensors().size(), 1U);
  EXPECT_EQ(SafetensorsSet(folder / "model.safetensors").tensors().size(), 1U);
  EXPECT_THAT(value_error([] { return shard_files({}, 0); }), HasSubstr("max_bytes is 0"));
}

TEST(Crc32c, KnownValuesAndPartsInAnyOrder) {
  EXPECT_EQ(crc32c(bytes_of_text("123456789")), 0xe3069283U);
  EXPECT_EQ(crc32c({}), 0U);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32)), 0x8a9136aaU);
  std::mt19937 random(1);
  std::string text(200'000, '\0');
  for (char& c : text) c = static_cast<char>(random());
  for (int round = 0; round < 50; ++round) {
    const std::string_view part = std::string_view(text).substr(random() % 9, 1 + random() % (round % 2 == 0 ? 3000 : 199'000));
    std::uint32_t bit_by_bit = ~0U;
    for (const char c : part) {
      bit_by_bit ^= static_cast<unsigned char>(c);
      for (int bit = 0; bit < 8; ++bit) bit_by_bit = bit_by_bit >> 1 ^ ((bit_by_bit & 1) != 0 ? 0x82f63b78U : 0);
    }
    ASSERT_EQ(crc32c(bytes_of_text(part)), ~bit_by_bit) << part.size();
    // Two readers take turns.
    PartialCrc32c readers[2];
    for (std::size_t at = 0; at < part.size();) {
      const std::size_t size = std::min<std::size_t>(part.size() - at, 1 + random() % (round % 3 == 0 ? 90'000 : 400));
      readers[random() % 2].add(at, bytes_of_text(part.substr(at, size)));
      at += size;
    }
    const std::uint32_t together = readers[0].contribution(part.size()) ^ readers[1].contribution(part.size());
    ASSERT_EQ(PartialCrc32c::finish(together, part.size()), ~bit_by_bit) << part.size();
  }
}

}  // namespace
}  // namespace hyper_parallel::ckpt
