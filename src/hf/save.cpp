// Writing model folders: by the ranks that have the model, or from files.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include <hyper_parallel/hf/model.h>

#include "ckpt/agree.h"
#include "ckpt/commit.h"
#include "ckpt/elements.h"
#include "ckpt/file.h"
#include "ckpt/runs.h"
#include "ckpt/save.h"
#include "ckpt/slabs.h"
#include "ckpt/strict_json.h"

namespace hyper_parallel::hf {
namespace {

using ckpt::TensorSpec;

constexpr std::string_view kOp = "hf.save_model";
constexpr const char* kConfig = "config.json";
constexpr std::size_t kConvertAtOnce = 4 << 20;  // elements

/// What is written where.
struct Folder {
  ckpt::ShardedFiles files;
  std::map<std::string, std::size_t> file_of;      // key to file
  std::map<std::string, std::vector<Part>> parts;  // our name, with prefix, to what makes it up
  std::map<std::string, std::string> texts;        // other files
  ckpt::Dtype dtype = ckpt::Dtype::kF32;
};

/// Compares what there is with what the config has: all that differs, in words. \param specs of our tensors, with prefix
std::string compare(const std::vector<TensorSpec>& specs, const std::string& prefix, const Config& config,
                    const std::vector<TensorSpec>& wanted, std::map<std::string, std::vector<Part>>& parts_of_ours) {
  std::map<std::string, const TensorSpec*> by_key;
  for (const TensorSpec& spec : wanted) by_key[spec.name] = &spec;
  std::string problems;
  const auto problem = [&](const auto&... what) { problems += concat(problems.empty() ? "" : "; ", what...); };
  for (const TensorSpec& spec : specs) {
    std::vector<Part>& parts = parts_of_ours[spec.name] = parts_of(spec.name.substr(prefix.size()), spec.shape);
    if (!ckpt::is_real(spec.dtype)) problem(spec.name, " is ", to_string(spec.dtype), ", want floating point");
    for (const Part& part : parts) {
      const auto found = by_key.find(part.key);
      if (found == by_key.end()) {
        problem(spec.name, " has no place in a ", to_string(config.family), " model of this config");
        break;
      }
      if (found->second->shape != part.shape)
        problem(part.key, " is ", ckpt::whole_box(part.shape).to_string(), ", want ",
                ckpt::whole_box(found->second->shape).to_string());
      by_key.erase(found);
    }
  }
  for (const auto& [key, spec] : by_key) problem(key, " is missing");
  return problems;
}

Folder plan_folder(const std::vector<TensorSpec>& specs, const std::string& prefix, Config config,
                   const std::optional<ckpt::Dtype>& dtype, std::uint64_t max_file_bytes,
                   const std::map<std::string, std::string>& texts) {
  Folder folder;
  folder.dtype = dtype ? *dtype : dtype_of(config.dtype);
  check_value(ckpt::is_real(folder.dtype), kOp, "dtype is ", to_string(folder.dtype), ", want a floating point type");
  for (const char* name : {"float32", "float16", "bfloat16", "float64"}) {
    if (dtype_of(name) == folder.dtype) config.dtype = name;
  }
  const std::vector<TensorSpec> wanted = tensors_of(config, folder.dtype);
  const std::string problems = compare(specs, prefix, config, wanted, folder.parts);
  check_value(problems.empty(), kOp, problems);
  folder.files = ckpt::shard_files(wanted, max_file_bytes);
  for (std::size_t i = 0; i < folder.files.files.size(); ++i) {
    for (const TensorSpec& spec : folder.files.files[i].tensors) folder.file_of[spec.name] = i;
  }
  folder.texts = texts;
  for (const auto& [name, text] : texts) {
    const bool plain =
        !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos && !name.ends_with(".safetensors");
    check_value(plain, kOp, "\"", name, "\" is no name for a file beside the weights");
  }
  folder.texts[kConfig] = config_json(config);
  if (!folder.files.index.empty()) folder.texts["model.safetensors.index.json"] = folder.files.index;
  return folder;
}

/// What may be replaced: a model's config and weights, and the files that `folder` has anew.
ckpt::FolderKind kind_of(const Folder& folder) {
  ckpt::FolderKind kind{kConfig, {kConfig, "model.safetensors", "model-#-of-#.safetensors", "model.safetensors.index.json"}};
  for (const auto& [name, text] : folder.texts) kind.names.push_back(name);
  return kind;
}

std::vector<TensorSpec> specs_in(const ckpt::Source& source, const std::string& prefix) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : source.info().tensors) {
    if (name.starts_with(prefix)) specs.push_back({name, tensor.dtype, tensor.shape});
  }
  return specs;
}

/// The files of a folder that is being written, opened as they are needed.
class Files {
 public:
  Files(const Folder& folder, const std::filesystem::path& path)
      : folder_(folder), path_(path), writers_(folder.files.files.size()) {}

  /// Makes all of them, with their headers. \param partial others write the rest
  void create(bool partial) {
    for (std::size_t i = 0; i < writers_.size(); ++i) open(i, false, partial);
  }
  void write(const std::string& key, std::uint64_t offset, std::span<const std::byte> bytes) {
    const std::size_t number = folder_.file_of.at(key);
    if (!writers_[number]) open(number, true, true);
    writers_[number]->write(key, bytes, offset);
  }
  void finish() {
    for (auto& writer : writers_) {
      if (writer) writer->finish();
    }
  }
  void write_texts() const {
    for (const auto& [name, text] : folder_.texts) ckpt::write_text(path_ / name, text);
  }

 private:
  void open(std::size_t number, bool join, bool partial) {
    const auto& file = folder_.files.files[number];
    writers_[number].emplace(path_ / file.name, file.tensors,
                             ckpt::WriterOptions{.metadata = {{"format", "pt"}}, .join = join, .partial = partial});
  }

  const Folder& folder_;
  std::filesystem::path path_;
  std::vector<std::optional<ckpt::SafetensorsWriter>> writers_;
};

/// Writes what `box` of our tensor and a part share. \param bytes elements of the box
void write_part(Files& files, const Part& part, const Box& box, ckpt::Dtype from, ckpt::Dtype to,
                std::span<const std::byte> bytes, std::vector<std::byte>& memory) {
  const std::optional<Box> shared = intersect(part.box, box);
  if (!shared) return;
  const auto in = static_cast<std::uint64_t>(bits_of(from) / 8), out = static_cast<std::uint64_t>(bits_of(to) / 8);
  ckpt::for_each_run(box, part.box, *shared, [&](std::int64_t source, std::int64_t target, std::int64_t count) {
    for (std::uint64_t at = 0; at < static_cast<std::uint64_t>(count);) {
      const std::uint64_t some = std::min<std::uint64_t>(kConvertAtOnce, static_cast<std::uint64_t>(count) - at);
      const auto run = bytes.subspan((static_cast<std::uint64_t>(source) + at) * in, some * in);
      files.write(part.key, (static_cast<std::uint64_t>(target) + at) * out,
                  ckpt::convert_elements(run, from, to, memory, part.key));
      at += some;
    }
  });
}

}  // namespace

ckpt::Dtype dtype_of(const std::string& name) {
  static const std::map<std::string, ckpt::Dtype> kDtypes = {{"float32", ckpt::Dtype::kF32},
                                                             {"float16", ckpt::Dtype::kF16},
                                                             {"bfloat16", ckpt::Dtype::kBF16},
                                                             {"float64", ckpt::Dtype::kF64}};
  const auto found = kDtypes.find(name);
  check_value(found != kDtypes.end(), "hf", "dtype is \"", name, "\", want float32, float16, bfloat16 or float64");
  return found->second;
}

void save_model(const std::filesystem::path& path, const ckpt::StateDict& state, const Config& config,
                const SaveOptions& options) {
  const Comm comm = ckpt::comm_or_world(options.comm);
  const CommOptions patience{.label = kOp, .timeout = options.timeout};
  const std::filesystem::path target = ckpt::target_path(path), partial = ckpt::partial_path(target);
  const ckpt::SavePlan plan = ckpt::plan_save(state, {}, comm, patience, options.prefix);
  std::vector<TensorSpec> specs;
  for (const ckpt::GlobalTensor& tensor : plan.tensors) specs.push_back(tensor.spec);
  const bool first = comm.rank() == 0;
  Folder folder;
  ckpt::agree(
      comm, kOp,
      [&] {
        folder = plan_folder(specs, options.prefix, config, options.dtype, options.max_file_bytes, options.files);
        return std::string();
      },
      patience);
  // What is put on the disk must be what all mean.
  const std::vector<std::string> texts = ckpt::agree(
      comm, kOp, [&] { return config_json(config); }, patience);
  for (const std::string& text : texts) check_value(text == texts[0], kOp, "the ranks have different configs");
  try {
    Files files(folder, partial);
    ckpt::agree(
        comm, kOp,
        [&] {
          if (first) {
            ckpt::begin_commit(target, options.overwrite, kind_of(folder), kOp);
            files.create(true);
          }
          return std::string();
        },
        patience);
    ckpt::agree(
        comm, kOp,
        [&] {
          const ckpt::PieceBytes source = ckpt::bytes_in_tensors(plan, state);
          std::vector<std::byte> memory;
          for (std::size_t i = 0; i < plan.mine.size(); ++i) {
            const ckpt::PlannedPiece& piece = plan.pieces[plan.mine[i]];
            const TensorSpec& spec = plan.tensors[piece.tensor].spec;
            const std::span<const std::byte> bytes = source(i);
            for (const Part& part : folder.parts.at(spec.name))
              write_part(files, part, piece.box, spec.dtype, folder.dtype, bytes, memory);
          }
          files.finish();
          return std::string();
        },
        patience);
    ckpt::agree(
        comm, kOp,
        [&] {
          if (first) {
            files.write_texts();
            ckpt::finish_commit(target, kind_of(folder));
          }
          return std::string();
        },
        patience);
  } catch (...) {
    if (first) ckpt::abandon_commit(target);
    throw;
  }
}

void check_model(const ckpt::Source& source, const Config& config, const std::string& prefix) {
  std::map<std::string, std::vector<Part>> ignored;
  const std::string problems = compare(specs_in(source, prefix), prefix, config, tensors_of(config), ignored);
  check_value(problems.empty(), "hf.check_model", source.path().string(), ": does not fit its config: ", problems);
}

void export_model(const ckpt::Source& source, const std::filesystem::path& path, const Config& config,
                  const ExportOptions& options) {
  check_value(options.buffer_bytes > 0, kOp, "buffer_bytes is 0, want at least 1");
  const std::vector<TensorSpec> specs = specs_in(source, options.prefix);
  check_value(!specs.empty(), kOp, source.path().string(), ": has no tensor whose name begins with \"", options.prefix, '"');
  const Folder folder = plan_folder(specs, options.prefix, config, options.dtype, options.max_file_bytes, options.files);
  const std::filesystem::path target = ckpt::target_path(path);
  std::uint64_t all = 0, done = 0;
  for (const TensorSpec& spec : specs)
    all += static_cast<std::uint64_t>(ckpt::whole_box(spec.shape).numel() * bits_of(spec.dtype) / 8);
  ckpt::begin_commit(target, options.overwrite, kind_of(folder), kOp);
  try {
    Files files(folder, ckpt::partial_path(target));
    files.create(false);
    std::vector<std::byte> values, memory;
    for (const TensorSpec& spec : specs) {
      const std::int64_t size = bits_of(spec.dtype) / 8;
      const auto most = std::max<std::int64_t>(1, static_cast<std::int64_t>(options.buffer_bytes) / size);
      for (const Part& part : folder.parts.at(spec.name)) {
        ckpt::for_each_slab(part.box, most, [&](const Box& slab) {
          values.resize(static_cast<std::size_t>(slab.numel() * size));
          source.read(spec.name, slab, values);
          write_part(files, part, slab, spec.dtype, folder.dtype, values, memory);
          done += values.size();
          if (options.progress) options.progress(done, all);
        });
      }
    }
    files.finish();
    files.write_texts();
    ckpt::finish_commit(target, kind_of(folder));
  } catch (...) {
    ckpt::abandon_commit(target);
    throw;
  }
}

}  // namespace hyper_parallel::hf
