#pragma once
// Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): a part of the forward keeps only
// its inputs, and runs again when its backward begins.
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <hyper_parallel/core/export.h>
#include <hyper_parallel/nn/walk.h>

namespace hyper_parallel {

/// Options of checkpoint. Aggregate: use designated initialisers in this order.
struct CheckpointOptions {
  /// The recomputation draws the same random numbers as the forward: the state of the default generators (CPU, and the devices of
  /// the inputs) is kept and put back. False saves that where nothing is drawn. The default CPU generator belongs to the process:
  /// where ranks are threads, give each its own generator and list it below.
  bool preserve_rng_state = true;
  /// More generators that `fn` draws from; treated alike, whatever `preserve_rng_state` says.
  std::vector<at::Generator> generators = {};
};

namespace nn::detail {

/// Tensors of a result, in the order in which walk_tensors finds them.
using Rerun = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

/// The forward of one segment: construction before, `finish` after fn has run; destruction without `finish` forgets it.
class HP_API CheckpointForward {
 public:
  CheckpointForward(const CheckpointOptions& options, std::vector<at::Tensor> inputs);
  ~CheckpointForward();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;
  /// Takes the outputs off the graph that fn has built, which frees its activations, and hangs them on a node that calls `rerun`.
  void finish(const std::vector<at::Tensor*>& outputs, Rerun rerun);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class T>
std::vector<at::Tensor*> tensors_of(T& value) {
  std::vector<at::Tensor*> found;
  auto collect = [&](at::Tensor& tensor) { found.push_back(&tensor); };
  walk_tensors(value, collect);
  return found;
}

template <class T>
std::vector<at::Tensor> copies_of_tensors(T& value) {
  std::vector<at::Tensor> found;
  for (const at::Tensor* tensor : tensors_of(value)) found.push_back(*tensor);
  return found;
}

}  // namespace nn::detail

/// fn(inputs...) without keeping the activations of its backward: when that begins, fn runs a second time. The result and all
/// gradients are those of the plain call, bit for bit where the order of sums is (docs/design/010-checkpointing.md).
///
/// fn: a module holder, or anything callable with `const Inputs&...`; it and the inputs are copied, so capture modules by holder.
/// Parameters and other tensors that fn captures get their gradients like inputs do. fn must compute the same again: nothing that
/// it reads may have changed by then; what it does besides (counting, running statistics) happens twice. In inputs and result,
/// tensors are found as everywhere (nn/walk.h); other values pass untouched. Without grad mode this is a plain call.
///
/// Local, but a unit inside fn is gathered again in the recomputation, collectively: all ranks checkpoint alike. Around a unit,
/// inside one, around several, nested: all work, and each unit reduces once. ValueError: fn changes an input in place. In
/// backward, ValueError: an input was changed since; the recomputation gives other tensors than the forward (number, shape,
/// dtype, device, or what they depend on); a second backward without retain_graph; create_graph.
template <class Fn, class... Inputs>
requires std::invocable<Fn&, const Inputs&...>
auto checkpoint(const CheckpointOptions& options, Fn fn, const Inputs&... inputs) {
  using Result = std::decay_t<std::invoke_result_t<Fn&, const Inputs&...>>;
  static_assert(!std::is_void_v<Result>, "hp::checkpoint: fn returns nothing, want it to return what it computes");
  if (!at::GradMode::is_enabled()) return Result(std::invoke(fn, inputs...));
  std::tuple<std::decay_t<const Inputs&>...> kept(inputs...);
  nn::detail::CheckpointForward forward(options, nn::detail::copies_of_tensors(kept));
  Result result = std::invoke(fn, inputs...);
  forward.finish(nn::detail::tensors_of(result),
                 [fn = std::move(fn), kept = std::move(kept)](const std::vector<at::Tensor>& tensors) mutable {
                   auto again = kept;
                   const std::vector<at::Tensor*> places = nn::detail::tensors_of(again);
                   for (std::size_t i = 0; i < places.size(); ++i) *places[i] = tensors[i];
                   Result outputs = std::apply(fn, std::as_const(again));
                   return nn::detail::copies_of_tensors(outputs);
                 });
  return result;
}

/// With default options.
template <class Fn, class... Inputs>
requires std::invocable<Fn&, const Inputs&...>
auto checkpoint(Fn fn, const Inputs&... inputs) { return checkpoint(CheckpointOptions{}, std::move(fn), inputs...); }

}  // namespace hyper_parallel
