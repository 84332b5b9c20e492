#include "train/batches.h"

#include <torch/torch.h>

#include <algorithm>

namespace hyper_parallel::train {
namespace {

std::int64_t checked_windows(const Config& config, const Split& split) {
  const std::int64_t windows = split.windows(config.data.seq_len);
  check_value(windows >= config.train.batch_size, "data", config.data.path, ": ", split.tokens(), " training tokens make ",
              windows, " sequences of data.seq_len = ", config.data.seq_len,
              ", want at least train.batch_size = ", config.train.batch_size,
              " for one batch (data.path: ", config.where("data.path"), ")");
  return windows;
}

}  // namespace

Batches::Batches(const Config& config, const BatchPlan& plan, int rank)
    : seq_len_(config.data.seq_len),
      micro_batch_(plan.micro_batch),
      rank_(rank),
      world_(static_cast<int>(plan.data_ranks())),
      corpus_(Corpus::open(config.data.path, config.where("data.path"))),
      splits_(split_tokens(corpus_.size(), config.data.validation_fraction)),
      sampler_(checked_windows(config, splits_.train), static_cast<std::uint64_t>(config.train.seed)) {
  validation_available_ = splits_.validation.windows(seq_len_);
  validation_windows_ = std::min(config.train.eval_windows, validation_available_);
  check_value(validation_windows_ > 0 || config.data.validation_fraction == 0, "data", config.data.path, ": ",
              splits_.validation.tokens(), " validation tokens, want at least ", seq_len_ + 1,
              " for one sequence: raise data.validation_fraction, or set it to 0 (", config.where("data.validation_fraction"),
              ")");
}

Batch Batches::load(const Split& split, std::span<const std::int64_t> windows) const {
  const torch::Tensor tokens = torch::empty({static_cast<std::int64_t>(windows.size()), seq_len_ + 1}, torch::kLong);
  std::int64_t* row = tokens.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t window : windows) {
    corpus_.read(split.begin + window * seq_len_, {row, static_cast<std::size_t>(seq_len_ + 1)});
    row += seq_len_ + 1;
  }
  return {.inputs = tokens.narrow(1, 0, seq_len_).contiguous(), .targets = tokens.narrow(1, 1, seq_len_).contiguous()};
}

Batch Batches::next() { return load(splits_.train, sampler_.next(rank_, world_, micro_batch_)); }

std::int64_t Batches::validation_rounds() const {
  const std::int64_t round = micro_batch_ * world_;
  return (validation_windows_ + round - 1) / round;
}

Batch Batches::validation(std::int64_t round, std::int64_t* real) const {
  std::vector<std::int64_t> windows;
  *real = 0;
  for (std::int64_t i = 0; i < micro_batch_; ++i) {
    const std::int64_t slot = (round * world_ + rank_) * micro_batch_ + i;
    const bool exists = slot < validation_windows_;
    // Spread over the whole split; what fills up the last round is computed and not counted.
    windows.push_back(exists ? slot * validation_available_ / validation_windows_ : 0);
    *real += exists ? 1 : 0;
  }
  return load(splits_.validation, windows);
}

}  // namespace hyper_parallel::train
