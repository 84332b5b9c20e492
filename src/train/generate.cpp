#include <hyper_parallel/train/generate.h>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include <hyper_parallel/train/tokenizer.h>

namespace hyper_parallel::train {

std::int64_t draw(std::span<const float> logits, double temperature, std::int64_t top_k, std::mt19937_64& random) {
  std::vector<std::int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  auto logit = [&](std::int64_t i) { return logits[static_cast<std::size_t>(i)]; };
  // Equal logits keep the order of their indices, so that the result is the same everywhere.
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return logit(a) > logit(b); });
  if (temperature <= 0) return order.front();
  if (top_k > 0 && top_k < static_cast<std::int64_t>(order.size())) order.resize(static_cast<std::size_t>(top_k));
  std::vector<double> cumulative;
  double sum = 0;
  for (const std::int64_t i : order) cumulative.push_back(sum += std::exp((logit(i) - logit(order.front())) / temperature));
  // 53 random bits: standard distributions differ between libraries.
  const double target = static_cast<double>(random() >> 11) * 0x1.0p-53 * sum;
  const auto it = std::upper_bound(cumulative.begin(), cumulative.end(), target);
  return order[std::min(static_cast<std::size_t>(it - cumulative.begin()), order.size() - 1)];
}

std::string generate(Llama& model, const std::string& prompt, const SampleConfig& config, std::int64_t context,
                     std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> tokens = ByteTokenizer::encode(prompt.empty() ? "\n" : prompt);
  for (std::int64_t i = 0; i < config.tokens; ++i) {
    const std::int64_t length = std::min(context, static_cast<std::int64_t>(tokens.size()));
    const torch::ArrayRef<std::int64_t> last(&tokens.back() + 1 - length, static_cast<std::size_t>(length));
    const torch::Tensor window = torch::tensor(last);
    const torch::Tensor logits =
        model->whole_logits(model(window.unsqueeze(0)), length).select(1, length - 1).to(torch::kFloat).contiguous();
    const std::span<const float> row(logits.const_data_ptr<float>(), static_cast<std::size_t>(ByteTokenizer::kVocabSize));
    tokens.push_back(draw(row, config.temperature, config.top_k, random));
  }
  return ByteTokenizer::decode(tokens);
}

}  // namespace hyper_parallel::train
