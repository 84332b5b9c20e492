#pragma once
// AdamW over flat shards.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel::optim {

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  /// False for a parameter that gets no weight decay; default: all get it.
  std::function<bool(const std::string& name, const std::vector<std::int64_t>& full_shape)> decays = {};
};

/// AdamW (Loshchilov and Hutter, 2019) with torch's fused kernel, run over the flat shards of a unit tree: a few large calls
/// however many parameters there are. Gives the numbers of torch::optim::AdamW to fp32 rounding. Parameters without gradient are
/// skipped, with their own step count, as there. State: two tensors of the shard's size and dtype for each trainable group, made
/// at the first step. Thread safety: one thread at a time. Owns its state; shares the parameters with the units.
class HP_API AdamW {
 public:
  /// ValueError: lr, eps or weight_decay negative, betas outside [0, 1).
  explicit AdamW(const fsdp::UnitHandle& root, AdamWOptions options = {});

  /// Updates every parameter that has a gradient. Local.
  void step();
  void zero_grad(bool set_to_none = true);

  [[nodiscard]] double lr() const { return options_.lr; }
  /// ValueError: negative.
  void set_lr(double lr);
  [[nodiscard]] const AdamWOptions& options() const { return options_; }

  /// State of one parameter: views of the flat state, shaped like the sharded parameter. Undefined tensors before its first step.
  struct State {
    std::string name;
    std::int64_t step = 0;
    at::Tensor exp_avg;
    at::Tensor exp_avg_sq;
  };
  [[nodiscard]] std::vector<State> state() const;

 private:
  struct Parameter {
    std::int64_t step = 0;
    bool decays = true;
  };
  struct Group {
    at::Tensor exp_avg, exp_avg_sq;
    std::vector<Parameter> parameters;
  };
  struct Batch;
  void collect(const fsdp::ShardedGroup& shard, Group& group, std::vector<Batch>& batches);

  fsdp::UnitHandle root_;
  AdamWOptions options_;
  std::vector<Group> groups_;
  std::vector<at::Tensor> steps_;  // scalars handed to the kernel, reused
  std::size_t steps_used_ = 0;
};

}  // namespace hyper_parallel::optim
