// Checkpoints rewritten, compared and read by one process.
#include <hyper_parallel/ckpt/offline.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/small_net.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

namespace fs = std::filesystem;
using namespace hyper_parallel::testing;
using ::testing::HasSubstr;

/// Tensors of many shapes and types.
Tensors some_tensors() {
  torch::manual_seed(4);
  return {{"a.weight", torch::rand({7, 5})},     {"a.bias", torch::rand({7})},
          {"b.cube", torch::rand({3, 4, 6})},    {"b.half", torch::rand({5, 2}).to(torch::kBFloat16)},
          {"count", torch::tensor(int64_t{42})}, {"empty", torch::empty({0, 3})},
          {"flags", torch::rand({9}) > 0.5},     {"ids", torch::randint(100, {6, 3}, torch::kLong)}};
}

void save_on(int world, const fs::path& path, const Tensors& values, int64_t dim, const std::string& extra = {}) {
  run_ranks(world, [&] {
    const DeviceMesh mesh = init_device_mesh("cpu", {get_world_size()});
    StateDict state;
    for (const auto& [name, value] : values) {
      if (value.dim() == 0) {
        state.add(name, value);
      } else {
        state.add(name, distribute_tensor(value, mesh, {Shard(std::min(dim, value.dim() - 1))}));
      }
    }
    save(path, state, {.extra = extra});
  });
}

void expect_loads(const fs::path& path, const Tensors& values) {
  run_ranks(1, [&] {
    Tensors got;
    StateDict state;
    for (const auto& [name, value] : values) {
      got[name] = torch::zeros_like(value);
      state.add(name, got[name]);
    }
    load(path, state);
    for (const auto& [name, value] : values) EXPECT_TRUE(torch::equal(got[name], value)) << name;
  });
}

TEST(CkptOffline, ReshardedInSmallBoxes) {
  const TempFolder folder;
  const Tensors values = some_tensors();
  save_on(3, folder / "three", values, 1, "{\"step\": 7}");
  for (const int ranks : {1, 2, 4}) {
    for (const std::uint64_t buffer : {std::uint64_t{1}, std::uint64_t{40}, std::uint64_t{16} << 20}) {
      const fs::path path = folder / concat(ranks, '-', buffer);
      std::uint64_t last = 0, whole = 0;
      const Source source(folder / "three");
      write_checkpoint_of(
          source, path,
          {.ranks = ranks, .extra = source.info().extra, .buffer_bytes = buffer, .progress = [&](auto done, auto all) {
             EXPECT_GT(done, last);
             last = done;
             whole = all;
           }});
      EXPECT_EQ(last, whole);
      EXPECT_TRUE(verify(path).empty());
      const CheckpointInfo info = read_info(path);
      EXPECT_EQ(info.world_size, ranks);
      EXPECT_EQ(info.extra, "{\"step\":7}");
      EXPECT_EQ(info.tensors.at("b.cube").pieces.size(), static_cast<std::size_t>(std::min(ranks, 3)));
      EXPECT_EQ(static_cast<std::uint64_t>(source.bytes_read()), whole);
      expect_loads(path, values);
      EXPECT_TRUE(diff(source, Source(path), {.buffer_bytes = 64}).empty());
    }
  }
}

TEST(CkptOffline, ReshardedFilesAreThoseOfRanks) {
  const TempFolder folder;
  Tensors values = some_tensors();
  values.erase("count");  // which rank has it is a matter of load
  save_on(2, folder / "two", values, 0);
  write_checkpoint_of(Source(folder / "two"), folder / "again", {.ranks = 2});
  for (const char* file : {"rank-00000.safetensors", "rank-00001.safetensors"})
    EXPECT_TRUE(file_text(folder / "two" / file) == file_text(folder / "again" / file)) << file;
}

TEST(CkptOffline, PrefixesAndDtypes) {
  const TempFolder folder;
  const Tensors values = some_tensors();
  save_on(2, folder / "two", values, 0);
  write_checkpoint_of(Source(folder / "two"), folder / "b", {.prefix = "b.", .add_prefix = "model.", .dtype = Dtype::kF16});
  const CheckpointInfo info = read_info(folder / "b");
  EXPECT_EQ(info.tensors.size(), 2U);
  EXPECT_EQ(info.tensors.at("model.cube").dtype, Dtype::kF16);
  save_on(2, folder / "large", {{"big", torch::tensor({1.0, 1e38, 70000.0})}, {"inf", torch::tensor({INFINITY, -1.0F})}}, 0);
  EXPECT_THAT(value_error([&] {
                write_checkpoint_of(Source(folder / "large"), folder / "c", {.dtype = Dtype::kF16});
                return 0;
              }),
              HasSubstr("tensor big has 1e+38, which is beyond the range of F16"));
  EXPECT_FALSE(fs::exists(folder / "c"));
  EXPECT_FALSE(fs::exists(folder / ".c.partial"));
  write_checkpoint_of(Source(folder / "large"), folder / "c", {.dtype = Dtype::kBF16});
  write_checkpoint_of(Source(folder / "large"), folder / "d", {.prefix = "inf", .add_prefix = "x", .dtype = Dtype::kF16});
  EXPECT_TRUE(verify(folder / "d").empty()) << "infinity was there before";
  expect_loads(folder / "b",
               {{"model.cube", values.at("b.cube").to(torch::kHalf)}, {"model.half", values.at("b.half").to(torch::kHalf)}});
}

TEST(CkptOffline, DcpFoldersBothWays) {
  const TempFolder folder;
  const Tensors values = some_tensors();
  save_on(2, folder / "two", values, 0);
  write_dcp_of(Source(folder / "two"), folder / "dcp", {.ranks = 3, .buffer_bytes = 64});
  const Source dcp(folder / "dcp");
  EXPECT_EQ(dcp.kind(), SourceKind::kDcp);
  EXPECT_EQ(dcp.info().files.size(), 3U);
  EXPECT_TRUE(diff(Source(folder / "two"), dcp).empty());
  write_checkpoint_of(dcp, folder / "back", {.ranks = 2});
  expect_loads(folder / "back", values);
  // A part less, and one that lies elsewhere.
  fs::remove(folder / "dcp/shard-00002-model-00001-of-00001.safetensors");
  EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / "dcp"); }),
              HasSubstr("pieces that overlap or leave holes"));
}

TEST(CkptOffline, WhatDiffers) {
  const TempFolder folder;
  Tensors a = some_tensors(), b = some_tensors();
  a["only"] = torch::ones({2});
  b["other"] = torch::ones({2});
  b["a.weight"][2][3] += 0.25;
  b["ids"][0][0] += 1;
  b["a.bias"] = torch::rand({8});
  b["b.half"] = b["b.half"].to(torch::kFloat);
  a["nan"] = torch::tensor({1.0F, NAN});
  b["nan"] = a["nan"].clone();
  save_on(1, folder / "a", a, 0);
  save_on(2, folder / "b", b, 0);
  std::map<std::string, Difference> found;
  for (const Difference& one : diff(Source(folder / "a"), Source(folder / "b"), {.buffer_bytes = 32})) found[one.name] = one;
  EXPECT_EQ(found.size(), 6U);
  EXPECT_EQ(found["only"].kind, Difference::Kind::kOnlyFirst);
  EXPECT_EQ(found["other"].kind, Difference::Kind::kOnlySecond);
  EXPECT_EQ(found["a.bias"].kind, Difference::Kind::kShape);
  EXPECT_EQ(found["b.half"].kind, Difference::Kind::kDtype);
  EXPECT_EQ(found["a.weight"].count, 1);
  EXPECT_NEAR(found["a.weight"].max_abs, 0.25, 1e-6);
  EXPECT_THAT(found["a.weight"].text, HasSubstr("1 of 35 elements differ, by at most 0.25"));
  EXPECT_THAT(found["ids"].text, HasSubstr("1 of 18 elements differ"));
  const auto close = diff(Source(folder / "a"), Source(folder / "b"), {.atol = 0.3, .compare_dtypes = false});
  EXPECT_EQ(close.size(), 4U);
  EXPECT_THAT(value_error([&] { return diff(Source(folder / "a"), Source(folder / "b"), {.atol = -1}); }),
              HasSubstr("atol is -1"));
}

/// |a - b| <= atol + rtol |b|, whatever the width.
TEST(CkptOffline, TolerancesOfIntegers) {
  const TempFolder folder;
  const int64_t most = std::numeric_limits<int64_t>::max(), least = std::numeric_limits<int64_t>::min();
  const auto different = [&](const torch::Tensor& a, const torch::Tensor& b, const DiffOptions& options) {
    int number = 0;
    for (const torch::Tensor& value : {a, b}) {
      fs::remove_all(folder / concat(number));
      save_on(1, folder / concat(number++), {{"x", value}}, 0);
    }
    const auto found = diff(Source(folder / "0"), Source(folder / "1"), options);
    return found.empty() ? Difference{} : found.at(0);
  };
  for (const auto type : {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong}) {
    const torch::Tensor a = torch::tensor({5, 100}).to(type), b = torch::tensor({6, 102}).to(type);
    EXPECT_EQ(different(a, b, {}).count, 2) << type;
    EXPECT_EQ(different(a, b, {.atol = 1}).count, 1) << type;
    EXPECT_EQ(different(a, b, {.atol = 1}).text, "1 of 2 elements differ, by at most 2") << type;
    EXPECT_EQ(different(a, b, {.atol = 1, .rtol = 0.01}).count, 0) << type;
  }
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({most - 1}), {}).count, 1);
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({most - 2}), {.atol = 1}).count, 1);
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({most - 2}), {.atol = 2}).count, 0);
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({least}), {.atol = 9e18}).count, 1);
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({least}), {.atol = 9e18}).max_abs, std::ldexp(1.0, 64));
  EXPECT_EQ(different(torch::tensor({most}), torch::tensor({least}), {.rtol = 2}).count, 0);
  EXPECT_EQ(different(torch::tensor({true}), torch::tensor({false}), {.atol = 1}).count, 1) << "booleans are equal or not";
}

TEST(CkptOffline, OnlyFoldersOfItsOwnAreReplaced) {
  const TempFolder folder;
  save_on(1, folder / "a", some_tensors(), 0);
  const Source source(folder / "a");
  const auto again = [&](const fs::path& target, bool dcp) {
    return value_error([&] {
      dcp ? write_dcp_of(source, target, {.overwrite = true}) : write_checkpoint_of(source, target, {.overwrite = true});
      return 0;
    });
  };
  for (const bool dcp : {false, true}) {
    const fs::path target = folder / (dcp ? "dcp" : "ckpt");
    EXPECT_EQ(again(target, dcp), "no ValueError");
    EXPECT_EQ(again(target, dcp), "no ValueError");
    const std::vector<std::pair<const char*, bool>> others = {{"notes.txt", false},
                                                              {"rank-1x.safetensors", false},
                                                              {"rank-.safetensors", false},
                                                              {"rank-00000.safetensors.bak", false},
                                                              {"mine", true},
                                                              {"shard-00009-model-00001-of-00001.safetensors", true}};
    for (const auto& [name, is_folder] : others) {
      is_folder ? (void)fs::create_directory(target / name) : set_file_text(target / name, "mine");
      EXPECT_THAT(again(target, dcp),
                  HasSubstr(concat(" holds ", name, " besides what would be written, which is not overwritten")));
      EXPECT_TRUE(fs::exists(target / name));
      fs::remove(target / name);
    }
    fs::create_symlink(folder / "a/rank-00000.safetensors", target / "rank-00007.safetensors");
    EXPECT_THAT(again(target, dcp), HasSubstr("holds rank-00007.safetensors"));
    fs::remove(target / "rank-00007.safetensors");
    EXPECT_EQ(again(target, dcp), "no ValueError");
    const fs::path link = folder / (dcp ? "dcp-link" : "ckpt-link");
    fs::create_directory_symlink(target, link);
    EXPECT_THAT(again(link, dcp), HasSubstr(concat("-link is a link to ", target.string(), ", which is not overwritten")));
    EXPECT_TRUE(fs::is_symlink(link));
  }
  set_file_text(folder / "plain", "mine");
  EXPECT_THAT(again(folder / "plain", false), HasSubstr("is something else than a checkpoint"));
  EXPECT_EQ(file_text(folder / "plain"), "mine");
  EXPECT_EQ(again("", false), "[ckpt.save] the path is \"\", want a folder");
}

/// What is no checkpoint is not a damaged one.
TEST(CkptOffline, WhatIsNoCheckpointIsAnError) {
  const TempFolder folder;
  save_on(1, folder / "run/checkpoints/step-00000004", some_tensors(), 0);
  save_on(1, folder / "run/checkpoints/step-00000012", some_tensors(), 0);
  set_file_text(folder / "c.toml", "[model]\ndim = 16\n");
  set_file_text(folder / "short", "{");
  set_file_text(folder / "pickle", "\x80\x04");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"c.toml", "c.toml: is no safetensors file, want one, or the folder of a checkpoint or model"},
      {"short", "is no safetensors file"},
      {"pickle", "is pickled"},
      {"nothing", "does not exist"},
      {"run", "holds neither checkpoint.json nor safetensors files; its last checkpoint is " +
                  (folder / "run/checkpoints/step-00000012").string()},
      {"run/checkpoints", "its last checkpoint is " + (folder / "run/checkpoints/step-00000012").string()}};
  for (const auto& [name, want] : cases) {
    EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / name); }), HasSubstr(want));
    EXPECT_THAT(message_of<CheckpointError>([&] { return verify_source(folder / name); }), HasSubstr(want));
  }
  // By its name, or by what is beside it, this one is: damaged.
  set_file_text(folder / "x.safetensors", "short");
  EXPECT_EQ(verify_source(folder / "x.safetensors").size(), 1U);
  fs::remove(folder / "run/checkpoints/step-00000004/checkpoint.json");
  EXPECT_THAT(verify_source(folder / "run/checkpoints/step-00000004"),
              ::testing::ElementsAre(HasSubstr("step-00000004: has files of a checkpoint but no checkpoint.json")));
  // And one without that suffix is read.
  fs::copy(folder / "run/checkpoints/step-00000012/rank-00000.safetensors", folder / "weights");
  EXPECT_TRUE(verify_source(folder / "weights").empty());
  // Nor is that of another release.
  std::string text = file_text(folder / "run/checkpoints/step-00000012/checkpoint.json");
  text.replace(text.find("\"version\":1"), 11, "\"version\":2");
  set_file_text(folder / "run/checkpoints/step-00000012/checkpoint.json", text);
  EXPECT_THAT(message_of<CheckpointError>([&] { return verify_source(folder / "run/checkpoints/step-00000012"); }),
              HasSubstr("has format version 2, want 1: it was written by another release"));
}

/// What an index does not list would be lost.
TEST(CkptOffline, TensorsThatAnIndexHides) {
  const TempFolder folder;
  for (const char* name : {"one", "two"}) {
    SafetensorsWriter writer(folder / concat(name, ".safetensors"), {{"x", Dtype::kU8, {2}}, {"y", Dtype::kU8, {2}}});
    for (const char* tensor : {"x", "y"}) writer.write(tensor, std::vector<std::byte>(2));
    writer.finish();
  }
  const auto problems = [&](const std::string& map) {
    set_file_text(folder / "model.safetensors.index.json", concat("{\"weight_map\": ", map, "}"));
    return verify_source(folder.path());
  };
  EXPECT_THAT(problems(R"({"x": "one.safetensors", "y": "one.safetensors"})"), ::testing::IsEmpty());
  EXPECT_THAT(
      problems(R"({"x": "one.safetensors"})"),
      ::testing::ElementsAre(HasSubstr("one.safetensors: has tensor y, which model.safetensors.index.json does not list")));
  EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder.path()); }), HasSubstr("has tensor y, which"));
  EXPECT_THAT(
      problems(R"({"x": "one.safetensors", "y": "two.safetensors"})"),
      ::testing::ElementsAre(HasSubstr("one.safetensors: has tensor y, which model.safetensors.index.json has in another file")));
}

TEST(CkptOffline, WhatIsRefused) {
  const TempFolder folder;
  save_on(1, folder / "a", some_tensors(), 0);
  const Source source(folder / "a");
  const auto error = [&](const RewriteOptions& options, const char* to = "b") {
    return value_error([&] {
      write_checkpoint_of(source, folder / to, options);
      return 0;
    });
  };
  EXPECT_THAT(error({.ranks = 0}), HasSubstr("ranks is 0, want 1 to 100000"));
  EXPECT_THAT(error({.prefix = "zz"}), HasSubstr("has no tensor whose name begins with \"zz\""));
  EXPECT_THAT(error({.extra = "{"}), HasSubstr("extra is no JSON"));
  EXPECT_THAT(error({.buffer_bytes = 0}), HasSubstr("buffer_bytes is 0"));
  EXPECT_THAT(error({.dtype = Dtype::kI8}), HasSubstr("dtype is I8, want a floating point type"));
  EXPECT_THAT(error({}, "a"), HasSubstr("is there already"));
  EXPECT_FALSE(fs::exists(folder / "b"));
  for (const char* name : {"model.bin", "model.pt", "x.distcp"}) {
    set_file_text(folder / name, "anything");
    EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / name); }), HasSubstr("is pickled, which is not opened"))
        << name;
  }
  fs::create_directory(folder / "torch");
  set_file_text(folder / "torch/.metadata", "\x80\x04");
  EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / "torch"); }), HasSubstr("its .metadata is pickled"));
  set_file_text(folder / "odd.safetensors", "PK\3\4 and so on");
  EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / "odd.safetensors"); }),
              HasSubstr("HuggingFaceStorageWriter"));
  EXPECT_THAT(message_of<CheckpointError>([&] { return Source(folder / "nothing"); }), HasSubstr("does not exist"));
  // What a progress bar throws ends the work, and leaves nothing.
  EXPECT_THROW(write_checkpoint_of(source, folder / "c", {.progress = [](auto, auto) { throw std::runtime_error("stop"); }}),
               std::runtime_error);
  EXPECT_FALSE(fs::exists(folder / "c"));
  EXPECT_FALSE(fs::exists(folder / ".c.partial"));
  std::uint64_t last = 0, whole = 0;
  EXPECT_TRUE(verify_source(folder / "a", [&](std::uint64_t done, std::uint64_t all) {
                EXPECT_GT(done, last);
                last = done, whole = all;
              }).empty());
  EXPECT_GT(whole, 0U);
  EXPECT_EQ(last, whole) << "every byte of every piece, once";
  // A damaged file is noticed where it is read.
  std::string text = file_text(folder / "a/rank-00000.safetensors");
  set_file_text(folder / "a/rank-00000.safetensors", text.substr(0, text.size() - 1));
  EXPECT_THAT(message_of<CheckpointError>([&] {
                write_checkpoint_of(Source(folder / "a"), folder / "d");
                return 0;
              }),
              HasSubstr("rank-00000.safetensors"));
  EXPECT_FALSE(verify_source(folder / "a").empty());
}

}  // namespace
}  // namespace hyper_parallel::ckpt
