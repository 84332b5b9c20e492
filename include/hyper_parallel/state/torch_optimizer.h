#pragma once
// The optimizers of torch::optim as state dictionaries and checkpoints see them.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <hyper_parallel/optim/stateful_optimizer.h>

namespace hyper_parallel {

/// A torch::optim optimizer over parameters of a module with units inside, by their names: what ckpt::StateDict::add_optimizer
/// takes.
/// \code hp::TorchOptimizer by_name(model, optimizer); state.add_optimizer(by_name); \endcode
/// Adam, AdamW, SGD, Adagrad, RMSprop and what is derived from them. LBFGS keeps one history for all parameters of a rank, which
/// cannot be cut anew. Thread safety: one thread at a time. Refers to the optimizer, which must outlive it.
class HP_API TorchOptimizer : public optim::StatefulOptimizer {
 public:
  /// Local. ValueError: LBFGS and other kinds of optimizer, a parameter that the module does not have, one that is listed twice
  /// (parameters() of a module lists tied ones under each name).
  TorchOptimizer(const std::shared_ptr<torch::nn::Module>& model, torch::optim::Optimizer& optimizer);
  template <class Contained>
  TorchOptimizer(const torch::nn::ModuleHolder<Contained>& model, torch::optim::Optimizer& optimizer)
      : TorchOptimizer(std::shared_ptr<torch::nn::Module>(model.ptr()), optimizer) {}
  TorchOptimizer(TorchOptimizer&&) noexcept;
  ~TorchOptimizer() override;

  [[nodiscard]] std::vector<State> state() const override;
  /// A step of 0 takes a parameter's state away: its next step is its first.
  void load_state(const std::vector<State>& state) override;
  void check_state(const std::vector<State>& state) override;
  [[nodiscard]] bool counts_steps() const override;
  [[nodiscard]] std::vector<optim::ParamGroupState> param_groups() const override;
  void load_param_groups(const std::vector<optim::ParamGroupState>& groups) override;
  [[nodiscard]] std::map<std::string, DTensor> sharded_parameters() const override;

  struct Impl;  // src/state

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace hyper_parallel
