// Optimizers over flat shards, clipping, averages, loss scaling.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <hyper_parallel/optim/adamw.h>
#include <hyper_parallel/optim/clip_grad.h>
#include <hyper_parallel/optim/ema.h>
#include <hyper_parallel/optim/grad_scaler.h>
#include <hyper_parallel/optim/muon.h>
#include <hyper_parallel/optim/sgd.h>

#include "bind.h"
#include "unit.h"

namespace hyper_parallel::python {
namespace {

using NoLock = py::call_guard<py::gil_scoped_release>;

optim::ParameterPredicate predicate(const py::handle function) {
  if (function.is_none()) return {};
  return callback<bool, const std::string&, const std::vector<std::int64_t>&>(py::reinterpret_borrow<py::object>(function));
}

/// Entries of dictionaries under the names of the C++ options.
class Given {
 public:
  explicit Given(const py::dict& values) : values_(values) {}
  template <class T>
  void operator()(const char* name, T& option) const {
    option = values_[name].cast<T>();
  }
  void operator()(const char* name, optim::ParameterPredicate& option) const { option = predicate(values_[name]); }
  void operator()(const char* name, std::vector<optim::ParamGroup>& option) const {
    for (const py::handle entry : values_[name].cast<py::list>()) {
      const Given group(entry.cast<py::dict>());
      optim::ParamGroup& own = option.emplace_back();
      group("names", own.names);
      group("predicate", own.predicate);
      group("lr", own.lr);
      group("weight_decay", own.weight_decay);
      group("betas", own.betas);
      group("eps", own.eps);
    }
  }

 private:
  const py::dict& values_;
};

optim::AdamWOptions adamw_options(const py::dict& values) {
  const Given given(values);
  optim::AdamWOptions options;
  given("lr", options.lr);
  given("betas", options.betas);
  given("eps", options.eps);
  given("weight_decay", options.weight_decay);
  given("decays", options.decays);
  given("groups", options.groups);
  given("maximize", options.maximize);
  given("state_dtype", options.state_dtype);
  given("master_weights", options.master_weights);
  given("parameters", options.parameters);
  return options;
}

optim::SGDOptions sgd_options(const py::dict& values) {
  const Given given(values);
  optim::SGDOptions options;
  given("lr", options.lr);
  given("momentum", options.momentum);
  given("dampening", options.dampening);
  given("weight_decay", options.weight_decay);
  given("nesterov", options.nesterov);
  given("maximize", options.maximize);
  given("decays", options.decays);
  given("groups", options.groups);
  given("state_dtype", options.state_dtype);
  given("master_weights", options.master_weights);
  given("parameters", options.parameters);
  return options;
}

optim::MuonOptions muon_options(const py::dict& values) {
  const Given given(values);
  optim::MuonOptions options;
  given("lr", options.lr);
  given("weight_decay", options.weight_decay);
  given("momentum", options.momentum);
  given("nesterov", options.nesterov);
  given("ns_coefficients", options.ns_coefficients);
  given("eps", options.eps);
  given("ns_steps", options.ns_steps);
  if (values["match_rms_adamw"].cast<bool>()) options.adjust_lr_fn = optim::MuonLr::kMatchRmsAdamW;
  given("matrices", options.matrices);
  given("not_matrices", options.not_matrices);
  given("groups", options.groups);
  given("ns_dtype", options.ns_dtype);
  given("state_dtype", options.state_dtype);
  given("master_weights", options.master_weights);
  options.adamw = adamw_options(values["adamw"].cast<py::dict>());
  return options;
}

py::list state_of(const optim::FlatOptimizer& optimizer) {
  py::list result;
  for (const auto& state : optimizer.state()) {
    py::dict tensors;
    for (const auto& [name, tensor] : state.tensors) tensors[py::str(name)] = tensor;
    result.append(py::make_tuple(state.name, state.step, tensors));
  }
  return result;
}

void load_state(optim::FlatOptimizer& optimizer, const py::list& list) {
  std::vector<optim::FlatOptimizer::State> states;
  for (const py::handle entry : list) {
    const auto fields = entry.cast<py::tuple>();
    auto& state = states.emplace_back();
    state.name = fields[0].cast<std::string>();
    state.step = fields[1].cast<std::int64_t>();
    for (const auto& [name, tensor] : fields[2].cast<py::dict>())
      state.tensors.emplace_back(name.cast<std::string>(), tensor.cast<at::Tensor>());
  }
  optimizer.load_state(states);
}

void bind_optimizers(py::module_& m) {
  using optim::FlatOptimizer;
  py::class_<FlatOptimizer>(m, "FlatOptimizer")
      .def("step", &FlatOptimizer::step, NoLock())
      .def("zero_grad", &FlatOptimizer::zero_grad, NoLock())
      .def("lr", &FlatOptimizer::lr)
      .def("set_lr", &FlatOptimizer::set_lr)
      .def("lrs", &FlatOptimizer::lrs)
      .def("set_lrs", &FlatOptimizer::set_lrs)
      .def("state", &state_of)
      .def("load_state", &load_state)
      .def("state_bytes", &FlatOptimizer::state_bytes);
  py::class_<optim::AdamW, FlatOptimizer>(m, "AdamW").def(py::init([](const PyUnit& root, const py::dict& options) {
    return std::make_unique<optim::AdamW>(root.handle(), adamw_options(options));
  }));
  py::class_<optim::SGD, FlatOptimizer>(m, "SGD").def(py::init([](const PyUnit& root, const py::dict& options) {
    return std::make_unique<optim::SGD>(root.handle(), sgd_options(options));
  }));
  py::class_<optim::Muon, FlatOptimizer>(m, "Muon").def(py::init([](const PyUnit& root, const py::dict& options) {
    return std::make_unique<optim::Muon>(root.handle(), muon_options(options));
  }));
}

ClipGradOptions clip_options(double norm_type, bool error_if_nonfinite, std::vector<at::Tensor> plain_parameters) {
  return {.norm_type = norm_type, .error_if_nonfinite = error_if_nonfinite, .plain_parameters = std::move(plain_parameters)};
}

void bind_clipping(py::module_& m) {
  m.def(
      "clip_grad_norm_",
      [](const PyUnit& root, double max_norm, double norm_type, bool error_if_nonfinite, std::vector<at::Tensor> plain) {
        return clip_grad_norm_(root.handle(), max_norm, clip_options(norm_type, error_if_nonfinite, std::move(plain)));
      },
      NoLock());
  m.def(
      "get_total_norm",
      [](const PyUnit& root, double norm_type, bool error_if_nonfinite, std::vector<at::Tensor> plain) {
        return get_total_norm(root.handle(), clip_options(norm_type, error_if_nonfinite, std::move(plain)));
      },
      NoLock());
  m.def(
      "clip_grads_with_norm_",
      [](const PyUnit& root, double max_norm, double total_norm, std::vector<at::Tensor> plain) {
        clip_grads_with_norm_(root.handle(), max_norm, total_norm, clip_options(2.0, false, std::move(plain)));
      },
      NoLock());
  m.def(
      "clip_grad_value_",
      [](const PyUnit& root, double clip_value, std::vector<at::Tensor> plain) {
        clip_grad_value_(root.handle(), clip_value, clip_options(2.0, false, std::move(plain)));
      },
      NoLock());
}

void bind_averages_and_scaling(py::module_& m) {
  py::class_<Ema>(m, "Ema")
      .def(py::init([](const PyUnit& root, double decay, bool ramp, std::optional<at::ScalarType> dtype) {
        return std::make_unique<Ema>(root.handle(), EmaOptions{.decay = decay, .ramp = ramp, .dtype = dtype});
      }))
      .def("update", &Ema::update, NoLock())
      .def("reset", &Ema::reset, NoLock())
      .def("swap", &Ema::swap, NoLock())
      .def("restore", &Ema::restore, NoLock())
      .def("swapped", &Ema::swapped)
      .def("copy_to", &Ema::copy_to, NoLock())
      .def("decay_at", &Ema::decay_at)
      .def("averages", [](const Ema& self) {
        py::dict result;
        for (const auto& [name, average] : self.named_dtensors()) result[py::str(name)] = average.to_local();
        return result;
      });
  using optim::GradScaler;
  py::class_<GradScaler>(m, "GradScaler")
      .def(py::init(
          [](double init_scale, double growth_factor, double backoff_factor, std::int64_t growth_interval, bool enabled) {
            return std::make_unique<GradScaler>(optim::GradScalerOptions{.init_scale = init_scale,
                                                                         .growth_factor = growth_factor,
                                                                         .backoff_factor = backoff_factor,
                                                                         .growth_interval = growth_interval,
                                                                         .enabled = enabled});
          }))
      .def("scale", &GradScaler::scale)
      .def(
          "unscale_",
          [](GradScaler& self, const PyUnit& root, const std::vector<at::Tensor>& plain) { self.unscale_(root.handle(), plain); },
          NoLock())
      .def("step", &GradScaler::step<optim::FlatOptimizer>, NoLock())
      .def("update", &GradScaler::update)
      .def("get_scale", &GradScaler::get_scale)
      .def("enabled", &GradScaler::enabled)
      .def("found_nonfinite", &GradScaler::found_nonfinite)
      .def("state", [](const GradScaler& self) { return std::make_pair(self.state().scale, self.state().growth_tracker); })
      .def("load_state", [](GradScaler& self, double scale, std::int64_t growth_tracker) {
        self.load_state({.scale = scale, .growth_tracker = growth_tracker});
      });
}

}  // namespace

void bind_optim(py::module_& m) {
  bind_optimizers(m);
  bind_clipping(m);
  bind_averages_and_scaling(m);
}

}  // namespace hyper_parallel::python
