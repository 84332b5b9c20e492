// What a checkpoint holds, whether it is whole, and what differs from another.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <hyper_parallel/ckpt/offline.h>
#include <hyper_parallel/hf/model.h>
#include <hyper_parallel/train/progress.h>
#include <hyper_parallel/train/tokenizer.h>

#include "bar.h"
#include "commands.h"

namespace hyper_parallel::apps {
namespace {

using ckpt::CheckpointInfo;
using train::format_bytes;
using train::format_count;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t d = 0; d < shape.size(); ++d) text += concat(d == 0 ? "" : ", ", shape[d]);
  return text + ")";
}

/// Text out of a file on one line, with control characters escaped.
std::string printable(const std::string& text) {
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    char code[8];
    if (byte < 0x20 || byte == 0x7f) {
      std::snprintf(code, sizeof(code), "\\x%02x", byte);
      line += code;
    } else {
      line += c;
    }
  }
  return train::printable(line);
}

std::int64_t count_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

/// A part of the tree of names, which are cut at their dots.
struct Node {
  std::map<std::string, Node> children;
  const CheckpointInfo::Tensor* tensor = nullptr;
  std::int64_t tensors = 0, elements = 0, bytes = 0;
};

/// Numbers in their order, other words alphabetically.
std::vector<const std::pair<const std::string, Node>*> in_order(const Node& node) {
  std::vector<const std::pair<const std::string, Node>*> all;
  for (const auto& child : node.children) all.push_back(&child);
  const auto number = [](const std::string& text) {
    return !text.empty() && text.size() < 10 && text.find_first_not_of("0123456789") == std::string::npos ? std::stol(text) : -1;
  };
  std::ranges::stable_sort(all, [&](const auto* a, const auto* b) {
    const long x = number(a->first), y = number(b->first);
    return x >= 0 && y >= 0 ? x < y : a->first < b->first;
  });
  return all;
}

void print(const Node& node, int level, int depth) {
  for (const auto* child : in_order(node)) {
    const Node& below = child->second;
    const std::string name(static_cast<std::size_t>(2 * level), ' ');
    const std::string label = name + printable(child->first);
    if (below.tensor != nullptr) {
      std::printf("%-44s %-9s %-20s %10s  %s\n", label.c_str(), std::string(to_string(below.tensor->dtype)).c_str(),
                  shape_text(below.tensor->shape).c_str(), format_bytes(bytes_of(*below.tensor)).c_str(),
                  printable(below.tensor->layout).c_str());
    }
    if (below.children.empty()) continue;
    std::printf("%-44s %-9s %-20s %10s\n", label.c_str(), "",
                concat(format_count(below.tensors), below.tensors == 1 ? " tensor" : " tensors").c_str(),
                format_bytes(below.bytes).c_str());
    if (depth == 0 || level + 1 < depth) print(below, level + 1, depth);
  }
}

Node tree_of(const CheckpointInfo& info) {
  Node root;
  for (const auto& [name, tensor] : info.tensors) {
    Node* node = &root;
    const auto add = [&] {
      node->tensors += 1;
      node->elements += count_of(tensor.shape);
      node->bytes += bytes_of(tensor);
    };
    add();
    for (std::size_t begin = 0; begin <= name.size();) {
      const std::size_t end = std::min(name.find('.', begin), name.size());
      node = &node->children[name.substr(begin, end - begin)];
      add();
      begin = end + 1;
    }
    node->tensor = &tensor;
  }
  return root;
}

ckpt::Source open_for(const std::filesystem::path& path, bool our_names) {
  return our_names && is_model_folder(path) ? hf::open_model(path) : ckpt::Source(path);
}

ckpt::Source only(const ckpt::Source& source, const std::string& prefix) {
  CheckpointInfo info = source.info();
  std::erase_if(info.tensors, [&](const auto& tensor) { return !tensor.first.starts_with(prefix); });
  return ckpt::Source(source.folder(), source.kind(), std::move(info));
}

}  // namespace

bool is_model_folder(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path / "config.json", ignored) && !std::filesystem::exists(path / "checkpoint.json", ignored);
}

std::int64_t bytes_of(const CheckpointInfo::Tensor& tensor) { return count_of(tensor.shape) * bits_of(tensor.dtype) / 8; }

std::string counted(std::size_t count, const char* what) { return concat(count, ' ', what, count == 1 ? "" : "s"); }

int inspect(const CkptCommand& command) {
  const ckpt::Source source(command.source);
  const CheckpointInfo& info = source.info();
  const Node root = tree_of(info);
  std::printf("%s: %s, %s tensor%s, %s element%s, %s\n", command.source.c_str(), std::string(to_string(source.kind())).c_str(),
              format_count(root.tensors).c_str(), root.tensors == 1 ? "" : "s", format_count(root.elements).c_str(),
              root.elements == 1 ? "" : "s", format_bytes(root.bytes).c_str());
  if (source.kind() == ckpt::SourceKind::kCheckpoint)
    std::printf("format version %d, written by %s\n", info.version,
                counted(static_cast<std::size_t>(info.world_size), "rank").c_str());
  for (const CheckpointInfo::File& file : info.files)
    std::printf("  %-58s %10s\n", printable(file.name).c_str(), format_bytes(static_cast<std::int64_t>(file.bytes)).c_str());
  if (is_model_folder(command.source)) {
    const hf::Config config = hf::read_config(command.source);
    std::printf("config.json: %s, %lld layers of width %lld, %lld tokens\n", std::string(to_string(config.family)).c_str(),
                static_cast<long long>(config.num_hidden_layers), static_cast<long long>(config.hidden_size),
                static_cast<long long>(config.vocab_size));
  }
  if (info.extra != "null" && info.extra.size() < 4000) std::printf("extra: %s\n", printable(info.extra).c_str());
  print(root, 0, command.depth);
  return 0;
}

int verify(const CkptCommand& command) {
  std::vector<std::string> problems;
  {
    Bar bar("verify", command.quiet);
    problems = ckpt::verify_source(command.source, [&](std::uint64_t done, std::uint64_t all) { bar.show(done, all); });
  }
  for (const std::string& problem : problems) std::printf("%s\n", printable(problem).c_str());
  if (!problems.empty()) {
    std::printf("DAMAGED %s: %s\n", command.source.c_str(), counted(problems.size(), "problem").c_str());
    return 1;
  }
  const ckpt::Source source(command.source);
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : source.info().tensors) bytes += bytes_of(tensor);
  std::printf("WHOLE %s: %s, %s%s\n", command.source.c_str(), counted(source.info().tensors.size(), "tensor").c_str(),
              format_bytes(bytes).c_str(),
              source.kind() == ckpt::SourceKind::kCheckpoint ? ", checksums agree" : ", has no checksums");
  return 0;
}

int diff(const CkptCommand& command) {
  // A model folder is compared with anything else under our names.
  const bool mixed = is_model_folder(command.source) != is_model_folder(command.target);
  const std::string prefix = command.prefix.value_or("");
  const ckpt::Source first = only(open_for(command.source, mixed), prefix),
                     second = only(open_for(command.target, mixed), prefix);
  check_value(prefix.empty() || !first.info().tensors.empty() || !second.info().tensors.empty(), "hp-ckpt", "neither ",
              command.source.string(), " nor ", command.target.string(), " has a tensor whose name begins with \"", prefix, '"');
  std::vector<ckpt::Difference> differences;
  {
    Bar bar("diff", command.quiet);
    differences = ckpt::diff(first, second,
                             {.atol = command.atol,
                              .rtol = command.rtol,
                              .compare_dtypes = !command.any_dtype,
                              .progress = [&](std::uint64_t done, std::uint64_t all) { bar.show(done, all); }});
  }
  if (differences.empty()) {
    std::printf("EQUAL: %s\n", counted(first.info().tensors.size(), "tensor").c_str());
    return 0;
  }
  const std::size_t shown = std::min(differences.size(), static_cast<std::size_t>(command.most));
  for (std::size_t i = 0; i < shown; ++i)
    std::printf("%s: %s\n", printable(differences[i].name).c_str(), differences[i].text.c_str());
  if (shown < differences.size()) std::printf("... and %zu more\n", differences.size() - shown);
  std::printf("DIFFERENT: %s\n", counted(differences.size(), "tensor").c_str());
  return 1;
}

}  // namespace hyper_parallel::apps
