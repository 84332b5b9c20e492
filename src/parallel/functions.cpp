// Pairs of collectives as autograd nodes: the backward of each is another function of this file, so any order of derivative
// works.
#include <hyper_parallel/parallel/functions.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/transfer.h"

namespace hyper_parallel::parallel {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Backward = std::function<at::Tensor(const at::Tensor&)>;

class PairNode : public Node {
 public:
  PairNode(const char* name, Backward backward) : name_(name), backward_(std::move(backward)) {}
  variable_list apply(variable_list&& gradients) override {
    // Ranks whose gradient is absent take part as well: what is absent is zero.
    return {backward_(gradients[0].defined() ? gradients[0] : input_metadata(0).zeros_like())};
  }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  Backward backward_;
};

/// `value`, which shares no graph with x yet, as the result of a node that leads to x.
at::Tensor with_backward(const char* name, const at::Tensor& x, at::Tensor value, Backward backward) {
  if (!torch::autograd::compute_requires_grad(x)) return value;
  const auto node = c10::make_intrusive<PairNode>(name, std::move(backward));
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::impl::set_gradient_edge(value, Edge(node, node->add_input_metadata(value)));
  return value;
}

void check_defined(const char* op, const at::Tensor& x) { check_value(x.defined(), op, "x is an undefined tensor"); }

std::int64_t checked_dim(const char* op, const at::Tensor& x, std::int64_t dim) {
  check_defined(op, x);
  check_value(dim >= -x.dim() && dim < x.dim(), op, "dim ", dim, " of a tensor of shape ", x.sizes(), ", want one of its ",
              x.dim(), " dimensions");
  return dim < 0 ? dim + x.dim() : dim;
}

void check_sizes(const char* op, const std::vector<std::int64_t>& sizes, const Comm& comm) {
  check_value(sizes.size() == static_cast<std::size_t>(comm.size()), op, sizes.size(), " sizes, want one for each of ",
              comm.size(), " ranks (group ", comm.name(), ')');
  for (const std::int64_t size : sizes) check_value(size >= 0, op, "size ", size, ", want 0 or more (group ", comm.name(), ')');
}

DimCut cut_of_input(const char* op, const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  DimCut cut{checked_dim(op, x, options.dim), options.sizes};
  if (cut.sizes.empty()) cut.sizes.assign(static_cast<std::size_t>(comm.size()), x.size(cut.dim));
  check_sizes(op, cut.sizes, comm);
  const std::int64_t want = cut.sizes[static_cast<std::size_t>(comm.rank())];
  check_value(x.size(cut.dim) == want, op, "x has shape ", x.sizes(), ", want length ", want, " along dim ", cut.dim, " (group ",
              comm.name(), ", rank ", comm.rank(), '/', comm.size(), ')');
  return cut;
}

DimCut cut_of_output(const char* op, const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  DimCut cut{checked_dim(op, x, options.dim), options.sizes};
  if (cut.sizes.empty()) cut.sizes = ceil_chunks(x.size(cut.dim), comm.size());
  check_sizes(op, cut.sizes, comm);
  const std::int64_t sum = std::accumulate(cut.sizes.begin(), cut.sizes.end(), std::int64_t{0});
  check_value(x.size(cut.dim) == sum, op, "x has shape ", x.sizes(), ", want length ", sum, " along dim ", cut.dim,
              ", the sum of the sizes (group ", comm.name(), ')');
  return cut;
}

DimOptions options_of(const DimCut& cut, const std::string& label) { return {cut.dim, cut.sizes, label}; }

}  // namespace

std::vector<std::int64_t> ceil_chunks(std::int64_t n, int ranks) {
  check_value(n >= 0 && ranks >= 1, "ceil_chunks", n, " elements over ", ranks, " ranks, want none or more over one or more");
  const std::int64_t chunk = (n + ranks - 1) / ranks;
  std::vector<std::int64_t> sizes;
  for (std::int64_t r = 0; r < ranks; ++r) sizes.push_back(std::min(n, (r + 1) * chunk) - std::min(n, r * chunk));
  return sizes;
}

at::Tensor identity_all_reduce(const at::Tensor& x, const Comm& comm, const std::string& label) {
  check_defined("identity_all_reduce", x);
  if (alone(comm) || !torch::autograd::compute_requires_grad(x)) return x;
  return with_backward("HyperParallelIdentityAllReduce", x, x.detach(),
                       [comm, label](const at::Tensor& g) { return all_reduce_identity(g, comm, label); });
}

at::Tensor all_reduce_identity(const at::Tensor& x, const Comm& comm, const std::string& label) {
  check_defined("all_reduce_identity", x);
  if (alone(comm)) return x;
  return with_backward("HyperParallelAllReduceIdentity", x, summed(x, comm, label),
                       [comm, label](const at::Tensor& g) { return identity_all_reduce(g, comm, label); });
}

at::Tensor all_gather_reduce_scatter(const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  constexpr const char* kOp = "all_gather_reduce_scatter";
  (void)checked_dim(kOp, x, options.dim);
  if (alone(comm)) return x;
  const DimCut cut = cut_of_input(kOp, x, comm, options);
  return with_backward(
      "HyperParallelAllGatherReduceScatter", x, gathered(x, comm, cut, options.label),
      [comm, again = options_of(cut, options.label)](const at::Tensor& g) { return reduce_scatter_all_gather(g, comm, again); });
}

at::Tensor reduce_scatter_all_gather(const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  constexpr const char* kOp = "reduce_scatter_all_gather";
  (void)checked_dim(kOp, x, options.dim);
  if (alone(comm)) return x;
  const DimCut cut = cut_of_output(kOp, x, comm, options);
  return with_backward(
      "HyperParallelReduceScatterAllGather", x, reduced(x, comm, cut, options.label),
      [comm, again = options_of(cut, options.label)](const at::Tensor& g) { return all_gather_reduce_scatter(g, comm, again); });
}

at::Tensor all_gather_split(const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  constexpr const char* kOp = "all_gather_split";
  (void)checked_dim(kOp, x, options.dim);
  if (alone(comm)) return x;
  const DimCut cut = cut_of_input(kOp, x, comm, options);
  return with_backward(
      "HyperParallelAllGatherSplit", x, gathered(x, comm, cut, options.label),
      [comm, again = options_of(cut, options.label)](const at::Tensor& g) { return split_all_gather(g, comm, again); });
}

at::Tensor split_all_gather(const at::Tensor& x, const Comm& comm, const DimOptions& options) {
  constexpr const char* kOp = "split_all_gather";
  (void)checked_dim(kOp, x, options.dim);
  if (alone(comm)) return x;
  const DimCut cut = cut_of_output(kOp, x, comm, options);
  return with_backward(
      "HyperParallelSplitAllGather", x, own_chunk(x, comm, cut),
      [comm, again = options_of(cut, options.label)](const at::Tensor& g) { return all_gather_split(g, comm, again); });
}

at::Tensor all_to_all(const at::Tensor& x, const Comm& comm, const AllToAllOptions& options) {
  constexpr const char* kOp = "all_to_all";
  (void)checked_dim(kOp, x, 0);
  if (alone(comm)) return x;
  check_sizes(kOp, options.output_rows, comm);
  check_sizes(kOp, options.input_rows, comm);
  const std::int64_t sum = std::accumulate(options.input_rows.begin(), options.input_rows.end(), std::int64_t{0});
  check_value(x.size(0) == sum, kOp, "x has shape ", x.sizes(), ", want ", sum, " rows, the sum of input_rows (group ",
              comm.name(), ')');
  return with_backward("HyperParallelAllToAll", x, exchanged(x, comm, options.output_rows, options.input_rows, options.label),
                       [comm, options](const at::Tensor& g) {
                         return all_to_all(
                             g, comm,
                             {.output_rows = options.input_rows, .input_rows = options.output_rows, .label = options.label});
                       });
}

}  // namespace hyper_parallel::parallel
