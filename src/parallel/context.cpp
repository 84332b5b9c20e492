#include <hyper_parallel/parallel/context.h>

#include <cmath>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <hyper_parallel/parallel/functions.h>

#include "parallel/transfer.h"

namespace hyper_parallel::parallel {
namespace {

using Piece = SequenceSplit::Piece;

constexpr const char* kOp = "context_parallel_attention";

/// A view of the whole costs a copy in backward: x itself then.
at::Tensor part_of(const at::Tensor& x, std::int64_t dim, std::int64_t begin, std::int64_t size) {
  return size == x.size(dim) ? x : x.narrow(dim, begin, size);
}

at::Tensor cat_pieces(const at::Tensor& x, std::int64_t dim, const std::vector<Piece>& pieces) {
  std::vector<at::Tensor> parts;
  for (const Piece& piece : pieces) {
    if (piece.size() > 0) parts.push_back(part_of(x, dim, piece.begin, piece.size()));
  }
  if (parts.empty()) return x.narrow(dim, 0, 0);
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

/// No queries: what comes out is empty, and still hangs on everything that the other ranks' results hang on.
at::Tensor attention_of_nothing(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t group = q.size(1) / std::max<std::int64_t>(1, k.size(1));
  const at::Tensor keys = group == 1 ? k : k.repeat_interleave(group, 1), values = group == 1 ? v : v.repeat_interleave(group, 1);
  return at::matmul(at::matmul(q, keys.transpose(-2, -1)), values);
}

/// Queries at [begin, end) of the sequence.
at::Tensor attend(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const Piece& piece,
                  const ContextAttentionOptions& options) {
  const std::int64_t seen = options.causal ? piece.end : keys.size(2);
  const at::Tensor k = part_of(keys, 2, 0, seen), v = part_of(values, 2, 0, seen);
  std::optional<at::Tensor> mask;
  if (options.causal && piece.begin > 0) {
    const auto positions = at::TensorOptions().dtype(at::kLong).device(q.device());
    mask = at::arange(seen, positions).unsqueeze(0).le(at::arange(piece.begin, piece.end, positions).unsqueeze(1));
  }
  return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, /*is_causal=*/options.causal && piece.begin == 0,
                                          options.scale, /*enable_gqa=*/q.size(1) != k.size(1));
}

void check_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Comm& comm, const SequenceSplit& split) {
  for (const auto& [name, tensor] : {std::pair{"q", q}, {"k", k}, {"v", v}})
    check_value(tensor.defined() && tensor.dim() == 4, kOp, name, " has ", tensor.defined() ? tensor.dim() : 0,
                " dimensions, want (B, H, length, D)");
  check_value(split.ranks() == size_of(comm), kOp, "split over ", split.ranks(), " ranks, want the size of the group, ",
              size_of(comm));
  const std::int64_t own = split.lengths()[static_cast<std::size_t>(rank_in(comm))];
  check_value(q.size(2) == own && k.size(2) == own && v.size(2) == own, kOp, "q, k and v have lengths ", q.size(2), ", ",
              k.size(2), " and ", v.size(2), ", want this rank's part of the sequence, ", own);
  check_value(q.size(0) == k.size(0) && k.size(0) == v.size(0) && q.size(3) == k.size(3) && k.size(1) == v.size(1) &&
                  k.size(1) > 0 && q.size(1) % k.size(1) == 0,
              kOp, "q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(),
              ", want equal batches and head sizes, and query heads a multiple of key heads");
}

}  // namespace

SequenceSplit::SequenceSplit(std::int64_t length, int ranks, SequenceOrder order)
    : length_(length), ranks_(ranks), order_(order) {
  check_value(length >= 0 && ranks >= 1, "SequenceSplit", "length ", length, " over ", ranks,
              " ranks, want 0 or more over one or more");
}

std::vector<Piece> SequenceSplit::pieces(int rank) const {
  check_value(rank >= 0 && rank < ranks_, "SequenceSplit", "rank ", rank, " of ", ranks_);
  const int chunks = order_ == SequenceOrder::kZigZag ? 2 * ranks_ : ranks_;
  const std::int64_t chunk = (length_ + chunks - 1) / chunks;
  const auto piece = [&](std::int64_t i) { return Piece{std::min(length_, i * chunk), std::min(length_, (i + 1) * chunk)}; };
  if (ranks_ == 1) return {{0, length_}};
  if (order_ == SequenceOrder::kContiguous) return {piece(rank)};
  return {piece(rank), piece(chunks - 1 - rank)};
}

std::vector<std::int64_t> SequenceSplit::lengths() const {
  std::vector<std::int64_t> lengths;
  for (int r = 0; r < ranks_; ++r) {
    lengths.push_back(0);
    for (const Piece& piece : pieces(r)) lengths.back() += piece.size();
  }
  return lengths;
}

at::Tensor SequenceSplit::positions(int rank) const { return cat_pieces(at::arange(length_, at::kLong), 0, pieces(rank)); }

void SequenceSplit::check_length(const at::Tensor& x, std::int64_t dim) const {
  check_value(x.defined() && dim >= -x.dim() && dim < x.dim() && x.size(dim) == length_, "SequenceSplit", "x has shape ",
              x.defined() ? x.sizes() : at::IntArrayRef(), ", want length ", length_, " along dim ", dim);
}

at::Tensor SequenceSplit::part(const at::Tensor& x, std::int64_t dim, int rank) const {
  check_length(x, dim);
  return cat_pieces(x, dim, pieces(rank));
}

at::Tensor SequenceSplit::restore(const at::Tensor& x, std::int64_t dim) const {
  check_length(x, dim);
  if (ranks_ == 1 || order_ == SequenceOrder::kContiguous) return x;
  // First halves lie in the order of the sequence, rank after rank; second halves in the opposite one.
  std::vector<Piece> first, second;
  std::int64_t begin = 0;
  for (int r = 0; r < ranks_; ++r) {
    for (const bool low : {true, false}) {
      const std::int64_t size = pieces(r)[low ? 0 : 1].size();
      (low ? first : second).push_back({begin, begin + size});
      begin += size;
    }
  }
  first.insert(first.end(), second.rbegin(), second.rend());
  return cat_pieces(x, dim, first);
}

at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Comm& comm,
                                      const SequenceSplit& split, const ContextAttentionOptions& options) {
  check_shapes(q, k, v, comm, split);
  at::Tensor keys = k, values = v;
  if (!alone(comm)) {
    // One message for both.
    const at::Tensor both =
        split.restore(all_gather_reduce_scatter(at::cat({k, v}, 3), comm, {.dim = 2, .sizes = split.lengths(), .label = kOp}), 2);
    keys = both.narrow(3, 0, k.size(3));
    values = both.narrow(3, k.size(3), v.size(3));
  }
  std::vector<at::Tensor> outputs;
  std::int64_t begin = 0;
  for (const Piece& piece : split.pieces(rank_in(comm))) {
    if (piece.size() > 0) outputs.push_back(attend(part_of(q, 2, begin, piece.size()), keys, values, piece, options));
    begin += piece.size();
  }
  if (outputs.empty()) return attention_of_nothing(q, keys, values);
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 2);
}

}  // namespace hyper_parallel::parallel
