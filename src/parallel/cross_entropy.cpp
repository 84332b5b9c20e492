// Softmax over a vocabulary that no rank has as a whole.
//
//   m_n = max over ranks of max_v x_nv         s_n = sum over ranks of sum_v exp(x_nv - m_n)
//   loss_n = m_n + log s_n - x_nt              dx_nv = g_n (exp(x_nv - m_n) / s_n - [v = t])
//
// Rows are taken in blocks, so that what is computed in fp32 stays small.
#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <hyper_parallel/parallel/embedding.h>

#include "parallel/layer.h"

namespace hyper_parallel::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "parallel_cross_entropy";
constexpr std::int64_t kBlockElements = 1 << 16;

/// Rows whose fp32 copy is of moderate size.
std::int64_t rows_per_block(std::int64_t columns) {
  return std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, columns));
}

template <class Body>
void for_blocks(std::int64_t rows, std::int64_t columns, Body body) {
  const std::int64_t step = rows_per_block(columns);
  for (std::int64_t begin = 0; begin < rows; begin += step) body(begin, std::min(step, rows - begin));
}

/// Which targets this rank has, as row numbers, and their columns here.
struct OwnTargets {
  at::Tensor rows, columns;
};

OwnTargets own_targets(const at::Tensor& targets, const FeatureRange& own, std::int64_t ignore_index) {
  const at::Tensor mine = targets.ge(own.begin).logical_and_(targets.lt(own.end)).logical_and_(targets.ne(ignore_index));
  at::Tensor rows = mine.nonzero().reshape({-1});
  at::Tensor columns = targets.index_select(0, rows).sub_(own.begin);
  return {std::move(rows), std::move(columns)};
}

at::Tensor maximum(const at::Tensor& logits, const Comm& comm, const at::TensorOptions& exact) {
  at::Tensor highest = at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), exact);
  if (logits.size(1) > 0 && logits.size(0) > 0) highest.copy_(logits.amax(1));
  return alone(comm) ? highest : summed(highest, comm, kOp, ReduceOp::kMax);
}

/// Per row: sum of exponentials, and the target's logit less the maximum (0 where it is ignored).
std::pair<at::Tensor, at::Tensor> sums(const at::Tensor& logits, const at::Tensor& highest, const OwnTargets& own,
                                       const Comm& comm) {
  const std::int64_t rows = logits.size(0);
  at::Tensor both = at::zeros({2, rows}, highest.options());
  at::Tensor exponentials = both[0], target = both[1];
  if (logits.size(1) > 0) {
    for_blocks(rows, logits.size(1), [&](std::int64_t begin, std::int64_t n) {
      at::Tensor block = logits.narrow(0, begin, n).to(highest.scalar_type(), false, /*copy=*/true);
      exponentials.narrow(0, begin, n).copy_(block.sub_(highest.narrow(0, begin, n).unsqueeze(1)).exp_().sum(1));
    });
    target.index_copy_(0, own.rows,
                       logits.index({own.rows, own.columns}).to(highest.scalar_type()) - highest.index_select(0, own.rows));
  }
  if (!alone(comm)) both = summed(both, comm, kOp);
  return {both[0], both[1]};
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            const ParallelCrossEntropyOptions& options) {
    const Comm comm = group_of(kOp, options.mesh);
    const auto exact = logits.options().dtype(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const FeatureRange own = chunk_of(options.vocab_size, size_of(comm), rank_in(comm));
    const at::Tensor highest = maximum(logits, comm, exact);
    const auto [exponentials, target] = sums(logits, highest, own_targets(targets, own, options.ignore_index), comm);
    const at::Tensor log_sum = at::log(exponentials);
    context->save_for_backward({logits, targets, highest + log_sum});
    context->saved_data["begin"] = own.begin;
    context->saved_data["end"] = own.end;
    context->saved_data["ignore_index"] = options.ignore_index;
    return (log_sum - target).masked_fill_(targets.eq(options.ignore_index), 0);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_value(!at::GradMode::is_enabled(), kOp, "backward with create_graph = true, want false");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &log_sum = saved[2];
    const std::int64_t ignore_index = context->saved_data["ignore_index"].toInt();
    const FeatureRange range{context->saved_data["begin"].toInt(), context->saved_data["end"].toInt()};
    const at::Tensor weight = gradients[0].masked_fill(targets.eq(ignore_index), 0);
    at::Tensor result = at::empty(logits.sizes(), logits.options());
    const std::int64_t columns = logits.size(1);
    if (columns == 0) return {result, {}, {}};
    for_blocks(logits.size(0), columns, [&](std::int64_t begin, std::int64_t n) {
      at::Tensor block = logits.narrow(0, begin, n).to(log_sum.scalar_type(), false, /*copy=*/true);
      block.sub_(log_sum.narrow(0, begin, n).unsqueeze(1)).exp_();
      const OwnTargets own = own_targets(targets.narrow(0, begin, n), range, ignore_index);
      block.index_put_({own.rows, own.columns}, block.index({own.rows, own.columns}).sub_(1.0));
      const at::Tensor factor = weight.narrow(0, begin, n).unsqueeze(1);
      // An ignored row has no gradient, whatever its logits are.
      result.narrow(0, begin, n).copy_(block.mul_(factor).masked_fill_(factor.eq(0), 0));
    });
    return {result, {}, {}};
  }
};

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, const ParallelCrossEntropyOptions& options,
                     const Comm& comm) {
  check_value(logits.defined() && logits.dim() >= 1 && logits.is_floating_point(), kOp, "logits are ",
              logits.defined() ? logits.toString() : "undefined", ", want floats of shape (..., columns)");
  check_value(options.vocab_size > 0, kOp, "vocab_size ", options.vocab_size, ", want the size of the whole vocabulary");
  const std::int64_t columns = chunk_of(options.vocab_size, size_of(comm), rank_in(comm)).size();
  check_value(logits.size(-1) == columns, kOp, "logits have ", logits.size(-1), " columns, want ", columns,
              ", this rank's part of the vocabulary of ", options.vocab_size);
  check_value(targets.scalar_type() == at::kLong && targets.sizes() == logits.sizes().slice(0, logits.dim() - 1), kOp,
              "targets are ", targets.scalar_type(), " of shape ", targets.sizes(), ", want int64 of shape ",
              logits.sizes().slice(0, logits.dim() - 1));
  const at::Tensor wrong =
      targets.lt(0).logical_or_(targets.ge(options.vocab_size)).logical_and_(targets.ne(options.ignore_index));
  check_value(!wrong.any().item<bool>(), kOp, "a target is out of range, want 0 to ", options.vocab_size - 1, " or ignore_index ",
              options.ignore_index);
}

}  // namespace

at::Tensor parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                  const ParallelCrossEntropyOptions& options) {
  check_arguments(logits, targets, options, group_of(kOp, options.mesh));
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor losses = CrossEntropy::apply(logits.reshape({flat.numel(), logits.size(-1)}), flat, options);
  switch (options.reduction) {
    case LossReduction::kNone:
      return losses.view(targets.sizes());
    case LossReduction::kSum:
      return losses.sum();
    case LossReduction::kMean:
      break;
  }
  return losses.sum() / flat.ne(options.ignore_index).sum();
}

}  // namespace hyper_parallel::parallel
