// Checkpoints written anew: as another kind, or for another number of ranks.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hyper_parallel/ckpt/offline.h>
#include <hyper_parallel/hf/model.h>
#include <hyper_parallel/hf/tokenizer.h>
#include <hyper_parallel/train/hf_config.h>
#include <hyper_parallel/train/progress.h>

#include "bar.h"
#include "commands.h"

namespace hyper_parallel::apps {
namespace {

namespace fs = std::filesystem;

std::optional<ckpt::Dtype> dtype_of(const CkptCommand& command) {
  return command.dtype.empty() ? std::nullopt : std::optional(hf::dtype_of(command.dtype));
}

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  check_value(in.is_open(), "hp-ckpt", "cannot read ", file.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

/// CheckpointError if a checkpoint is damaged: what is written from it would get checksums of its own.
void check_whole(const CkptCommand& command) {
  if (ckpt::Source(command.source).kind() != ckpt::SourceKind::kCheckpoint) return;
  Bar bar("verify", command.quiet);
  const std::vector<std::string> problems =
      ckpt::verify_source(command.source, [&](std::uint64_t done, std::uint64_t all) { bar.show(done, all); });
  if (!problems.empty()) throw CheckpointError(problems.front());
}

/// ValueError if one of them is the other or lies in it, under whatever name: what is read would be written over.
void check_apart(const CkptCommand& command) {
  const auto inside = [](const fs::path& inner, const fs::path& outer) {
    std::error_code error;
    for (fs::path at = fs::weakly_canonical(fs::absolute(inner), error); at.has_relative_path(); at = at.parent_path()) {
      if (fs::equivalent(at, outer, error)) return true;
    }
    return false;
  };
  const std::string source = command.source.string(), target = command.target.string();
  std::error_code error;
  check_value(!fs::equivalent(command.source, command.target, error), "hp-ckpt", "the target ", target, " is the source ", source,
              ", want another folder");
  check_value(!inside(command.target, command.source), "hp-ckpt", "the target ", target, " lies in the source ", source,
              ", want a folder outside of it");
  check_value(!inside(command.source, command.target), "hp-ckpt", "the source ", source, " lies in the target ", target,
              ", which would be replaced, want another folder");
  const fs::path here = fs::current_path(error);
  check_value(here.empty() || !inside(here, command.target), "hp-ckpt", "the current folder ", here.string(),
              " lies in the target ", target, ", which would be replaced, want to be started elsewhere");
}

struct Model {
  hf::Config config;
  bool bytes = false;  ///< of hp-train, whose tokens are bytes
};

/// What a checkpoint remembers of the run or conversion that wrote it.
std::optional<Model> remembered(const ckpt::Source& source) {
  const nlohmann::json extra = nlohmann::json::parse(source.info().extra);
  const std::string name = concat(source.path().string(), " (extra)");
  if (extra.is_object() && extra.contains("hf_config")) return Model{hf::parse_config(extra["hf_config"].dump(), name)};
  if (extra.is_object() && extra.contains("config") && extra["config"].is_string())
    return Model{train::hf_config_of(train::parse_config(extra["config"].get<std::string>(), name).model), true};
  return std::nullopt;
}

/// ValueError where a file says something else about the model than the checkpoint: the same weights would be another function.
void check_same_model(const std::string& file, const hf::Config& given, const ckpt::Source& source, const hf::Config& saved) {
  const auto fields = [](const hf::Config& config) {
    nlohmann::json all = nlohmann::json::parse(hf::config_json(config));
    // What does not change the function, and what is there twice.
    for (const char* key : {"dtype", "torch_dtype", "initializer_range", "router_aux_loss_coef", "bos_token_id", "eos_token_id",
                            "pad_token_id", "rope_parameters"})
      all.erase(key);
    return all;
  };
  const nlohmann::json got = fields(given), want = fields(saved);
  std::string text;
  for (const auto& [key, value] : want.items()) {
    const nlohmann::json other = got.value(key, nlohmann::json());
    if (other != value) text += concat(text.empty() ? "" : "; ", key, " is ", other.dump(), ", want ", value.dump());
  }
  check_value(text.empty(), "hp-ckpt", file, " is not the model of ", source.path().string(), ": ", text,
              " as it was saved; without --config the checkpoint's own is taken");
}

/// The model whose weights the source has: as the user says, as the source says, or as a file beside it says.
Model model_of(const CkptCommand& command, const ckpt::Source& source) {
  const auto from_file = [](const fs::path& file) { return Model{train::hf_config_of_file(file), file.extension() != ".json"}; };
  // Of hp-train: what it was saved with, which a later run under the same name may have replaced beside it.
  const std::optional<Model> saved = remembered(source);
  if (!command.config.empty()) {
    Model given = from_file(command.config);
    if (saved) check_same_model(command.config, given.config, source, saved->config);
    return given;
  }
  if (saved) return *saved;
  const fs::path here = fs::absolute(source.folder()).lexically_normal();
  const fs::path folder = here.has_filename() ? here : here.parent_path();
  for (const fs::path& file :
       {folder / "config.json", folder.parent_path() / "config.toml", folder.parent_path().parent_path() / "config.toml"}) {
    std::error_code ignored;
    if (fs::exists(file, ignored)) return from_file(file);
  }
  throw ValueError(concat("[hp-ckpt] ", source.path().string(), " does not say which model it is, want --config FILE"));
}

/// Files that go with the weights.
std::map<std::string, std::string> files_of(const CkptCommand& command, const Model& model, const fs::path& folder) {
  std::map<std::string, std::string> files;
  std::error_code ignored;
  if (command.tokenizer == "bytes" || (command.tokenizer.empty() && model.bytes)) {
    files["tokenizer.json"] = hf::byte_tokenizer_json();
  } else if (!command.tokenizer.empty()) {
    files["tokenizer.json"] = text_of(command.tokenizer);
  } else if (fs::exists(folder / "tokenizer.json", ignored)) {
    files["tokenizer.json"] = text_of(folder / "tokenizer.json");
  }
  for (const char* name : {"tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja"}) {
    if (command.tokenizer.empty() && fs::exists(folder / name, ignored)) files[name] = text_of(folder / name);
  }
  const auto tokenizer = files.find("tokenizer.json");
  if (tokenizer == files.end()) return files;
  if (!command.tokenizer.empty() || model.bytes) {
    const std::int64_t size = hf::Tokenizer::parse(tokenizer->second, command.tokenizer).vocab_size();
    check_value(size <= model.config.vocab_size, "hp-ckpt", "the tokenizer has ", size, " tokens, the model only ",
                model.config.vocab_size);
  }
  if (!files.contains("tokenizer_config.json"))
    files["tokenizer_config.json"] = nlohmann::json({{"tokenizer_class", "PreTrainedTokenizerFast"},
                                                     {"clean_up_tokenization_spaces", false},
                                                     {"model_max_length", model.config.max_position_embeddings}})
                                         .dump(2) +
                                     "\n";
  return files;
}

/// The model under our names where the source has those of a model folder; nothing else of it.
std::optional<ckpt::Source> translated(const ckpt::Source& source, const hf::Config& config) {
  ckpt::CheckpointInfo model = source.info();
  model.tensors.clear();
  for (const ckpt::TensorSpec& spec : hf::tensors_of(config)) {
    const auto found = source.info().tensors.find(spec.name);
    if (found == source.info().tensors.end()) return std::nullopt;
    model.tensors.insert(*found);
  }
  return hf::with_our_names(ckpt::Source(source.folder(), source.kind(), std::move(model)), config);
}

void to_hf(const CkptCommand& command, const ckpt::OnProgress& progress) {
  const ckpt::Source given(command.source);
  const Model model = model_of(command, given);
  const std::optional<ckpt::Source> ours = command.prefix ? std::nullopt : translated(given, model.config);
  const ckpt::Source source = ours.value_or(given);
  hf::export_model(source, command.target, model.config,
                   {.prefix = command.prefix.value_or("model."),
                    .dtype = dtype_of(command),
                    .max_file_bytes = static_cast<std::uint64_t>(command.file_mb) * 1'000'000,
                    .files = files_of(command, model, given.folder()),
                    .overwrite = command.overwrite,
                    .buffer_bytes = static_cast<std::uint64_t>(command.buffer_mb) << 20,
                    .progress = progress});
}

ckpt::RewriteOptions rewriting(const CkptCommand& command, const ckpt::OnProgress& progress) {
  return {.ranks = command.ranks,
          .dtype = dtype_of(command),
          .overwrite = command.overwrite,
          .buffer_bytes = static_cast<std::uint64_t>(command.buffer_mb) << 20,
          .progress = progress};
}

void to_checkpoint(const CkptCommand& command, const ckpt::OnProgress& progress) {
  ckpt::RewriteOptions options = rewriting(command, progress);
  if (is_model_folder(command.source)) {
    const std::string prefix = command.prefix.value_or("model.");
    const hf::Config config = hf::read_config(command.source);
    const ckpt::Source source = hf::open_model(command.source, prefix);
    hf::check_model(source, config, prefix);
    options.extra = nlohmann::json({{"hf_config", nlohmann::json::parse(hf::config_json(config))}}).dump();
    ckpt::write_checkpoint_of(source, command.target, options);
    return;
  }
  const ckpt::Source source(command.source);
  options.prefix = command.prefix.value_or("");
  options.add_prefix = options.prefix;
  options.extra = source.info().extra;
  ckpt::write_checkpoint_of(source, command.target, options);
}

void to_dcp(const CkptCommand& command, const ckpt::OnProgress& progress) {
  ckpt::RewriteOptions options = rewriting(command, progress);
  options.prefix = command.prefix.value_or("");
  options.add_prefix = options.prefix;
  ckpt::write_dcp_of(ckpt::Source(command.source), command.target, options);
}

int done(const CkptCommand& command) {
  const ckpt::Source result(command.target);
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : result.info().tensors) bytes += bytes_of(tensor);
  std::printf("WROTE %s: %s, %s in %s\n", command.target.c_str(), counted(result.info().tensors.size(), "tensor").c_str(),
              train::format_bytes(bytes).c_str(), counted(result.info().files.size(), "file").c_str());
  return 0;
}

}  // namespace

int convert(const CkptCommand& command) {
  const bool hf = command.to == "hf";
  check_value(hf || (command.config.empty() && command.tokenizer.empty()), "hp-ckpt",
              "--config and --tokenizer are for --to hf, got --to ", command.to);
  check_value(!hf || command.ranks == 1, "hp-ckpt", "--ranks is for --to checkpoint and dcp, got --to hf");
  check_apart(command);
  check_whole(command);
  {
    Bar bar("convert", command.quiet);
    const ckpt::OnProgress progress = [&](std::uint64_t some, std::uint64_t all) { bar.show(some, all); };
    if (hf) to_hf(command, progress);
    if (command.to == "checkpoint") to_checkpoint(command, progress);
    if (command.to == "dcp") to_dcp(command, progress);
  }
  return done(command);
}

int reshard(const CkptCommand& command) {
  check_apart(command);
  const ckpt::Source source(command.source);
  check_value(source.kind() == ckpt::SourceKind::kCheckpoint, "hp-ckpt", command.source.string(), " is ",
              to_string(source.kind()), ", want a checkpoint; convert makes one");
  check_whole(command);
  {
    Bar bar("reshard", command.quiet);
    ckpt::RewriteOptions options = rewriting(command, [&](std::uint64_t some, std::uint64_t all) { bar.show(some, all); });
    options.extra = source.info().extra;
    ckpt::write_checkpoint_of(source, command.target, options);
  }
  return done(command);
}

}  // namespace hyper_parallel::apps
