#pragma once
// The decoder of hp-train and Hugging Face's configurations. Torch-free.
#include <filesystem>

#include <hyper_parallel/hf/config.h>
#include <hyper_parallel/train/config.h>

namespace hyper_parallel::train {

/// The decoder with the weights of a Hugging Face model. With rope type "dynamic", max_seq_len is as long as the factor
/// stretches. Local. ValueError: mlp_only_layers, which the decoder has not.
[[nodiscard]] ModelConfig model_config_of(const hf::Config& config);

/// The configuration under which transformers opens the decoder: a Llama, or with qk_norm a Qwen3, with experts a Qwen3 MoE.
/// Local. ValueError: experts without qk_norm, a shared expert, sigmoid routers, a scale or bias of routing, none of which Qwen3
/// MoE has.
[[nodiscard]] hf::Config hf_config_of(const ModelConfig& model);

/// The model of a file: hp-train's config.toml, or config.json. Local. Errors: those of load_config and hf::parse_config.
[[nodiscard]] hf::Config hf_config_of_file(const std::filesystem::path& file);

}  // namespace hyper_parallel::train
