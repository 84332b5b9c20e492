// Sharded checkpoints of tensors: every layout to every layout, what is read and written, what is refused.
#include <hyper_parallel/ckpt/checkpoint.h>

#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/comm/world.h>

#include "ckpt/crc32c.h"
#include "support/message_of.h"
#include "support/rank_threads.h"
#include "support/temp_folder.h"

namespace hyper_parallel::ckpt {
namespace {

using hyper_parallel::testing::file_text;
using hyper_parallel::testing::message_of;
using hyper_parallel::testing::run_ranks;
using hyper_parallel::testing::set_file_text;
using hyper_parallel::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Sizes = std::vector<std::int64_t>;
using Placements = std::vector<Placement>;

DeviceMesh make_mesh(const Sizes& shape) {
  const std::vector<std::string> names = {"a", "b", "c"};
  return init_device_mesh("cpu", shape, {names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shape.size())});
}

int ranks_of(const Sizes& mesh) { return static_cast<int>(c10::multiply_integers(mesh)); }

/// Another value for each element.
torch::Tensor counting(const Sizes& shape, torch::Dtype dtype = torch::kFloat, int start = 0) {
  return (torch::arange(c10::multiply_integers(shape)) + start).to(dtype).view(shape);
}

struct Named {
  std::string name;
  torch::Tensor whole;
};

/// Odd sizes, empty ones, a scalar, several dtypes.
std::vector<Named> some_tensors() {
  return {{"matrix", counting({7, 5})},
          {"cube", counting({5, 3, 4}, torch::kLong, 100)},
          {"row", counting({1, 17}, torch::kDouble, 7)},
          {"vector", counting({11}, torch::kBFloat16)},
          {"flags", counting({6}).remainder(2).to(torch::kBool)},
          {"scalar", torch::tensor(3.5F)},
          {"none", torch::empty({0, 4})},
          {"big", counting({130, 257}, torch::kInt)}};
}

/// A random way to lay out a tensor on a mesh: shards on any dimension, nested ones, a ragged axis at the end, replicas.
Placements random_placements(std::mt19937& random, const Sizes& mesh, const torch::Tensor& tensor) {
  Placements placements;
  for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
    const auto choice = random() % 4;
    if (tensor.dim() == 0 || choice == 0) {
      placements.push_back(Replicate());
    } else if (choice == 1 && axis + 1 == mesh.size() &&
               std::ranges::none_of(placements, [](const Placement& p) { return p.is_shard(); })) {
      const std::int64_t dims = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tensor.dim()));
      const std::int64_t positions = c10::multiply_integers(tensor.sizes().slice(0, static_cast<std::size_t>(dims)));
      Sizes units(static_cast<std::size_t>(mesh[axis]), 0);
      for (std::int64_t i = 0; i < positions; ++i) ++units[random() % units.size()];
      placements.push_back(positions == 0 ? Replicate() : RaggedShard(dims, units));
    } else {
      placements.push_back(Shard(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tensor.dim()))));
    }
  }
  return placements;
}

/// The tensors (or zeros) laid out at random; `seed` must be the same on all ranks.
std::pair<StateDict, std::vector<std::pair<Named, DTensor>>> lay_out(const Sizes& mesh_shape, unsigned seed, bool zeros) {
  std::mt19937 random(seed);
  const DeviceMesh mesh = make_mesh(mesh_shape);
  std::pair<StateDict, std::vector<std::pair<Named, DTensor>>> result;
  for (const Named& named : some_tensors()) {
    const Placements placements = random_placements(random, mesh_shape, named.whole);
    const DTensor tensor = distribute_tensor(zeros ? torch::zeros_like(named.whole) : named.whole, mesh, placements);
    result.first.add(named.name, tensor);
    result.second.emplace_back(named, tensor);
  }
  return result;
}

TEST(Ckpt, EveryLayoutToEveryLayout) {
  const std::vector<Sizes> meshes = {{1}, {2}, {3}, {4}, {2, 2}, {1, 3}, {2, 1, 2}};
  const TempFolder folder;
  for (std::size_t from = 0; from < meshes.size(); ++from) {
    const std::filesystem::path path = folder / std::to_string(from);
    run_ranks(ranks_of(meshes[from]),
              [&] { save(path, lay_out(meshes[from], static_cast<unsigned>(from), false).first, {.extra = R"({"step": 7})"}); });
    EXPECT_THAT(verify(path), ::testing::IsEmpty());
    std::int64_t stored = 0;
    for (const Named& named : some_tensors()) stored += static_cast<std::int64_t>(named.whole.nbytes());
    for (std::size_t to = 0; to < meshes.size(); ++to) {
      run_ranks(ranks_of(meshes[to]), [&] {
        auto [state, tensors] = lay_out(meshes[to], static_cast<unsigned>(100 * from + to), true);
        const LoadResult result = load(path, state);
        for (const auto& [named, tensor] : tensors)
          ASSERT_TRUE(torch::equal(tensor.full_tensor(), named.whole)) << named.name << ' ' << tensor.to_string();
        EXPECT_EQ(result.bytes_read, result.bytes_owned);
        EXPECT_EQ(result.bytes_checked, stored);
        EXPECT_EQ(result.extra, R"({"step":7})");
      });
    }
  }
}

TEST(Ckpt, InfoAndFiles) {
  const TempFolder folder;
  run_ranks(2, [&] {
    StateDict state;
    state.add("w", distribute_tensor(counting({4, 3}), make_mesh({2}), {Shard(0)}));
    state.add("shared", torch::tensor(1, torch::kLong));
    save(folder / "c", state);
  });
  const CheckpointInfo info = read_info(folder / "c");
  EXPECT_EQ(info.world_size, 2);
  EXPECT_EQ(info.extra, "null");
  ASSERT_EQ(info.files.size(), 2U);
  const CheckpointInfo::Tensor& w = info.tensors.at("w");
  EXPECT_EQ(w.layout, "Layout(a=2: Shard(dim=0))");
  ASSERT_EQ(w.pieces.size(), 2U);
  EXPECT_EQ(w.pieces[1].key, "w[2:4, 0:3]");
  const SafetensorsFile file(folder / "c/rank-00001.safetensors");
  EXPECT_EQ(file.at("w[2:4, 0:3]").shape, (Sizes{2, 3}));
  std::vector<float> values(6);
  file.read(file.at("w[2:4, 0:3]"), 0, std::as_writable_bytes(std::span(values)));
  EXPECT_THAT(values, ::testing::ElementsAre(6, 7, 8, 9, 10, 11));
}

TEST(Ckpt, ReplicasShareTheWork) {
  run_ranks(4, [] {
    const DeviceMesh mesh = make_mesh({2, 2});
    StateDict state;
    state.add("hsdp", distribute_tensor(counting({333, 100}), mesh, {Replicate(), Shard(0)}));
    state.add("whole", counting({400, 100}));
    for (int i = 0; i < 40; ++i) state.add(concat("norm", i), counting({100}));
    const std::int64_t mine = bytes_to_write(state);
    const std::vector<std::string> all = current_world().comm().all_gather_string(std::to_string(mine));
    std::int64_t sum = 0;
    for (const std::string& text : all) sum += std::stoll(text);
    EXPECT_EQ(sum, 4 * (33300 + 40000 + 4000)) << "everything once";
    for (const std::string& text : all)
      EXPECT_NEAR(static_cast<double>(std::stoll(text)), static_cast<double>(sum) / 4, 800) << "two rows";
  });
}

TEST(Ckpt, MemoryThatIsNotContiguousAndViews) {
  const TempFolder folder;
  run_ranks(2, [&] {
    const torch::Tensor base = counting({6, 8});
    StateDict state;
    state.add("transposed", base.t());
    state.add("strided", base.slice(1, 1, 8, 3));
    state.add("conjugate", torch::complex(base, base + 1).conj());
    save(folder / "c", state);
    torch::Tensor transposed = torch::zeros({6, 8}).t(), strided = torch::zeros({6, 8}).slice(1, 0, 6, 2),
                  conjugate = torch::zeros({6, 8}, torch::kComplexFloat);
    StateDict target;
    target.add("transposed", transposed);
    target.add("strided", strided);
    target.add("conjugate", conjugate);
    load(folder / "c", target);
    EXPECT_TRUE(torch::equal(transposed, base.t()));
    EXPECT_TRUE(torch::equal(strided, base.slice(1, 1, 8, 3)));
    EXPECT_TRUE(torch::equal(conjugate, torch::complex(base, base + 1).conj().resolve_conj()));
  });
}

/// A checkpoint of w [4, 3] and b [4], written by two ranks.
void write_small(const std::filesystem::path& path) {
  run_ranks(2, [&] {
    StateDict state;
    state.add("w", distribute_tensor(counting({4, 3}), make_mesh({2}), {Shard(0)}));
    state.add("b", counting({4}));
    save(path, state);
  });
}

/// Messages of all ranks must be the same; returns it.
template <class Expected>
std::string message_on_all(int world, const std::function<void()>& call) {
  std::string message;
  run_ranks(world, [&](int rank) {
    const std::string mine = message_of<Expected>(call);
    const std::vector<std::string> all = current_world().comm().all_gather_string(mine);
    for (const std::string& other : all) EXPECT_EQ(other, mine);
    if (rank == 0) message = mine;
  });
  return message;
}

TEST(Ckpt, NamesShapesAndDtypesMustFit) {
  const TempFolder folder;
  write_small(folder / "c");
  const auto load_error = [&](const std::vector<Named>& wanted, const LoadOptions& options = {}) {
    return message_on_all<ValueError>(2, [&] {
      StateDict state;
      std::vector<torch::Tensor> tensors;
      for (const Named& named : wanted) state.add(named.name, tensors.emplace_back(named.whole.clone()));
      try {
        load(folder / "c", state, options);
      } catch (...) {
        for (std::size_t i = 0; i < wanted.size(); ++i)
          EXPECT_TRUE(torch::equal(tensors[i], wanted[i].whole)) << "nothing is changed";
        throw;
      }
    });
  };
  const Named w{"w", torch::zeros({4, 3})}, b{"b", torch::zeros({4})};
  EXPECT_EQ(load_error({w, b}), "nothing thrown");
  EXPECT_THAT(load_error({w}), HasSubstr("c: unexpected: b"));
  EXPECT_THAT(load_error({{"x", torch::zeros({1})}, {"y", torch::zeros({1})}}), HasSubstr("missing: x, y; unexpected: b, w"));
  EXPECT_THAT(load_error({b, {"w", torch::zeros({3, 4})}}), HasSubstr("shapes: w is [0:4, 0:3] there, want [0:3, 0:4]"));
  EXPECT_THAT(load_error({b, {"w", torch::zeros({3, 4})}}, {.strict = false}), HasSubstr("shapes: w"));
  EXPECT_THAT(load_error({w, {"b", torch::zeros({4}, torch::kLong)}}),
              HasSubstr("dtypes: b is F32 there, want I64; convert_dtype = true casts"));
  EXPECT_EQ(load_error({w}, {.strict = false}), "nothing thrown");
  EXPECT_EQ(load_error({w, {"x", torch::zeros({1})}}, {.prefixes = {"w"}}), "nothing thrown");
}

TEST(Ckpt, LooserLoads) {
  const TempFolder folder;
  write_small(folder / "c");
  run_ranks(3, [&] {
    torch::Tensor b = torch::zeros({4}, torch::kDouble), x = torch::ones({2});
    StateDict state;
    state.add("b", b);
    state.add("x", x);
    const LoadResult result = load(folder / "c", state, {.strict = false, .convert_dtype = true});
    EXPECT_TRUE(torch::equal(b, counting({4}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(x, torch::ones({2})));
    EXPECT_THAT(result.missing, ::testing::ElementsAre("x"));
    EXPECT_THAT(result.unexpected, ::testing::ElementsAre("w"));
    EXPECT_EQ(result.bytes_read, 16);
    EXPECT_EQ(result.bytes_checked, 16);
  });
}

TEST(Ckpt, RanksMustAgree) {
  const TempFolder folder;
  const auto message = [&](const std::function<void(StateDict&)>& fill) {
    return message_on_all<ValueError>(2, [&] {
      StateDict state;
      fill(state);
      save(folder / "c", state);
    });
  };
  EXPECT_THAT(message([](StateDict& state) { state.add("a", torch::zeros({get_rank() + 1})); }),
              HasSubstr("[ckpt.save] ranks disagree: a is F32 [1] on rank 0, F32 [2] on rank 1"));
  EXPECT_THAT(message([](StateDict& state) {
                const DeviceMesh mesh = make_mesh({2});
                state.add("a", distribute_tensor(torch::zeros({4, 4}), mesh, {Shard(get_rank())}));
              }),
              HasSubstr("the ranks' parts overlap or leave holes, want each element once or on replicas: a ("));
  EXPECT_THAT(message([](StateDict& state) { state.add("a", torch::zeros({2}, torch::kMeta)); }), HasSubstr("a has no values"));
  EXPECT_FALSE(std::filesystem::exists(folder / "c"));
}

TEST(Ckpt, WhatAStateDictRefuses) {
  run_ranks(2, [] {
    const DeviceMesh mesh = make_mesh({2});
    StateDict state;
    state.add("a", torch::zeros({1}));
    const auto error = [&](const auto& value, const std::string& name = "b") {
      return message_of<ValueError>([&] { state.add(name, value); });
    };
    EXPECT_THAT(error(torch::zeros({1}), "a"), HasSubstr("[StateDict::add] a is there already"));
    EXPECT_THAT(error(torch::zeros({1}), ""), HasSubstr("is no name"));
    EXPECT_THAT(error(torch::zeros({1}), "__metadata__"), HasSubstr("is no name"));
    EXPECT_THAT(error(torch::eye(3).to_sparse()), HasSubstr("b is sparse"));
    EXPECT_THAT(error(torch::Tensor()), HasSubstr("b is an undefined tensor"));
    EXPECT_THAT(error(DTensor()), HasSubstr("b is an empty DTensor"));
    EXPECT_THAT(error(torch::zeros({1}, torch::kComplexDouble)),
                HasSubstr("tensor b is ComplexDouble, which safetensors files do not have"));
    EXPECT_THAT(error(DTensor::from_local(torch::zeros({2}), mesh, {Partial()}, {.shape = Sizes{2}})),
                HasSubstr("b has partial values"));
    EXPECT_EQ(state.entries().size(), 1U);
  });
}

TEST(Ckpt, DamageIsFoundOnAllRanks) {
  const TempFolder folder;
  const std::filesystem::path path = folder / "c";
  write_small(path);
  const auto load_message = [&] {
    return message_on_all<CheckpointError>(3, [&] {
      const DTensor w = distribute_tensor(torch::zeros({4, 3}), make_mesh({3}), {Shard(1)});
      torch::Tensor b = torch::zeros({4});
      StateDict state;
      state.add("w", w);
      state.add("b", b);
      load(path, state);
    });
  };
  EXPECT_EQ(load_message(), "nothing thrown");
  const std::filesystem::path shard = path / "rank-00001.safetensors";
  const std::string good = file_text(shard);
  const auto with = [&](const std::string& text) {
    set_file_text(shard, text);
    return load_message();
  };
  std::string flipped = good;
  flipped.back() ^= 4;
  EXPECT_THAT(with(flipped), AllOf(HasSubstr("checksums differ from checkpoint.json, these are damaged: tensor w[2:4, 0:3] in "),
                                   HasSubstr("rank-00001.safetensors")));
  EXPECT_THAT(verify(path), ::testing::ElementsAre(AllOf(HasSubstr("rank-00001.safetensors: tensor w[2:4, 0:3] has checksum "),
                                                         HasSubstr("are damaged"))));
  EXPECT_THAT(with(good.substr(0, good.size() - 1)), HasSubstr("but the file ends after 23 bytes of data"));
  EXPECT_THAT(verify(path), ::testing::ElementsAre(HasSubstr("but the file ends after 23 bytes of data")));
  std::string renamed = good;
  renamed.replace(renamed.find("w[2:4"), 5, "w[1:3");
  EXPECT_THAT(with(renamed), HasSubstr("has no tensor w[2:4, 0:3]"));
  std::string retyped = good;
  retyped.replace(retyped.find("F32"), 3, "I32");
  EXPECT_THAT(with(retyped), HasSubstr("is I32 [0:2, 0:3], want F32 [0:2, 0:3] as checkpoint.json says"));
  std::filesystem::remove(shard);
  EXPECT_THAT(load_message(), HasSubstr("rank-00001.safetensors: cannot open: No such file"));
  EXPECT_EQ(verify(path).size(), 1U);
  set_file_text(shard, good);
  EXPECT_EQ(load_message(), "nothing thrown");

  const std::filesystem::path json = path / "checkpoint.json";
  const std::string info = file_text(json);
  const auto with_info = [&](const std::string& from, const std::string& to) {
    std::string text = info;
    text.replace(text.find(from), from.size(), to);
    set_file_text(json, text);
    return load_message();
  };
  EXPECT_THAT(with_info("\"shape\":[4]", "\"shape\":[5]"), HasSubstr("checkpoint.json: has checksum "));
  EXPECT_THAT(with_info("\"version\":1", "\"version\":2"),
              HasSubstr("has format version 2, want 1: it was written by another release"));
  EXPECT_THAT(with_info("hyper_parallel.checkpoint", "other"), HasSubstr("has another format"));
  EXPECT_THAT(with_info("}", ""), HasSubstr("is no JSON"));
  std::filesystem::remove(json);
  EXPECT_THAT(load_message(), HasSubstr("is no checkpoint, it has no checkpoint.json"));
}

/// With the right checksum, so that what it says is looked at.
std::string sealed(std::string text) {
  constexpr std::size_t kAt = std::string_view("{\"checksum\":\"").size();
  text.replace(kAt, 8, 8, '0');
  char checksum[9];
  std::snprintf(checksum, sizeof(checksum), "%08x", crc32c(std::as_bytes(std::span(text))));
  return text.replace(kAt, 8, checksum);
}

TEST(Ckpt, InfoThatIsRefused) {
  const TempFolder folder;
  write_small(folder / "c");
  const std::filesystem::path json = folder / "c/checkpoint.json";
  const std::string info = file_text(json);
  EXPECT_EQ(sealed(info), info);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = info;
    EXPECT_NE(text.find(from), std::string::npos) << from;
    set_file_text(json, sealed(text.replace(text.find(from), from.size(), to)));
    return message_of<CheckpointError>([&] { return read_info(folder / "c"); });
  };
  // "w" has pieces [0,[0,0],[2,3],crc] and [1,[2,0],[2,3],crc].
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[1,0],[2,3]"), HasSubstr("tensor w has pieces that overlap or leave holes"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[2,0],[1,3]"), HasSubstr("tensor w has pieces that overlap or leave holes"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[3,0],[2,3]"), HasSubstr("outside of its shape"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[2],[2]"), HasSubstr("outside of its shape"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[2,[2,0],[2,3]"), HasSubstr("has 2, want an integer of 0 to 1"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[2,-1],[2,3]"), HasSubstr("has -1, want an integer of 0 to"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,[2,0.0],[2,3]"), HasSubstr("has 0.0, want an integer"));
  EXPECT_THAT(with("[1,[2,0],[2,3],", "[1,[2,0],[2,3],0,"), HasSubstr("has a piece of 5 values, want 4"));
  EXPECT_THAT(with("[1,[2,0],[2,3]", "[1,2,[2,3]"), HasSubstr("has 2, want a list"));
  EXPECT_THAT(with("\"shape\":[4,3]", "\"shape\":[4611686018427387904,3]"),
              HasSubstr("tensor w has a shape whose bytes overflow"));
  EXPECT_THAT(with("\"dtype\":\"F32\"", "\"dtype\":\"F33\""),
              HasSubstr("has dtype \"F33\", which safetensors files do not have"));
  EXPECT_THAT(with("\"dtype\":\"F32\"", "\"dtype\":7"), HasSubstr("has 7, want a string"));
  EXPECT_THAT(with("\"layout\":", "\"other\":"), HasSubstr("has no \"layout\" where one belongs"));
  EXPECT_THAT(with("rank-00001.safetensors", "../rank-00001.safetensors"), HasSubstr("want a plain name inside its folder"));
  EXPECT_THAT(with("rank-00001.safetensors", "rank-00000.safetensors"), HasSubstr("names the file rank-00000.safetensors twice"));
  EXPECT_THAT(with("\"world_size\":2", "\"world_size\":2,\"world_size\":3"), HasSubstr("has \"world_size\" twice in one object"));
  EXPECT_THAT(with("\"tensors\":{", "\"tensors\":[],\"more\":{"), HasSubstr("has tensors that are no object"));
  EXPECT_THAT(with("\"format\"", "\"former\""), HasSubstr("has another format"));
}

TEST(Ckpt, FoldersThatAreInTheWay) {
  const TempFolder folder;
  write_small(folder / "c");
  const auto message = [&](const std::filesystem::path& path, const SaveOptions& options, bool value_error) {
    const auto call = [&] {
      StateDict state;
      state.add("b", counting({4}, torch::kFloat, 5));
      save(path, state, options);
    };
    return value_error ? message_on_all<ValueError>(2, call) : message_on_all<CheckpointError>(2, call);
  };
  EXPECT_THAT(message(folder / "c", {}, true), AllOf(HasSubstr("/c is there already"), HasSubstr("(rank 0/2)")));
  EXPECT_EQ(read_info(folder / "c").tensors.size(), 2U);
  EXPECT_EQ(message(folder / "c/", {.overwrite = true}, true), "nothing thrown");
  EXPECT_EQ(read_info(folder / "c").tensors.size(), 1U);
  EXPECT_THAT(verify(folder / "c"), ::testing::IsEmpty());
  std::filesystem::create_directory(folder / "other");
  EXPECT_EQ(message(folder / "other", {}, true), "nothing thrown") << "an empty folder may be there";
  std::filesystem::create_directory(folder / "mine");
  set_file_text(folder / "mine/file", "x");
  EXPECT_THAT(message(folder / "mine", {.overwrite = true}, true), HasSubstr("holds something else than a checkpoint"));
  EXPECT_THAT(message(folder / "mine/file/c", {}, false), HasSubstr("cannot create the folder"));
  EXPECT_THAT(message(folder / "d", {.extra = "{"}, true), HasSubstr("extra is no JSON"));
  EXPECT_EQ(message(folder / "deep/er/d", {}, true), "nothing thrown");
  // What an attempt that was broken off left behind does not matter.
  std::filesystem::create_directories(folder / ".e.partial/rank-00000.safetensors");
  EXPECT_EQ(message(folder / "e", {}, true), "nothing thrown");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
}

}  // namespace
}  // namespace hyper_parallel::ckpt
