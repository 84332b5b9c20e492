#pragma once
// Finds the tensors inside arguments and results of a forward.
#include <array>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace hyper_parallel::nn {

/// Extension point: specialise for a struct of yours so that units find its tensors.
/// \code
/// template <> struct hyper_parallel::nn::TensorWalker<Output> {
///   template <class F> static void walk(Output& output, F& f) { walk_tensors(output.logits, f); walk_tensors(output.cache, f); }
/// };
/// \endcode
/// A struct with a member template `template <class F> void walk_tensors(F& f)` works without specialisation.
template <class T, class = void>
struct TensorWalker {
  template <class F>
  static void walk(T& value, F& f) {
    if constexpr (requires { value.walk_tensors(f); }) value.walk_tensors(f);
  }
};

/// Calls f(at::Tensor&) for every tensor that is reachable from `value`.
template <class T, class F>
void walk_tensors(T& value, F& f) {
  TensorWalker<T>::walk(value, f);
}

template <>
struct TensorWalker<at::Tensor> {
  template <class F>
  static void walk(at::Tensor& value, F& f) {
    f(value);
  }
};

template <class T>
struct TensorWalker<std::optional<T>> {
  template <class F>
  static void walk(std::optional<T>& value, F& f) {
    if (value) walk_tensors(*value, f);
  }
};

template <class... Ts>
struct TensorWalker<std::tuple<Ts...>> {
  template <class F>
  static void walk(std::tuple<Ts...>& value, F& f) {
    std::apply([&](auto&... element) { (walk_tensors(element, f), ...); }, value);
  }
};

template <class A, class B>
struct TensorWalker<std::pair<A, B>> {
  template <class F>
  static void walk(std::pair<A, B>& value, F& f) {
    walk_tensors(value.first, f);
    walk_tensors(value.second, f);
  }
};

template <class... Ts>
struct TensorWalker<std::variant<Ts...>> {
  template <class F>
  static void walk(std::variant<Ts...>& value, F& f) {
    std::visit([&](auto& element) { walk_tensors(element, f); }, value);
  }
};

namespace detail {
template <class C, class F>
void walk_elements(C& container, F& f) {
  for (auto& element : container) walk_tensors(element, f);
}
template <class C, class F>
void walk_mapped(C& container, F& f) {
  for (auto& entry : container) walk_tensors(entry.second, f);
}
}  // namespace detail

template <class T, class A>
struct TensorWalker<std::vector<T, A>> {
  template <class F>
  static void walk(std::vector<T, A>& value, F& f) {
    if constexpr (!std::is_same_v<T, bool>) detail::walk_elements(value, f);
  }
};
template <class T, std::size_t N>
struct TensorWalker<std::array<T, N>> {
  template <class F>
  static void walk(std::array<T, N>& value, F& f) {
    detail::walk_elements(value, f);
  }
};
template <class T, class A>
struct TensorWalker<std::deque<T, A>> {
  template <class F>
  static void walk(std::deque<T, A>& value, F& f) {
    detail::walk_elements(value, f);
  }
};
template <class T, class A>
struct TensorWalker<std::list<T, A>> {
  template <class F>
  static void walk(std::list<T, A>& value, F& f) {
    detail::walk_elements(value, f);
  }
};
template <class K, class T, class C, class A>
struct TensorWalker<std::map<K, T, C, A>> {
  template <class F>
  static void walk(std::map<K, T, C, A>& value, F& f) {
    detail::walk_mapped(value, f);
  }
};
template <class K, class T, class H, class E, class A>
struct TensorWalker<std::unordered_map<K, T, H, E, A>> {
  template <class F>
  static void walk(std::unordered_map<K, T, H, E, A>& value, F& f) {
    detail::walk_mapped(value, f);
  }
};

}  // namespace hyper_parallel::nn
