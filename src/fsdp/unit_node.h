#pragma once
#include <memory>

#include <torch/csrc/autograd/function.h>

namespace hyper_parallel::fsdp {

class Unit;

/// The autograd node whose outputs are the parameters of a unit: it runs as soon as the last gradient of the last parameter is
/// in.
class UnitNode : public torch::autograd::Node {
 public:
  // The highest sequence number makes the engine prefer this node over everything else that is ready.
  explicit UnitNode(std::weak_ptr<Unit> unit) : Node(UINT64_MAX, {}), unit_(std::move(unit)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  /// For graphs that were made before the parameters changed their dtype: apply throws.
  void retire() {
    unit_.reset();
    retired_ = true;
  }
  std::string name() const override { return "HyperParallelUnit"; }

 private:
  std::weak_ptr<Unit> unit_;
  bool retired_ = false;
};

}  // namespace hyper_parallel::fsdp
