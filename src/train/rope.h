#pragma once
// Rotary frequencies that are stretched to longer contexts. Torch-free.
#include <cstdint>
#include <vector>

#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// Angle of position t and pair i of a head: t * frequencies[i]; cosines and sines are multiplied by `scale`.
struct Rope {
  std::vector<float> frequencies;
  double scale = 1.0;
};

/// Of `model`, whose rope_scaling is not "none", for sequences of `length` tokens, which matters to "dynamic" alone.
/// linear: Chen et al. 2023; dynamic: base * (factor * length / original - (factor - 1))^(D / (D - 2)); llama3: waves longer than
/// original / low are stretched, those shorter than original / high are not, and those in between partly; yarn: Peng et al. 2023.
[[nodiscard]] Rope scaled_rope(const ModelConfig& model, std::int64_t head_dim, std::int64_t length);

/// Context of the first training.
[[nodiscard]] std::int64_t original_len(const ModelConfig& model);

/// ValueError: values that contradict each other.
void check_rope(const ModelConfig& model);

}  // namespace hyper_parallel::train
