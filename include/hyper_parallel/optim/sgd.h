#pragma once
// Stochastic gradient descent over flat shards.
#include <hyper_parallel/optim/flat_optimizer.h>

namespace hyper_parallel::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;  ///< added to the gradient (L2), as torch does it
  bool nesterov = false;
  bool maximize = false;
  /// False for a parameter that gets no weight decay, whatever its group says; default: all get it.
  ParameterPredicate decays = {};
  std::vector<ParamGroup> groups = {};  ///< lr and weight_decay
  /// Of the momentum: float32, float64 or bfloat16. Default: float32, but float64 for float64 parameters.
  std::optional<c10::ScalarType> state_dtype = {};
  bool master_weights = false;         ///< as in AdamWOptions
  ParameterPredicate parameters = {};  ///< which are updated; default: all of the tree
};

/// Gradient descent with momentum (Sutskever et al., 2013, in torch's form): the numbers of torch::optim::SGD to rounding. State
/// with momentum: "momentum_buffer", which a parameter's first gradient fills undampened.
class HP_API SGD : public FlatOptimizer {
 public:
  /// Local. ValueError: lr, momentum or weight_decay negative, nesterov without momentum or with dampening, and what AdamW
  /// rejects in groups and state_dtype.
  explicit SGD(const fsdp::UnitHandle& root, SGDOptions options = {});

  [[nodiscard]] const SGDOptions& options() const { return options_; }

 private:
  void update(const Update& update) override;

  SGDOptions options_;
};

}  // namespace hyper_parallel::optim
