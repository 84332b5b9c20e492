#pragma once
// fully_shard for torch::nn modules.
#include <concepts>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/fsdp/policy.h>
#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/nn/init.h>
#include <hyper_parallel/nn/module.h>

namespace hyper_parallel {

/// Handle of a sharded module: the unit's methods, and the module. Cheap to copy.
class HP_API HSDPModule : public fsdp::UnitHandle {
 public:
  HSDPModule() = default;
  HSDPModule(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<fsdp::Unit> unit)
      : fsdp::UnitHandle(std::move(unit)), module_(std::move(module)) {}

  /// The handle of a module on which fully_shard was called; ValueError otherwise.
  [[nodiscard]] static HSDPModule of(const std::shared_ptr<torch::nn::Module>& module);
  template <class Contained>
  [[nodiscard]] static HSDPModule of(const torch::nn::ModuleHolder<Contained>& holder) {
    return of(std::shared_ptr<torch::nn::Module>(holder.ptr()));
  }

  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& module() const noexcept { return module_; }

  /// fn(args...) as a forward of this module, for methods other than `forward` (PyTorch: register_fsdp_forward_method):
  /// \code root.call([&](auto x) { return model->encode(x); }, tokens) \endcode
  /// The unit is gathered before; floating tensors in `args` are cast to `param_dtype`, what fn captures is not; the result is
  /// cast to `output_dtype` and its tensors lead the backward to the unit; the unit is freed afterwards as after `forward`. fn
  /// may call `forward`. With a list of modules it counts as the run of this member. Returns what fn returns. Collective, like a
  /// forward. ValueError: a handle without module, or of a module that was dropped from the list of its unit.
  template <class Fn, class... Args>
  requires std::invocable<Fn&, Args...>
  auto call(Fn&& fn, Args&&... args) const { return nn::detail::run_in_unit(unit(), member(), fn, std::forward<Args>(args)...); }

  // Values. All of these want a model between two steps (ValueError otherwise), work on the whole tree below this handle, keep
  // the registered leaves, so that optimizers built before go on, and let the next forward compare the ranks again.

  /// Gives memory to parameters and buffers on the meta device; what has values keeps them. What has none by the first forward is
  /// named there. Local. ValueError: `device` is not the mesh's.
  void to_empty(at::Device device = at::kCPU) const;
  /// Initialises every parameter as torch's constructors would: for each parameter the module that registers it, and then the
  /// modules around it from the inside out, run their reset_parameters() on a whole tensor of that parameter; everything else is
  /// on meta meanwhile. Modules of torch's and those declared with HP_MODULE are known; `reset` is asked first. Random numbers
  /// come from a generator seeded from `seed` and the parameter's name: the values do not depend on world, mesh, layout or units.
  /// Buffers without values are initialised likewise. Memory: one parameter besides the shards. Local; pass the same seed on all
  /// ranks of a mesh. ValueError: a parameter that no module initialises (those before it have their values then).
  void reset_parameters(std::uint64_t seed, const nn::ResetModule& reset = {}) const;
  /// The same with a function that fills one whole parameter at a time, by name; see fsdp::reset_parameters.
  void reset_parameters(std::uint64_t seed, const fsdp::InitParameter& init) const;
  /// Whole values of parameters and buffers that every rank has; each keeps its part. Local; see fsdp::load_full.
  void load_full(const fsdp::NamedTensors& values, bool strict = true) const;
  /// Whole values of parameters and buffers that rank 0 has, sent part by part. Collective; see fsdp::load_from_rank0.
  void load_from_rank0(const fsdp::NamedTensors& values, bool strict = true) const;

  // Conversions. Module::to(dtype) on the whole module does the same at its next forward; these do it at once.

  /// Another master dtype for floating parameters, their gradients, and buffers. Local, on all ranks; see fsdp::convert.
  void to(at::ScalarType dtype) const;
  /// No-op; ValueError: `device` is not the mesh's.
  void to(at::Device device) const;
  void half() const { to(at::kHalf); }
  void bfloat16() const { to(at::kBFloat16); }
  /// Buffers keep their dtype whatever `mp_policy` says; this casts the floating ones. Local, on all ranks.
  void cast_buffers(at::ScalarType dtype) const;

 private:
  /// Position of the module among those that form the unit.
  [[nodiscard]] int member() const;
  void check_defined(std::string_view op) const;
  void check_device(std::string_view op, at::Device device) const;

  std::shared_ptr<torch::nn::Module> module_;
};

/// Shards the parameters of `module` over the mesh and gathers them just in time for its forward and backward.
///
/// Parameters of inner modules on which fully_shard was called before stay with those: wrap inner modules first, the whole model
/// last. Afterwards `module->parameters()` are this rank's shards, to be given to an optimizer; gradients are averaged over all
/// ranks of the mesh. The module must be declared with HP_MODULE. Local: nothing is sent before the first forward, where all
/// ranks compare what they have wrapped. Values are taken from each rank's own module: seed all ranks alike, or
/// build it without memory (nn/init.h) and give it values afterwards. \return the handle
/// of the unit; its methods are in fsdp/unit.h ValueError (the module is unchanged): module without hooks or wrapped before, mesh
/// of more than two axes, parameter on another device than the mesh, shard dim out of range, parameter that belongs to another
/// unit, ParameterList or ParameterDict inside.
HP_API HSDPModule fully_shard(const std::shared_ptr<torch::nn::Module>& module, const FullyShardOptions& options = {});

/// Shards several modules as one unit: gathered when the first one runs, freed when the last one has run. Modules below another
/// listed module are dropped. Returns a handle for each listed module, all of the same unit. ValueError: empty list, an element
/// that is null.
HP_API std::vector<HSDPModule> fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                           const FullyShardOptions& options = {});

/// The parameters that fully_shard(modules, options) would manage, by the names that they have in the unit: those below the
/// modules that no unit manages and options.ignored_params does not list, each once. Local. ValueError: empty list, an element
/// that is null, ParameterList or ParameterDict inside.
[[nodiscard]] HP_API std::vector<std::pair<std::string, at::Tensor>> managed_parameters(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});

template <class Contained>
HSDPModule fully_shard(const torch::nn::ModuleHolder<Contained>& holder, const FullyShardOptions& options = {}) {
  return fully_shard(std::shared_ptr<torch::nn::Module>(holder.ptr()), options);
}

/// A list of holders, e.g. the blocks that form one unit.
template <class Holder>
requires requires(const Holder& holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
std::vector<HSDPModule> fully_shard(const std::vector<Holder>& holders, const FullyShardOptions& options = {}) {
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  for (const Holder& holder : holders)
    modules.push_back(holder.is_empty() ? nullptr : std::shared_ptr<torch::nn::Module>(holder.ptr()));
  return fully_shard(modules, options);
}

}  // namespace hyper_parallel
