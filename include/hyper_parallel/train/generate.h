#pragma once
// Text from a trained decoder.
#include <cstdint>
#include <random>
#include <span>
#include <string>

#include <hyper_parallel/train/config.h>
#include <hyper_parallel/train/llama.h>

namespace hyper_parallel::train {

/// Draws an index from softmax(logits / temperature) over the `top_k` largest (0: all); temperature 0 takes the largest.
[[nodiscard]] std::int64_t draw(std::span<const float> logits, double temperature, std::int64_t top_k, std::mt19937_64& random);

/// Continues `prompt` by config.tokens bytes; returns prompt and continuation. `context`: the longest window that the model is
/// shown. Collective over all ranks that share `model`, also those that only cut it; all of them get the same text.
[[nodiscard]] std::string generate(Llama& model, const std::string& prompt, const SampleConfig& config, std::int64_t context,
                                   std::uint64_t seed);

}  // namespace hyper_parallel::train
