#include "train/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace hyper_parallel::train {
namespace {

std::vector<double> plain(double theta, std::int64_t head_dim) {
  std::vector<double> frequencies;
  for (std::int64_t i = 0; i < head_dim; i += 2)
    frequencies.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(head_dim)));
  return frequencies;
}

double llama3(const ModelConfig& m, double frequency) {
  const auto original = static_cast<double>(original_len(m));
  const double wave = 2 * std::numbers::pi / frequency;
  if (wave < original / m.rope_high_freq_factor) return frequency;
  if (wave > original / m.rope_low_freq_factor) return frequency / m.rope_factor;
  const double smooth = (original / wave - m.rope_low_freq_factor) / (m.rope_high_freq_factor - m.rope_low_freq_factor);
  return (1 - smooth) * frequency / m.rope_factor + smooth * frequency;
}

/// The pair whose wave turns `rotations` times in the first context, as a real number.
double yarn_pair(const ModelConfig& m, double head_dim, double rotations) {
  const auto original = static_cast<double>(original_len(m));
  return head_dim * std::log(original / (rotations * 2 * std::numbers::pi)) / (2 * std::log(m.rope_theta));
}

void yarn(const ModelConfig& m, std::int64_t head_dim, std::vector<double>& frequencies) {
  const auto width = static_cast<double>(head_dim);
  double low = yarn_pair(m, width, m.rope_beta_fast), high = yarn_pair(m, width, m.rope_beta_slow);
  if (m.rope_truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / m.rope_factor * stretched + frequencies[i] * (1 - stretched);
  }
}

}  // namespace

std::int64_t original_len(const ModelConfig& model) {
  return model.rope_original_len > 0 ? model.rope_original_len : model.max_seq_len;
}

Rope scaled_rope(const ModelConfig& m, std::int64_t head_dim, std::int64_t length) {
  double theta = m.rope_theta;
  if (m.rope_scaling == "dynamic") {
    const auto original = static_cast<double>(original_len(m)), width = static_cast<double>(head_dim);
    const double now = std::max(static_cast<double>(length), original);
    theta *= std::pow(m.rope_factor * now / original - (m.rope_factor - 1), width / (width - 2));
  }
  std::vector<double> frequencies = plain(theta, head_dim);
  Rope rope;
  if (m.rope_scaling == "linear") {
    for (double& frequency : frequencies) frequency /= m.rope_factor;
  } else if (m.rope_scaling == "llama3") {
    for (double& frequency : frequencies) frequency = llama3(m, frequency);
  } else if (m.rope_scaling == "yarn") {
    yarn(m, head_dim, frequencies);
    rope.scale = m.rope_attention_factor > 0 ? m.rope_attention_factor
                 : m.rope_factor <= 1        ? 1.0
                                             : 0.1 * std::log(m.rope_factor) + 1.0;
  }
  rope.frequencies.assign(frequencies.begin(), frequencies.end());
  return rope;
}

void check_rope(const ModelConfig& m) {
  check_value(m.rope_scaling != "llama3" || m.rope_high_freq_factor > m.rope_low_freq_factor, "Llama", "rope_high_freq_factor ",
              m.rope_high_freq_factor, ", want more than rope_low_freq_factor ", m.rope_low_freq_factor);
  check_value(m.rope_scaling != "yarn" || m.rope_theta > 1, "Llama", "rope_theta ", m.rope_theta, ", want more than 1 with yarn");
  check_value(m.rope_scaling != "dynamic" || head_dim_of(m) > 2, "Llama", "head_dim ", head_dim_of(m),
              ", want more than 2 with rope_scaling dynamic");
}

}  // namespace hyper_parallel::train
