#pragma once
// From windows of the corpus to tensors.
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/corpus.h>
#include <hyper_parallel/train/sampler.h>

namespace hyper_parallel::train {

/// Tokens (B, T) and the tokens that follow them.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
};

/// The training and validation batches of one of the plan.data_ranks() ranks that are given different sequences. Thread safety:
/// one thread at a time.
class Batches {
 public:
  /// Local. ValueError: the text cannot be opened or is too short for one batch or one validation sequence.
  Batches(const Config& config, const BatchPlan& plan, int rank);

  [[nodiscard]] Batch next();
  [[nodiscard]] const WindowSampler& sampler() const { return sampler_; }
  [[nodiscard]] const Corpus& corpus() const { return corpus_; }
  [[nodiscard]] const Splits& splits() const { return splits_; }

  /// Sequences of one validation, all ranks together; 0 without a validation split.
  [[nodiscard]] std::int64_t validation_windows() const { return validation_windows_; }
  /// How often every rank must call `validation`.
  [[nodiscard]] std::int64_t validation_rounds() const;
  /// This rank's part of round `round`: as many sequences as a training micro-batch, of which only the first `real` count.
  [[nodiscard]] Batch validation(std::int64_t round, std::int64_t* real) const;

 private:
  [[nodiscard]] Batch load(const Split& split, std::span<const std::int64_t> windows) const;

  std::int64_t seq_len_, micro_batch_;
  int rank_, world_;
  Corpus corpus_;
  Splits splits_;
  WindowSampler sampler_;
  std::int64_t validation_windows_ = 0, validation_available_ = 0;
};

}  // namespace hyper_parallel::train
