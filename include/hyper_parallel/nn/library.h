#pragma once
// Library modules that can be units of their own.
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <hyper_parallel/nn/module.h>

namespace hyper_parallel::nn {

HP_MODULE_IMPL(Embedding, torch::nn::EmbeddingImpl);
HP_MODULE_IMPL(LayerNorm, torch::nn::LayerNormImpl);
HP_MODULE_IMPL(Linear, torch::nn::LinearImpl);

}  // namespace hyper_parallel::nn
