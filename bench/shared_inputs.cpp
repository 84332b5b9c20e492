#include "shared_inputs.h"

#include <fstream>
#include <stdexcept>

#include <nlohmann/json.hpp>

namespace bench {
namespace {

void fill(std::ifstream& file, const torch::Tensor& tensor, const std::string& what) {
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  if (!file) throw std::runtime_error("the file with " + what + " is missing or too short");
}

}  // namespace

SharedInputs::SharedInputs(const std::filesystem::path& folder) : folder_(folder) {
  std::ifstream file(folder / "inputs.json");
  if (!file) throw std::runtime_error("no inputs.json in " + folder.string());
  const nlohmann::json header = nlohmann::json::parse(file);
  model_.dim = header.at("dim");
  model_.n_layers = header.at("n_layers");
  model_.n_heads = header.at("n_heads");
  model_.ffn_dim = header.at("ffn_dim");
  model_.vocab_size = header.at("vocab_size");
  model_.max_seq_len = header.at("seq_len");
  model_.rope_theta = header.at("rope_theta");
  model_.norm_eps = header.at("norm_eps");
  batch_size_ = header.at("batch_size");
  steps_ = header.at("steps");
  world_ = header.at("world");
  for (const auto& entry : header.at("weights")) weights_.emplace_back(entry.at("name"), entry.at("shape"));
}

std::vector<Batch> SharedInputs::batches(int rank) const {
  if (rank >= world_) throw std::runtime_error("the inputs are for " + std::to_string(world_) + " ranks only");
  const torch::Tensor all = torch::empty({steps_, world_, batch_size_, model_.max_seq_len + 1}, torch::kInt);
  std::ifstream file(folder_ / "tokens.bin", std::ios::binary);
  fill(file, all, "tokens");
  std::vector<Batch> batches;
  for (std::int64_t step = 0; step < steps_; ++step) {
    const torch::Tensor rows = all[step][rank].to(torch::kLong);
    batches.push_back({rows.narrow(1, 0, model_.max_seq_len).contiguous(), rows.narrow(1, 1, model_.max_seq_len).contiguous()});
  }
  return batches;
}

void SharedInputs::load_weights(hyper_parallel::train::LlamaImpl& model) const {
  const torch::NoGradGuard no_grad;
  std::ifstream file(folder_ / "weights.bin", std::ios::binary);
  auto parameters = model.named_parameters();
  if (parameters.size() != weights_.size())
    throw std::runtime_error("the model has " + std::to_string(parameters.size()) + " parameters, the file " +
                             std::to_string(weights_.size()));
  for (const auto& [name, shape] : weights_) {
    torch::Tensor* parameter = parameters.find(name);
    if (parameter == nullptr || parameter->sizes() != shape || !parameter->is_contiguous())
      throw std::runtime_error(name + " of the file is no parameter of the model or has another shape there");
    fill(file, *parameter, name);
  }
}

}  // namespace bench
