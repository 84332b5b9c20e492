#pragma once
// Comparison of parallel layers with whole ones.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

inline Tensors parameters_of(const torch::nn::Module& module) {
  Tensors values;
  for (const auto& item : module.named_parameters()) values[item.key()] = item.value().detach().clone();
  return values;
}

/// Parameters of a parallel model as whole tensors. Collective.
template <class Holder>
Tensors whole_parameters(const Holder& model) {
  const auto cuts = parallel::parameter_cuts(model);
  Tensors values;
  for (const auto& item : model->named_parameters()) {
    const auto cut = cuts.find(item.key());
    values[item.key()] = cut == cuts.end() ? item.value().detach().clone() : parallel::full_tensor(cut->second, item.value());
  }
  return values;
}

/// Gradients of a parallel model as whole tensors against `want`. Collective.
template <class Holder>
void expect_same_whole_gradients(const Holder& model, const Tensors& want, double tolerance, const std::string& what) {
  const auto cuts = parallel::parameter_cuts(model);
  EXPECT_EQ(model->named_parameters().size(), want.size()) << what;
  for (const auto& item : model->named_parameters()) {
    torch::Tensor gradient = item.value().grad();
    EXPECT_TRUE(gradient.defined()) << what << ' ' << item.key();
    if (!gradient.defined()) gradient = torch::zeros_like(item.value());
    const auto cut = cuts.find(item.key());
    if (cut != cuts.end()) gradient = parallel::full_tensor(cut->second, gradient);
    ASSERT_TRUE(want.contains(item.key())) << what << ' ' << item.key();
    EXPECT_LT(relative_difference({{item.key(), gradient}}, {{item.key(), want.at(item.key())}}), tolerance)
        << what << ' ' << item.key();
  }
}

}  // namespace hyper_parallel::testing
