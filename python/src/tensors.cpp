#include "tensors.h"

#include <vector>

#include <torch/csrc/autograd/python_variable.h>

namespace hyper_parallel::python {
namespace {

using Map = std::function<at::Tensor(const at::Tensor&)>;

py::object same(py::handle value) { return py::reinterpret_borrow<py::object>(value); }

py::object shallow_copy(py::handle value) { return py::module_::import("copy").attr("copy")(value); }

/// Containers that hold themselves, and ones that are nested without end, raise RecursionError.
class Depth {
 public:
  Depth() {
    if (Py_EnterRecursiveCall(" while looking for tensors") != 0) throw py::error_already_set();
  }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;
  ~Depth() { Py_LeaveRecursiveCall(); }
};

py::object map_tensor(py::handle value, const Map& f) {
  const at::Tensor tensor = THPVariable_Unpack(value.ptr());
  const at::Tensor result = f(tensor);
  return result.is_same(tensor) ? same(value) : py::reinterpret_steal<py::object>(THPVariable_Wrap(result));
}

/// Elements of a sequence or a set after f. True if any is another object.
bool map_elements(py::handle value, const Map& f, py::list& mapped) {
  bool changed = false;
  for (const py::handle element : py::reinterpret_borrow<py::iterable>(value)) {
    py::object result = map_tensors(element, f);
    changed = changed || !result.is(element);
    mapped.append(std::move(result));
  }
  return changed;
}

py::object map_tuple(py::handle value, const Map& f) {
  py::list mapped;
  if (!map_elements(value, f, mapped)) return same(value);
  if (PyTuple_CheckExact(value.ptr())) return py::tuple(mapped);
  const py::object type = py::type::of(value);
  return py::hasattr(type, "_make") ? type.attr("_make")(mapped) : type(py::tuple(mapped));
}

py::object map_list(py::handle value, const Map& f) {
  py::list mapped;
  if (!map_elements(value, f, mapped)) return same(value);
  if (PyList_CheckExact(value.ptr())) return mapped;
  py::object copy = shallow_copy(value);
  for (std::size_t i = 0; i < mapped.size(); ++i) copy[py::int_(i)] = mapped[i];
  return copy;
}

py::object map_dict(py::handle value, const Map& f) {
  py::object copy;
  for (const auto& [key, element] : py::reinterpret_borrow<py::dict>(value)) {
    const py::object result = map_tensors(element, f);
    if (result.is(element)) continue;
    if (!copy) copy = shallow_copy(value);
    copy[key] = result;
  }
  return copy ? copy : same(value);
}

py::object map_dataclass(py::handle value, const py::object& fields, const Map& f) {
  py::object copy;
  for (const auto& entry : py::reinterpret_borrow<py::dict>(fields)) {
    if (!py::hasattr(value, entry.first)) continue;
    const py::object element = value.attr(entry.first);
    const py::object result = map_tensors(element, f);
    if (result.is(element)) continue;
    if (!copy) copy = shallow_copy(value);
    // Frozen ones, too: the copy is ours.
    if (PyObject_GenericSetAttr(copy.ptr(), entry.first.ptr(), result.ptr()) != 0) throw py::error_already_set();
  }
  return copy ? copy : same(value);
}

py::object map_registered(py::handle value, const Map& f) {
  const py::module_ pytree = py::module_::import("torch.utils._pytree");
  if (!pytree.attr("SUPPORTED_NODES").contains(py::type::of(value))) return same(value);
  bool changed = false;
  const py::cpp_function leaf([&](const py::object& element) {
    py::object result = map_tensors(element, f);
    changed = changed || !result.is(element);
    return result;
  });
  py::object result = pytree.attr("tree_map")(leaf, value);
  return changed ? result : same(value);
}

}  // namespace

py::object map_tensors(py::handle value, const Map& f) {
  PyObject* object = value.ptr();
  if (THPVariable_Check(object)) return map_tensor(value, f);
  if (object == Py_None || PyLong_Check(object) || PyFloat_Check(object) || PyUnicode_Check(object) || PyBytes_Check(object))
    return same(value);
  const Depth depth;
  if (PyTuple_Check(object)) return map_tuple(value, f);
  if (PyList_Check(object)) return map_list(value, f);
  if (PyDict_Check(object)) return map_dict(value, f);
  if (PyAnySet_Check(object)) {
    py::list mapped;
    return map_elements(value, f, mapped) ? py::type::of(value)(mapped) : same(value);
  }
  if (PyType_Check(object)) return same(value);
  if (const py::object fields = py::getattr(py::type::of(value), "__dataclass_fields__", py::none()); !fields.is_none())
    return map_dataclass(value, fields, f);
  return map_registered(value, f);
}

}  // namespace hyper_parallel::python
