#include "train/updater.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/optim/clip_grad.h>
#include <hyper_parallel/optim/muon.h>
#include <hyper_parallel/optim/sgd.h>

#include "train/dtypes.h"

namespace hyper_parallel::train {
namespace {

/// Weight decay for matrices only; Muon with the update size of AdamW, so that one rate serves both. Routers and stacks of
/// experts, which are no single matrices, stay with AdamW.
std::unique_ptr<optim::FlatOptimizer> make_optimizer(const OptimConfig& o, const HSDPModule& root) {
  const optim::ParameterPredicate is_matrix = [](const std::string&, const std::vector<std::int64_t>& shape) {
    return shape.size() > 1;
  };
  const c10::ScalarType state_dtype = dtype_of(o.state_dtype);
  const optim::AdamWOptions adamw{.lr = o.lr,
                                  .betas = {o.beta1, o.beta2},
                                  .eps = o.eps,
                                  .weight_decay = o.weight_decay,
                                  .decays = is_matrix,
                                  .state_dtype = state_dtype};
  if (o.optimizer == "adamw") return std::make_unique<optim::AdamW>(root, adamw);
  if (o.optimizer == "sgd") {
    const optim::SGDOptions sgd{.lr = o.lr,
                                .momentum = o.momentum,
                                .weight_decay = o.weight_decay,
                                .nesterov = o.nesterov,
                                .decays = is_matrix,
                                .state_dtype = state_dtype};
    return std::make_unique<optim::SGD>(root, sgd);
  }
  optim::MuonOptions muon{.lr = o.lr, .weight_decay = o.weight_decay, .momentum = o.momentum, .nesterov = o.nesterov};
  muon.state_dtype = state_dtype;
  muon.adjust_lr_fn = optim::MuonLr::kMatchRmsAdamW;
  muon.matrices = [](const std::string& name, const std::vector<std::int64_t>& shape) {
    return name.starts_with("layers.") && shape.size() == 2 && !name.ends_with("router.weight");
  };
  muon.adamw = adamw;
  return std::make_unique<optim::Muon>(root, muon);
}

optim::GradScalerOptions scaler_options(const Config& config) {
  optim::GradScalerOptions options;
  options.enabled = scales_loss(config);
  if (config.precision.loss_scale > 0) options.init_scale = config.precision.loss_scale;
  return options;
}

}  // namespace

Updater::Updater(const Config& config, const HSDPModule& root)
    : root_(root),
      clip_norm_(config.optim.clip_norm > 0 ? config.optim.clip_norm : std::numeric_limits<double>::infinity()),
      ema_decay_(config.optim.ema_decay),
      optimizer_(make_optimizer(config.optim, root)),
      scaler_(scaler_options(config)) {}

void Updater::start() {
  if (ema_decay_ > 0) ema_.emplace(root_, EmaOptions{.decay = ema_decay_, .ramp = true});
}

Updater::Outcome Updater::step(double lr) {
  Outcome outcome{.loss_scale = scaler_.get_scale()};
  if (scaler_.enabled()) scaler_.unscale_(root_);
  outcome.grad_norm = clip_grad_norm_(root_, clip_norm_);
  optimizer_->set_lr(lr);
  outcome.stepped = scaler_.step(*optimizer_);
  if (scaler_.enabled()) scaler_.update();
  optimizer_->zero_grad();
  if (ema_ && outcome.stepped) ema_->update(steps_++);
  return outcome;
}

void Updater::add_to(ckpt::StateDict& state) const {
  state.add_optimizer(*optimizer_);
  if (!ema_) return;
  for (const auto& [name, average] : ema_->named_dtensors()) state.add("ema." + name, average);
}

void Updater::add_to(ckpt::StateDict& state, const ckpt::CheckpointInfo& saved) {
  state.add_optimizer(*optimizer_, saved);
  if (!ema_) return;
  for (const auto& [name, average] : ema_->named_dtensors()) state.add("ema." + name, average);
}

void Updater::set_counters(const Counters& counters) {
  scaler_.load_state(counters.scaler);
  steps_ = counters.updates;
}

std::int64_t Updater::state_bytes() const {
  std::int64_t bytes = optimizer_->state_bytes();
  if (ema_decay_ == 0) return bytes;
  constexpr std::int64_t kNarrowest = sizeof(float);  // averages of wider parameters are as wide as these
  for (const fsdp::ShardedGroup& group : root_.groups()) {
    const at::Tensor& shard = group.shard;
    if (shard.is_floating_point()) bytes += shard.numel() * std::max<std::int64_t>(shard.element_size(), kNarrowest);
  }
  return bytes;
}

}  // namespace hyper_parallel::train
