#pragma once
// HP_MODULE: what TORCH_MODULE does, plus calls that go through the hooks of a unit.
//
// torch::nn modules have no forward hooks. HP_MODULE(Block) declares a holder `Block` whose contained type is Hooked<BlockImpl>,
// a subclass of the user's BlockImpl that intercepts block(x), block->forward(x), torch::nn::Sequential and AnyModule. Before
// fully_shard it does nothing.
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/nn/walk.h>

namespace hyper_parallel::nn {

/// The part of a hooked module that fully_shard needs.
class HookedBase {
 public:
  virtual ~HookedBase() = default;
  [[nodiscard]] const std::shared_ptr<fsdp::Unit>& unit() const noexcept { return unit_; }
  [[nodiscard]] int member() const noexcept { return member_; }
  /// `member`: position of this module among the modules that form the unit.
  /// Runs the module's own `void reset_parameters()`; false when it has none that is public and takes no arguments.
  virtual bool reset_own_parameters() { return false; }
  void set_unit(std::shared_ptr<fsdp::Unit> unit, int member) {
    unit_ = std::move(unit);
    member_ = member;
  }

 protected:
  std::shared_ptr<fsdp::Unit> unit_;
  int member_ = 0;
};

namespace detail {

/// A copy of an argument, so that its tensors can be replaced, passed on like the original: as an lvalue or to be moved from.
template <class Given>
struct CastArgument {
  CastArgument(const fsdp::ForwardScope& scope, Given given) : copy(std::forward<Given>(given)) {
    auto cast = [&](at::Tensor& tensor) { tensor = scope.input(tensor); };
    walk_tensors(copy, cast);
  }
  decltype(auto) pass() {
    if constexpr (std::is_lvalue_reference_v<Given>) {
      return (copy);
    } else {
      return std::move(copy);
    }
  }
  std::decay_t<Given> copy;
};

/// body(given...) inside the phases of a unit: gathered before, inputs cast, outputs hooked and cast, freed afterwards.
template <class Body, class... Given>
auto run_in_unit(std::shared_ptr<fsdp::Unit> unit, int member, Body&& body, Given&&... given) {
  using Result = std::decay_t<std::invoke_result_t<Body&, Given&&...>>;
  fsdp::ForwardScope scope(*unit, member);
  const auto call = [&]() -> decltype(auto) {
    if (!scope.casts_inputs()) return std::invoke(body, std::forward<Given>(given)...);
    return std::invoke(body, CastArgument<Given&&>(scope, std::forward<Given>(given)).pass()...);
  };
  if constexpr (std::is_void_v<Result>) {
    call();
    scope.finish();
  } else {
    Result result = call();
    auto hook = [&](at::Tensor& tensor) { tensor = scope.output(tensor); };
    walk_tensors(result, hook);
    scope.finish();
    return result;
  }
}

/// Impl::forward of a module, also where a subclass hides it.
template <class Impl>
struct ForwardOf {
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return module->Impl::forward(std::forward<Args>(args)...);
  }
  Impl* module;
};

}  // namespace detail

template <class Impl, class Forward = decltype(&Impl::forward)>
class Hooked;

#define HP_DETAIL_HOOKED(QUALIFIER)                                                                                 \
  template <class Impl, class Result, class Class, class... Args>                                                   \
  class Hooked<Impl, Result (Class::*)(Args...) QUALIFIER> : public Impl, public HookedBase {                       \
   public:                                                                                                          \
    using Impl::Impl;                                                                                               \
    bool reset_own_parameters() override {                                                                          \
      if constexpr (requires(Impl & impl) { impl.reset_parameters(); }) {                                           \
        Impl::reset_parameters();                                                                                   \
        return true;                                                                                                \
      }                                                                                                             \
      return false;                                                                                                 \
    }                                                                                                               \
    Result forward(Args... args) { return hooked_call(std::forward<Args>(args)...); }                               \
                                                                                                                    \
    /* Runs Impl::forward inside the unit's phases; also takes fewer arguments where Impl::forward has defaults. */ \
    template <class... Given>                                                                                       \
    Result hooked_call(Given&&... given) {                                                                          \
      if (!unit_) return Impl::forward(std::forward<Given>(given)...);                                              \
      return detail::run_in_unit(unit_, member_, detail::ForwardOf<Impl>{this}, std::forward<Given>(given)...);     \
    }                                                                                                               \
  };
HP_DETAIL_HOOKED()
HP_DETAIL_HOOKED(const)
#undef HP_DETAIL_HOOKED

/// A holder for Hooked<Impl>; made by HP_MODULE.
template <class Impl>
class HookedHolder : public torch::nn::ModuleHolder<Hooked<Impl>> {
 public:
  using torch::nn::ModuleHolder<Hooked<Impl>>::ModuleHolder;
  template <class... Args>
  auto operator()(Args&&... args) const {
    return this->impl_->hooked_call(std::forward<Args>(args)...);
  }
};

}  // namespace hyper_parallel::nn

/// Declares the holder `Name` for `NameImpl`, like TORCH_MODULE(Name), with calls that fully_shard can hook.
#define HP_MODULE_IMPL(Name, ImplType)                                \
  class Name : public ::hyper_parallel::nn::HookedHolder<ImplType> {  \
   public:                                                            \
    using ::hyper_parallel::nn::HookedHolder<ImplType>::HookedHolder; \
    using Impl [[maybe_unused]] = ImplType;                           \
  }
#define HP_MODULE(Name) HP_MODULE_IMPL(Name, Name##Impl)
