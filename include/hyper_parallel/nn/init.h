#pragma once
// Models that are built without memory.
//
//   hp::Model model{nullptr};
//   { const hp::MetaInit no_memory;  model = Model(config); }
//   for (auto& block : model->blocks) hp::fully_shard(block, options);
//   hp::HSDPModule root = hp::fully_shard(model, options);
//   root.reset_parameters(seed);          // or load_full, load_from_rank0
#include <functional>
#include <memory>
#include <string>

#include <torch/nn/module.h>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel {

/// While one lives, tensors that this thread makes without naming a device are on the meta device: they have shape and dtype, but
/// no memory and no values. Parameters and buffers of modules that are built meanwhile among them.
///
/// Factories with a device in their options, torch::tensor with a list, and functions of existing tensors (zeros_like) are left
/// as they are: a table that a constructor computes once is best made with an explicit device. May be nested. Costs nothing where
/// none lives. Thread safety: each thread has its own.
class HP_API MetaInit {
 public:
  MetaInit();
  MetaInit(const MetaInit&) = delete;
  MetaInit& operator=(const MetaInit&) = delete;
  ~MetaInit();

 private:
  struct Scope;
  std::unique_ptr<Scope> scope_;
};

namespace nn {

/// Initialises the parameters and buffers of a module, through its members, in place; true when it knows the module.
using ResetModule = std::function<bool(torch::nn::Module& module)>;

}  // namespace nn
}  // namespace hyper_parallel
