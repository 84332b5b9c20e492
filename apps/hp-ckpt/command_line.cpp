#include "command_line.h"

#include <charconv>
#include <cmath>

#include <CLI/CLI.hpp>

#include <hyper_parallel/core/error.h>

namespace hyper_parallel::apps {
namespace {

constexpr const char* kDescription =
    "Looks at checkpoints and rewrites them, in bounded memory and without the program that wrote them.\n"
    "PATH is a checkpoint of this library, a Hugging Face model folder, a folder of torch.distributed.checkpoint's\n"
    "HuggingFaceStorageWriter, or a safetensors file. Pickles (.pt, .bin, .distcp) are refused.\n"
    "Exit code: 0 done, whole, equal; 1 damaged, different; 2 an error.";

/// A folder or file that is named at all.
std::string check_named(const std::string& path) { return path.empty() ? "is \"\", want a path" : ""; }

/// CLI11's own checks show bounds of 300 digits.
std::string check_tolerance(const std::string& text) {
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool fine = problem == std::errc() && end == text.data() + text.size() && value >= 0 && std::isfinite(value);
  return fine ? "" : concat("is ", text, ", want a finite number >= 0");
}

void add_inspect(CLI::App& app, CkptCommand& c) {
  CLI::App* sub = app.add_subcommand("inspect", "tree of names, shapes, dtypes, layouts and sizes");
  sub->add_option("path", c.source, "what to look at")->type_name("PATH")->required()->check(check_named);
  sub->add_option("--depth", c.depth, "levels of the tree [all]")->type_name("N")->check(CLI::Range(1, 100));
}

void add_verify(CLI::App& app, CkptCommand& c) {
  CLI::App* sub = app.add_subcommand("verify", "read every byte; of checkpoints, compare it with the checksums");
  sub->add_option("path", c.source, "what to check")->type_name("PATH")->required()->check(check_named);
  sub->add_flag("-q,--quiet", c.quiet, "no progress bar");
}

void add_rewriting(CLI::App* sub, CkptCommand& c) {
  sub->add_option("source", c.source, "what to read")->type_name("PATH")->required()->check(check_named);
  sub->add_option("target", c.target, "the folder to write")->type_name("PATH")->required()->check(check_named);
  sub->add_option("--dtype", c.dtype, "of floating point tensors: float32, float16, bfloat16, float64 [as they are]")
      ->type_name("DTYPE")
      ->check(CLI::IsMember({"float32", "float16", "bfloat16", "float64"}));
  sub->add_option("--buffer-mb", c.buffer_mb, "memory for values [16]")->type_name("MB")->check(CLI::Range(1, 1 << 20));
  sub->add_flag("--overwrite", c.overwrite,
                "replace a folder of the same kind without other files, once the new one is complete");
  sub->add_flag("-q,--quiet", c.quiet, "no progress bar");
}

void add_convert(CLI::App& app, CkptCommand& c) {
  CLI::App* sub = app.add_subcommand("convert", "from and to Hugging Face and torch.distributed.checkpoint folders");
  add_rewriting(sub, c);
  sub->add_option("--to", c.to, "checkpoint, hf, dcp [checkpoint]")
      ->type_name("KIND")
      ->check(CLI::IsMember({"checkpoint", "hf", "dcp"}));
  sub->add_option("--ranks", c.ranks, "checkpoint and dcp: files to cut the tensors into [1]")
      ->type_name("N")
      ->check(CLI::Range(1, 100000));
  sub->add_option("--prefix", c.prefix, "of the model's tensors in a checkpoint [model.]")->type_name("TEXT");
  sub->add_option("--config", c.config, "hf: the model, as config.json or hp-train's config.toml [what lies beside the source]")
      ->type_name("FILE");
  sub->add_option("--tokenizer", c.tokenizer,
                  "hf: tokenizer.json to go with it, or 'bytes' for hp-train's [what lies beside the source]")
      ->type_name("FILE");
  sub->add_option("--file-mb", c.file_mb, "hf: tensors in a file [5000]")->type_name("MB")->check(CLI::Range(1, 1 << 30));
}

void add_diff(CLI::App& app, CkptCommand& c) {
  CLI::App* sub = app.add_subcommand("diff", "what differs between the tensors of two");
  sub->add_option("first", c.source, "one")->type_name("PATH")->required()->check(check_named);
  sub->add_option("second", c.target, "the other")->type_name("PATH")->required()->check(check_named);
  sub->add_option("--atol", c.atol, "equal if |a - b| <= atol + rtol |b| [0]")->type_name("X")->check(check_tolerance);
  sub->add_option("--rtol", c.rtol, "the same [0]")->type_name("X")->check(check_tolerance);
  sub->add_flag("--any-dtype", c.any_dtype, "compare values of different floating point types");
  sub->add_option("--prefix", c.prefix, "only names that begin with it")->type_name("TEXT");
  sub->add_option("--most", c.most, "lines to print [20]")->type_name("N")->check(CLI::Range(1, 1 << 30));
  sub->add_flag("-q,--quiet", c.quiet, "no progress bar");
}

void add_reshard(CLI::App& app, CkptCommand& c) {
  CLI::App* sub = app.add_subcommand("reshard", "a checkpoint as another number of ranks would have written it");
  add_rewriting(sub, c);
  sub->add_option("--ranks", c.ranks, "how many")->type_name("N")->required()->check(CLI::Range(1, 100000));
}

}  // namespace

CkptCommand parse_ckpt_command(int argc, const char* const* argv) {
  CkptCommand command;
  CLI::App app(kDescription, "hp-ckpt");
  app.require_subcommand(0, 1);
  bool version = false;
  app.add_flag("--version", version, "print the version and leave");
  add_inspect(app, command);
  add_verify(app, command);
  add_convert(app, command);
  add_diff(app, command);
  add_reshard(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    command.text = app.help();
    return command;
  } catch (const CLI::Error& error) {
    throw ValueError(concat("[hp-ckpt] ", error.what(), ", see hp-ckpt --help"));
  }
  const auto chosen = app.get_subcommands();
  if (version) command.text = concat("hp-ckpt ", HP_VERSION, '\n');
  if (!version && chosen.empty()) command.text = app.help();
  if (!chosen.empty()) command.name = chosen[0]->get_name();
  return command;
}

}  // namespace hyper_parallel::apps
