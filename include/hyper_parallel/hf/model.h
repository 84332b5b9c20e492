#pragma once
// Hugging Face model folders: weights under the names of our decoders, read and written where they lie.
//
//   folder                                              ours (behind a prefix)
//   model.layers.0.self_attn.q_proj.weight              layers.0.self_attn.q_proj.weight
//   model.layers.0.mlp.gate.weight                      layers.0.mlp.router.weight
//   model.layers.0.mlp.experts.7.up_proj.weight (F, D)  layers.0.mlp.experts.up_proj[7]   of (experts, F, D)
//   lm_head.weight                                      lm_head.weight; none when tied
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <hyper_parallel/ckpt/checkpoint.h>
#include <hyper_parallel/ckpt/offline.h>
#include <hyper_parallel/ckpt/source.h>
#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/box.h>
#include <hyper_parallel/hf/config.h>

namespace hyper_parallel::hf {

/// A tensor of a folder, and which part of a tensor of ours it is: as many elements, row-major.
struct Part {
  std::string key;
  Box box;
  std::vector<std::int64_t> shape;
};
/// The tensors of a folder that make up a tensor of ours, without prefix: one, or one for each expert. Local. ValueError: stacked
/// experts whose shape has not 3 dimensions.
[[nodiscard]] HP_API std::vector<Part> parts_of(const std::string& name, const std::vector<std::int64_t>& shape);

/// Where a tensor of a folder belongs.
struct OurName {
  std::string name;
  std::optional<std::int64_t> expert = {};  ///< its place in the stack
};
[[nodiscard]] HP_API OurName name_of(const std::string& key);

/// The tensors of a model folder under our names, experts stacked, behind `prefix`. Local. CheckpointError: no config.json or no
/// weights, pickled weights, damage, names outside of the folder, experts that are missing or of different shapes. A copy of the
/// embedding as lm_head.weight of a tied model is passed over, and so are rotary frequencies.
[[nodiscard]] HP_API ckpt::Source open_model(const std::filesystem::path& folder, const std::string& prefix = "model.");

/// The same for files in which the names of the folder are used: of another kind, or without config.json.
[[nodiscard]] HP_API ckpt::Source with_our_names(const ckpt::Source& source, const Config& config,
                                                 const std::string& prefix = "model.");

struct LoadOptions {
  std::string prefix = "model.";  ///< before the names of the model in the state; what has another one is left alone
  bool strict = true;             ///< names that only one side has are errors; otherwise they are passed over (and returned)
  bool convert_dtype = true;      ///< cast where folder and state have other dtypes; otherwise that is an error
  Comm comm = {};                 ///< the ranks that load; default: all ranks of the world
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< how long to wait for slower ranks
};

/// Fills the model in `state` from a folder, in place, whatever its mesh and layouts: each rank reads the ranges that it owns and
/// nothing else. Collective over the ranks that load. Errors are those of ckpt::load, the same on all ranks; see open_model.
HP_API ckpt::LoadResult load_model(const std::filesystem::path& folder, ckpt::StateDict& state, const LoadOptions& options = {});

struct SaveOptions {
  std::string prefix = "model.";                 ///< before the names of the model in the state; what has another one is left out
  std::optional<ckpt::Dtype> dtype = {};         ///< of all weights; default: that of the config
  std::uint64_t max_file_bytes = 5'000'000'000;  ///< of tensors in a file
  std::map<std::string, std::string> files = {};  ///< more files by name, e.g. tokenizer.json
  /// Replace a model folder that is there, once the new one is complete: one with config.json, weights, and no other file than
  /// those of `files`.
  bool overwrite = false;
  Comm comm = {};                                                ///< the ranks that save; default: all ranks of the world
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< how long to wait for slower ranks
};

/// Writes the model in `state` as a folder that transformers opens. Each rank writes its parts into the files, replicas share the
/// work; nothing is gathered, and beyond the model a rank needs memory for 4 M elements where the dtype changes. The folder
/// appears as a whole or not at all. Collective over the ranks that save, which must all see the folder.
///
/// Errors are the same on all ranks. ValueError, nothing is written: tensors that the config does not have, or lacks, or that
/// have another shape (all are listed), a folder that is in the way, names of files with a slash; see ckpt::save.
/// CheckpointError.
HP_API void save_model(const std::filesystem::path& folder, const ckpt::StateDict& state, const Config& config,
                       const SaveOptions& options = {});

/// ValueError unless the tensors of `source` that begin with `prefix` are those of a model of this config: in our names, with all
/// problems listed, as save_model has them. Local.
HP_API void check_model(const ckpt::Source& source, const Config& config, const std::string& prefix = "model.");

struct ExportOptions {
  std::string prefix = "model.";  ///< of the model's tensors in the source
  std::optional<ckpt::Dtype> dtype = {};
  std::uint64_t max_file_bytes = 5'000'000'000;
  std::map<std::string, std::string> files = {};
  bool overwrite = false;
  std::uint64_t buffer_bytes = 16 << 20;  ///< memory for values, besides that of a conversion
  ckpt::OnProgress progress = {};
};

/// save_model for tensors that lie in files, by one process. Local. Errors: those of save_model.
HP_API void export_model(const ckpt::Source& source, const std::filesystem::path& folder, const Config& config,
                         const ExportOptions& options = {});

/// The dtype that a config names ("bfloat16"). ValueError: one that weights cannot have.
[[nodiscard]] HP_API ckpt::Dtype dtype_of(const std::string& name);

}  // namespace hyper_parallel::hf
