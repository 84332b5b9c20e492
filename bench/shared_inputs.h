#pragma once
// Initial weights and tokens that PyTorch's side starts from too. shared_inputs.py writes the files and describes them.
#include <filesystem>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/train/llama.h>

namespace bench {

struct Batch {
  torch::Tensor tokens, targets;  ///< (batch_size, seq_len) int64
};

class SharedInputs {
 public:
  /// std::runtime_error: a file that is missing, damaged or too short.
  explicit SharedInputs(const std::filesystem::path& folder);

  [[nodiscard]] const hyper_parallel::train::ModelConfig& model() const { return model_; }
  [[nodiscard]] std::int64_t sequences_per_rank() const { return batch_size_; }
  /// What `rank` trains on, one entry per step; then it starts again.
  [[nodiscard]] std::vector<Batch> batches(int rank) const;
  /// std::runtime_error: the parameters of the model are not those of the file.
  void load_weights(hyper_parallel::train::LlamaImpl& model) const;

 private:
  std::filesystem::path folder_;
  hyper_parallel::train::ModelConfig model_;
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> weights_;
  std::int64_t batch_size_ = 0, steps_ = 0, world_ = 0;
};

}  // namespace bench
