#pragma once
// Checkpoints that all ranks write together and any number of ranks can read.
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/core/error.h>
#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/fsdp/unit.h>
#include <hyper_parallel/optim/stateful_optimizer.h>

namespace hyper_parallel::ckpt {

/// What a checkpoint says about itself, without the values. Torch-free but for this header.
struct CheckpointInfo {
  struct File {
    std::string name;
    std::uint64_t bytes = 0;
  };
  /// A box of a tensor, stored as a tensor of a safetensors file.
  struct Piece {
    std::size_t file = 0;  ///< position in `files`
    std::string key;       ///< name of the tensor; with "[2:5, 0:3]" behind it if it is not the whole
    Box box;
    std::uint32_t crc32c = 0;  ///< of its bytes
  };
  struct Tensor {
    Dtype dtype = Dtype::kF32;
    std::vector<std::int64_t> shape;
    std::string layout;  ///< how it lay on the ranks that wrote it, for people
    std::vector<Piece> pieces;
  };
  int version = 1;
  int world_size = 1;  ///< of the run that wrote it
  std::string extra;   ///< JSON text that was saved with it: "null" if none was
  std::vector<File> files;
  std::map<std::string, Tensor> tensors;
};

/// Reads and checks what the checkpoint in folder `path` says about itself. Local. CheckpointError: there is none, it is damaged,
/// of a later format version, or names files outside of the folder.
[[nodiscard]] HP_API CheckpointInfo read_info(const std::filesystem::path& path);

/// Reads every byte of the checkpoint in folder `path` and compares it with its checksums. Local. Returns what is wrong, one line
/// for each thing; nothing if the checkpoint is whole.
[[nodiscard]] HP_API std::vector<std::string> verify(const std::filesystem::path& path);

/// What a rank saves, or where it wants loaded values: tensors by name. A collection of handles that share the tensors' memory.
/// All members are local, but all ranks must build the same. Thread safety: one thread at a time.
class HP_API StateDict {
 public:
  /// A tensor that lies in parts on the ranks of a mesh. Other ranks than those may not know it. ValueError: a name twice, an
  /// axis with partial values, a dtype that safetensors files do not have, a sparse tensor, none.
  void add(const std::string& name, const DTensor& tensor);
  /// A tensor that is the same on every rank that adds it.
  void add(const std::string& name, const at::Tensor& tensor);
  /// The managed parameters and the buffers of a tree of units, as "<prefix><name>". A load first gives memory to what is on the
  /// meta device and drops gathered copies; it throws ValueError in the middle of a step.
  void add_model(const fsdp::UnitHandle& root, const std::string& prefix = "model.");
  /// The state of an optimizer of ours, or of torch's by way of TorchOptimizer, to be saved: tensors as
  /// "<prefix><parameter>.<tensor>", laid out like the parameter, and the number of its steps as "<prefix><parameter>.step".
  /// Parameters without step have only that.
  void add_optimizer(const optim::StatefulOptimizer& optimizer, const std::string& prefix = "optim.");
  /// The state of an optimizer, to be loaded from the checkpoint that `saved` describes: what that has of each parameter. The
  /// load makes the state of an optimizer that has none yet. The optimizer must outlive the load.
  void add_optimizer(optim::StatefulOptimizer& optimizer, const CheckpointInfo& saved, const std::string& prefix = "optim.");

  struct Entry {
    std::string name;
    at::Tensor local;  ///< this rank's part; undefined where a load will make it
    std::vector<std::int64_t> shape;
    std::vector<Box> boxes;  ///< of the whole tensor; their elements, one after the other, are those of `local`
    std::string layout;
  };
  [[nodiscard]] const std::map<std::string, Entry>& entries() const { return entries_; }

  /// Called by a load, before values arrive: gives memory to what has none.
  void prepare();
  /// Called by a load, once all values are there: gives optimizers their numbers of steps.
  void finish() const;

 private:
  void add_entry(Entry entry);
  void add_model_entries(const fsdp::UnitHandle& root, const std::string& prefix);

  std::map<std::string, Entry> entries_;
  struct Optimizer {
    optim::StatefulOptimizer* optimizer;
    std::string prefix;
    std::vector<at::Tensor> steps;  // in the order of its state()
  };
  std::vector<std::pair<fsdp::UnitHandle, std::string>> models_;
  std::vector<Optimizer> optimizers_;  // to be loaded
};

struct SaveOptions {
  std::string extra = {};  ///< JSON text to keep with the tensors: configuration, position in the data, anything
  bool overwrite = false;  ///< replace a checkpoint that is there, once the new one is complete
  Comm comm = {};          ///< the ranks that save; default: all ranks of the world
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< how long to wait for slower ranks
};

/// Writes a checkpoint into folder `path`, which appears as a whole or not at all. Collective over the ranks that save.
///
/// Each rank writes its parts to a safetensors file of its own; those that several ranks have are shared out evenly among them.
/// Everything goes into ".<name>.partial" beside `path`, is brought to the disk, and then renamed: a crash at any moment leaves
/// what was there before. All ranks must see the same folder.
///
/// Errors are the same on all ranks, with the text of the first that failed. ValueError, nothing is written: ranks that disagree
/// about a tensor, parts that overlap or leave holes, `extra` that is no JSON, a folder that is there (with `overwrite`: that
/// holds no checkpoint, or files besides it). CheckpointError: a file system error; the folder of the attempt is removed.
/// CommError.
HP_API void save(const std::filesystem::path& path, const StateDict& state, const SaveOptions& options = {});

struct LoadOptions {
  /// Names that only the checkpoint or only `state` has are errors; otherwise they are passed over (and returned).
  bool strict = true;
  /// Look only at names that begin with one of these; all if empty. {"model."} loads a model from a checkpoint of everything.
  std::vector<std::string> prefixes = {};
  bool convert_dtype = false;  ///< cast where checkpoint and state have other dtypes; otherwise that is an error
  Comm comm = {};              ///< the ranks that load; default: all ranks of the world
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< how long to wait for slower ranks
};

struct LoadResult {
  std::string extra;                    ///< JSON text that was saved with the checkpoint
  std::vector<std::string> missing;     ///< names of `state` that the checkpoint lacks
  std::vector<std::string> unexpected;  ///< names of the checkpoint that `state` lacks
  std::int64_t bytes_owned = 0;         ///< of this rank's parts, as they are stored
  std::int64_t bytes_read = 0;          ///< by this rank from tensors: as many
  std::int64_t bytes_checked = 0;       ///< of all ranks, compared with checksums
};

/// Reads the checkpoint in folder `path` into the tensors of `state`: in place, whatever number of ranks, mesh and layouts wrote
/// it or wants it. Collective over the ranks that load.
///
/// Each rank reads the ranges that it owns and nothing else. Where the ranks together read the whole of a stored piece, its
/// checksum is compared, without reading it again.
///
/// Errors are the same on all ranks. ValueError, nothing is changed: names that are missing or unexpected (all are listed), other
/// shapes or dtypes, ranks that disagree; in the middle of a step. CheckpointError: no checkpoint, missing or damaged files; when
/// a checksum differs or a read fails, which is noticed last, values have been changed.
HP_API LoadResult load(const std::filesystem::path& path, StateDict& state, const LoadOptions& options = {});

struct CheckpointerOptions {
  /// So many remain once a new one is complete: that one, and those of the highest steps; 0: all.
  int keep_last = 0;
  Comm comm = {};  ///< the ranks that save and load; default: all ranks of the world
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< how long to wait for slower ranks
};

/// The checkpoints of a run: folder/step-00000100, step-00000200, ... Saves in the background, keeps the last few.
///
/// Thread safety: one thread at a time. Owns the staging buffer and the thread of the save in progress.
class HP_API Checkpointer {
 public:
  /// Local; the folder is made by the first save. ValueError: keep_last < 0.
  explicit Checkpointer(std::filesystem::path folder, CheckpointerOptions options = {});
  Checkpointer(Checkpointer&&) noexcept;
  Checkpointer& operator=(Checkpointer&&) = delete;
  /// Waits for the save in progress; logs its error, which nobody else will see.
  ~Checkpointer();

  /// ckpt::save to the folder of the step, after the save in progress; an older checkpoint of that step is replaced. Collective.
  /// Errors: those of ckpt::save; that of the save in progress, in which case nothing is saved.
  void save(std::int64_t step, const StateDict& state, const std::string& extra = {});
  /// The same in the background: returns once this rank's parts are copied to the staging buffer, which is kept for later saves.
  /// The state may change from then on. Collective. ValueError: what ckpt::save throws before it writes. Whatever goes wrong
  /// afterwards is thrown by the next save, save_async or wait, on all ranks.
  void save_async(std::int64_t step, const StateDict& state, const std::string& extra = {});
  /// Waits until the save in progress, if any, is complete. Local. Throws its error.
  void wait();
  [[nodiscard]] bool busy() const;

  /// Steps that have a checkpoint, ascending. Local.
  [[nodiscard]] std::vector<std::int64_t> steps() const;
  /// The last of them. Local.
  [[nodiscard]] std::optional<std::int64_t> latest() const;
  [[nodiscard]] std::filesystem::path path_of(std::int64_t step) const;
  /// Bytes of the staging buffer, which grows to what this rank writes. Local.
  [[nodiscard]] std::int64_t staging_bytes() const;

  struct Impl;  // src/ckpt

 private:
  std::unique_ptr<Impl> impl_;
};

/// Bytes that this rank would write of `state`, which is what a save in the background takes as staging buffer. Collective.
[[nodiscard]] HP_API std::int64_t bytes_to_write(const StateDict& state, const Comm& comm = {});

}  // namespace hyper_parallel::ckpt
