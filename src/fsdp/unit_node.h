#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include <torch/csrc/autograd/function.h>

namespace hyper_parallel::fsdp {

class Unit;

/// The autograd node whose outputs are the parameters of a unit: it runs as soon as the last gradient of the last parameter is
/// in.
class UnitNode : public torch::autograd::Node {
 public:
  explicit UnitNode(std::weak_ptr<Unit> unit) : Node(next_sequence_number(), {}), unit_(std::move(unit)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  /// For graphs that were made before the parameters changed their dtype: apply throws.
  void retire() {
    unit_.reset();
    retired_ = true;
  }
  std::string name() const override { return "HyperParallelUnit"; }
  [[nodiscard]] std::shared_ptr<Unit> unit() const { return unit_.lock(); }

 private:
  /// Higher than that of any other node, so that the engine prefers this one over everything else that is ready. Of units that
  /// become ready together, the one made last comes first: the engine's own choice between equals would depend on what else
  /// waits.
  static std::uint64_t next_sequence_number() {
    static std::atomic<std::uint64_t> next{std::uint64_t{1} << 63};
    return next++;
  }

  std::weak_ptr<Unit> unit_;
  bool retired_ = false;
};

}  // namespace hyper_parallel::fsdp
