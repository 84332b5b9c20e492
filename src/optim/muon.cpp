#include <hyper_parallel/optim/muon.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <ATen/core/grad_mode.h>

#include <hyper_parallel/core/trace.h>
#include <hyper_parallel/dtensor/dtensor.h>

#include "optim/flat_update.h"
#include "optim/muon_exchange.h"

namespace hyper_parallel::optim {
namespace {

constexpr std::string_view kOp = "Muon";

ParameterPredicate matrices_of(const MuonOptions& options) {
  return [wanted = options.matrices, others = options.not_matrices](const std::string& name,
                                                                    const std::vector<std::int64_t>& shape) {
    if (std::find(others.begin(), others.end(), name) != others.end()) return false;
    return wanted ? wanted(name, shape) : shape.size() == 2;
  };
}

AdamWOptions adamw_options(const MuonOptions& options) {
  AdamWOptions result = options.adamw;
  result.parameters = [is_matrix = matrices_of(options), wanted = options.adamw.parameters](
                          const std::string& name, const std::vector<std::int64_t>& shape) {
    return !is_matrix(name, shape) && (!wanted || wanted(name, shape));
  };
  return result;
}

/// What each rank of `comm` owns of a tensor.
std::vector<std::vector<Box>> boxes_by_rank(const DTensor& tensor, const Comm& comm) {
  const DeviceMesh& mesh = tensor.device_mesh();
  const std::vector<int>& members = mesh.ranks();
  std::vector<std::vector<Box>> boxes;
  for (const int rank : comm.ranks()) {
    auto position = static_cast<std::int64_t>(std::find(members.begin(), members.end(), rank) - members.begin());
    std::vector<std::int64_t> coordinate(static_cast<std::size_t>(mesh.ndim()));
    for (std::size_t axis = coordinate.size(); axis-- > 0;) {
      coordinate[axis] = position % mesh.shape()[axis];
      position /= mesh.shape()[axis];
    }
    boxes.push_back(tensor.layout().boxes(tensor.shape(), coordinate));
  }
  return boxes;
}

void check_options(const MuonOptions& o) {
  check_value(o.momentum >= 0 && o.momentum < 1, kOp, "momentum is ", o.momentum, ", want 0 to below 1");
  check_value(o.ns_steps >= 0 && o.ns_steps < 100, kOp, "ns_steps is ", o.ns_steps, ", want 0 to 99");
  check_value(o.eps >= 0, kOp, "eps is ", o.eps, ", want at least 0");
  check_value(o.ns_dtype == c10::ScalarType::Float || o.ns_dtype == c10::ScalarType::BFloat16, kOp, "ns_dtype is ", o.ns_dtype,
              ", want float32 or bfloat16");
}

}  // namespace

Muon::Muon(const fsdp::UnitHandle& root, MuonOptions options)
    : FlatOptimizer(root, {.op = std::string(kOp),
                           .defaults = {.lr = options.lr, .weight_decay = options.weight_decay},
                           .groups = options.groups,
                           .parameters = matrices_of(options),
                           .state_dtype = options.state_dtype,
                           .master_weights = options.master_weights,
                           .slots = {"momentum_buffer"}}),
      options_(std::move(options)),
      adamw_(root, adamw_options(options_)) {
  check_options(options_);
  const std::vector<fsdp::ShardedGroup> all = shards();
  const std::vector<std::pair<std::string, DTensor>> tensors = root.named_dtensors();
  std::set<std::string> others(options_.not_matrices.begin(), options_.not_matrices.end());
  auto tensor = tensors.begin();
  for (std::size_t g = 0; g < all.size(); ++g) {
    const Comm& comm = all[g].parts_comm;
    for (std::size_t i = 0; i < all[g].parameters.size(); ++i, ++tensor) {
      const auto& parameter = all[g].parameters[i];
      others.erase(parameter.name);
      if (groups_[g].parameters[i].group < 0) continue;
      check_value(parameter.full_shape.size() == 2, kOp, parameter.name, " has ", parameter.full_shape.size(),
                  " dimensions, want a matrix: leave it to AdamW");
      auto exchange = std::find_if(exchanges_.begin(), exchanges_.end(),
                                   [&](const auto& known) { return known->comm().ranks() == comm.ranks(); });
      if (exchange == exchanges_.end()) {
        const NewtonSchulz iteration{options_.ns_coefficients, options_.eps, options_.ns_steps};
        exchange = exchanges_.insert(exchanges_.end(), std::make_unique<MuonExchange>(comm, options_.ns_dtype, iteration));
      }
      MuonMatrix matrix{.name = parameter.name,
                        .group = g,
                        .index = i,
                        .rows = parameter.full_shape[0],
                        .columns = parameter.full_shape[1],
                        .boxes = boxes_by_rank(tensor->second, comm)};
      std::int64_t numel = 0;
      for (const auto& boxes : matrix.boxes) {
        std::int64_t& mine = matrix.numel.emplace_back(0);
        for (const Box& box : boxes) mine += box.numel();
        numel += mine;
      }
      check_internal(numel == matrix.rows * matrix.columns, kOp, "the parts of ", parameter.name, " are not the whole");
      (*exchange)->add(std::move(matrix));
    }
  }
  check_value(others.empty(), kOp, "not_matrices lists ", others.empty() ? "" : *others.begin(),
              ", want the name of a parameter of the tree");
  for (const auto& exchange : exchanges_) exchange->assign();
}

Muon::~Muon() = default;
Muon::Muon(Muon&&) noexcept = default;
Muon& Muon::operator=(Muon&&) noexcept = default;

void Muon::step() {
  const trace::Span span("optim", op());
  at::NoGradGuard no_grad;
  const std::vector<fsdp::ShardedGroup> all = shards_to_update();
  for (const auto& exchange : exchanges_) {
    for (MuonMatrix& matrix : exchange->matrices()) matrix.active = all[matrix.group].parameters[matrix.index].grad.defined();
    exchange->begin();
    for (const MuonMatrix& matrix : exchange->matrices()) {
      const fsdp::ShardedGroup& shard = all[matrix.group];
      if (!begin(shard, groups_[matrix.group], matrix.index)) continue;
      const Update own = update_of(shard, groups_[matrix.group], matrix.index);
      momentum({.gradient = own.gradient,
                .buffer = own.slots[0],
                .update = values_of(exchange->piece(matrix)),
                .numel = own.numel,
                .momentum = options_.momentum,
                .nesterov = options_.nesterov});
    }
    exchange->run();
    for (const MuonMatrix& matrix : exchange->matrices()) {
      const auto& parameter = all[matrix.group].parameters[matrix.index];
      if (!matrix.active || parameter.numel == 0) continue;
      const Update own = update_of(all[matrix.group], groups_[matrix.group], matrix.index);
      const auto rows = static_cast<double>(matrix.rows), columns = static_cast<double>(matrix.columns);
      const double ratio = options_.adjust_lr_fn == MuonLr::kOriginal ? std::sqrt(std::max(1.0, rows / columns))
                                                                      : 0.2 * std::sqrt(std::max(rows, columns));
      apply_update({.weights = own.weights,
                    .update = values_of(exchange->piece(matrix)),
                    .numel = own.numel,
                    .keep = 1 - own.settings.lr * own.settings.weight_decay,
                    .factor = -own.settings.lr * ratio});
      count_write(parameter.sharded);
    }
  }
  adamw_.step();
}

void Muon::update(const Update&) { check_internal(false, kOp, "matrices are not updated one by one"); }

std::vector<double> Muon::lrs() const {
  std::vector<double> lrs = FlatOptimizer::lrs();
  const std::vector<double> others = adamw_.lrs();
  lrs.insert(lrs.end(), others.begin(), others.end());
  return lrs;
}

void Muon::set_lrs(const std::vector<double>& lrs) {
  const std::size_t matrices = settings_.size(), others = adamw_.num_groups();
  check_value(lrs.size() == matrices + others, kOp, lrs.size(), " learning rates, want ", matrices + others,
              ", one for each parameter group of matrices, then of AdamW");
  for (const double lr : lrs) check_value(lr >= 0, kOp, "lr is ", lr, ", want at least 0");
  const auto middle = lrs.begin() + static_cast<std::ptrdiff_t>(matrices);
  FlatOptimizer::set_lrs({lrs.begin(), middle});
  adamw_.set_lrs({middle, lrs.end()});
}

std::vector<FlatOptimizer::State> Muon::state() const {
  std::vector<State> states = FlatOptimizer::state();
  for (State& state : adamw_.state()) states.push_back(std::move(state));
  return states;
}

std::pair<std::vector<Muon::State>, std::vector<Muon::State>> Muon::divided(const std::vector<State>& states) const {
  std::set<std::string> names;
  for (const State& state : FlatOptimizer::state()) names.insert(state.name);
  std::pair<std::vector<State>, std::vector<State>> result;
  for (const State& state : states) (names.contains(state.name) ? result.first : result.second).push_back(state);
  return result;
}

void Muon::check_state(const std::vector<State>& states) {
  const auto [matrices, others] = divided(states);
  FlatOptimizer::check_state(matrices);
  adamw_.check_state(others);
}

void Muon::load_state(const std::vector<State>& states) {
  check_state(states);
  const auto [matrices, others] = divided(states);
  FlatOptimizer::load_state(matrices);
  adamw_.load_state(others);
}

std::vector<ParamGroupState> Muon::param_groups() const {
  std::vector<ParamGroupState> groups = FlatOptimizer::param_groups();
  for (ParamGroupState& group : adamw_.param_groups()) groups.push_back(std::move(group));
  return groups;
}

std::int64_t Muon::state_bytes() const {
  std::int64_t bytes = FlatOptimizer::state_bytes() + adamw_.state_bytes();
  for (const auto& exchange : exchanges_) bytes += exchange->buffer_bytes();
  return bytes;
}

std::int64_t Muon::bytes_per_step() const {
  std::int64_t bytes = 0;
  for (const auto& exchange : exchanges_) bytes += exchange->bytes_per_step();
  return bytes;
}

std::vector<std::pair<std::string, int>> Muon::owners() const {
  std::vector<std::pair<std::string, int>> owners;
  for (const auto& exchange : exchanges_) {
    for (const MuonMatrix& matrix : exchange->matrices()) owners.emplace_back(matrix.name, matrix.owner);
  }
  return owners;
}

}  // namespace hyper_parallel::optim
