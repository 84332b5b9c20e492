// Reading model folders.
#include <map>
#include <set>
#include <utility>

#include <hyper_parallel/hf/model.h>

#include "ckpt/info.h"
#include "ckpt/load.h"

namespace hyper_parallel::hf {
namespace {

using ckpt::CheckpointInfo;

constexpr std::string_view kOp = "hf.load_model";
constexpr std::int64_t kMaxExperts = 1 << 20;

/// Whether what our models do not have is no loss.
bool is_derived(const std::string& key, const Config& config) {
  return key.ends_with(".rotary_emb.inv_freq") || (config.tie_word_embeddings && key == "lm_head.weight");
}

/// Experts, which are tensors of their own in the folder, as one tensor. Their pieces have the expert's number as first offset.
void stack(const std::string& folder, const std::string& name, CheckpointInfo::Tensor& tensor,
           const std::set<std::int64_t>& experts) {
  const auto count = static_cast<std::int64_t>(experts.size());
  if (*experts.rbegin() + 1 != count)
    throw CheckpointError(concat("[hf] ", folder, ": ", name, " has ", count, " experts, the last is ", *experts.rbegin(),
                                 ", want ", *experts.rbegin() + 1));
  tensor.shape.insert(tensor.shape.begin(), count);
  tensor.layout = concat(count, " experts");
}

CheckpointInfo our_info(const CheckpointInfo& theirs, const Config& config, const std::string& folder,
                        const std::string& prefix) {
  CheckpointInfo info;
  info.extra = "null";
  info.files = theirs.files;
  std::map<std::string, std::set<std::int64_t>> stacks;
  for (const auto& [key, tensor] : theirs.tensors) {
    if (is_derived(key, config)) continue;
    const OurName ours = name_of(key);
    const std::string name = prefix + ours.name;
    const auto [found, fresh] = info.tensors.emplace(name, CheckpointInfo::Tensor{tensor.dtype, tensor.shape, tensor.layout, {}});
    if (ours.expert) {
      const bool fits = tensor.shape.size() == 2 && found->second.shape == tensor.shape && found->second.dtype == tensor.dtype;
      if (!fits || !stacks[name].insert(*ours.expert).second || *ours.expert >= kMaxExperts)
        throw CheckpointError(concat("[hf] ", folder, ": ", key, " does not fit the other experts"));
    } else if (!fresh) {
      throw CheckpointError(concat("[hf] ", folder, ": ", key, " is there under two names"));
    }
    for (CheckpointInfo::Piece piece : tensor.pieces) {
      if (ours.expert) {
        piece.box.offset.insert(piece.box.offset.begin(), *ours.expert);
        piece.box.size.insert(piece.box.size.begin(), 1);
      }
      found->second.pieces.push_back(std::move(piece));
    }
  }
  for (const auto& [name, experts] : stacks) stack(folder, name, info.tensors.at(name), experts);
  return info;
}

CheckpointInfo info_of(const std::filesystem::path& folder, const std::string& prefix) {
  ckpt::refuse_pickle(folder);
  const Config config = read_config(folder);
  return our_info(ckpt::info_of_set(folder, ckpt::SafetensorsSet(folder)), config, folder.string(), prefix);
}

}  // namespace

ckpt::Source open_model(const std::filesystem::path& folder, const std::string& prefix) {
  return ckpt::Source(folder, ckpt::SourceKind::kSafetensors, info_of(folder, prefix));
}

ckpt::Source with_our_names(const ckpt::Source& source, const Config& config, const std::string& prefix) {
  return ckpt::Source(source.folder(), source.kind(), our_info(source.info(), config, source.path().string(), prefix));
}

ckpt::LoadResult load_model(const std::filesystem::path& folder, ckpt::StateDict& state, const LoadOptions& options) {
  ckpt::LoadOptions inner;
  inner.strict = options.strict;
  if (!options.prefix.empty()) inner.prefixes = {options.prefix};
  inner.convert_dtype = options.convert_dtype;
  inner.comm = options.comm;
  inner.timeout = options.timeout;
  return ckpt::load_pieces(folder, state, inner,
                           {.op = kOp, .info = [&] { return info_of(folder, options.prefix); }, .checkpoint = false});
}

}  // namespace hyper_parallel::hf
