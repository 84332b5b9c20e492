#pragma once
// AdamW over flat shards.
#include <hyper_parallel/optim/flat_optimizer.h>

namespace hyper_parallel::optim {

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  /// False for a parameter that gets no weight decay, whatever its group says; default: all get it.
  ParameterPredicate decays = {};
  std::vector<ParamGroup> groups = {};
  bool maximize = false;
  /// Of both moments: float32, float64 or bfloat16. Default: float32, but float64 for float64 parameters.
  std::optional<c10::ScalarType> state_dtype = {};
  /// Keep an fp32 copy of bf16 and fp16 shards and update that; the shard is its rounding. Without it an update smaller than half
  /// a unit in the last place of the parameter is lost.
  bool master_weights = false;
  /// Which parameters are updated; default: all of the tree.
  ParameterPredicate parameters = {};
};

/// AdamW (Loshchilov and Hutter, 2019): the numbers of torch::optim::AdamW to rounding. State: "exp_avg" and "exp_avg_sq", with
/// master weights also "master", each of the shard's size.
class HP_API AdamW : public FlatOptimizer {
 public:
  /// Local. ValueError: lr, eps or weight_decay negative, betas outside [0, 1), a group without names and predicate, a name in
  /// two groups or of no parameter, another state_dtype, parameters that are not on the CPU.
  explicit AdamW(const fsdp::UnitHandle& root, AdamWOptions options = {});

  [[nodiscard]] const AdamWOptions& options() const { return options_; }

 private:
  void update(const Update& update) override;

  AdamWOptions options_;
};

}  // namespace hyper_parallel::optim
