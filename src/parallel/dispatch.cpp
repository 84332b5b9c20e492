#include "parallel/dispatch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <hyper_parallel/parallel/moe.h>

namespace hyper_parallel::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::ScalarType sum_dtype(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

void check_once(const char* op) { check_value(!at::GradMode::is_enabled(), op, "backward with create_graph = true, want false"); }

/// Sum over the k rows of each token, in expert order; `weights` (N, k) may be undefined.
at::Tensor sum_rows(const at::Tensor& rows, const at::Tensor& position, const at::Tensor& weights) {
  const auto exact = sum_dtype(rows);
  at::Tensor sum = at::zeros({position.size(0), rows.size(1)}, rows.options().dtype(exact));
  for (std::int64_t j = 0; j < position.size(1); ++j) {
    at::Tensor term = rows.index_select(0, position.select(1, j)).to(exact);
    if (weights.defined()) term.mul_(weights.select(1, j).unsqueeze(1));
    sum.add_(term);
  }
  return sum.to(rows.scalar_type());
}

struct Spread : Function<Spread> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& token, const at::Tensor& position) {
    context->save_for_backward({position});
    return x.index_select(0, token);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_once("MixtureOfExperts");
    return {sum_rows(gradients[0], context->get_saved_variables()[0], {}), {}, {}};
  }
};

struct Collect : Function<Collect> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& token,
                            const at::Tensor& pair, const at::Tensor& position) {
    context->save_for_backward({rows, weights, token, pair, position});
    return sum_rows(rows, position, weights);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_once("MixtureOfExperts");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &weights = saved[1], &token = saved[2], &pair = saved[3], &position = saved[4];
    const at::Tensor of_rows = gradients[0].index_select(0, token).to(sum_dtype(rows));
    const at::Tensor of_pairs = (of_rows * rows).sum(1).to(weights.scalar_type());
    const at::Tensor factor = weights.reshape({-1}).index_select(0, pair).unsqueeze(1);
    return {(of_rows * factor).to(rows.scalar_type()),
            of_pairs.index_select(0, position.reshape({-1})).view(weights.sizes()),
            {},
            {},
            {}};
  }
};

struct Permute : Function<Permute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse) {
    context->save_for_backward({order, inverse});
    return x.index_select(0, order);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {permute_rows(gradients[0], saved[1], saved[0]), {}, {}};
  }
};

/// Calls body(group, first row, rows) for groups that have rows.
template <class Body>
void for_groups(const std::vector<std::int64_t>& counts, Body body) {
  std::int64_t begin = 0;
  for (std::size_t g = 0; g < counts.size(); ++g) {
    if (counts[g] > 0) body(static_cast<std::int64_t>(g), begin, counts[g]);
    begin += counts[g];
  }
}

struct GroupedLinear : Function<GroupedLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const std::vector<std::int64_t>& counts) {
    context->save_for_backward({x, weight});
    context->saved_data["counts"] = counts;
    at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
    for_groups(counts, [&](std::int64_t g, std::int64_t begin, std::int64_t n) {
      at::Tensor rows = y.narrow(0, begin, n);
      at::mm_out(rows, x.narrow(0, begin, n), weight[g].t());
    });
    return y;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_once("grouped_linear");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], dy = gradients[0].contiguous();
    const std::vector<std::int64_t> counts = context->saved_data["counts"].toIntVector();
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) {
      dx = at::empty(x.sizes(), x.options());
      for_groups(counts, [&](std::int64_t g, std::int64_t begin, std::int64_t n) {
        at::Tensor rows = dx.narrow(0, begin, n);
        at::mm_out(rows, dy.narrow(0, begin, n), weight[g]);
      });
    }
    if (context->needs_input_grad(1)) {
      dw = at::zeros(weight.sizes(), weight.options());
      for_groups(counts, [&](std::int64_t g, std::int64_t begin, std::int64_t n) {
        at::Tensor matrix = dw[g];
        at::mm_out(matrix, dy.narrow(0, begin, n).t(), x.narrow(0, begin, n));
      });
    }
    return {dx, dw, {}};
  }
};

}  // namespace

RowOrder order_rows(const at::Tensor& experts, std::int64_t n_experts) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = experts.reshape({-1});
  const std::int64_t k = experts.size(1);
  RowOrder order;
  order.pair = std::get<1>(at::sort(flat, /*stable=*/true, 0, /*descending=*/false));
  order.token = order.pair.floor_divide(k);
  order.position = at::empty_like(flat);
  order.position.index_copy_(0, order.pair, at::arange(flat.numel(), flat.options()));
  order.position = order.position.view(experts.sizes());
  const at::Tensor counts = at::bincount(flat, {}, n_experts).to(at::kCPU);
  order.counts.assign(counts.const_data_ptr<std::int64_t>(), counts.const_data_ptr<std::int64_t>() + n_experts);
  return order;
}

at::Tensor spread(const at::Tensor& x, const RowOrder& order) { return Spread::apply(x, order.token, order.position); }

at::Tensor collect(const at::Tensor& rows, const at::Tensor& weights, const RowOrder& order) {
  return Collect::apply(rows, weights, order.token, order.pair, order.position);
}

at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse) {
  return Permute::apply(x, order, inverse);
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::vector<std::int64_t>& counts) {
  constexpr const char* kOp = "grouped_linear";
  std::int64_t rows = 0;
  for (const std::int64_t count : counts) {
    check_value(count >= 0, kOp, "a group has ", count, " rows, want 0 or more");
    rows += count;
  }
  check_value(x.defined() && weight.defined() && x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2), kOp, "x ",
              x.sizes(), " and weight ", weight.sizes(), ", want (rows, in) and (groups, out, in)");
  check_value(counts.size() == static_cast<std::size_t>(weight.size(0)) && rows == x.size(0), kOp, counts.size(), " groups with ",
              rows, " rows, want ", weight.size(0), " with ", x.size(0));
  check_value(x.scalar_type() == weight.scalar_type(), kOp, "x is ", x.scalar_type(), ", weight ", weight.scalar_type(),
              ", want equal dtypes");
  return GroupedLinear::apply(x, weight, counts);
}

}  // namespace hyper_parallel::parallel
