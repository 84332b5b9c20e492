#include <hyper_parallel/parallel/moe.h>

#include <cmath>
#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include "parallel/dispatch.h"
#include "parallel/layer.h"

namespace hyper_parallel::parallel {
namespace {

constexpr const char* kOp = "MixtureOfExperts";

using Counts = std::vector<std::int64_t>;

void check_options(std::int64_t dim, const MoEOptions& options) {
  check_value(dim >= 1 && options.ffn_dim >= 1 && options.shared_ffn_dim >= 0, kOp, "dim ", dim, ", ffn_dim ", options.ffn_dim,
              ", shared_ffn_dim ", options.shared_ffn_dim, ", want 1, 1 and 0 or more");
  check_value(options.n_experts >= 1 && options.top_k >= 1 && options.top_k <= options.n_experts, kOp, "top_k ", options.top_k,
              " of ", options.n_experts, " experts, want at least 1 and at most all");
  check_value(options.aux_loss_weight >= 0 && options.bias_update_speed >= 0, kOp, "aux_loss_weight ", options.aux_loss_weight,
              ", bias_update_speed ", options.bias_update_speed, ", want 0 or more");
}

at::Tensor to_tensor(const Counts& counts) { return at::tensor(counts, at::kLong); }

Counts to_vector(const at::Tensor& counts) {
  const at::Tensor flat = counts.contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

/// Rows from ranks (each in expert order) <-> rows of experts (each in rank order).
struct ReceivedOrder {
  at::Tensor by_expert;  ///< permutation from the first to the second
  at::Tensor by_rank;    ///< and back
  Counts counts;         ///< of each local expert
};

/// \param counts (ranks, local experts)
ReceivedOrder received_order(const Counts& counts, std::int64_t n_local) {
  const std::int64_t n_ranks = n_local == 0 ? 0 : static_cast<std::int64_t>(counts.size()) / n_local;
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  Counts begin(counts.size(), 0);
  std::exclusive_scan(counts.begin(), counts.end(), begin.begin(), std::int64_t{0});
  ReceivedOrder order{at::empty({total}, at::kLong), at::empty({total}, at::kLong), Counts(static_cast<std::size_t>(n_local), 0)};
  auto* by_expert = order.by_expert.mutable_data_ptr<std::int64_t>();
  auto* by_rank = order.by_rank.mutable_data_ptr<std::int64_t>();
  std::int64_t next = 0;
  for (std::int64_t e = 0; e < n_local; ++e) {
    for (std::int64_t q = 0; q < n_ranks; ++q) {
      const auto cell = static_cast<std::size_t>(q * n_local + e);
      order.counts[static_cast<std::size_t>(e)] += counts[cell];
      for (std::int64_t i = 0; i < counts[cell]; ++i, ++next) {
        by_expert[next] = begin[cell] + i;
        by_rank[begin[cell] + i] = next;
      }
    }
  }
  return order;
}

/// Sums of consecutive groups.
Counts sums_of(const Counts& values, const Counts& group_sizes) {
  Counts sums;
  auto next = values.begin();
  for (const std::int64_t size : group_sizes) {
    sums.push_back(std::accumulate(next, next + size, std::int64_t{0}));
    next += size;
  }
  return sums;
}

}  // namespace

MoERouterImpl::MoERouterImpl(std::int64_t size, const MoEOptions& moe_options) : dim(size), options(moe_options) {
  check_options(dim, options);
  weight = register_parameter("weight", at::empty({options.n_experts, dim}));
  if (options.bias_update_speed > 0) {
    expert_bias = register_buffer("expert_bias", at::zeros({options.n_experts}, at::kFloat));
    tokens_per_expert = register_buffer("tokens_per_expert", at::zeros({options.n_experts}, at::kLong));
  }
  reset_parameters();
}

void MoERouterImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (expert_bias.defined()) expert_bias.zero_();
  if (tokens_per_expert.defined()) tokens_per_expert.zero_();
}

ParameterCuts MoERouterImpl::own_cuts() const {
  return {
      {"weight",
       {{options.n_experts, dim}, axis_cut(options.tp_mesh, Replicate(), options.sequence_parallel || options.split_tokens)}}};
}

MoERouterImpl::Choice MoERouterImpl::forward(torch::Tensor x) {
  const auto exact = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor logits = at::linear(x.to(exact), weight.to(exact));
  const bool softmax = options.score == RouterScore::kSoftmax;
  const at::Tensor scores = softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  const at::Tensor wanted = expert_bias.defined() ? scores.detach() + expert_bias : scores.detach();
  const at::Tensor ranked = std::get<1>(at::sort(wanted, /*stable=*/true, -1, /*descending=*/true));
  const at::Tensor experts = std::get<0>(at::sort(ranked.narrow(-1, 0, options.top_k), /*stable=*/true, -1, false));
  at::Tensor weights = scores.gather(-1, experts);
  if (options.normalize_weights) weights = weights / (weights.sum(-1, /*keepdim=*/true) + 1e-20);
  if (options.route_scale != 1.0) weights = weights * options.route_scale;
  return {experts, weights, softmax ? scores : scores / (scores.sum(-1, /*keepdim=*/true) + 1e-20)};
}

GroupedExpertsImpl::GroupedExpertsImpl(std::int64_t size, const MoEOptions& moe_options) : dim(size), options(moe_options) {
  check_options(dim, options);
  (void)group_of("GroupedExperts", options.ep_mesh);
  (void)group_of("GroupedExperts", options.tp_mesh);
  const ParameterCuts cuts = own_cuts();
  gate_proj = register_parameter("gate_proj", at::empty(local_shape(cuts.at("gate_proj"))));
  up_proj = register_parameter("up_proj", at::empty(local_shape(cuts.at("up_proj"))));
  down_proj = register_parameter("down_proj", at::empty(local_shape(cuts.at("down_proj"))));
  reset_parameters();
}

ParameterCuts GroupedExpertsImpl::own_cuts() const {
  const auto cut = [this](std::vector<std::int64_t> shape, std::int64_t hidden) {
    std::vector<AxisCut> axes = axis_cut(options.ep_mesh, Shard(0));
    if (!options.split_tokens) {
      for (AxisCut& axis : axis_cut(options.tp_mesh, Shard(hidden))) axes.push_back(std::move(axis));
    }
    return ParameterCut{std::move(shape), std::move(axes)};
  };
  const std::int64_t n = options.n_experts, ffn = options.ffn_dim;
  return {{"gate_proj", cut({n, ffn, dim}, 1)}, {"up_proj", cut({n, ffn, dim}, 1)}, {"down_proj", cut({n, dim, ffn}, 2)}};
}

void GroupedExpertsImpl::reset_parameters() {
  const ParameterCuts cuts = own_cuts();
  const FeatureRange own = options.ep_mesh.defined() ? chunk_of(options.n_experts, static_cast<int>(options.ep_mesh.size()),
                                                                options.ep_mesh.get_local_rank())
                                                     : FeatureRange{0, options.n_experts};
  const auto reset = [&](const char* name, at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    // Expert by expert, so that one whole matrix is the only memory besides: all are drawn, to use up equally many random
    // numbers.
    ParameterCut matrix = cuts.at(name);
    matrix.shape.erase(matrix.shape.begin());
    std::erase_if(matrix.axes, [](const AxisCut& axis) { return axis.placement.is_shard(0); });
    for (AxisCut& axis : matrix.axes) axis.placement = Shard(axis.placement.dim() - 1);
    at::Tensor unused = at::empty(local_shape(matrix), parameter.options().requires_grad(false));
    for (std::int64_t e = 0; e < options.n_experts; ++e) {
      const bool mine = e >= own.begin && e < own.end;
      reset_part(matrix, mine ? parameter[e - own.begin] : unused,
                 [](at::Tensor& whole) { torch::nn::init::kaiming_uniform_(whole, std::sqrt(5.0)); });
    }
  };
  reset("gate_proj", gate_proj);
  reset("up_proj", up_proj);
  reset("down_proj", down_proj);
}

torch::Tensor GroupedExpertsImpl::forward(torch::Tensor rows, std::vector<std::int64_t> counts) {
  const at::Tensor hidden = at::silu(grouped_linear(rows, gate_proj, counts)) * grouped_linear(rows, up_proj, counts);
  return grouped_linear(hidden, down_proj, counts);
}

MixtureOfExpertsImpl::MixtureOfExpertsImpl(std::int64_t size, MoEOptions moe_options)
    : dim(size), options(std::move(moe_options)) {
  check_options(dim, options);
  ep_ = group_of(kOp, options.ep_mesh);
  tp_ = group_of(kOp, options.tp_mesh);
  balance_ = options.split_tokens && !options.balance_mesh.defined() ? tp_ : group_of(kOp, options.balance_mesh);
  router = register_module("router", MoERouter(dim, options));
  experts = register_module("experts", GroupedExperts(dim, options));
  if (options.shared_ffn_dim > 0) {
    const ParallelSwiGLUOptions shared{
        .mesh = options.tp_mesh, .sequence_parallel = options.sequence_parallel, .sequence_dim = options.sequence_dim};
    shared_expert = register_module("shared_expert", ParallelSwiGLU(dim, options.shared_ffn_dim, shared));
  }
}

torch::Tensor MixtureOfExpertsImpl::run_experts(const torch::Tensor& rows, const Counts& counts) {
  if (alone(ep_)) return experts(rows, counts);
  const Counts experts_of = ceil_chunks(options.n_experts, ep_.size());
  const std::int64_t n_local = experts_of[static_cast<std::size_t>(ep_.rank())];
  const Counts from_each(experts_of.size(), n_local);
  const at::Tensor received = exchanged(to_tensor(counts), ep_, from_each, experts_of, kOp);
  const Counts received_counts = to_vector(received);
  const Counts to = sums_of(counts, experts_of), from = sums_of(received_counts, from_each);
  const ReceivedOrder order = received_order(received_counts, n_local);
  at::Tensor arrived = all_to_all(rows, ep_, {.output_rows = from, .input_rows = to, .label = kOp});
  arrived = permute_rows(arrived, order.by_expert, order.by_rank);
  const at::Tensor results = permute_rows(experts(arrived, order.counts), order.by_rank, order.by_expert);
  return all_to_all(results, ep_, {.output_rows = to, .input_rows = from, .label = kOp});
}

torch::Tensor MixtureOfExpertsImpl::aux_loss(const torch::Tensor& scores, torch::Tensor loads) const {
  if (!alone(balance_)) loads = summed(loads, balance_, "aux_loss");
  const double assignments = std::max<double>(1.0, static_cast<double>(loads.sum().item<std::int64_t>()));
  // Ranks of tp_mesh that share out the tokens of one rank compute summands of its loss.
  const int ranks = size_of(balance_) / (options.split_tokens ? size_of(tp_) : 1);
  const double tokens_of_rank = assignments / static_cast<double>(options.top_k) / std::max(1, ranks);
  const at::Tensor share = loads.to(scores.scalar_type()) / assignments;
  const at::Tensor mean_scores = scores.reshape({-1, options.n_experts}).sum(0) / tokens_of_rank;
  const at::Tensor loss = (share * mean_scores).sum() * (options.aux_loss_weight * static_cast<double>(options.n_experts));
  // With sequence parallelism, too, each rank has the scores of its own tokens only.
  return options.sequence_parallel || options.split_tokens ? all_reduce_identity(loss, tp_, "aux_loss") : loss;
}

torch::Tensor MixtureOfExpertsImpl::own_tokens(const torch::Tensor& x) const {
  if (!options.split_tokens || options.sequence_parallel || alone(tp_)) return x;
  check_value(options.sequence_dim >= 0 && options.sequence_dim < x.dim() - 1, kOp, "x has shape ", x.sizes(),
              ", want tokens along sequence_dim ", options.sequence_dim, " to share out");
  return split_all_gather(x, tp_, {options.sequence_dim, {}, kOp});
}

MoEOutput MixtureOfExpertsImpl::forward(torch::Tensor x, std::int64_t sequence_length) {
  check_value(x.dim() >= 1 && x.size(-1) == dim, kOp, "x has shape ", x.sizes(), ", want (..., ", dim, ')');
  const SequenceParallel sequence = sequence_of(options);
  const bool split = options.split_tokens;
  const at::Tensor own = own_tokens(x);
  const auto [chosen, weights, scores] = router(own);
  // Without split_tokens each rank of tp_mesh computes a summand of the result for the same tokens, so what flows back into x
  // and the weights is summed.
  const auto entered = [&](const at::Tensor& t) { return split ? t : enter(t, tp_, sequence, sequence_length, kOp); };
  const at::Tensor tokens = entered(own), factors = entered(weights);
  const at::Tensor of_tokens = sequence.enabled ? entered(chosen) : chosen;

  const RowOrder order = order_rows(of_tokens.reshape({-1, options.top_k}), options.n_experts);
  const at::Tensor rows = spread(tokens.reshape({-1, dim}), order);
  const at::Tensor summand =
      collect(run_experts(rows, order.counts), factors.reshape({-1, options.top_k}), order).view(tokens.sizes());
  MoEOutput result;
  if (!split) {
    result.output = leave(summand, tp_, sequence, kOp);
  } else if (sequence.enabled || alone(tp_)) {
    result.output = summand;
  } else {
    result.output = all_gather_split(summand, tp_, {sequence.dim, ceil_chunks(x.size(sequence.dim), tp_.size()), kOp});
  }
  if (!shared_expert.is_empty()) result.output = result.output + shared_expert(x, sequence_length);
  if (options.aux_loss_weight > 0) result.aux_loss = aux_loss(scores, to_tensor(order.counts));
  if (is_training() && router->tokens_per_expert.defined()) router->tokens_per_expert.add_(to_tensor(order.counts));
  return result;
}

void MixtureOfExpertsImpl::update_bias() {
  if (!router->expert_bias.defined()) return;
  const at::NoGradGuard no_grad;
  at::Tensor loads = router->tokens_per_expert;
  if (!alone(balance_)) loads = summed(loads, balance_, "update_bias");
  const at::Tensor exact = loads.to(at::kDouble);
  // Module::to casts buffers too, and steps are small against what bf16 can tell apart.
  at::Tensor& bias = router->expert_bias;
  if (bias.scalar_type() != at::kFloat) bias.set_data(bias.to(at::kFloat));
  bias.add_((exact.mean() - exact).sign().to(at::kFloat), options.bias_update_speed);
  router->tokens_per_expert.zero_();
}

}  // namespace hyper_parallel::parallel
