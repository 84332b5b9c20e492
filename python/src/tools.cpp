// ZeRO levels, scopes in which everything is gathered, values for parameters, traces.
#include <memory>
#include <string>
#include <utility>

#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/fsdp/init.h>
#include <hyper_parallel/fsdp/zero.h>

#include "bind.h"
#include "unit.h"

namespace hyper_parallel::python {

using NoLock = py::call_guard<py::gil_scoped_release>;

void bind_tools(py::module_& m) {
  m.def("set_zero_level", [](const PyUnit& root, int level, bool last_micro_batch) {
    set_zero_level(root.handle(), static_cast<ZeroLevel>(level), last_micro_batch);
  });
  py::class_<fsdp::UnshardScope>(m, "UnshardScope").def(py::init([](const PyUnit& root) {
    const py::gil_scoped_release unlocked;
    return std::make_unique<fsdp::UnshardScope>(root.handle());
  }));
  m.def("reset_parameters", [](const PyUnit& root, std::uint64_t seed, const py::object& init) {
    const auto held = std::make_shared<Ref>(init);
    const py::gil_scoped_release unlocked;
    fsdp::reset_parameters(root.handle(), seed, [&](const std::string& name, at::Tensor& whole, at::Generator& generator) {
      const py::gil_scoped_acquire lock;
      held->object()(name, whole, generator);
    });
  });
  const auto load = [&](const char* name, void (*f)(const fsdp::UnitHandle&, const fsdp::NamedTensors&, bool)) {
    m.def(
        name, [f](const PyUnit& root, const fsdp::NamedTensors& values, bool strict) { f(root.handle(), values, strict); },
        NoLock());
  };
  load("load_full", &fsdp::load_full);
  load("load_from_rank0", &fsdp::load_from_rank0);
  m.def("trace_start", [](const std::string& path, std::size_t events_per_thread) {
    trace::start(path, {.events_per_thread = events_per_thread});
  });
  m.def("trace_stop", &trace::stop, NoLock());
}

}  // namespace hyper_parallel::python
