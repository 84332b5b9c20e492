#pragma once
// What happens to the weights between a backward and the next forward.
#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/optim/ema.h>
#include <hyper_parallel/optim/flat_optimizer.h>
#include <hyper_parallel/optim/grad_scaler.h>
#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Unscales and clips the gradients, steps the optimizer, and averages the weights, as [optim] and [precision] say.
class Updater {
 public:
  struct Outcome {
    double grad_norm = 0;   ///< before clipping
    double loss_scale = 1;  ///< of this step's loss
    bool stepped = true;    ///< false: gradients were not finite and the scale was at fault
  };

  /// Local. The parameters may be without values yet.
  Updater(const Config& config, const HSDPModule& root);
  /// Starts the averages from the weights as they are, before the first step; nothing without averages. Local.
  void start();

  /// What to run backward from.
  [[nodiscard]] at::Tensor scaled(const at::Tensor& loss) const { return scaler_.scale(loss); }
  /// Collective. Gradients are gone afterwards.
  Outcome step(double lr);
  /// Of one rank: the optimizer's and the averages', those included that start() will make.
  [[nodiscard]] std::int64_t state_bytes() const;

  /// What a checkpoint holds of it: tensors "optim.…" and "ema.…".
  void add_to(ckpt::StateDict& state) const;
  /// The same for a load from the checkpoint that `saved` describes.
  void add_to(ckpt::StateDict& state, const ckpt::CheckpointInfo& saved);
  struct Counters {
    std::int64_t updates = 0;  ///< of the averages
    optim::GradScaler::State scaler;
  };
  [[nodiscard]] Counters counters() const { return {steps_, scaler_.state()}; }
  /// ValueError: a scale that is none.
  void set_counters(const Counters& counters);

  /// Puts the averages into the model for the lifetime of the result; nothing without averages. Local.
  class Averages {
   public:
    explicit Averages(Ema* ema) : ema_(ema) {
      if (ema_ != nullptr) ema_->swap();
    }
    ~Averages() {
      if (ema_ != nullptr) ema_->restore();
    }
    Averages(const Averages&) = delete;
    Averages& operator=(const Averages&) = delete;

   private:
    Ema* ema_;
  };
  [[nodiscard]] Averages averages() { return Averages(ema_ ? &*ema_ : nullptr); }

 private:
  HSDPModule root_;
  double clip_norm_, ema_decay_;
  std::unique_ptr<optim::FlatOptimizer> optimizer_;
  optim::GradScaler scaler_;
  std::optional<Ema> ema_;
  std::int64_t steps_ = 0;
};

}  // namespace hyper_parallel::train
