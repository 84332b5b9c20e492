// Loading: each rank reads the ranges that it owns.
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include "ckpt/agree.h"
#include "ckpt/crc32c.h"
#include "ckpt/dtypes.h"
#include "ckpt/holdings.h"
#include "ckpt/info.h"
#include "ckpt/load.h"
#include "ckpt/runs.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::uint64_t kChunk = 16 << 20;  // the kernel copies long runs faster

/// What a rank has read of a stored piece, for the check that the ranks do together.
struct Share {
  std::uint32_t piece = 0;  // number in the checkpoint
  std::uint32_t crc = 0;    // contribution
  std::uint64_t bytes = 0;
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text;
}

/// One call of load.
class Loader {
 public:
  Loader(const std::filesystem::path& path, StateDict& state, const LoadOptions& options, const PieceSource& source)
      : path_(path),
        state_(state),
        options_(options),
        source_(source),
        op_(source.op),
        comm_(comm_or_world(options.comm)),
        patience_{.label = op_, .timeout = options.timeout} {}

  LoadResult run() {
    compare();
    agree(
        comm_, op_,
        [&] {
          open_files();
          return std::string();
        },
        patience_);
    agree(
        comm_, op_,
        [&] {
          state_.prepare();
          check_dtypes();
          return std::string();
        },
        patience_);
    const std::vector<std::string> shares = agree(
        comm_, op_, [&] { return read(); }, patience_);
    check_shares(shares);
    agree(
        comm_, op_,
        [&] {
          state_.finish();
          return std::string();
        },
        patience_);
    result_.extra = info_.extra;
    return std::move(result_);
  }

 private:
  [[nodiscard]] bool wanted(const std::string& name) const {
    return options_.prefixes.empty() ||
           std::ranges::any_of(options_.prefixes, [&](const std::string& prefix) { return name.starts_with(prefix); });
  }

  /// Names and shapes of the checkpoint against those of all ranks.
  void compare() {
    const std::vector<std::string> packed = agree(
        comm_, op_,
        [&] {
          info_ = source_.info();
          for (const auto& [name, entry] : state_.entries()) {
            check_value(entry.local.defined() || info_.tensors.contains(name), op_, name, " was added for another checkpoint");
          }
          return pack(holdings_of(state_, &info_));
        },
        patience_);
    std::vector<Holdings> holdings;
    for (const std::string& text : packed) holdings.push_back(unpack(text));
    std::vector<std::string> shapes;
    for (GlobalTensor& tensor : combine(op_, holdings)) {
      const std::string& name = tensor.spec.name;
      if (!wanted(name)) continue;
      const auto found = info_.tensors.find(name);
      if (found == info_.tensors.end()) {
        result_.missing.push_back(name);
      } else if (found->second.shape != tensor.spec.shape) {
        shapes.push_back(concat(name, " is ", whole_box(found->second.shape).to_string(), " there, want ",
                                whole_box(tensor.spec.shape).to_string()));
      }
      all_.emplace(name, std::move(tensor));
    }
    for (const auto& [name, tensor] : info_.tensors) {
      if (wanted(name) && !all_.contains(name)) result_.unexpected.push_back(name);
    }
    std::string problems;
    const auto add = [&](const char* what, const std::vector<std::string>& names) {
      if (!names.empty()) problems += concat(problems.empty() ? "" : "; ", what, joined(names));
    };
    if (options_.strict) add("missing: ", result_.missing);
    if (options_.strict) add("unexpected: ", result_.unexpected);
    add("shapes: ", shapes);
    check_value(problems.empty(), op_, path_.string(), ": ", problems);
    check_dtypes();
  }

  /// Of the tensors that are there: before prepare(), not those that it makes.
  void check_dtypes() const {
    if (options_.convert_dtype) return;
    std::vector<std::string> wrong;
    for (const auto& [name, entry] : state_.entries()) {
      const auto found = info_.tensors.find(name);
      if (!wanted(name) || found == info_.tensors.end() || !entry.local.defined()) continue;
      const Dtype here = dtype_of(entry.local.scalar_type(), name);
      if (here != found->second.dtype)
        wrong.push_back(concat(name, " is ", to_string(found->second.dtype), " there, want ", to_string(here)));
    }
    check_value(wrong.empty(), op_, path_.string(), ": dtypes: ", joined(wrong), "; convert_dtype = true casts");
  }

  /// Files that this rank reads, and their headers.
  void open_files() {
    files_.resize(info_.files.size());
    for_each_part([&](const StateDict::Entry&, const CheckpointInfo::Tensor& tensor, const CheckpointInfo::Piece& piece,
                      std::uint32_t, const Box&, std::int64_t, const Box&) {
      std::optional<SafetensorsFile>& file = files_[piece.file];
      if (!file) {
        file.emplace(path_ / info_.files[piece.file].name);
        if (file->header().file_size != info_.files[piece.file].bytes)
          throw CheckpointError(concat("[ckpt] ", file->path().string(), ": has ", file->header().file_size, " bytes, want ",
                                       info_.files[piece.file].bytes));
      }
      (void)entry_of(*file, tensor, piece);
    });
  }

  [[nodiscard]] const TensorEntry& entry_of(const SafetensorsFile& file, const CheckpointInfo::Tensor& tensor,
                                            const CheckpointInfo::Piece& piece) const {
    return source_.checkpoint ? piece_entry(file, tensor, piece) : file.at(piece.key);
  }

  /// f(entry, tensor, piece, number of the piece, box of this rank, elements before that box in the local tensor, what both
  /// share).
  template <class F>
  void for_each_part(F&& f) const {
    std::uint32_t number = 0;
    for (const auto& [name, tensor] : info_.tensors) {
      const auto entry = state_.entries().find(name);
      if (entry == state_.entries().end() || !wanted(name)) {
        number += static_cast<std::uint32_t>(tensor.pieces.size());
        continue;
      }
      for (const CheckpointInfo::Piece& piece : tensor.pieces) {
        std::int64_t before = 0;
        for (const Box& box : entry->second.boxes) {
          if (const std::optional<Box> shared = intersect(box, piece.box))
            f(entry->second, tensor, piece, number, box, before, *shared);
          before += box.numel();
        }
        ++number;
      }
    }
  }

  /// Whether this rank answers for the checksum of a box: the first of those that have it.
  [[nodiscard]] bool answers_for(const std::string& name, const Box& box) const {
    const GlobalTensor& tensor = all_.at(name);
    if (!source_.checkpoint || !tensor.exact) return false;
    for (const Region& region : tensor.regions) {
      if (region.box == box) return region.holders.front() == comm_.rank();
    }
    return false;
  }

  std::string read() {
    at::NoGradGuard no_grad;
    std::vector<Share> shares;
    // Dense memory of the stored dtype; the tensor itself where it is that. A tensor's parts come one after the other.
    const StateDict::Entry* current = nullptr;
    at::Tensor memory;
    const auto leave = [&] {
      if (current == nullptr) return;
      if (memory.is_same(current->local)) {
        torch::autograd::impl::bump_version(current->local);  // written behind torch's back
      } else {
        current->local.copy_(memory);
      }
      current = nullptr;
    };
    for_each_part([&](const StateDict::Entry& entry, const CheckpointInfo::Tensor& tensor, const CheckpointInfo::Piece& piece,
                      std::uint32_t number, const Box& box, std::int64_t before, const Box& shared) {
      if (current != &entry) {
        leave();
        current = &entry;
        const c10::ScalarType stored = scalar_type_of(tensor.dtype, entry.name);
        const bool direct = entry.local.is_cpu() && entry.local.is_contiguous() && entry.local.scalar_type() == stored &&
                            !entry.local.is_neg() && !entry.local.is_conj();
        memory = direct ? entry.local : at::empty(entry.local.sizes(), at::TensorOptions().dtype(stored));
      }
      const std::int64_t size = memory.element_size();
      auto* data = static_cast<std::byte*>(memory.mutable_data_ptr()) + before * size;
      const std::uint32_t crc = read_part(tensor, piece, box, shared, data, size);
      if (answers_for(entry.name, box)) shares.push_back({number, crc, static_cast<std::uint64_t>(shared.numel() * size)});
    });
    leave();
    for (const auto& [name, entry] : state_.entries()) {
      const auto found = info_.tensors.find(name);
      if (!wanted(name) || found == info_.tensors.end()) continue;
      for (const Box& box : entry.boxes) result_.bytes_owned += box.numel() * bits_of(found->second.dtype) / 8;
    }
    for (const auto& file : files_) {
      if (file) result_.bytes_read += file->bytes_read();
    }
    std::string text(shares.size() * sizeof(Share), '\0');
    if (!shares.empty()) std::memcpy(text.data(), shares.data(), text.size());
    return text;
  }

  /// Reads what a piece and a box share into the box, whose elements are at `data`. \return contribution to the checksum of the
  /// piece
  std::uint32_t read_part(const CheckpointInfo::Tensor& tensor, const CheckpointInfo::Piece& piece, const Box& box,
                          const Box& shared, std::byte* data, std::int64_t size) {
    const SafetensorsFile& file = *files_[piece.file];
    const TensorEntry& entry = entry_of(file, tensor, piece);
    const auto all = static_cast<std::uint64_t>(shared.numel() * size);
    PartialCrc32c crc;
    for_each_run(piece.box, box, shared, [&](std::int64_t from, std::int64_t to, std::int64_t count) {
      const std::span<std::byte> out(data + to * size, static_cast<std::size_t>(count * size));
      const auto offset = static_cast<std::uint64_t>(from * size);
      const bool mapped = better_mapped(out.size(), all);
      for (std::uint64_t at = 0; at < out.size();) {
        const std::span<std::byte> chunk = out.subspan(at, std::min<std::uint64_t>(kChunk, out.size() - at));
        if (mapped) {
          file.copy(entry, offset + at, chunk);
        } else {
          file.read(entry, offset + at, chunk);
        }
        if (source_.checkpoint) crc.add(offset + at, chunk);
        at += chunk.size();
      }
    });
    return crc.contribution(entry.bytes());
  }

  /// Puts the ranks' contributions together; all ranks come to the same result.
  void check_shares(const std::vector<std::string>& texts) {
    struct Sum {
      std::uint32_t crc = 0;
      std::uint64_t bytes = 0;
    };
    std::map<std::uint32_t, Sum> sums;
    for (const std::string& text : texts) {
      for (std::size_t at = 0; at < text.size(); at += sizeof(Share)) {
        Share share;
        std::memcpy(&share, text.data() + at, sizeof(Share));
        sums[share.piece].crc ^= share.crc;
        sums[share.piece].bytes += share.bytes;
      }
    }
    std::uint32_t number = 0;
    std::vector<std::string> damaged;
    for (const auto& [name, tensor] : info_.tensors) {
      for (const CheckpointInfo::Piece& piece : tensor.pieces) {
        const auto sum = sums.find(number++);
        const auto bytes = static_cast<std::uint64_t>(piece.box.numel() * bits_of(tensor.dtype) / 8);
        if (sum == sums.end() || sum->second.bytes != bytes) continue;
        result_.bytes_checked += static_cast<std::int64_t>(bytes);
        if (PartialCrc32c::finish(sum->second.crc, bytes) != piece.crc32c)
          damaged.push_back(concat("tensor ", piece.key, " in ", (path_ / info_.files[piece.file].name).string()));
      }
    }
    if (!damaged.empty())
      throw CheckpointError(concat('[', op_, "] checksums differ from ", kInfoFile, ", these are damaged: ", joined(damaged)));
  }

  std::filesystem::path path_;
  StateDict& state_;
  const LoadOptions& options_;
  const PieceSource& source_;
  std::string_view op_;
  Comm comm_;
  CommOptions patience_;
  CheckpointInfo info_;
  std::map<std::string, GlobalTensor> all_;  // that the ranks want, by name
  std::vector<std::optional<SafetensorsFile>> files_;
  LoadResult result_;
};

}  // namespace

LoadResult load_pieces(const std::filesystem::path& path, StateDict& state, const LoadOptions& options,
                       const PieceSource& source) {
  return Loader(path, state, options, source).run();
}

LoadResult load(const std::filesystem::path& path, StateDict& state, const LoadOptions& options) {
  return load_pieces(path, state, options, {.op = "ckpt.load", .info = [&] { return read_info(path); }});
}

}  // namespace hyper_parallel::ckpt
