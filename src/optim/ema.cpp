#include <hyper_parallel/optim/ema.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "optim/kernels.h"

namespace hyper_parallel {
namespace {

void write(const fsdp::ShardedGroup& group, const at::Tensor& values) {
  group.shard.copy_(values);
  for (const auto& parameter : group.parameters) optim::count_write(parameter.sharded);
}

}  // namespace

Ema::Ema(const fsdp::UnitHandle& root, EmaOptions options) : root_(root), options_(options) {
  check_value(root_.defined(), "Ema", "root is empty, want the handle that fully_shard returned");
  check_value(options_.decay >= 0 && options_.decay <= 1, "Ema", "decay is ", options_.decay, ", want 0 to 1");
  check_value(!options_.dtype || c10::isFloatingType(*options_.dtype), "Ema", "dtype is ", *options_.dtype,
              ", want a floating-point one");
  at::NoGradGuard no_grad;
  for (const fsdp::ShardedGroup& group : root_.groups()) {
    averages_.emplace_back();
    if (!group.shard.is_floating_point()) continue;  // indices and masks have no average
    check_value(group.shard.is_cpu(), "Ema", "parameters are on ", group.shard.device(), ", want them on the CPU");
    const auto wide = group.shard.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    averages_.back() = at::empty_like(group.shard, group.shard.options().dtype(options_.dtype.value_or(wide)));
  }
  trained_.resize(averages_.size());
  reset();
}

std::vector<fsdp::ShardedGroup> Ema::shards() const {
  std::vector<fsdp::ShardedGroup> shards = root_.groups();
  check_value(shards.size() == averages_.size(), "Ema", "the unit tree has ", shards.size(), " groups, want ", averages_.size(),
              ": build the averages after the last fully_shard");
  return shards;
}

void Ema::require_swapped(const char* what, bool wanted) const {
  if (swapped_ != wanted) {
    throw Error(concat("[Ema] ", what, wanted ? " without swap, want swap() before" : " while swapped, want restore() before"));
  }
}

double Ema::decay_at(std::int64_t step) const {
  const auto n = static_cast<double>(step);
  return options_.ramp ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
}

void Ema::update(std::int64_t step) {
  require_swapped("update", false);
  check_value(step >= 0, "Ema", "step is ", step, ", want at least 0");
  const std::vector<fsdp::ShardedGroup> groups = shards();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!averages_[g].defined()) continue;
    const at::Tensor& shard = groups[g].shard;
    optim::average(optim::values_of(averages_[g]), optim::values_of(shard), shard.numel(), 1 - decay_at(step));
  }
}

void Ema::reset() {
  require_swapped("reset", false);
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = shards();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (averages_[g].defined()) averages_[g].copy_(groups[g].shard);
  }
}

void Ema::copy_to() {
  require_swapped("copy_to", false);
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = shards();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (averages_[g].defined()) write(groups[g], averages_[g]);
  }
}

void Ema::swap() {
  require_swapped("swap", false);
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = shards();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (!averages_[g].defined()) continue;
    trained_[g] = groups[g].shard.clone();
    write(groups[g], averages_[g]);
  }
  swapped_ = true;
}

void Ema::restore() {
  require_swapped("restore", true);
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> groups = shards();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (trained_[g].defined()) write(groups[g], std::exchange(trained_[g], at::Tensor()));
  }
  swapped_ = false;
}

std::vector<std::pair<std::string, DTensor>> Ema::named_dtensors() const {
  std::vector<std::pair<std::string, DTensor>> result = root_.named_dtensors();
  const std::vector<fsdp::ShardedGroup> groups = shards();
  auto entry = result.begin();
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const auto& parameter : groups[g].parameters) {
      DTensor& tensor = (entry++)->second;
      if (!averages_[g].defined()) continue;
      const at::Tensor part = averages_[g].narrow(0, parameter.offset, parameter.numel).view(parameter.sharded.sizes());
      tensor = DTensor::from_local(part, tensor.device_mesh(), tensor.layout(), tensor.shape());
    }
  }
  return result;
}

}  // namespace hyper_parallel
