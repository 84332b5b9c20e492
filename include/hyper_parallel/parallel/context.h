#pragma once
// Context parallelism: long sequences are split over the ranks of a mesh axis. Everything but attention works on this rank's
// tokens alone; attention gathers keys and values of all ranks (all-gather-KV, as in Llama 3, Dubey et al. 2024).
//
//   kZigZag, 3 ranks, the sequence in 6 chunks:   0 | 1 | 2 | 3 | 4 | 5          chunks of each rank: (0, 5) (1, 4) (2, 3)
//
// With a causal mask a query reads the keys before it. Contiguous parts would give the last rank (2 W - 1) times the work of the
// first; with kZigZag, chunk i reads i + 1 chunks, so every rank computes 2 W + 1 blocks. That is the default.
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::parallel {

enum class SequenceOrder { kZigZag, kContiguous };

/// Which positions of a sequence each rank has. Immutable. All members are local.
class HP_API SequenceSplit {
 public:
  struct Piece {
    std::int64_t begin = 0, end = 0;
    [[nodiscard]] std::int64_t size() const { return end - begin; }
  };
  /// kZigZag: ceil chunks of 2 * ranks, kContiguous: of `ranks`; the last ones may be shorter or empty. ValueError: length < 0,
  /// ranks < 1.
  SequenceSplit(std::int64_t length, int ranks, SequenceOrder order = SequenceOrder::kZigZag);

  [[nodiscard]] std::int64_t length() const { return length_; }  ///< of the whole sequence
  [[nodiscard]] int ranks() const { return ranks_; }
  /// In the order in which the rank holds them: ascending. Some may be empty.
  [[nodiscard]] std::vector<Piece> pieces(int rank) const;
  [[nodiscard]] std::vector<std::int64_t> lengths() const;  ///< of each rank's part
  /// int64 positions of the rank's tokens, e.g. to pick rotary angles.
  [[nodiscard]] at::Tensor positions(int rank) const;
  /// The rank's part of a whole x along `dim`. Differentiable. ValueError: x has another length.
  [[nodiscard]] at::Tensor part(const at::Tensor& x, std::int64_t dim, int rank) const;
  /// All ranks' parts, joined in rank order, in the order of the sequence. Differentiable. ValueError: x has another length.
  [[nodiscard]] at::Tensor restore(const at::Tensor& x, std::int64_t dim) const;

 private:
  void check_length(const at::Tensor& x, std::int64_t dim) const;

  std::int64_t length_;
  int ranks_;
  SequenceOrder order_;
};

struct ContextAttentionOptions {
  bool causal = true;
  std::optional<double> scale = {};  ///< default 1 / sqrt(head size)
};

/// Softmax attention of this rank's queries to the keys of the whole sequence.
///
/// \param q (B, H, own length, D), k (B, H_kv, own length, D), v (B, H_kv, own length, D_v): this rank's part; H a multiple of
/// H_kv, query head h reads key head h / (H / H_kv)
/// \param comm the ranks that share the sequence: split.ranks() of them; undefined: alone
/// \return (B, H, own length, D_v)
/// Collective, forward and backward: one all-gather of keys and values, (W - 1) B H_kv (D + D_v) own length elements sent, and
/// one reduce-scatter of their gradients. Ranks without any position take part. Gathered keys and values are kept for backward:
/// wrap the layer in hp::checkpoint to gather them again instead. ValueError: shapes that do not fit.
[[nodiscard]] HP_API at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                           const Comm& comm, const SequenceSplit& split,
                                                           const ContextAttentionOptions& options = {});

}  // namespace hyper_parallel::parallel
