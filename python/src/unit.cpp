#include "unit.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <unordered_map>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "tensors.h"

namespace hyper_parallel::python {
namespace {

py::object wrap_tensor(const at::Tensor& tensor) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)); }

/// torch's types and names that are looked up once.
struct Names {
  py::object dtensor_type = py::module_::import("torch.distributed.tensor").attr("DTensor");
  py::object make_dtensor = py::module_::import("torch").attr("Tensor").attr("_dtensor__new__");
  py::str local = "_local_tensor", spec = "_spec", main_grad = "main_grad";
  py::dict plain;  ///< keyword arguments
  Names() { plain["requires_grad"] = false; }
};

const Names& names() {
  static const auto* instance = new Names;  // never destroyed: the interpreter may end before static objects do
  return *instance;
}

/// The exception that Python code is handling; null if none.
py::object handled_exception() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_GetExcInfo(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return py::reinterpret_steal<py::object>(value != nullptr ? value : Py_NewRef(Py_None));
}

/// How torch.utils.checkpoint ends a recomputation of which it has seen enough.
bool is_early_stop(const py::object& exception) {
  return std::string_view(Py_TYPE(exception.ptr())->tp_name) == "_StopRecomputationError";
}

/// A forward that has begun on this thread.
struct Begun {
  std::weak_ptr<PyUnit> unit;
  int member = 0;
  std::uint64_t id = 0;
};
thread_local std::vector<Begun> begun;

py::object current_frame() {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
}

/// Whether this thread still runs `frame`.
bool runs(PyObject* frame) {
  for (py::object at = current_frame(); at;) {
    if (at.ptr() == frame) return true;
    at = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(at.ptr()))));
  }
  return false;
}

/// Takes the local part of a DTensor's gradient.
class BlockNode : public torch::autograd::Node {
 public:
  BlockNode(py::object spec, std::vector<std::size_t> data_axes)
      : Node(std::numeric_limits<std::uint64_t>::max(), {}), spec_(std::move(spec)), data_axes_(std::move(data_axes)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!gradients.at(0).defined()) return {at::Tensor()};
    const py::gil_scoped_acquire lock;
    py::object gradient = wrap_tensor(gradients[0]);
    if (!py::isinstance(gradient, names().dtensor_type)) return {gradients[0]};
    const py::object given = gradient.attr(names().spec).attr("placements");  // not the property: that is a call of Python
    const py::list placements(spec_.object().attr("placements"));
    for (const std::size_t axis : data_axes_) placements[axis] = given[py::int_(axis)];
    if (!given.equal(py::tuple(placements))) gradient = gradient.attr("redistribute")(spec_.object().attr("mesh"), placements);
    return {gradient.attr(names().local).cast<at::Tensor>()};
  }
  std::string name() const override { return "HyperParallelBlock"; }

 private:
  Ref spec_;
  std::vector<std::size_t> data_axes_;
};

}  // namespace

void GatheredBlock::make() {
  at::Tensor alias = block_.detach();
  py::object whole = wrap_.object()(wrap_tensor(alias));
  node_.reset();
  whole_ = Ref(std::move(whole));
}

PyObject* GatheredBlock::current() {
  const auto storage = [](const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl(); };
  const auto local = [&] { return whole_.object().attr(names().local).cast<at::Tensor>(); };
  // A conversion has given the block another storage.
  if (whole_.get() == nullptr || storage(local()) != storage(block_)) make();
  const at::Tensor& whole = THPVariable_Unpack(whole_.get());
  if (block_.requires_grad()) {
    const torch::autograd::Edge next = torch::autograd::impl::gradient_edge(block_);
    if (!node_ || !(node_->next_edge(0) == next)) {
      node_ = c10::make_intrusive<BlockNode>(whole_.object().attr(names().spec), data_axes_);
      node_->add_input_metadata(whole);
      node_->add_next_edge(next);
      torch::autograd::impl::set_gradient_edge(whole, torch::autograd::Edge(node_, 0));
    }
  } else if (whole.requires_grad()) {
    torch::autograd::impl::set_gradient_edge(whole, torch::autograd::Edge());
    node_.reset();
  }
  return whole_.get();
}

DTensorLeaf::DTensorLeaf(py::object parameter, const at::Tensor& sharded, bool main_grad)
    : parameter_(std::move(parameter)), local_(wrap_tensor(sharded)), main_grad_(main_grad) {
  if (!main_grad) return;
  parameter_.object().attr(names().main_grad) = py::none();
  const py::object spec = parameter_.object().attr(names().spec);
  const py::object meta = spec.attr("tensor_meta");
  const py::object wide = py::type::of(meta)(meta.attr("shape"), meta.attr("stride"), py::cast(at::kFloat));
  main_spec_ = Ref(py::type::of(spec)(spec.attr("mesh"), spec.attr("placements"), wide));
}

void DTensorLeaf::replace(py::object parameter) {
  if (main_grad_) parameter.attr(names().main_grad) = py::getattr(parameter_.object(), names().main_grad, py::none());
  parameter_ = Ref(std::move(parameter));
}

const at::Tensor& DTensorLeaf::tensor() const { return THPVariable_Unpack(parameter_.get()); }

at::Tensor DTensorLeaf::grad() const {
  if (!main_grad_ && !tensor().grad().defined()) return {};
  const py::gil_scoped_acquire lock;
  const py::object grad =
      main_grad_ ? py::getattr(parameter_.object(), names().main_grad, py::none()) : wrap_tensor(tensor().grad());
  if (grad.is_none()) return {};
  return py::getattr(grad, names().local, grad).cast<at::Tensor>();
}

void DTensorLeaf::set_grad(const at::Tensor& part) {
  if (!main_grad_ && !part.defined()) {
    tensor().mutable_grad() = at::Tensor();
    return;
  }
  const py::gil_scoped_acquire lock;
  py::object grad = py::none();
  if (part.defined()) {
    const py::object spec = main_grad_ ? main_spec_.object() : py::object(parameter_.object().attr(names().spec));
    grad = names().make_dtensor(names().dtensor_type, wrap_tensor(part), spec, **names().plain);
  }
  if (main_grad_) {
    parameter_.object().attr(names().main_grad) = grad;
  } else {
    tensor().mutable_grad() = grad.cast<at::Tensor>();
  }
}

void DTensorLeaf::grad_arrived() {
  if (const auto& hook = torch::autograd::impl::post_acc_grad_hooks(tensor())) (*hook)(tensor());
}

std::uint64_t DTensorLeaf::version() const { return static_cast<std::uint64_t>(tensor()._version()); }

bool DTensorLeaf::is_registered_as(PyObject* entry) const {
  if (entry != parameter_.get()) return false;
  const auto local = py::reinterpret_steal<py::object>(PyObject_GetAttr(entry, names().local.ptr()));
  if (!local) throw py::error_already_set();
  return local.ptr() == local_.get();
}

py::object PyUnit::parameter(std::size_t slot) const {
  const Slot& own = slots_.at(slot);
  return own.leaf ? py::reinterpret_borrow<py::object>(own.leaf->parameter()) : own.sharded.object();
}

std::shared_ptr<PyUnit> PyUnit::make(const std::string& name, const std::vector<SlotDescription>& slots,
                                     const FullyShardOptions& given,
                                     const std::vector<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>>& children,
                                     int members, const py::object& wrap, const py::object& adopt) {
  const auto unit = std::make_shared<PyUnit>();
  unit->adopt_ = Ref(adopt);
  unit->slots_.resize(slots.size());
  unit->open_.resize(static_cast<std::size_t>(members));
  FullyShardOptions options = given;
  const bool main_grads = options.mp_policy.apply_grad_on_fp32_main_grad;
  std::unordered_map<const void*, std::optional<std::int64_t>> dims;
  std::vector<fsdp::ParameterSlot> parameters;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    dims[slots[i].parameter.unsafeGetTensorImpl()] = slots[i].shard_dim;
    fsdp::ParameterSlot& slot = parameters.emplace_back();
    slot.name = slots[i].name;
    slot.parameter = slots[i].parameter;
    slot.member = slots[i].member;
    slot.make_leaf = [&, i](const at::Tensor& sharded) -> std::shared_ptr<fsdp::ParameterLeaf> {
      const py::gil_scoped_acquire lock;
      Slot& own = unit->slots_[i];
      own.sharded = Ref(wrap_tensor(sharded));
      py::object parameter = wrap(i, own.sharded.object());
      if (!parameter.is_none()) own.leaf = std::make_shared<DTensorLeaf>(std::move(parameter), sharded, main_grads);
      return own.leaf;
    };
  }
  options.shard_placement_fn = [&](const std::string&, const at::Tensor& parameter) {
    return dims.at(parameter.unsafeGetTensorImpl());
  };
  std::vector<fsdp::ChildUnit> inner;
  for (const auto& [child, paths] : children) inner.push_back({child->handle_.unit(), paths});
  check_value(!torch::jit::tracer::isTracing(), "fully_shard", "unit ", name, " is made under torch.jit.trace, want it before");

  {
    // It may wait for other ranks, and ask a store that is written in Python, on another thread.
    const py::gil_scoped_release unlocked;
    unit->handle_ = fsdp::UnitHandle(fsdp::make_unit(name, std::move(parameters), options, inner, members));
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    Slot& own = unit->slots_[i];
    own.gathered = Ref(wrap_tensor(slots[i].parameter));
    if (!slots[i].wrap_block.is_none()) {
      own.block = std::make_unique<GatheredBlock>(slots[i].parameter, slots[i].wrap_block, slots[i].data_axes);
    }
    for (const py::handle place : slots[i].places) {
      const auto pair = place.cast<std::pair<py::object, py::object>>();
      own.places.emplace_back(Ref(pair.first), Ref(pair.second));
    }
  }
  for (const auto& [child, paths] : children) child->inner_ = true;
  unit->shown_ = true;
  unit->show(false);
  // The modules own the unit; the engine must not.
  const std::weak_ptr<PyUnit> weak = unit;
  unit->handle_.set_front_end({.show =
                                   [weak](bool gathered) {
                                     if (const auto self = weak.lock()) self->show(gathered);
                                   },
                               .follow =
                                   [weak] {
                                     if (const auto self = weak.lock()) self->follow();
                                   }});
  return unit;
}

void PyUnit::show(bool gathered) {
  if (std::exchange(shown_, gathered) == gathered) return;
  const py::gil_scoped_acquire lock;
  for (const Slot& slot : slots_) {
    PyObject* entry = slot.leaf ? slot.leaf->parameter() : slot.sharded.get();
    if (gathered) entry = slot.block ? slot.block->current() : slot.gathered.get();
    for (const auto& [dictionary, key] : slot.places) {
      if (PyDict_SetItem(dictionary.get(), key.get(), entry) != 0) throw py::error_already_set();
    }
  }
}

void PyUnit::follow() {
  if (shown_ || following_) return;
  const py::gil_scoped_acquire lock;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    for (const auto& [dictionary, key] : slot.places) {
      PyObject* entry = PyDict_GetItemWithError(dictionary.get(), key.get());
      if (entry == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if (slot.leaf ? entry != nullptr && slot.leaf->is_registered_as(entry) : entry == slot.sharded.get()) continue;
      following_ = true;
      try {
        adopt_.object()(shared_from_this(), i,
                        entry != nullptr ? py::reinterpret_borrow<py::object>(entry) : py::object(py::none()));
      } catch (...) {
        following_ = false;
        throw;
      }
      following_ = false;
    }
  }
}

void PyUnit::replace(std::size_t slot, const py::object& parameter) {
  Slot& own = slots_.at(slot);
  if (own.leaf) own.leaf->replace(parameter);
  if (shown_) return;
  for (const auto& [dictionary, key] : own.places) {
    if (PyDict_SetItem(dictionary.get(), key.get(), this->parameter(slot).ptr()) != 0) throw py::error_already_set();
  }
}

py::object PyUnit::enter(int member, const py::tuple& args, const py::dict& kwargs) {
  check_value(!torch::jit::tracer::isTracing(), "fully_shard", "unit ", handle_.name(),
              " runs under torch.jit.trace, want the plain module there: a trace would keep the parameters of this moment");
  if (!begun.empty() && (!inner_ || !open_.at(static_cast<std::size_t>(member)).empty())) abandon_lost();
  static std::atomic<std::uint64_t> forwards = 0;
  Open open;
  open.handled = Ref(handled_exception());
  open.frame = Ref(current_frame());
  open.id = ++forwards;
  {
    const py::gil_scoped_release unlocked;
    open.scope = std::make_unique<fsdp::ForwardScope>(*handle_.unit(), member);
  }
  py::object changed = py::none();
  if (open.scope->casts_inputs()) {
    try {
      const auto cast = [&](const at::Tensor& tensor) { return open.scope->input(tensor); };
      py::object new_args = map_tensors(args, cast), new_kwargs = map_tensors(kwargs, cast);
      if (!new_args.is(args) || !new_kwargs.is(kwargs)) changed = py::make_tuple(std::move(new_args), std::move(new_kwargs));
    } catch (...) {
      const py::gil_scoped_release unlocked;
      open.scope.reset();
      throw;
    }
  }
  begun.push_back({weak_from_this(), member, open.id});
  open_.at(static_cast<std::size_t>(member)).push_back(std::move(open));
  return changed;
}

PyUnit::Open PyUnit::take(int member) {
  std::vector<Open>& open = open_.at(static_cast<std::size_t>(member));
  check_value(!open.empty(), "fully_shard", "the forward of unit ", handle_.name(), " ends without having begun");
  Open last = std::move(open.back());
  open.pop_back();
  const auto own = std::find_if(begun.rbegin(), begun.rend(), [&](const Begun& each) { return each.id == last.id; });
  if (own != begun.rend()) begun.erase(std::next(own).base());
  return last;
}

py::object PyUnit::leave(int member, const py::object& result) {
  Open open = take(member);
  try {
    py::object mapped = map_tensors(result, [&](const at::Tensor& tensor) { return open.scope->output(tensor); });
    const py::gil_scoped_release unlocked;
    open.scope->finish();
    open.scope.reset();
    return mapped;
  } catch (...) {
    const py::gil_scoped_release unlocked;
    open.scope.reset();
    throw;
  }
}

void PyUnit::abandon(int member, bool stopped_early) {
  Open open = take(member);
  const py::gil_scoped_release unlocked;
  if (stopped_early) open.scope->finish();
  open.scope.reset();
}

void PyUnit::abandon_lost() {
  while (!begun.empty()) {
    const Begun last = begun.back();
    const auto unit = last.unit.lock();
    std::vector<Open>* open = unit ? &unit->open_.at(static_cast<std::size_t>(last.member)) : nullptr;
    if (open == nullptr || open->empty() || open->back().id != last.id) {
      begun.pop_back();
    } else if (runs(open->back().frame.get())) {
      return;
    } else {
      unit->abandon(last.member, false);
    }
  }
}

py::object PyUnit::pre_hook(int member) {
  return py::cpp_function([self = shared_from_this(), member](const py::object&, const py::tuple& args, const py::dict& kwargs) {
    return self->enter(member, args, kwargs);
  });
}

py::object PyUnit::post_hook(int member) {
  return py::cpp_function([self = shared_from_this(), member](const py::object&, const py::object&, py::object result) {
    const auto& open = self->open_.at(static_cast<std::size_t>(member));
    const py::object handled = handled_exception();
    // torch calls the hook while it handles what forward has thrown, also where a hook before ours has and nothing has begun.
    if (open.empty() || (!handled.is_none() && handled.ptr() != open.back().handled.get())) {
      if (!open.empty()) self->abandon(member, is_early_stop(handled));
      return py::object(py::none());
    }
    py::object mapped = self->leave(member, result);
    return mapped.is(result) ? py::object(py::none()) : mapped;
  });
}

}  // namespace hyper_parallel::python
