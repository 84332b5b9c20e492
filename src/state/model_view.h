#pragma once
// The tensors of a module by name, whoever manages them.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include <hyper_parallel/dtensor/dtensor.h>

namespace hyper_parallel::fsdp {
class Unit;
}

namespace hyper_parallel::state {

/// A parameter or buffer. Tied ones are one, with several names.
struct ModelTensor {
  std::vector<std::string> names;
  at::Tensor tensor;               ///< as it is registered: the sharded leaf, or whole
  std::optional<DTensor> sharded;  ///< of a managed parameter; shares memory with the leaf
  bool is_parameter = true;
  bool frozen = false;
  [[nodiscard]] const std::string& name() const { return names.front(); }
  [[nodiscard]] std::vector<std::int64_t> shape() const { return sharded ? sharded->shape() : tensor.sizes().vec(); }
  /// What must be equal on all ranks that share it.
  [[nodiscard]] std::string line() const;
};

/// A snapshot: what gets memory later is not seen. Local.
class ModelView {
 public:
  ModelView() = default;
  /// ValueError of `op`: no module; a parameter that a unit above the module manages.
  ModelView(std::string_view op, std::shared_ptr<torch::nn::Module> module);

  [[nodiscard]] const std::vector<ModelTensor>& tensors() const { return tensors_; }
  /// nullptr: there is none.
  [[nodiscard]] const ModelTensor* find(const std::string& name) const;
  /// By identity.
  [[nodiscard]] const ModelTensor* find(const at::Tensor& tensor) const;

  /// ValueError of `op` unless all units are between two steps.
  void check_between_steps(std::string_view op) const;
  /// Before values change: gathered copies are dropped, what is on meta gets memory. The result sees that.
  [[nodiscard]] ModelView prepared(std::string_view op) const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<fsdp::Unit*> tops_;  // units that are below no other unit of the module
  std::vector<ModelTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  std::unordered_map<const void*, std::size_t> by_tensor_;
};

}  // namespace hyper_parallel::state
