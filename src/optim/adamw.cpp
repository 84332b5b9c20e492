#include <hyper_parallel/optim/adamw.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

namespace hyper_parallel::optim {

/// Arguments of one call of the fused kernel: equal dtype and weight decay.
struct AdamW::Batch {
  at::ScalarType dtype;
  bool decays;
  std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
};

AdamW::AdamW(const fsdp::UnitHandle& root, AdamWOptions options) : root_(root), options_(std::move(options)) {
  constexpr std::string_view kOp = "AdamW";
  const auto& [beta1, beta2] = options_.betas;
  check_value(root_.defined(), kOp, "root is empty, want the handle that fully_shard returned");
  check_value(options_.lr >= 0, kOp, "lr is ", options_.lr, ", want at least 0");
  check_value(options_.eps >= 0, kOp, "eps is ", options_.eps, ", want at least 0");
  check_value(options_.weight_decay >= 0, kOp, "weight_decay is ", options_.weight_decay, ", want at least 0");
  check_value(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, kOp, "betas are ", beta1, " and ", beta2,
              ", want both in [0, 1)");
  for (const fsdp::ShardedGroup& shard : root_.groups()) {
    Group& group = groups_.emplace_back();
    for (const auto& parameter : shard.parameters) {
      group.parameters.push_back(
          {.step = 0, .decays = !options_.decays || options_.decays(parameter.name, parameter.full_shape)});
    }
  }
}

void AdamW::set_lr(double lr) {
  check_value(lr >= 0, "AdamW", "lr is ", lr, ", want at least 0");
  options_.lr = lr;
}

/// Neighbours that have gradients, the same step count and the same decay form one run: in the usual case the whole flat shard.
/// Padding inside a run is zero in shard and gradient and stays so.
void AdamW::collect(const fsdp::ShardedGroup& shard, Group& group, std::vector<Batch>& batches) {
  struct Run {
    std::int64_t begin, end, step;
    bool decays;
  };
  std::vector<std::size_t> order(shard.parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return shard.parameters[a].offset < shard.parameters[b].offset; });

  std::vector<Run> runs;
  bool open = false;
  for (const std::size_t i : order) {
    const auto& parameter = shard.parameters[i];
    const at::Tensor& grad = parameter.sharded.grad();
    if (!grad.defined()) {
      open = open && parameter.numel == 0;
      continue;
    }
    Parameter& own = group.parameters[i];
    ++own.step;
    if (parameter.numel == 0) continue;
    const at::Tensor home = shard.grad.narrow(0, parameter.offset, parameter.numel);
    if (grad.const_data_ptr() != home.const_data_ptr())
      home.copy_(grad.reshape({-1}));  // the user put a tensor of their own there
    const std::int64_t end = parameter.offset + parameter.numel;
    if (open && runs.back().step == own.step && runs.back().decays == own.decays) {
      runs.back().end = end;
    } else {
      runs.push_back({parameter.offset, end, own.step, own.decays});
    }
    open = true;
  }
  if (runs.empty()) return;
  if (!group.exp_avg.defined()) {
    group.exp_avg = at::zeros_like(shard.shard);
    group.exp_avg_sq = at::zeros_like(shard.shard);
  }
  if (group.exp_avg.scalar_type() != shard.shard.scalar_type()) {  // the model was converted
    group.exp_avg = group.exp_avg.to(shard.shard.scalar_type());
    group.exp_avg_sq = group.exp_avg_sq.to(shard.shard.scalar_type());
  }
  for (const Run& run : runs) {
    auto batch = std::find_if(batches.begin(), batches.end(),
                              [&](const Batch& b) { return b.dtype == shard.shard.scalar_type() && b.decays == run.decays; });
    if (batch == batches.end())
      batch = batches.insert(batches.end(), Batch{shard.shard.scalar_type(), run.decays, {}, {}, {}, {}, {}});
    const auto part = [&](const at::Tensor& flat) { return flat.narrow(0, run.begin, run.end - run.begin); };
    batch->parameters.push_back(part(shard.shard));
    batch->gradients.push_back(part(shard.grad));
    batch->exp_avgs.push_back(part(group.exp_avg));
    batch->exp_avg_sqs.push_back(part(group.exp_avg_sq));
    if (steps_used_ == steps_.size()) steps_.push_back(at::empty({}, shard.shard.options().dtype(at::kFloat)));
    batch->steps.push_back(steps_[steps_used_++].fill_(static_cast<double>(run.step)));
  }
}

void AdamW::step() {
  at::NoGradGuard no_grad;
  std::vector<fsdp::ShardedGroup> shards = root_.groups();
  check_value(shards.size() == groups_.size(), "AdamW", "the unit tree has ", shards.size(), " groups, want ", groups_.size(),
              ": build the optimizer after the last fully_shard");
  steps_used_ = 0;
  std::vector<Batch> batches;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto& parameters = shards[i].parameters;
    const bool any = std::any_of(parameters.begin(), parameters.end(), [](const auto& p) { return p.sharded.grad().defined(); });
    if (!any) continue;
    if (!shards[i].grad.defined()) shards[i].grad = at::zeros_like(shards[i].shard);  // no backward made these gradients
    collect(shards[i], groups_[i], batches);
  }
  for (Batch& batch : batches) {
    at::_fused_adamw_(batch.parameters, batch.gradients, batch.exp_avgs, batch.exp_avg_sqs, {}, batch.steps, options_.lr,
                      options_.betas.first, options_.betas.second, batch.decays ? options_.weight_decay : 0.0, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::zero_grad(bool set_to_none) { root_.zero_grad(set_to_none); }

std::vector<AdamW::State> AdamW::state() const {
  std::vector<State> states;
  const std::vector<fsdp::ShardedGroup> shards = root_.groups();
  for (std::size_t g = 0; g < shards.size() && g < groups_.size(); ++g) {
    for (std::size_t i = 0; i < shards[g].parameters.size(); ++i) {
      const auto& parameter = shards[g].parameters[i];
      State& state = states.emplace_back();
      state.name = parameter.name;
      state.step = groups_[g].parameters[i].step;
      if (!groups_[g].exp_avg.defined()) continue;
      const auto view = [&](const at::Tensor& flat) {
        return flat.narrow(0, parameter.offset, parameter.numel).view(parameter.sharded.sizes());
      };
      state.exp_avg = view(groups_[g].exp_avg);
      state.exp_avg_sq = view(groups_[g].exp_avg_sq);
    }
  }
  return states;
}

}  // namespace hyper_parallel::optim
