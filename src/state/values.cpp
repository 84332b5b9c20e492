#include "state/values.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <hyper_parallel/core/error.h>

#include "ckpt/agree.h"
#include "dtensor/exchange.h"

namespace hyper_parallel::state {
namespace {

Box everything(const std::vector<std::int64_t>& shape) {
  return {.offset = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
}

/// The rank's part of `whole`, row after row, in `target` (flat).
void copy_part(const at::Tensor& whole, const std::vector<Box>& boxes, const at::Tensor& target) {
  copy_own({everything(whole.sizes().vec())}, boxes, whole.detach().contiguous().view({-1}), target);
}

/// Calls f with the elements of `local` in a row and brings them back where they are not.
template <class F>
void in_a_row(const at::Tensor& local, F&& f) {
  const at::Tensor tensor = local.detach();
  const at::Tensor dense = tensor.contiguous();
  f(dense.view({-1}));
  if (dense.is_same(tensor)) {
    torch::autograd::impl::bump_version(local);  // may have been written behind torch's back
  } else {
    tensor.copy_(dense);
  }
}

}  // namespace

std::string Fit::collective() const { return way == Way::kRedistribute ? "redistribute" : way == Way::kGather ? "gather" : ""; }

Fit fit(const StateValue& value, const Target& target) {
  const auto* parts = std::get_if<DTensor>(&value);
  const auto* tensor = parts == nullptr ? &std::get<at::Tensor>(value) : nullptr;
  if (parts != nullptr && parts->defined()) tensor = &parts->to_local();
  if (tensor == nullptr || !tensor->defined()) return {.problem = "has no values"};
  if (tensor->is_meta()) return {.problem = "has no values (it is on meta)"};
  if (tensor->layout() != at::kStrided) return {.problem = "is sparse, want a dense tensor"};
  const std::vector<std::int64_t> want = target.shape();
  if (!c10::canCast(tensor->scalar_type(), target.local.scalar_type()))
    return {.problem = concat("is ", tensor->scalar_type(), ", want ", target.local.scalar_type(), " or what can be cast to it")};
  if (parts != nullptr) {
    if (parts->shape() != want) return {.problem = concat("is ", parts->to_string(), ", want shape ", at::IntArrayRef(want))};
    if (!parts->device_mesh().get_coordinate()) return {.problem = concat("is ", parts->to_string(), " on other ranks")};
    if (!target.sharded || !(parts->device_mesh() == target.sharded->device_mesh())) return {.way = Fit::Way::kGather};
    return {.way = parts->layout() == target.sharded->layout() ? Fit::Way::kPart : Fit::Way::kRedistribute};
  }
  if (tensor->sizes() == at::IntArrayRef(want)) return {.way = Fit::Way::kWhole};
  if (target.sharded && (tensor->sizes() == target.local.sizes() || tensor->sizes() == target.sharded->to_local().sizes()))
    return {.way = Fit::Way::kPart};
  return {.problem = concat("has shape ", tensor->sizes(), ", want ", at::IntArrayRef(want),
                            target.sharded ? concat(" or this rank's part of it, ", target.local.sizes()) : "")};
}

void assign(const StateValue& value, const Fit& fit, const Target& target) {
  const at::NoGradGuard no_grad;
  const auto* parts = std::get_if<DTensor>(&value);
  const at::Tensor local = target.local.detach();
  at::Tensor given;
  switch (fit.way) {
    case Fit::Way::kRedistribute:
      local.copy_(
          parts->redistribute(target.sharded->layout()).to_local().view(local.sizes()));  // parts of scalars have two shapes
      return;
    case Fit::Way::kPart:
      local.copy_((parts != nullptr ? parts->to_local() : std::get<at::Tensor>(value)).reshape(local.sizes()));
      return;
    case Fit::Way::kGather:
      given = parts->full_tensor();
      break;
    case Fit::Way::kWhole:
      given = std::get<at::Tensor>(value);
  }
  if (target.sharded) {
    in_a_row(target.local, [&](const at::Tensor& row) { copy_part(given.cpu(), target.sharded->boxes(), row); });
  } else {
    local.copy_(given);
  }
}

StateValue value_of(const Target& target, const StateDictOptions& options, const Comm& comm) {
  const at::Tensor local = target.local.detach();
  const auto home = options.cpu_offload ? local.options().device(at::kCPU) : local.options();
  if (!options.full_state_dict) {
    if (!target.sharded) return local.to(home);
    return DTensor::from_local(local.to(home).view(target.sharded->to_local().sizes()), target.sharded->device_mesh(),
                               target.sharded->layout(), target.sharded->shape());
  }
  at::Tensor whole = local;
  if (target.sharded)
    whole = DTensor::from_local(local.view(target.sharded->to_local().sizes()), target.sharded->device_mesh(),
                                target.sharded->layout(), target.sharded->shape())
                .full_tensor();
  if (options.cpu_offload && comm.rank() != 0) return at::Tensor();
  const bool own = whole.is_alias_of(local) || !target.sharded;
  return whole.to(home, /*non_blocking=*/false, /*copy=*/own).view(target.shape());
}

std::string scatter_problem(const Comm& comm, const Target& target) {
  if (!target.sharded) return {};
  const std::vector<int>& ranks = target.sharded->device_mesh().ranks();
  const int first = comm.ranks().front();
  if (std::find(ranks.begin(), ranks.end(), first) != ranks.end()) return {};
  return concat("lies on ", target.sharded->device_mesh().to_string(), ", which rank ", first, " is no part of");
}

void scatter(const Comm& comm, const at::Tensor* whole, const Target& target) {
  const at::NoGradGuard no_grad;
  if (!target.sharded) {
    const at::Tensor tensor = target.local.detach();
    if (whole != nullptr) tensor.copy_(*whole);
    if (comm.size() == 1 || tensor.numel() == 0) return;
    in_a_row(target.local, [&](const at::Tensor& row) { comm.broadcast(row, 0, {.label = "broadcast_from_rank0"}).wait(); });
    return;
  }
  const MeshView view("broadcast_from_rank0", target.sharded->device_mesh());
  const std::vector<int>& ranks = view.mesh.ranks();
  const auto source = static_cast<std::int64_t>(std::find(ranks.begin(), ranks.end(), comm.ranks().front()) - ranks.begin());
  const auto boxes_of = [&](std::int64_t position) {
    return target.sharded->layout().boxes(target.sharded->shape(), view.coordinate(position));
  };
  if (view.position != source) {
    const std::int64_t numel = target.local.numel();
    const Comm group = view.group();
    if (numel == 0) return;
    in_a_row(target.local,
             [&](const at::Tensor& row) { group.recv(row, static_cast<int>(source), {.label = "broadcast_from_rank0"}).wait(); });
    return;
  }
  const Comm group = view.size() > 1 ? view.group() : Comm();
  const at::Tensor dense = whole->detach().contiguous();
  for (std::int64_t position = 0; position < view.size(); ++position) {
    const std::vector<Box> boxes = boxes_of(position);
    if (position == source) {
      in_a_row(target.local, [&](const at::Tensor& row) { copy_part(dense, boxes, row); });
    } else if (const std::int64_t numel = numel_of(boxes); numel > 0) {
      const at::Tensor part = at::empty({numel}, target.local.options());
      copy_part(dense, boxes, part);
      group.send(part, static_cast<int>(position), {.label = "broadcast_from_rank0"}).wait();
    }
  }
}

Comm checked_comm(std::string_view op, const StateDictOptions& options) {
  check_value(options.keep_submodule_prefixes, op,
              "keep_submodule_prefixes is false, want true: pass the submodule itself, whose names have no prefix");
  check_value(!options.broadcast_from_rank0 || options.full_state_dict, op,
              "broadcast_from_rank0 without full_state_dict, want both: the first rank has whole tensors");
  return ckpt::comm_or_world(options.comm);
}

std::string listed(std::string_view what, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? what : ", ", name);
  return text;
}

}  // namespace hyper_parallel::state
