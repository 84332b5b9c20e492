#include <hyper_parallel/parallel/attention.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/silu.h>

#include "parallel/layer.h"

namespace hyper_parallel::parallel {
namespace {

/// Key heads that the query heads of each rank read.
std::vector<FeatureRange> read_by(const std::vector<FeatureRange>& heads, std::int64_t group) {
  std::vector<FeatureRange> ranges;
  for (const FeatureRange& range : heads) {
    const std::int64_t first = range.begin / group;
    ranges.push_back({first, range.size() == 0 ? first : (range.end - 1) / group + 1});
  }
  return ranges;
}

std::vector<FeatureRange> times(std::vector<FeatureRange> ranges, std::int64_t factor) {
  for (FeatureRange& range : ranges) range = {range.begin * factor, range.end * factor};
  return ranges;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return x * cos.to(x.scalar_type()) + at::cat({-halves[1], halves[0]}, -1) * sin.to(x.scalar_type());
}

}  // namespace

ParallelSwiGLUImpl::ParallelSwiGLUImpl(std::int64_t dim, std::int64_t hidden, ParallelSwiGLUOptions swiglu_options)
    : options(std::move(swiglu_options)) {
  comm_ = group_of("ParallelSwiGLU", options.mesh);
  const ParallelLinearOptions linear{.mesh = options.mesh,
                                     .bias = options.bias,
                                     .sequence_parallel = options.sequence_parallel,
                                     .sequence_dim = options.sequence_dim,
                                     .enter_region = false};
  gate_proj = register_module("gate_proj", ColumnParallelLinear(dim, hidden, linear));
  up_proj = register_module("up_proj", ColumnParallelLinear(dim, hidden, linear));
  down_proj = register_module("down_proj", RowParallelLinear(hidden, dim, linear));
}

torch::Tensor ParallelSwiGLUImpl::forward(torch::Tensor x, std::int64_t sequence_length) {
  x = enter(x, comm_, sequence_of(options), sequence_length, "ParallelSwiGLU");
  return down_proj(at::silu(gate_proj(x)) * up_proj(x));
}

ParallelAttentionImpl::ParallelAttentionImpl(std::int64_t size, ParallelAttentionOptions attention_options)
    : dim(size), options(std::move(attention_options)) {
  constexpr const char* kOp = "ParallelAttention";
  const std::int64_t n_heads = options.n_heads;
  kv_count_ = options.n_kv_heads == 0 ? n_heads : options.n_kv_heads;
  check_value(n_heads >= 1 && kv_count_ >= 1 && n_heads % kv_count_ == 0, kOp, n_heads, " heads and ", kv_count_,
              " key heads, want one or more, and a multiple");
  head_dim_ = options.head_dim == 0 ? dim / n_heads : options.head_dim;
  check_value(head_dim_ >= 1 && (options.head_dim != 0 || dim % n_heads == 0), kOp, "dim ", dim, " over ", n_heads,
              " heads, want a multiple, or head_dim");
  check_value(!options.sequence_parallel || options.sequence_dim == 1, kOp, "sequence_dim ", options.sequence_dim,
              ", want 1: x is (batch, sequence, dim)");
  comm_ = group_of(kOp, options.mesh);
  cp_comm_ = group_of(kOp, options.cp_mesh);

  const std::vector<FeatureRange> heads = balanced_ranges(n_heads, 1, size_of(comm_));
  const std::vector<FeatureRange> kv_heads = read_by(heads, n_heads / kv_count_);
  heads_ = heads[static_cast<std::size_t>(rank_in(comm_))];
  kv_heads_ = kv_heads[static_cast<std::size_t>(rank_in(comm_))];
  ParallelLinearOptions linear{.mesh = options.mesh,
                               .bias = options.bias,
                               .sequence_parallel = options.sequence_parallel,
                               .enter_region = false,
                               .ranges = times(heads, head_dim_)};
  ParallelLinearOptions kv_linear = linear;
  kv_linear.ranges = times(kv_heads, head_dim_);
  q_proj = register_module("q_proj", ColumnParallelLinear(dim, n_heads * head_dim_, linear));
  k_proj = register_module("k_proj", ColumnParallelLinear(dim, kv_count_ * head_dim_, kv_linear));
  v_proj = register_module("v_proj", ColumnParallelLinear(dim, kv_count_ * head_dim_, kv_linear));
  o_proj = register_module("o_proj", RowParallelLinear(n_heads * head_dim_, dim, linear));
  if (!options.qk_norm) return;
  const ParallelNormOptions norm{.mesh = options.mesh, .sequence_parallel = true, .eps = options.norm_eps};  // partial gradients
  q_norm = register_module("q_norm", ParallelRMSNorm(head_dim_, norm));
  k_norm = register_module("k_norm", ParallelRMSNorm(head_dim_, norm));
}

torch::Tensor ParallelAttentionImpl::mix(const torch::Tensor& q, torch::Tensor k, torch::Tensor v,
                                         std::int64_t context_length) const {
  const std::int64_t group = options.n_heads / kv_count_, n = heads_.size(), n_kv = kv_heads_.size();
  const bool whole_groups = heads_.begin == kv_heads_.begin * group && heads_.end == kv_heads_.end * group;
  if (n_kv > 1 && !whole_groups) {
    // This rank's heads end in the middle of a group: each gets its own key head.
    const auto index = at::TensorOptions().dtype(at::kLong).device(k.device());
    const at::Tensor of_head = at::arange(heads_.begin, heads_.end, index).floor_divide(group).sub(kv_heads_.begin);
    k = k.index_select(1, of_head);
    v = v.index_select(1, of_head);
  }
  check_internal(n % k.size(1) == 0, "ParallelAttention", n, " heads read ", k.size(1));
  const std::int64_t length = context_length == 0 ? q.size(2) * size_of(cp_comm_) : context_length;
  return context_parallel_attention(q, k, v, cp_comm_, SequenceSplit(length, size_of(cp_comm_), options.cp_order),
                                    {.causal = options.causal});
}

torch::Tensor ParallelAttentionImpl::forward(torch::Tensor x, AttentionArguments arguments) {
  x = enter(x, comm_, sequence_of(options), arguments.sequence_length, "ParallelAttention");
  const std::int64_t batch = x.size(0), length = x.size(1);
  const auto heads_of = [&](const at::Tensor& t, std::int64_t n, ParallelRMSNorm norm = nullptr) {
    const at::Tensor parts = t.view({batch, length, n, head_dim_});
    return (norm.is_empty() ? parts : norm(parts)).transpose(1, 2);
  };
  at::Tensor q = q_proj(x), k = k_proj(x), v = v_proj(x);
  // Without heads: no features, but a way back to x, whose gradient is summed over all ranks.
  if (heads_.size() == 0) {
    if (options.qk_norm) {
      q = heads_of(q, 0, q_norm).transpose(1, 2).flatten(2);
      k = heads_of(k, 0, k_norm).transpose(1, 2).flatten(2);
    }
    return o_proj(at::cat({q, k, v}, -1));
  }
  q = heads_of(q, heads_.size(), q_norm);
  k = heads_of(k, kv_heads_.size(), k_norm);
  v = heads_of(v, kv_heads_.size());
  if (arguments.cos.defined()) {
    q = rotate(q, arguments.cos, arguments.sin);
    k = rotate(k, arguments.cos, arguments.sin);
  }
  const at::Tensor mixed = mix(q, k, v, arguments.context_length);
  return o_proj(mixed.transpose(1, 2).reshape({batch, length, heads_.size() * head_dim_}));
}

}  // namespace hyper_parallel::parallel
