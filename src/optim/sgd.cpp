#include <hyper_parallel/optim/sgd.h>

#include <utility>

#include "optim/flat_update.h"

namespace hyper_parallel::optim {

SGD::SGD(const fsdp::UnitHandle& root, SGDOptions options)
    : FlatOptimizer(root,
                    {.op = "SGD",
                     .defaults = {.lr = options.lr, .weight_decay = options.weight_decay},
                     .groups = options.groups,
                     .parameters = options.parameters,
                     .decays = options.decays,
                     .state_dtype = options.state_dtype,
                     .master_weights = options.master_weights,
                     .slots = options.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{}}),
      options_(std::move(options)) {
  check_value(options_.momentum >= 0, "SGD", "momentum is ", options_.momentum, ", want at least 0");
  check_value(!options_.nesterov || (options_.momentum > 0 && options_.dampening == 0), "SGD", "nesterov with momentum ",
              options_.momentum, " and dampening ", options_.dampening, ", want momentum above 0 and no dampening");
}

void SGD::update(const Update& update) {
  sgd({.weights = update.weights,
       .gradient = update.gradient,
       .momentum_buffer = update.slots[0],
       .numel = update.numel,
       .lr = update.settings.lr,
       .momentum = options_.momentum,
       .dampening = options_.dampening,
       .weight_decay = update.settings.weight_decay,
       .nesterov = options_.nesterov,
       .maximize = options_.maximize,
       .first = update.step == 1});
}

}  // namespace hyper_parallel::optim
