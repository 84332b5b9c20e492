// Weights from whole tensors: those of every rank, or those of rank 0.
#include <hyper_parallel/fsdp/init.h>

#include <map>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include "dtensor/exchange.h"
#include "fsdp/places.h"
#include "fsdp/runtime.h"
#include "fsdp/unwritten.h"

namespace hyper_parallel::fsdp {
namespace {

using ByName = std::map<std::string, at::Tensor>;

/// What is to be filled: parameters, then buffers.
struct Targets {
  std::vector<ParameterPlace> parameters;
  NamedTensors buffers;
  [[nodiscard]] std::size_t size() const { return parameters.size() + buffers.size(); }
  [[nodiscard]] const std::string& name(std::size_t i) const {
    return i < parameters.size() ? parameters[i].name : buffers[i - parameters.size()].first;
  }
  [[nodiscard]] at::IntArrayRef shape(std::size_t i) const {
    if (i < parameters.size()) return parameters[i].parameter().whole_shape;
    return buffers[i - parameters.size()].second.sizes();
  }
};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += concat(text.empty() ? "" : ", ", name);
  return text;
}

/// What is wrong with the values; empty: nothing.
std::string complaint(const Targets& targets, const NamedTensors& values, bool strict) {
  std::set<std::string> known;
  std::vector<std::string> missing, unexpected, wrong;
  ByName given;
  for (const auto& [name, value] : values) {
    if (!value.defined() || value.is_meta()) wrong.push_back(concat(name, " has no values"));
    if (!given.emplace(name, value).second) wrong.push_back(concat(name, " is there twice"));
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    known.insert(targets.name(i));
    const auto value = given.find(targets.name(i));
    if (value == given.end()) {
      missing.push_back(targets.name(i));
    } else if (value->second.defined() && value->second.sizes() != targets.shape(i)) {
      wrong.push_back(concat(targets.name(i), " has shape ", value->second.sizes(), ", want ", targets.shape(i)));
    }
  }
  for (const auto& [name, value] : values) {
    if (!known.contains(name)) unexpected.push_back(name);
  }
  std::string text;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) text += concat(text.empty() ? "" : "; ", what, join(names));
  };
  if (strict) add("missing: ", missing);
  if (strict) add("unexpected: ", unexpected);
  add("", wrong);
  return text;
}

std::vector<const at::Tensor*> matched(const Targets& targets, const NamedTensors& values) {
  std::vector<const at::Tensor*> found(targets.size(), nullptr);
  std::map<std::string_view, const at::Tensor*> given;
  for (const auto& [name, value] : values) given[name] = &value;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (const auto value = given.find(targets.name(i)); value != given.end()) found[i] = value->second;
  }
  return found;
}

/// The parts of all shard ranks, one after the other, in the group's dtype: the tensor itself where it is that already.
at::Tensor parts_in_order(const ParamGroup& group, std::size_t i, const at::Tensor& whole) {
  const GroupLayout& layout = group.layout();
  const bool in_order = layout.kind() == ShardLayout::kRagged || layout.parameter(i).shard_dim == 0;
  if (in_order && whole.is_contiguous() && whole.scalar_type() == group.shard().scalar_type() &&
      whole.device() == group.shard().device())
    return whole.detach().reshape({-1});
  at::Tensor packed = at::empty({layout.numel(i)}, group.shard().options());
  if (in_order) {
    packed.view(whole.sizes()).copy_(whole.detach());
    return packed;
  }
  std::int64_t offset = 0;
  for (int rank = 0; rank < layout.world(); ++rank) {
    const ParameterSlice& slice = layout.slice(i, rank);
    packed.narrow(0, offset, slice.numel).view(slice.shape).copy_(group.part_of(whole.detach(), i, rank));
    offset += slice.numel;
  }
  return packed;
}

/// Rank 0 of the shard group sends each rank its part; those that have none yet get it from the first replica.
void scatter(ParamGroup& group, std::size_t i, const at::Tensor* whole) {
  const Comm& shard = group.options().shard_comm;
  const Comm& replicate = group.options().replicate_comm;
  const at::Tensor home = group.home_row(i);
  const std::string& label = group.options().unit;
  if (!replicate.defined() || replicate.rank() == 0) {
    std::vector<std::int64_t> to(static_cast<std::size_t>(shard.size()), 0), from(to);
    from[0] = home.numel();
    at::Tensor packed = at::empty({0}, home.options());
    if (shard.rank() == 0) {
      packed = parts_in_order(group, i, *whole);
      for (int rank = 0; rank < shard.size(); ++rank) to[static_cast<std::size_t>(rank)] = group.layout().slice(i, rank).numel;
    }
    shard.all_to_all_single(home, packed, from, to, {.label = label}).wait();
  }
  if (replicate.defined() && replicate.size() > 1 && home.numel() > 0) replicate.broadcast(home, 0, {.label = label}).wait();
}

/// The same for blocks of source axes: rank 0 of all ranks sends each of them its own part.
void scatter_blocks(const ParameterPlace& place, const at::Tensor* whole) {
  const ParamGroup& group = *place.group;
  const MeshView view("load_from_rank0", place.unit->mesh().whole);
  const std::vector<std::int64_t>& shape = place.parameter().whole_shape;
  const Layout layout = composed_layout(place.unit->mesh(), &group.options().source[place.index], group.layout(), place.index,
                                        group.options().replicated);
  const RegionOf want = [&](std::int64_t position) { return layout.boxes(shape, view.coordinate(position)); };
  const at::Tensor home = group.home_row(place.index);
  const Box everything{.offset = std::vector<std::int64_t>(shape.size(), 0), .size = shape};
  const at::Tensor source = view.position == 0 ? whole->detach().to(home.options()).contiguous().view({-1}) : home;
  home.copy_(run_scatter(view, 0, everything, want, source));
}

}  // namespace

void load_full(const UnitHandle& root, const NamedTensors& values, bool strict) {
  constexpr std::string_view kOp = "load_full";
  check_between_steps(root.get(), kOp);
  const Targets targets{places_of(root.get()), buffers_of(root.get())};
  const std::string problem = complaint(targets, values, strict);
  check_value(problem.empty(), kOp, problem, " (unit ", root.name(), ')');
  prepare_for_values(root.get(), kOp);
  at::NoGradGuard no_grad;
  const std::vector<const at::Tensor*> found = matched(targets, values);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (found[i] == nullptr) continue;
    if (i < targets.parameters.size()) {
      targets.parameters[i].group->set_value(targets.parameters[i].index, *found[i]);
    } else {
      targets.buffers[i - targets.parameters.size()].second.copy_(*found[i]);
    }
  }
}

void load_from_rank0(const UnitHandle& root, const NamedTensors& values, bool strict) {
  constexpr std::string_view kOp = "load_from_rank0";
  Unit& top = root.get();
  const Comm& comm = top.unit_comm();
  check_between_steps(top, kOp);
  const Targets targets{places_of(top), buffers_of(root.get())};
  std::vector<std::string> lines = {concat(kOp, strict ? ", strict" : ", not strict")};
  for (const ParameterPlace& place : targets.parameters) {
    check_value(place.unit->unit_comm().ranks() == comm.ranks(), kOp, "unit ", place.unit->name(),
                " is on other ranks than unit ", top.name(), ", want one set of ranks: call it for each unit");
  }
  for (std::size_t i = 0; i < targets.size(); ++i) lines.push_back(concat(targets.name(i), ": ", targets.shape(i)));
  if (comm.size() > 1) comm.check_same(kOp, lines, {.label = kOp});

  // Rank 0 tells what is wrong, or which names it has.
  const bool source = comm.rank() == 0;
  std::string mine;
  if (source) {
    const std::string problem = complaint(targets, values, strict);
    mine = problem.empty() ? "+" : concat('-', problem);
    for (const at::Tensor* value : matched(targets, values)) mine += problem.empty() ? (value != nullptr ? "1" : "0") : "";
  } else if (!values.empty()) {
    mine = concat("-rank ", comm.rank(), " passed ", values.size(), " tensor(s), want values on rank 0 only");
  }
  const std::vector<std::string> all = comm.size() > 1 ? comm.all_gather_string(mine, {.label = kOp}) : std::vector{mine};
  for (const std::string& text : all)
    check_value(!text.starts_with('-'), kOp, text.substr(std::min<std::size_t>(1, text.size())));

  prepare_for_values(top, kOp);
  at::NoGradGuard no_grad;
  const std::vector<const at::Tensor*> found = matched(targets, values);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (all[0][i + 1] == '0') continue;
    if (i < targets.parameters.size()) {
      const ParameterPlace& place = targets.parameters[i];
      if (place.unit->mesh().has_source()) {
        scatter_blocks(place, found[i]);
      } else {
        scatter(*place.group, place.index, found[i]);
      }
      place.group->parameters()[place.index].uninitialised = false;
      continue;
    }
    const at::Tensor& buffer = targets.buffers[i - targets.parameters.size()].second;
    if (source) buffer.copy_(*found[i]);
    const at::Tensor dense = buffer.contiguous();
    if (comm.size() > 1 && buffer.numel() > 0) comm.broadcast(dense, 0, {.label = kOp}).wait();
    if (dense.is_same(buffer)) {
      torch::autograd::impl::bump_version(buffer);  // written behind torch's back
    } else {
      buffer.copy_(dense);
    }
  }
}

}  // namespace hyper_parallel::fsdp
