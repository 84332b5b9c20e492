// Memory and values for parameters that began on the meta device.
#include <hyper_parallel/fsdp/init.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "fsdp/places.h"
#include "fsdp/runtime.h"

namespace hyper_parallel::fsdp {

std::vector<ParameterPlace> places_of(Unit& root) {
  std::vector<ParameterPlace> places;
  const std::vector<Unit*> units = root.reached(true);
  for (Unit* unit : units) {
    unit->follow_module();
    for (auto& group : unit->groups()) {
      group->readopt();
      for (std::size_t i = 0; i < group->parameters().size(); ++i)
        places.push_back({unit->qualified(group->parameters()[i]), unit, group.get(), i});
    }
  }
  return places;
}

NamedTensors Unit::buffers() const {
  NamedTensors buffers;
  if (!list_buffers) return buffers;
  for (const NamedBuffer& entry : list_buffers()) buffers.emplace_back(qualified(entry.member, entry.name), entry.buffer);
  return buffers;
}

NamedTensors Unit::buffers_without_values() const {
  NamedTensors waiting = buffers();
  std::erase_if(waiting, [&](const auto& entry) {
    const auto unwritten = unwritten_buffers_.find(entry.second.unsafeGetTensorImpl());
    const bool waits = unwritten != unwritten_buffers_.end() && unwritten->second.still(entry.second);
    return !waits && !entry.second.is_meta();
  });
  return waiting;
}

void Unit::materialize_buffers() {
  for (const auto& [name, buffer] : buffers()) {
    if (!buffer.is_meta()) continue;
    become(buffer, at::empty(buffer.sizes(), buffer.options().device(options_.mesh.device_type())));
    unwritten_buffers_[buffer.unsafeGetTensorImpl()] = Unwritten(buffer);
  }
}

NamedTensors buffers_of(Unit& root) {
  NamedTensors buffers;
  const std::vector<Unit*> units = root.reached(true);
  for (const Unit* unit : units) {
    for (auto& entry : unit->buffers()) buffers.push_back(std::move(entry));
  }
  return buffers;
}

void check_between_steps(Unit& root, std::string_view op) {
  const std::vector<Unit*> units = root.reached(true);
  for (const Unit* unit : units) {
    check_value(root.runtime().idle() && !unit->awaits_backward && !unit->owes_reduction, op, "unit ", unit->name(),
                " is in the middle of a step, want a model between two steps: run backward (with gradient synchronisation), or "
                "reset_iter_state() to drop the step");
  }
}

void prepare_for_values(Unit& root, std::string_view op) {
  check_between_steps(root, op);
  const std::vector<Unit*> units = root.reached(true);
  for (Unit* unit : units) {
    unit->reshard();
    for (auto& group : unit->groups()) group->materialize();
    unit->materialize_buffers();
  }
  root.runtime().renew_agreement();
}

at::Tensor whole_of(const ParameterPlace& place) {
  return at::empty(place.parameter().whole_shape, place.group->shard().options());
}

at::Generator named_generator(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ULL;
  // splitmix64, so that neighbouring seeds give unrelated streams
  std::uint64_t z = hash + (seed + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return at::detail::createCPUGenerator(z ^ (z >> 31));
}

void to_empty(const UnitHandle& root) { prepare_for_values(root.get(), "to_empty"); }

void reset_parameters(const UnitHandle& root, std::uint64_t seed, const InitParameter& init) {
  constexpr std::string_view kOp = "reset_parameters";
  check_value(static_cast<bool>(init), kOp, "init is empty, want a function that fills a parameter");
  prepare_for_values(root.get(), kOp);
  at::NoGradGuard no_grad;
  for (const ParameterPlace& place : places_of(root.get())) {
    at::Tensor whole = whole_of(place);
    const Unwritten unwritten(whole);
    at::Generator generator = named_generator(seed, place.name);
    init(place.name, whole, generator);
    check_value(whole.defined() && whole.sizes() == at::IntArrayRef(place.parameter().whole_shape), kOp,
                "init replaced parameter ", place.name, " by a tensor of another shape, want ",
                at::IntArrayRef(place.parameter().whole_shape));
    check_value(!unwritten.still(whole), kOp, "init left values of parameter ", place.name, " unwritten, want all of ",
                whole.sizes());
    place.group->set_value(place.index, whole);
  }
}

}  // namespace hyper_parallel::fsdp
