#pragma once
// Which windows of the text make up which batch, on which rank. Torch-free.
#include <cstdint>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::train {

/// A pseudo-random permutation of [0, n) that needs no table: a Feistel network over the next even power of two, walked until it
/// lands below n. Same result on every machine.
class Permutation {
 public:
  Permutation(std::uint64_t n, std::uint64_t seed);
  [[nodiscard]] std::uint64_t operator()(std::uint64_t i) const;  ///< i < n

 private:
  static constexpr int kRounds = 6;
  std::uint64_t n_;
  int half_bits_;
  std::uint64_t keys_[kRounds];
};

/// A contiguous range of tokens, cut into windows of seq_len inputs; each needs one more token as its last target.
struct Split {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t tokens() const { return end - begin; }
  [[nodiscard]] std::int64_t windows(std::int64_t seq_len) const { return tokens() > seq_len ? (tokens() - 1) / seq_len : 0; }
};

struct Splits {
  Split train;
  Split validation;
};
/// The last `validation_fraction` of the tokens is the validation split.
[[nodiscard]] Splits split_tokens(std::int64_t tokens, double validation_fraction);

/// The order in which the windows are consumed: epoch after epoch, each with a permutation of its own.
///
/// The order is one global sequence that knows nothing of ranks. Step s takes the next `batch` windows of it, micro-batch by
/// micro-batch; within a micro-batch of W * b windows rank r takes the r-th run of b. So every world size trains on the same
/// batches.
/// ```
///  global order   | w0 w1 w2 w3 | w4 w5 w6 w7 |   batch 8, W = 2, b = 2
///                 | rank0 rank1 | rank0 rank1 |   micro-batches 0 and 1
/// ```
/// Thread safety: one thread at a time.
class WindowSampler {
 public:
  WindowSampler(std::int64_t windows, std::uint64_t seed);

  /// Windows of this rank for the next micro-batch of `world * per_rank` windows, and moves the position behind all of it.
  [[nodiscard]] std::vector<std::int64_t> next(int rank, int world, std::int64_t per_rank);

  /// Windows consumed so far by all ranks: all that a restart needs besides seed and data, whatever the world size.
  [[nodiscard]] std::int64_t position() const { return position_; }
  void seek(std::int64_t position);
  [[nodiscard]] double epoch() const { return static_cast<double>(position_) / static_cast<double>(windows_); }

 private:
  [[nodiscard]] std::int64_t at(std::int64_t position);

  std::int64_t windows_;
  std::uint64_t seed_;
  std::int64_t position_ = 0;
  std::int64_t epoch_ = 0;
  Permutation permutation_;
};

}  // namespace hyper_parallel::train
