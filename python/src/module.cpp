// The module hyper_parallel._C. What users see, with its documentation, is in python/hyper_parallel.
#include <chrono>
#include <map>
#include <set>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/fsdp/init.h>

#include "bind.h"
#include "unit.h"

namespace hyper_parallel::python {
namespace {

using NoLock = py::call_guard<py::gil_scoped_release>;

World make_python_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::int64_t timeout_ms, bool fake,
                        std::optional<bool> samehost, std::optional<bool> map_shards, bool huge_pages, bool first_touch) {
  InitOptions options;
  options.samehost = samehost;
  options.map_shards = map_shards;
  options.huge_pages = huge_pages;
  options.first_touch = first_touch;
  if (fake) options.backend = "fake";
  options.timeout = std::chrono::milliseconds(timeout_ms);
  options.rank = rank;
  options.world_size = size;
  options.store = std::move(store);
  options.wait_for_ranks = false;
  World world = make_world(options);
  trace::set_rank(rank, size);
  return world;
}

DeviceMesh make_python_mesh(const World& world, const std::string& device_type, const std::vector<std::int64_t>& shape,
                            const std::vector<int>& ranks, const std::vector<std::string>& names, bool connect) {
  DeviceMesh mesh = DeviceMesh::from_ranks(world, device_type, shape, ranks, names);
  if (!connect) return mesh;
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
                            .wrap_block = fields[5],
                            .data_axes = fields[6].cast<std::vector<std::size_t>>()});
  }
  std::vector<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>> inner;
  for (const py::handle child : children)
    inner.push_back(child.cast<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>>());
  return PyUnit::make(name, descriptions, options, inner, members, wrap, adopt);
}

std::optional<ReshardAfterForward> to_reshard(const py::object& value, std::optional<std::int64_t> memory_budget) {
  if (memory_budget) return MemoryBudget{*memory_budget};
  if (value.is_none()) return std::nullopt;
  if (py::isinstance<py::bool_>(value)) return ReshardAfterForward(value.cast<bool>());
  return ReshardAfterForward(value.cast<int>());
}

ReplicaInit to_replica_init(const std::string& name) {
  if (name == "check") return ReplicaInit::kCheck;
  return name == "broadcast" ? ReplicaInit::kBroadcast : ReplicaInit::kNone;
}

/// From keyword arguments: see _C.pyi.
FullyShardOptions make_options(const py::kwargs& given) {
  const auto get = [&]<class T>(const char* name, T) { return given[name].cast<T>(); };
  using Dtype = std::optional<at::ScalarType>;
  FullyShardOptions options{.mesh = get("mesh", DeviceMesh())};
  options.reshard_after_forward = to_reshard(given["reshard_after_forward"], get("memory_budget", std::optional<std::int64_t>()));
  options.mp_policy = {.param_dtype = get("param_dtype", Dtype()),
                       .reduce_dtype = get("reduce_dtype", Dtype()),
                       .output_dtype = get("output_dtype", Dtype()),
                       .cast_forward_inputs = get("cast_forward_inputs", bool()),
                       .apply_grad_on_fp32_main_grad = get("main_grads", bool())};
  if (get("cpu_offload", bool())) options.offload_policy = CPUOffloadPolicy{.pin_memory = get("pin_memory", bool())};
  options.replicate_params = get("replicate_params", std::vector<at::Tensor>());
  options.comm_fusion = get("comm_fusion", bool());
  options.bucket_size = get("bucket_size", std::int64_t());
  options.shard_layout = get("ragged", bool()) ? ShardLayout::kRagged : ShardLayout::kPerParameter;
  options.replica_init = to_replica_init(get("replica_init", std::string()));
  if (const py::object sources = given["source_shard_infos"]; !sources.is_none())
    options.source_shard_infos = to_sources(sources);
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

py::dict to_dict(const fsdp::MemoryUse& use) {
  py::dict result;
  result["shards"] = use.shards;
  result["gradients"] = use.gradients;
  result["pool"] = use.pool;
  result["copies"] = use.copies;
  result["mapped"] = use.mapped;
  return result;
}

/// Calls and bytes of this rank, by group of the tree that has other ranks.
py::dict counters(const PyUnit& unit) {
  std::map<std::string, CommCounters> all;
  std::set<const void*> seen;
  const auto add = [&](const Comm& comm) {
    if (!comm.defined() || comm.size() == 1 || !seen.insert(comm.shared_impl().get()).second) return;
    CommCounters& sum = all[comm.name()];  // groups of several meshes may have the same name
    const CommCounters own = comm.counters();
    sum.calls += own.calls;
    sum.bytes_sent += own.bytes_sent;
    sum.bytes_received += own.bytes_received;
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
           [](const PyUnit& self, const py::object& wait) { self.handle().set_post_optim_event(callback<void>(wait)); })
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
      .def("memory", [](const PyUnit& self) { return to_dict(self.handle().memory_use()); })
      .def("plan_memory", [](const PyUnit& self, bool local,
                             bool partial) { return to_dict(self.handle().plan_memory({.local = local, .partial = partial})); })
      .def("main_grad",
           [](const PyUnit& self, std::size_t slot) { return self.handle().main_grad(self.sharded(slot).cast<at::Tensor>()); })
      .def("counters", &counters)
      .def("transport", [](const PyUnit& self) { return std::string(self.handle().data_parallel_comm().transport_name()); });
  bind_switches(unit);
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
  py::class_<hp::DeviceMesh>(m, "Mesh")
      .def(py::init(&hpy::make_python_mesh), py::arg("world"), py::arg("device_type"), py::arg("shape"), py::arg("ranks"),
           py::arg("names"), py::arg("connect") = true)
      .def("axes", [](const hp::DeviceMesh& mesh, const std::vector<std::string>& names) { return mesh[names]; })
      .def("__repr__", &hp::DeviceMesh::to_string);
  py::class_<hp::FullyShardOptions>(m, "Options").def(py::init(&hpy::make_options));
  m.def("make_unit", &hpy::make_python_unit);
  m.def("hsdp_sync_stream", &hp::hsdp_sync_stream, hpy::NoLock());
  hpy::bind_unit(m);
  hpy::bind_sources(m);
  hpy::bind_optim(m);
  hpy::bind_tools(m);
}
