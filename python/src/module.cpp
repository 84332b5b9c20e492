// The module hyper_parallel._C. What users see, with its documentation, is in python/hyper_parallel.
#include <chrono>
#include <map>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/optim/clip_grad.h>

#include "unit.h"

namespace hyper_parallel::python {
namespace {

using NoLock = py::call_guard<py::gil_scoped_release>;

World make_python_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::int64_t timeout_ms, bool fake) {
  InitOptions options;
  if (fake) options.backend = "fake";
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.rank = rank;
  options.world_size = size;
  options.store = std::move(store);
  options.wait_for_ranks = false;
  return make_world(options);
}

DeviceMesh make_python_mesh(const World& world, const std::string& device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<int>& ranks, const std::vector<std::string>& names) {
  DeviceMesh mesh = DeviceMesh::from_ranks(world, device_type, shape, ranks, names);
  // Here, where nobody needs the interpreter: making a group waits for its members.
  const py::gil_scoped_release unlocked;
  for (std::int64_t axis = 0; axis < mesh.ndim(); ++axis) (void)mesh.get_group(axis);
  if (mesh.ndim() > 1) (void)mesh.flatten().get_group(std::int64_t{0});
  return mesh;
}

std::shared_ptr<PyUnit> make_python_unit(const std::string& name, const py::list& slots, const FullyShardOptions& options,
                                         const py::list& children, int members, const py::object& wrap, const py::object& adopt) {
  std::vector<SlotDescription> descriptions;
  for (const py::handle slot : slots) {
    const auto fields = slot.cast<py::tuple>();
    descriptions.push_back({.name = fields[0].cast<std::string>(),
                            .parameter = fields[1].cast<at::Tensor>(),
                            .member = fields[2].cast<int>(),
                            .shard_dim = fields[3].cast<std::optional<std::int64_t>>(),
                            .places = fields[4].cast<py::list>(),
                            .wrap_block = fields[5]});
  }
  std::vector<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>> inner;
  for (const py::handle child : children)
    inner.push_back(child.cast<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>>());
  return PyUnit::make(name, descriptions, options, inner, members, wrap, adopt);
}

std::optional<ReshardAfterForward> to_reshard(const py::object& value) {
  if (value.is_none()) return std::nullopt;
  if (py::isinstance<py::bool_>(value)) return ReshardAfterForward(value.cast<bool>());
  return ReshardAfterForward(value.cast<int>());
}

FullyShardOptions make_options(const DeviceMesh& mesh, const py::object& reshard_after_forward,
                               std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> reduce_dtype,
                               std::optional<at::ScalarType> output_dtype, bool cast_forward_inputs, bool cpu_offload,
                               bool pin_memory, std::vector<at::Tensor> replicate_params, bool comm_fusion,
                               std::int64_t bucket_size, bool ragged) {
  FullyShardOptions options{.mesh = mesh};
  options.reshard_after_forward = to_reshard(reshard_after_forward);
  options.mp_policy = {.param_dtype = param_dtype,
                       .reduce_dtype = reduce_dtype,
                       .output_dtype = output_dtype,
                       .cast_forward_inputs = cast_forward_inputs};
  if (cpu_offload) options.offload_policy = CPUOffloadPolicy{.pin_memory = pin_memory};
  options.replicate_params = std::move(replicate_params);
  options.comm_fusion = comm_fusion;
  options.bucket_size = bucket_size;
  options.shard_layout = ragged ? ShardLayout::kRagged : ShardLayout::kPerParameter;
  return options;
}

using Units = std::vector<std::shared_ptr<PyUnit>>;

std::optional<std::vector<fsdp::UnitHandle>> handles_of(const std::optional<Units>& units) {
  if (!units) return std::nullopt;
  std::vector<fsdp::UnitHandle> handles;
  for (const auto& unit : *units) handles.push_back(unit->handle());
  return handles;
}

/// A Python function that starts a communication and returns what waits for it, or None where that is done.
CommWait start_custom(const std::shared_ptr<Ref>& start, const at::Tensor& output, const at::Tensor& input) {
  const py::gil_scoped_acquire lock;
  py::object wait = start->object()(output, input);
  if (wait.is_none()) return [] {};
  return [held = std::make_shared<Ref>(std::move(wait))] {
    const py::gil_scoped_acquire again;
    held->object()();
  };
}

template <class Start>
Start custom(const py::object& start) {
  if (start.is_none()) return {};
  return [held = std::make_shared<Ref>(start)](const Comm&, const at::Tensor& output, const at::Tensor& input) {
    return start_custom(held, output, input);
  };
}

/// Calls and bytes of this rank, by group of the tree.
py::dict counters(const PyUnit& unit) {
  std::map<std::string, CommCounters> all;
  const auto add = [&](const Comm& comm) {
    if (comm.defined()) all[comm.name()] = comm.counters();
  };
  for (const fsdp::ShardedGroup& group : unit.handle().groups()) {
    add(group.shard_comm);
    add(group.replicate_comm);
    add(group.unit_comm);
  }
  py::dict result;
  for (const auto& [name, count] : all)
    result[py::str(name)] = py::make_tuple(count.calls, count.bytes_sent, count.bytes_received);
  return result;
}

void bind_switches(py::class_<PyUnit, std::shared_ptr<PyUnit>>& unit) {
  using fsdp::UnitHandle;
  const auto flag = [&](const char* name, void (UnitHandle::*set)(bool, bool) const) {
    unit.def(name, [set](const PyUnit& self, bool value, bool recurse) { (self.handle().*set)(value, recurse); });
  };
  flag("set_requires_gradient_sync", &UnitHandle::set_requires_gradient_sync);
  flag("set_requires_all_reduce", &UnitHandle::set_requires_all_reduce);
  flag("set_reshard_after_forward", &UnitHandle::set_reshard_after_forward);
  flag("set_reshard_after_backward", &UnitHandle::set_reshard_after_backward);
  flag("set_reduce_scatter_unused_params", &UnitHandle::set_reduce_scatter_unused_params);
  unit.def("set_is_last_backward", [](const PyUnit& self, bool last) { self.handle().set_is_last_backward(last); })
      .def("set_unshard_in_backward", [](const PyUnit& self, bool value) { self.handle().set_unshard_in_backward(value); })
      .def("set_post_optim_event",
           [](const PyUnit& self, const py::object& wait) { self.handle().set_post_optim_event(callback<py::object>(wait)); })
      .def("set_reduce_op_type",
           [](const PyUnit& self, const std::string& op, bool recurse) { self.handle().set_reduce_op_type(op, recurse); })
      .def("set_gradient_scaling_factor",
           [](const PyUnit& self, std::optional<double> factor) { self.handle().set_gradient_scaling_factor(factor); })
      .def("set_gradient_divide_factor", [](const PyUnit& self, std::optional<double> factor,
                                            bool recurse) { self.handle().set_gradient_divide_factor(factor, recurse); })
      .def("set_modules_to_forward_prefetch",
           [](const PyUnit& self, const std::optional<Units>& units) {
             self.handle().set_modules_to_forward_prefetch(handles_of(units));
           })
      .def("set_modules_to_backward_prefetch",
           [](const PyUnit& self, const std::optional<Units>& units) {
             self.handle().set_modules_to_backward_prefetch(handles_of(units));
           })
      .def("set_custom_all_gather",
           [](const PyUnit& self, const py::object& start) {
             self.handle().set_custom_all_gather(custom<CustomAllGather>(start));
           })
      .def("set_custom_reduce_scatter",
           [](const PyUnit& self, const py::object& start) {
             self.handle().set_custom_reduce_scatter(custom<CustomReduceScatter>(start));
           })
      .def("set_all_reduce_hook", [](const PyUnit& self, const py::object& hook, bool recurse) {
        if (hook.is_none()) return self.handle().set_all_reduce_hook({}, recurse);
        self.handle().set_all_reduce_hook(
            [held = std::make_shared<Ref>(hook)](const at::Tensor& reduced) {
              const py::gil_scoped_acquire lock;
              held->object()(reduced);
            },
            recurse);
      });
}

void bind_unit(py::module_& m) {
  py::class_<fsdp::UnshardHandle>(m, "UnshardHandle").def("wait", &fsdp::UnshardHandle::wait, NoLock());
  py::class_<PyUnit, std::shared_ptr<PyUnit>> unit(m, "Unit");
  unit.def("pre_hook", &PyUnit::pre_hook)
      .def("post_hook", &PyUnit::post_hook)
      .def("enter", &PyUnit::enter)
      .def("leave", &PyUnit::leave)
      .def("abandon", &PyUnit::abandon)
      .def("follow", &PyUnit::follow)
      .def("size", &PyUnit::size)
      .def("shows_gathered",
           [](const PyUnit& self) {
             PyUnit::abandon_lost();
             return self.shows_gathered();
           })
      .def("sharded", &PyUnit::sharded)
      .def("parameter", &PyUnit::parameter)
      .def("gathered", &PyUnit::gathered)
      .def("replace", &PyUnit::replace)
      .def("name", [](const PyUnit& self) { return self.handle().name(); })
      .def("is_unsharded", [](const PyUnit& self) { return self.handle().is_unsharded(); })
      .def("unshard",
           [](const PyUnit& self, bool async_op) {
             PyUnit::abandon_lost();
             const py::gil_scoped_release unlocked;
             return self.handle().unshard(async_op);
           })
      .def("reshard",
           [](const PyUnit& self) {
             PyUnit::abandon_lost();
             const py::gil_scoped_release unlocked;
             self.handle().reshard();
           })
      .def(
          "to_empty", [](const PyUnit& self) { fsdp::to_empty(self.handle()); }, NoLock())
      .def(
          "wait_for_gradients", [](const PyUnit& self) { self.handle().wait_for_gradients(); }, NoLock())
      .def("reset_iter_state",
           [](const PyUnit& self, bool recursive) {
             PyUnit::abandon_lost();
             const py::gil_scoped_release unlocked;
             self.handle().reset_iter_state(recursive);
           })
      .def(
          "zero_grad", [](const PyUnit& self, bool set_to_none) { self.handle().zero_grad(set_to_none); }, NoLock())
      .def("memory",
           [](const PyUnit& self) {
             const fsdp::MemoryUse use = self.handle().memory_use();
             py::dict result;
             result["shards"] = use.shards;
             result["gradients"] = use.gradients;
             result["pool"] = use.pool;
             result["copies"] = use.copies;
             return result;
           })
      .def("counters", &counters)
      .def("transport", [](const PyUnit& self) { return std::string(self.handle().data_parallel_comm().transport_name()); });
  bind_switches(unit);
}

void bind_optim(py::module_& m) {
  py::class_<optim::AdamW>(m, "AdamW")
      .def(py::init([](const PyUnit& root, double lr, std::pair<double, double> betas, double eps, double weight_decay,
                       bool maximize, bool master_weights) {
        return std::make_unique<optim::AdamW>(root.handle(), optim::AdamWOptions{.lr = lr,
                                                                                 .betas = betas,
                                                                                 .eps = eps,
                                                                                 .weight_decay = weight_decay,
                                                                                 .maximize = maximize,
                                                                                 .master_weights = master_weights});
      }))
      .def("step", &optim::AdamW::step, NoLock())
      .def("zero_grad", &optim::AdamW::zero_grad, NoLock())
      .def("lr", &optim::AdamW::lr)
      .def("set_lr", &optim::AdamW::set_lr)
      .def("state",
           [](const optim::AdamW& self) {
             py::list result;
             for (const auto& state : self.state()) {
               py::dict tensors;
               for (const auto& [name, tensor] : state.tensors) tensors[py::str(name)] = tensor;
               result.append(py::make_tuple(state.name, state.step, tensors));
             }
             return result;
           })
      .def("load_state", [](optim::AdamW& self, const py::list& list) {
        std::vector<optim::FlatOptimizer::State> states;
        for (const py::handle entry : list) {
          const auto fields = entry.cast<py::tuple>();
          auto& state = states.emplace_back();
          state.name = fields[0].cast<std::string>();
          state.step = fields[1].cast<std::int64_t>();
          for (const auto& [name, tensor] : fields[2].cast<py::dict>())
            state.tensors.emplace_back(name.cast<std::string>(), tensor.cast<at::Tensor>());
        }
        self.load_state(states);
      });
  m.def(
      "clip_grad_norm_",
      [](const PyUnit& root, double max_norm, double norm_type, bool error_if_nonfinite) {
        return clip_grad_norm_(root.handle(), max_norm, {.norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite});
      },
      NoLock());
}

}  // namespace
}  // namespace hyper_parallel::python

PYBIND11_MODULE(_C, m) {
  namespace hp = hyper_parallel;
  namespace hpy = hyper_parallel::python;
  // The last one registered is tried first.
  py::register_exception<hp::Error>(m, "Error", PyExc_RuntimeError);
  const auto comm_error = py::register_exception<hp::CommError>(m, "CommError", PyExc_RuntimeError);
  py::register_exception<hp::TimeoutError>(m, "TimeoutError", comm_error);
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const hp::ValueError& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    }
  });
  py::class_<hp::World>(m, "World")
      .def(py::init(&hpy::make_python_world))
      .def("rank", &hp::World::rank)
      .def("size", &hp::World::size);
  py::class_<hp::DeviceMesh>(m, "Mesh").def(py::init(&hpy::make_python_mesh)).def("__repr__", &hp::DeviceMesh::to_string);
  py::class_<hp::FullyShardOptions>(m, "Options")
      .def(py::init(&hpy::make_options), py::kw_only(), py::arg("mesh"), py::arg("reshard_after_forward"), py::arg("param_dtype"),
           py::arg("reduce_dtype"), py::arg("output_dtype"), py::arg("cast_forward_inputs"), py::arg("cpu_offload"),
           py::arg("pin_memory"), py::arg("replicate_params"), py::arg("comm_fusion"), py::arg("bucket_size"), py::arg("ragged"));
  m.def("make_unit", &hpy::make_python_unit);
  m.def("hsdp_sync_stream", &hp::hsdp_sync_stream, hpy::NoLock());
  hpy::bind_unit(m);
  hpy::bind_optim(m);
}
