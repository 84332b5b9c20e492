// Checkpoints rewritten by one process.
#include <hyper_parallel/ckpt/offline.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "ckpt/commit.h"
#include "ckpt/crc32c.h"
#include "ckpt/elements.h"
#include "ckpt/info.h"
#include "ckpt/plan.h"
#include "ckpt/runs.h"
#include "ckpt/save.h"
#include "ckpt/sizes.h"
#include "ckpt/slabs.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "ckpt.rewrite";

/// What becomes of each tensor.
struct Renamed {
  std::string from;
  TensorSpec to;
};

std::vector<Renamed> renamed(const Source& source, const RewriteOptions& options) {
  check_value(options.ranks >= 1 && options.ranks <= 100'000, kOp, "ranks is ", options.ranks, ", want 1 to 100000");
  check_value(options.buffer_bytes > 0, kOp, "buffer_bytes is 0, want at least 1");
  std::vector<Renamed> result;
  for (const auto& [name, tensor] : source.info().tensors) {
    if (!name.starts_with(options.prefix)) continue;
    const Dtype dtype = options.dtype && is_real(tensor.dtype) ? *options.dtype : tensor.dtype;
    result.push_back({name, {options.add_prefix + name.substr(options.prefix.size()), dtype, tensor.shape}});
  }
  check_value(!result.empty(), kOp, source.path().string(), ": has no tensor whose name begins with \"", options.prefix, '"');
  check_value(!options.dtype || is_real(*options.dtype), kOp, "dtype is ", options.dtype ? to_string(*options.dtype) : "",
              ", want a floating point type");
  std::ranges::sort(result, {}, [](const Renamed& tensor) { return tensor.to.name; });
  return result;
}

/// The part of a tensor that a rank has: a ceil chunk of its first dimension; scalars belong to the first.
Box chunk_of(const std::vector<std::int64_t>& shape, int rank, int ranks) {
  Box box = whole_box(shape);
  if (shape.empty()) return box;
  const std::int64_t rows = (shape[0] + ranks - 1) / ranks;
  box.offset[0] = std::min(shape[0], rows * rank);
  box.size[0] = std::min(rows, shape[0] - box.offset[0]);
  return box;
}

/// Copies boxes from a source in slabs, with a conversion where there is one to make.
class Copier {
 public:
  Copier(const Source& source, const RewriteOptions& options, std::uint64_t all)
      : source_(source), options_(options), all_(all) {}

  /// f(bytes before it, bytes) for each slab of a box.
  template <class F>
  void copy(const std::string& name, Dtype to, const Box& box, F&& f) {
    const Dtype from = source_.at(name).dtype;
    const std::int64_t bits = bits_of(from);
    std::uint64_t at = 0;
    // A multiple of eight elements, so that packed ones begin and end at bytes.
    const auto most = std::max<std::int64_t>(8, static_cast<std::int64_t>(options_.buffer_bytes) * 8 / bits / 8 * 8);
    const auto one = [&](const Box& slab) {
      memory_.resize(static_cast<std::size_t>(slab.numel() * bits / 8));
      source_.read(name, slab, memory_);
      const std::span<const std::byte> bytes = convert_elements(memory_, from, to, converted_, name);
      f(at, bytes);
      at += bytes.size();
      done_ += bytes.size();
      if (options_.progress) options_.progress(done_, all_);
    };
    if (bits % 8 == 0) {
      for_each_slab(box, most, one);
    } else if (box.numel() > 0) {
      one(box);
    }
  }

 private:
  const Source& source_;
  const RewriteOptions& options_;
  std::uint64_t all_, done_ = 0;
  std::vector<std::byte> memory_, converted_;
};

std::uint64_t bytes_of_all(const std::vector<Renamed>& tensors) {
  std::uint64_t all = 0;
  for (const Renamed& tensor : tensors) all += *bytes_of(tensor.to);
  return all;
}

/// Runs `write` between the beginning and the end of a commit.
template <class F>
void committed(const std::filesystem::path& path, bool overwrite, const FolderKind& kind, F&& write) {
  const std::filesystem::path target = target_path(path);
  begin_commit(target, overwrite, kind, kOp);
  try {
    write(partial_path(target));
    finish_commit(target, kind);
  } catch (...) {
    abandon_commit(target);
    throw;
  }
}

SavePlan plan_of(const std::vector<Renamed>& tensors, const RewriteOptions& options) {
  std::vector<Holdings> holdings(static_cast<std::size_t>(options.ranks));
  for (const Renamed& tensor : tensors) {
    const auto& shape = tensor.to.shape;
    for (int rank = 0; rank < options.ranks; ++rank) {
      Holding mine{tensor.to, {}, options.ranks == 1 ? "whole" : concat("Shard(0) of ", options.ranks)};
      const Box box = chunk_of(shape, rank, options.ranks);
      if (box.numel() > 0 && (!shape.empty() || rank == 0)) mine.boxes.push_back(box);
      holdings[static_cast<std::size_t>(rank)].push_back(std::move(mine));
    }
  }
  SavePlan plan;
  plan.extra = check_extra(kOp, options.extra);
  plan.tensors = combine(kOp, holdings);
  plan.pieces = deal_out(kOp, plan.tensors, options.ranks);
  return plan;
}

}  // namespace

void write_checkpoint_of(const Source& source, const std::filesystem::path& target, const RewriteOptions& options) {
  const std::vector<Renamed> tensors = renamed(source, options);
  const SavePlan plan = plan_of(tensors, options);
  std::map<std::string_view, const Renamed*> by_name;
  for (const Renamed& tensor : tensors) by_name[tensor.to.name] = &tensor;
  Copier copier(source, options, bytes_of_all(tensors));
  committed(target, options.overwrite, checkpoint_folder(), [&](const std::filesystem::path& folder) {
    std::vector<std::string> checksums(static_cast<std::size_t>(options.ranks));
    for (int rank = 0; rank < options.ranks; ++rank) {
      const std::vector<TensorSpec> specs = specs_of(plan, rank);
      if (specs.empty()) continue;
      SafetensorsWriter writer(folder / file_name(rank), specs, {.metadata = {{"format", "pt"}}});
      std::string& mine = checksums[static_cast<std::size_t>(rank)];
      mine.resize(4 * specs.size());
      for (const PlannedPiece& piece : plan.pieces) {
        if (piece.rank != rank) continue;
        const Renamed& tensor = *by_name.at(plan.tensors[piece.tensor].spec.name);
        PartialCrc32c crc;
        const std::uint64_t size = *bytes_of({piece.key, tensor.to.dtype, piece.box.size});
        copier.copy(tensor.from, tensor.to.dtype, piece.box, [&](std::uint64_t at, std::span<const std::byte> bytes) {
          crc.add(at, bytes);
          writer.write(piece.key, bytes, at);
        });
        const std::uint32_t checksum = PartialCrc32c::finish(crc.contribution(size), size);
        std::memcpy(mine.data() + 4 * writer.header().positions.find(piece.key)->second, &checksum, 4);
      }
      writer.finish();
    }
    write_text(folder / kInfoFile, info_text(info_of(plan, checksums)));
  });
}

void write_dcp_of(const Source& source, const std::filesystem::path& target, const RewriteOptions& options) {
  const std::vector<Renamed> tensors = renamed(source, options);
  Copier copier(source, options, bytes_of_all(tensors));
  const auto name_of = [](int rank) {
    char text[64];
    std::snprintf(text, sizeof(text), "shard-%05d-model-00001-of-00001.safetensors", rank + 1);
    return std::string(text);
  };
  const FolderKind kind{name_of(0), {"shard-#-model-#-of-#.safetensors"}};
  committed(target, options.overwrite, kind, [&](const std::filesystem::path& folder) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      std::vector<TensorSpec> specs;
      nlohmann::json sharding = nlohmann::json::object();
      for (const Renamed& tensor : tensors) {
        const Box box = chunk_of(tensor.to.shape, rank, options.ranks);
        // Its readers learn shapes from the parts, so that an empty tensor needs one, too.
        const bool mine = rank == 0 || (!tensor.to.shape.empty() && box.numel() > 0);
        if (!mine) continue;
        specs.push_back({tensor.to.name, tensor.to.dtype, box.size});
        sharding[tensor.to.name] = {{"saved_offsets", box.offset}};
      }
      if (specs.empty()) continue;
      SafetensorsWriter writer(folder / name_of(rank), specs,
                               {.metadata = {{"format", "pt"}, {"DCP_VERSION", "1.0"}, {"DCP_SHARDING_INFO", sharding.dump()}}});
      for (const Renamed& tensor : tensors) {
        if (!sharding.contains(tensor.to.name)) continue;
        copier.copy(tensor.from, tensor.to.dtype, chunk_of(tensor.to.shape, rank, options.ranks),
                    [&](std::uint64_t at, std::span<const std::byte> bytes) { writer.write(tensor.to.name, bytes, at); });
      }
      writer.finish();
    }
  });
}

std::vector<std::string> verify_source(const std::filesystem::path& path, const OnProgress& progress) {
  refuse_foreign(path);
  std::vector<std::string> problems;
  try {
    const Source source(path);
    if (source.kind() == SourceKind::kCheckpoint) return verify_showing(path, progress);
    const RewriteOptions options{.progress = progress};
    std::uint64_t all = 0;
    for (const auto& [name, tensor] : source.info().tensors) all += *bytes_of({name, tensor.dtype, tensor.shape});
    Copier copier(source, options, all);
    for (const auto& [name, tensor] : source.info().tensors) {
      try {
        copier.copy(name, tensor.dtype, whole_box(tensor.shape), [](std::uint64_t, std::span<const std::byte>) {});
      } catch (const CheckpointError& error) {
        problems.emplace_back(error.what());
      }
    }
  } catch (const VersionError&) {
    throw;
  } catch (const CheckpointError& error) {
    problems.emplace_back(error.what());
  }
  return problems;
}

}  // namespace hyper_parallel::ckpt
