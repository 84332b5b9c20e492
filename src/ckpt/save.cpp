#include "ckpt/save.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include <ATen/ops/empty.h>

#include "ckpt/agree.h"
#include "ckpt/commit.h"
#include "ckpt/crc32c.h"
#include "ckpt/dtypes.h"
#include "ckpt/file.h"
#include "ckpt/holdings.h"
#include "ckpt/info.h"
#include "ckpt/runs.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "ckpt.save";
/// Bytes that are checksummed and written at a time: they stay in the cache in between, and the page cache gets large folios,
/// which are read faster.
constexpr std::uint64_t kChunk = 4 << 20;

/// Elements of this rank's part before those of `piece`.
std::int64_t offset_in(const StateDict::Entry& entry, const Box& piece) {
  std::int64_t offset = 0;
  for (const Box& box : entry.boxes) {
    const std::optional<Box> shared = intersect(box, piece);
    if (shared && *shared == piece) {
      int runs = 0;
      for_each_run(box, piece, piece, [&](std::int64_t from, std::int64_t, std::int64_t) {
        if (runs++ == 0) offset += from;
      });
      check_internal(runs == 1, kOp, "a piece is not contiguous");
      return offset;
    }
    offset += box.numel();
  }
  throw InternalError(concat('[', kOp, "] internal: ", entry.name, " has no ", piece.to_string(), " here"));
}

/// Writes this rank's file. \return the checksums of its pieces, 4 bytes each
std::string write_file(const std::filesystem::path& folder, const SavePlan& plan, const PieceBytes& bytes, int rank) {
  if (plan.mine.empty()) return {};
  SafetensorsWriter writer(folder / file_name(rank), specs_of(plan, rank), {.metadata = {{"format", "pt"}}});
  std::string checksums(4 * plan.mine.size(), '\0');
  for (std::size_t i = 0; i < plan.mine.size(); ++i) {
    const PlannedPiece& piece = plan.pieces[plan.mine[i]];
    const std::span<const std::byte> all = bytes(i);
    PartialCrc32c crc;
    for (std::uint64_t at = 0; at < all.size();) {
      const std::span<const std::byte> chunk = all.subspan(at, std::min<std::uint64_t>(kChunk, all.size() - at));
      crc.add(at, chunk);
      writer.write(piece.key, chunk, at);
      at += chunk.size();
    }
    const std::uint32_t checksum = PartialCrc32c::finish(crc.contribution(all.size()), all.size());
    std::memcpy(checksums.data() + 4 * i, &checksum, 4);
  }
  writer.finish();
  return checksums;
}

}  // namespace

std::string file_name(int rank) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank-%05d.safetensors", rank);
  return text;
}

std::vector<TensorSpec> specs_of(const SavePlan& plan, int rank) {
  std::vector<TensorSpec> specs;
  for (const PlannedPiece& piece : plan.pieces) {
    if (piece.rank == rank) specs.push_back({piece.key, plan.tensors[piece.tensor].spec.dtype, piece.box.size});
  }
  return specs;
}

CheckpointInfo info_of(const SavePlan& plan, const std::vector<std::string>& checksums) {
  CheckpointInfo info;
  info.world_size = static_cast<int>(checksums.size());
  info.extra = plan.extra;
  for (const GlobalTensor& tensor : plan.tensors)
    info.tensors[tensor.spec.name] = {tensor.spec.dtype, tensor.spec.shape, tensor.layout, {}};
  for (int rank = 0; rank < info.world_size; ++rank) {
    const auto [header, text] = make_header(specs_of(plan, rank), {{"format", "pt"}});
    if (header.tensors.empty()) continue;
    const std::string& mine = checksums[static_cast<std::size_t>(rank)];
    check_internal(mine.size() == 4 * header.tensors.size(), kOp, "rank ", rank, " sent ", mine.size(), " bytes of checksums");
    for (const PlannedPiece& piece : plan.pieces) {
      if (piece.rank != rank) continue;
      const std::size_t position = header.positions.find(piece.key)->second;
      CheckpointInfo::Piece entry{info.files.size(), piece.key, piece.box, 0};
      std::memcpy(&entry.crc32c, mine.data() + 4 * position, 4);
      info.tensors[plan.tensors[piece.tensor].spec.name].pieces.push_back(std::move(entry));
    }
    info.files.push_back({file_name(rank), header.file_size});
  }
  return info;
}

Holdings holdings_of(const StateDict& state, const CheckpointInfo* saved, std::string_view prefix) {
  Holdings holdings;
  for (const auto& [name, entry] : state.entries()) {
    if (!name.starts_with(prefix)) continue;
    // What a load will make has the dtype that is stored.
    const Dtype dtype = entry.local.defined() ? dtype_of(entry.local.scalar_type(), name) : saved->tensors.at(name).dtype;
    holdings.push_back({{name, dtype, entry.shape}, entry.boxes, entry.layout});
  }
  return holdings;
}

SavePlan plan_save(const StateDict& state, const std::string& extra, const Comm& comm, const CommOptions& options,
                   std::string_view prefix) {
  SavePlan plan;
  const std::vector<std::string> packed = agree(
      comm, kOp,
      [&] {
        plan.extra = check_extra(kOp, extra);
        for (const auto& [name, entry] : state.entries())
          check_value(!name.starts_with(prefix) || (entry.local.defined() && !entry.local.is_meta()), kOp, name,
                      " has no values, want a tensor with memory");
        return pack(holdings_of(state, nullptr, prefix));
      },
      options);
  std::vector<Holdings> holdings;
  for (const std::string& text : packed) holdings.push_back(unpack(text));
  plan.tensors = combine(kOp, holdings);
  plan.pieces = deal_out(kOp, plan.tensors, comm.size());
  std::map<std::string_view, std::size_t> by_key;
  for (std::size_t i = 0; i < plan.pieces.size(); ++i) {
    if (plan.pieces[i].rank == comm.rank()) by_key[plan.pieces[i].key] = i;
  }
  for (const TensorEntry& tensor : make_header(specs_of(plan, comm.rank())).first.tensors)
    plan.mine.push_back(by_key.at(tensor.name));
  return plan;
}

PieceBytes bytes_in_tensors(const SavePlan& plan, const StateDict& state) {
  struct Current {
    std::size_t tensor = SIZE_MAX;
    at::Tensor dense;
  };
  return [&plan, &state, current = std::make_shared<Current>()](std::size_t i) -> std::span<const std::byte> {
    const PlannedPiece& piece = plan.pieces[plan.mine[i]];
    const StateDict::Entry& entry = state.entries().at(plan.tensors[piece.tensor].spec.name);
    if (current->tensor != piece.tensor) {
      current->dense = entry.local.detach().cpu().resolve_conj().resolve_neg().contiguous();
      current->tensor = piece.tensor;
    }
    const std::int64_t size = current->dense.element_size();
    const auto* data = static_cast<const std::byte*>(current->dense.const_data_ptr());
    return {data + offset_in(entry, piece.box) * size, static_cast<std::size_t>(piece.box.numel() * size)};
  };
}

std::uint64_t bytes_of_mine(const SavePlan& plan) {
  std::uint64_t bytes = 0;
  for (const std::size_t i : plan.mine)
    bytes += static_cast<std::uint64_t>(plan.pieces[i].box.numel() * bits_of(plan.tensors[plan.pieces[i].tensor].spec.dtype) / 8);
  return bytes;
}

void write_checkpoint(const std::filesystem::path& target, const SavePlan& plan, const PieceBytes& bytes, bool overwrite,
                      const Comm& comm, const CommOptions& options) {
  const bool first = comm.rank() == 0;
  const std::filesystem::path partial = partial_path(target);
  agree(
      comm, kOp,
      [&] {
        if (first) begin_commit(target, overwrite);
        return std::string();
      },
      options);
  try {
    const std::vector<std::string> checksums = agree(
        comm, kOp, [&] { return write_file(partial, plan, bytes, comm.rank()); }, options);
    agree(
        comm, kOp,
        [&] {
          if (!first) return std::string();
          const CheckpointInfo info = info_of(plan, checksums);
          for (const CheckpointInfo::File& file : info.files) {
            if (File(partial / file.name, File::Mode::kRead).size() != file.bytes)
              throw CheckpointError(
                  concat('[', kOp, "] ", (partial / file.name).string(), ": has another size than was written"));
          }
          write_text(partial / kInfoFile, info_text(info));
          finish_commit(target);
          return std::string();
        },
        options);
  } catch (...) {
    if (first) abandon_commit(target);
    throw;
  }
}

void save(const std::filesystem::path& path, const StateDict& state, const SaveOptions& options) {
  const Comm comm = comm_or_world(options.comm);
  const std::filesystem::path target = target_path(path);
  const CommOptions patience{.label = kOp, .timeout = options.timeout};
  const SavePlan plan = plan_save(state, options.extra, comm, patience);
  write_checkpoint(target, plan, bytes_in_tensors(plan, state), options.overwrite, comm, patience);
}

std::int64_t bytes_to_write(const StateDict& state, const Comm& comm) {
  return static_cast<std::int64_t>(bytes_of_mine(plan_save(state, {}, comm_or_world(comm), {})));
}

}  // namespace hyper_parallel::ckpt
