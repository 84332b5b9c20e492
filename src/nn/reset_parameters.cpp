// Values for the parameters of a module tree, as their modules' own reset_parameters() gives them.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/nn/fully_shard.h>

#include "fsdp/places.h"
#include "nn/access.h"
#include "nn/factory_mode.h"

namespace hyper_parallel {
namespace {

using torch::nn::Module;

template <class Impl>
bool reset_as(Module& module) {
  auto* known = dynamic_cast<Impl*>(&module);
  if (known == nullptr) return false;
  known->reset_parameters();
  return true;
}

template <class... Impls>
bool reset_as_one_of(Module& module) {
  return (reset_as<Impls>(module) || ...);
}

bool reset_library_module(Module& module) {
  namespace n = torch::nn;
  if (auto* attention = dynamic_cast<n::MultiheadAttentionImpl*>(&module)) {
    attention->_reset_parameters();
    return true;
  }
  if (auto* prelu = dynamic_cast<n::PReLUImpl*>(&module)) {
    prelu->weight.fill_(prelu->options.init());
    return true;
  }
  return reset_as_one_of<n::LinearImpl, n::BilinearImpl, n::EmbeddingImpl, n::EmbeddingBagImpl, n::LayerNormImpl,
                         n::GroupNormImpl, n::BatchNorm1dImpl, n::BatchNorm2dImpl, n::BatchNorm3dImpl, n::InstanceNorm1dImpl,
                         n::InstanceNorm2dImpl, n::InstanceNorm3dImpl, n::Conv1dImpl, n::Conv2dImpl, n::Conv3dImpl,
                         n::ConvTranspose1dImpl, n::ConvTranspose2dImpl, n::ConvTranspose3dImpl, n::RNNImpl, n::LSTMImpl,
                         n::GRUImpl, n::RNNCellImpl, n::LSTMCellImpl, n::GRUCellImpl, n::TransformerImpl,
                         n::TransformerEncoderImpl, n::TransformerDecoderImpl, n::TransformerEncoderLayerImpl,
                         n::TransformerDecoderLayerImpl>(module);
}

bool reset_module(Module& module, const nn::ResetModule& reset) {
  if (reset && reset(module)) return true;
  auto* hooked = dynamic_cast<nn::HookedBase*>(&module);
  return (hooked != nullptr && hooked->reset_own_parameters()) || reset_library_module(module);
}

/// A handle that refers to something else for a while.
class Diverted {
 public:
  Diverted(const at::Tensor& handle, at::IntArrayRef shape) : handle_(handle), before_(handle.variable_data()) {
    fsdp::become(handle_, at::empty(shape, handle_.options().device(at::kMeta).requires_grad(false)));
  }
  Diverted(const Diverted&) = delete;
  Diverted& operator=(const Diverted&) = delete;
  Diverted(Diverted&& other) noexcept : handle_(std::move(other.handle_)), before_(std::move(other.before_)) {}
  Diverted& operator=(Diverted&&) = delete;
  ~Diverted() {
    if (handle_.defined()) fsdp::become(handle_, before_);
  }

 private:
  at::Tensor handle_, before_;
};

/// The module tree as it was before sharding: registered entries and members are the same tensors, all without memory but one.
class WholeModel {
 public:
  WholeModel(Module& root, const std::vector<fsdp::ParameterPlace>& places) {
    for (const auto& place : places) place_of_[place.parameter().sharded.unsafeGetTensorImpl()] = &place;
    visit(root);
  }
  WholeModel(const WholeModel&) = delete;
  WholeModel& operator=(const WholeModel&) = delete;
  ~WholeModel() {
    for (auto& [module, key, registered] : entries_) nn::Access::parameters(*module)[key] = registered;
  }

  struct Parameter {
    const fsdp::ParameterPlace* place;
    std::vector<Module*> owners;  ///< the module that registers it, then those around it
  };
  [[nodiscard]] const std::vector<Parameter>& parameters() const { return parameters_; }

  /// Of a buffer; none when it is not below the root.
  [[nodiscard]] std::vector<Module*> owners_of(const at::Tensor& buffer) const {
    const auto owners = owners_of_buffer_.find(buffer.unsafeGetTensorImpl());
    return owners == owners_of_buffer_.end() ? std::vector<Module*>() : owners->second;
  }

 private:
  void visit(Module& module) {
    if (!visited_.insert(&module).second) return;
    path_.insert(path_.begin(), &module);
    for (auto& entry : nn::Access::parameters(module)) {
      if (!entry.value().defined()) continue;
      const auto place = place_of_.find(entry.value().unsafeGetTensorImpl());
      const at::Tensor handle = place == place_of_.end() ? entry.value() : place->second->parameter().full;
      if (place != place_of_.end()) entries_.push_back({&module, entry.key(), entry.value()});
      if (!diverted_tensors_.insert(handle.unsafeGetTensorImpl()).second) continue;
      if (place != place_of_.end()) parameters_.push_back({place->second, path_});
      // Modules look at the shapes of their other parameters.
      diverted_.emplace_back(handle, place == place_of_.end() ? handle.sizes() : place->second->parameter().whole_shape);
    }
    for (const auto& [key_module, key, registered] : entries_) {
      if (key_module == &module)
        nn::Access::parameters(module)[key] = place_of_.at(registered.unsafeGetTensorImpl())->parameter().full;
    }
    for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
      if (entry.value().defined()) owners_of_buffer_.emplace(entry.value().unsafeGetTensorImpl(), path_);
    }
    for (const auto& child : module.children()) visit(*child);
    path_.erase(path_.begin());
  }

  struct Entry {
    Module* module;
    std::string key;
    at::Tensor registered;
  };
  std::unordered_map<const void*, const fsdp::ParameterPlace*> place_of_;
  std::unordered_set<const void*> visited_, diverted_tensors_;
  std::vector<Module*> path_;
  std::vector<Parameter> parameters_;
  std::unordered_map<const void*, std::vector<Module*>> owners_of_buffer_;
  std::vector<Entry> entries_;
  std::vector<Diverted> diverted_;
};

/// As while they are built: a module's own values first, then what the modules around it make of them.
void reset_owners(const std::vector<Module*>& owners, std::uint64_t seed, const std::string& name, const nn::ResetModule& reset) {
  for (Module* owner : owners) {
    const at::Generator generator = fsdp::named_generator(seed, name);
    const nn::GeneratorScope scope(generator);
    reset_module(*owner, reset);
  }
}

}  // namespace

void HSDPModule::reset_parameters(std::uint64_t seed, const nn::ResetModule& reset) const {
  constexpr std::string_view kOp = "reset_parameters";
  check_value(defined(), kOp, "handle is empty, want the one that fully_shard returned");
  fsdp::prepare_for_values(*unit(), kOp);
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ParameterPlace> places = fsdp::places_of(*unit());
  const WholeModel model(*module(), places);
  for (const WholeModel::Parameter& parameter : model.parameters()) {
    const fsdp::ParameterPlace& place = *parameter.place;
    const at::Tensor whole = fsdp::whole_of(place);
    const fsdp::Unwritten unwritten(whole);
    const at::Tensor& handle = place.parameter().full;
    const at::Tensor meta = handle.variable_data();
    fsdp::become(handle, whole);
    try {
      reset_owners(parameter.owners, seed, place.name, reset);
    } catch (...) {
      fsdp::become(handle, meta);
      throw;
    }
    fsdp::become(handle, meta);
    check_value(!unwritten.still(whole), kOp, "nothing initialises parameter ", place.name, " of module ",
                parameter.owners.front()->name(), ", want a module of torch's, one declared with HP_MODULE that has ",
                "reset_parameters(), or a function of yours as the second argument");
    place.group->set_value(place.index, whole);
  }
  std::vector<fsdp::Unit*> units;
  unit()->subtree(units);
  for (const fsdp::Unit* each : units) {
    for (const auto& [name, buffer] : each->buffers_without_values()) {
      if (const auto owners = model.owners_of(buffer); !owners.empty()) reset_owners(owners, seed, name, reset);
    }
  }
}

}  // namespace hyper_parallel
