#pragma once
// Exponential moving average of the parameters, kept on the shards.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/dtensor/dtensor.h>
#include <hyper_parallel/fsdp/unit.h>

namespace hyper_parallel {

struct EmaOptions {
  double decay = 0.999;
  /// Decay min(decay, (1 + step) / (10 + step)) in early steps, so that the first values are soon forgotten.
  bool ramp = false;
  /// Of the averages. Default: float32, but float64 for float64 parameters.
  std::optional<c10::ScalarType> dtype = {};
};

/// Averages of the parameters of a unit tree: average = decay * average + (1 - decay) * parameter, shard by shard, without any
/// gather. Starts from the parameters as they are.
///
/// Memory: one flat tensor of each shard's size, a second one of the shard's own dtype while swapped. Everything is local.
/// torch::load into the model leaves the averages as they are (reset() starts anew from what was loaded). Buffers are not
/// managed by units and not averaged; parameters that are not floating-point stay as they are. Thread safety: one thread at a
/// time. Owns the averages; shares the parameters with the units.
class HP_API Ema {
 public:
  /// ValueError: decay outside [0, 1], a dtype that is not floating-point, floating-point parameters that are not on the CPU,
  /// empty root.
  explicit Ema(const fsdp::UnitHandle& root, EmaOptions options = {});

  /// Takes the parameters into the averages, after an optimizer step. \param step number of that step, from 0; counts for `ramp`
  /// only. Error: while swapped. ValueError: negative step, units added to the tree since.
  void update(std::int64_t step);
  /// The averages become the parameters as they are now. Error: while swapped.
  void reset();

  /// Puts the averages, rounded to the parameters' dtype, into the model, for evaluation, and keeps the trained parameters.
  /// Every forward gathers anew and so reads the averages, but for units that unshard() holds. Error: swapped already.
  void swap();
  /// Puts the trained parameters back, bit for bit; what was written to the model in between is lost. Error: not swapped.
  void restore();
  [[nodiscard]] bool swapped() const { return swapped_; }
  /// Puts the averages into the model for good: the trained parameters are gone. Error: while swapped.
  void copy_to();

  [[nodiscard]] double decay_at(std::int64_t step) const;
  /// The averages by name, laid out like UnitHandle::named_dtensors: for files, comparisons, full_tensor(). Local; shares memory,
  /// so that writing to a local tensor restores an average.
  [[nodiscard]] std::vector<std::pair<std::string, DTensor>> named_dtensors() const;

 private:
  [[nodiscard]] std::vector<fsdp::ShardedGroup> shards() const;
  void require_swapped(const char* what, bool wanted) const;

  fsdp::UnitHandle root_;
  EmaOptions options_;
  std::vector<at::Tensor> averages_, trained_;  // one for each flat group
  bool swapped_ = false;
};

}  // namespace hyper_parallel
