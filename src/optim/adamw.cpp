#include <hyper_parallel/optim/adamw.h>

#include <utility>

#include "optim/flat_update.h"

namespace hyper_parallel::optim {

AdamW::AdamW(const fsdp::UnitHandle& root, AdamWOptions options)
    : FlatOptimizer(
          root, {.op = "AdamW",
                 .defaults = {.lr = options.lr, .weight_decay = options.weight_decay, .betas = options.betas, .eps = options.eps},
                 .groups = options.groups,
                 .takes_betas = true,
                 .parameters = options.parameters,
                 .decays = options.decays,
                 .state_dtype = options.state_dtype,
                 .master_weights = options.master_weights,
                 .slots = {"exp_avg", "exp_avg_sq"}}),
      options_(std::move(options)) {}

void AdamW::update(const Update& update) {
  adamw({.weights = update.weights,
         .gradient = update.gradient,
         .exp_avg = update.slots[0],
         .exp_avg_sq = update.slots[1],
         .numel = update.numel,
         .lr = update.settings.lr,
         .beta1 = update.settings.betas.first,
         .beta2 = update.settings.betas.second,
         .eps = update.settings.eps,
         .weight_decay = update.settings.weight_decay,
         .step = update.step,
         .maximize = options_.maximize});
}

}  // namespace hyper_parallel::optim
