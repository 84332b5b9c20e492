// The switches of a unit's handle, and what waits and recovers.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <utility>

#include "fsdp/runtime.h"
#include "fsdp/unit_impl.h"

namespace hyper_parallel::fsdp {
namespace {

ReduceOp parse_reduce_op(std::string_view given) {
  std::string op;
  for (const char c : given) {
    if (std::isspace(static_cast<unsigned char>(c)) == 0) op += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (op == "avg") return ReduceOp::kAvg;
  if (op == "sum") return ReduceOp::kSum;
  throw ValueError(concat("[set_reduce_op_type] \"", given, "\", want \"avg\" or \"sum\""));
}

Unit::PrefetchList prefetch_list(std::string_view op, const std::optional<std::vector<UnitHandle>>& handles) {
  if (!handles) return std::nullopt;
  std::vector<std::weak_ptr<Unit>> units;
  for (std::size_t i = 0; i < handles->size(); ++i) {
    check_value((*handles)[i].defined(), op, "element ", i, " is no unit, want the handle of a sharded module");
    units.emplace_back((*handles)[i].unit());
  }
  return units;
}

/// Buffers can only be made anew while nothing is in them.
void check_settings_may_change(std::string_view op, const Unit& unit) {
  check_value(!unit.holds_gradients(), op, "unit ", unit.name(),
              " holds accumulated, parked or unfinished gradients, want it between steps");
}

}  // namespace

void UnitHandle::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) const {
  for (Unit* unit : get().reached(recurse)) unit->requires_gradient_sync = requires_gradient_sync;
}

void UnitHandle::set_requires_all_reduce(bool requires_all_reduce, bool recurse) const {
  for (Unit* unit : get().reached(recurse)) unit->requires_all_reduce = requires_all_reduce;
}

void UnitHandle::set_reshard_after_forward(bool reshard_after_forward, bool recurse) const {
  for (Unit* unit : get().reached(recurse)) unit->set_reshard_after_forward(reshard_after_forward);
}

void UnitHandle::set_reshard_after_backward(bool reshard_after_backward, bool recurse) const {
  for (Unit* unit : get().reached(recurse)) unit->reshard_after_backward = reshard_after_backward;
}

void UnitHandle::set_is_last_backward(bool is_last_backward) const { get().runtime().is_last_backward = is_last_backward; }

void UnitHandle::set_post_optim_event(std::function<void()> wait) const { get().runtime().post_optim_event = std::move(wait); }

void UnitHandle::set_unshard_in_backward(bool unshard_in_backward) const { get().unshard_in_backward = unshard_in_backward; }

void UnitHandle::set_reduce_scatter_unused_params(bool reduce_scatter_unused_params, bool recurse) const {
  for (Unit* unit : get().reached(recurse)) unit->reduce_scatter_unused_params = reduce_scatter_unused_params;
}

void UnitHandle::set_reduce_op_type(std::string_view op, bool recurse) const {
  const ReduceOp parsed = parse_reduce_op(op);
  for (Unit* unit : get().reached(recurse)) unit->settings.reduce_op = parsed;
}

void UnitHandle::set_gradient_scaling_factor(std::optional<double> factor) const {
  check_value(!factor || std::isfinite(*factor), "set_gradient_scaling_factor", "factor is ", factor.value_or(0),
              ", want a finite number (unit ", name(), ')');
  get().settings.scaling_factor = factor;
}

void UnitHandle::set_gradient_scaling_factor(const at::Tensor& factor) const {
  check_value(factor.defined() && factor.numel() == 1, "set_gradient_scaling_factor", "factor has ",
              factor.defined() ? factor.numel() : 0, " elements, want 1 (unit ", name(), ')');
  set_gradient_scaling_factor(std::optional<double>(factor.item<double>()));
}

void UnitHandle::set_gradient_divide_factor(std::optional<double> factor, bool recurse) const {
  check_value(!factor || (std::isfinite(*factor) && *factor != 0), "set_gradient_divide_factor", "factor is ", factor.value_or(0),
              ", want a finite number other than 0 (unit ", name(), ')');
  for (Unit* unit : get().reached(recurse)) unit->settings.divide_factor = factor;
}

void UnitHandle::set_modules_to_forward_prefetch(const std::optional<std::vector<UnitHandle>>& units) const {
  get().forward_prefetch = prefetch_list("set_modules_to_forward_prefetch", units);
}

void UnitHandle::set_modules_to_backward_prefetch(const std::optional<std::vector<UnitHandle>>& units) const {
  get().backward_prefetch = prefetch_list("set_modules_to_backward_prefetch", units);
}

void UnitHandle::set_custom_all_gather(CustomAllGather all_gather) const { get().settings.all_gather = std::move(all_gather); }

void UnitHandle::set_custom_reduce_scatter(CustomReduceScatter reduce_scatter) const {
  check_settings_may_change("set_custom_reduce_scatter", get());
  get().settings.reduce_scatter = std::move(reduce_scatter);
  for (auto& group : get().groups()) group->settings_changed();
}

void UnitHandle::set_all_reduce_hook(AllReduceHook hook, bool recurse) const {
  const std::vector<Unit*> units = get().reached(recurse);
  for (const Unit* unit : units) check_settings_may_change("set_all_reduce_hook", *unit);
  for (Unit* unit : units) {
    unit->settings.all_reduce_hook = hook;
    for (auto& group : unit->groups()) group->settings_changed();
  }
}

void UnitHandle::wait_for_gradients() const { get().runtime().wait_for_gradients(); }

void hsdp_sync_stream() { wait_for_all_gradients(); }

void UnitHandle::reset_iter_state(bool recursive) const {
  if (recursive) {
    get().runtime().reset();
  } else {
    get().runtime().reset(get());
  }
}

at::Tensor UnitHandle::main_grad(const at::Tensor& sharded) const {
  for (Unit* unit : get().reached(true)) {
    for (auto& group : unit->groups()) {
      for (ManagedParameter& parameter : group->parameters()) {
        if (!parameter.sharded.is_same(sharded)) continue;
        return group->options().main_grad ? group->gradient(parameter) : at::Tensor();
      }
    }
  }
  throw ValueError(concat("[main_grad] the tensor is no sharded parameter below unit ", name()));
}

UnshardScope::UnshardScope(const UnitHandle& root) : root_(root) {
  check_value(root_.defined(), "UnshardScope", "the handle has no unit, want that of a sharded module");
  const std::vector<Unit*> units = root_.unit()->reached(true);
  std::vector<Unit*> taken;
  try {
    for (Unit* unit : units) {
      if (!unit->held) taken.push_back(unit);
      unit->start_hold("UnshardScope");
    }
    for (Unit* unit : units) unit->finish_unshard();
    for (Unit* unit : units) unit->show(true);
    for (Unit* unit : units) ++unit->scopes;
  } catch (...) {
    for (Unit* unit : taken) {
      try {
        unit->reshard();
      } catch (...) {  // the group is broken: the exception that is under way says by what
      }
    }
    throw;
  }
}

UnshardScope::~UnshardScope() {
  for (Unit* unit : root_.unit()->reached(true)) {
    unit->scopes = std::max(0, unit->scopes - 1);
    unit->reshard();
  }
}

}  // namespace hyper_parallel::fsdp
