// The gradient half of ParamGroup.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/zeros.h>

#include "comm/rows.h"
#include "fsdp/flat_tensor.h"
#include "fsdp/param_group.h"

namespace hyper_parallel::fsdp {

namespace {

bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() == b.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl();
}

}  // namespace

ParamGroup::Pack ParamGroup::make_pack(at::ScalarType dtype) const {
  const std::int64_t numel = layout_.shard_numel() * layout_.world();
  const at::TensorOptions options = compute_.dtype(dtype);
  Pack pack;
  pack.buffer = SwappedBuffer(numel, options, "[fully_shard] internal: reduce buffer used after it was freed");
  if (layout_.world() > 1) {
    pack.receive = SwappedBuffer(numel, options, "[fully_shard] internal: receive buffer used after it was freed", receive_use());
  }
  pack.pieces = pack_pieces(pack.buffer.flat());
  for (const auto& range : layout_.padding()) pack.padding.push_back(pack.buffer.flat().narrow(0, range.offset, range.numel));
  return pack;
}

/// Where shards are mapped, rows are summed in the peers' memory, and received only where a rank is late.
MemoryPool::Use ParamGroup::receive_use() const { return can_map() ? MemoryPool::Use::kSpare : MemoryPool::Use::kData; }

std::vector<ParamGroup::Piece> ParamGroup::pack_pieces(const at::Tensor& flat) const {
  std::vector<Piece> pieces;
  const int world = layout_.world();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& shape = parameters_[i].full_shape;
    if (layout_.numel(i) == 0) continue;
    if (layout_.in_place()) {
      pieces.push_back(
          {.parameter = i, .view = shape, .place = flat.narrow(0, layout_.full_offset(i), layout_.numel(i)).view(shape)});
      if (shape.empty()) pieces.back().view = {1}, pieces.back().place = pieces.back().place.view({1});
      continue;
    }
    const std::int64_t dim = layout_.parameter(i).shard_dim;
    const auto& first = layout_.slice(i, 0);
    if (dim == 0 && first.numel * world == layout_.numel(i)) {
      Piece piece{.parameter = i, .view = {world, first.numel}};
      piece.place = flat.view({world, layout_.shard_numel()}).narrow(1, first.shard_offset, first.numel);
      pieces.push_back(std::move(piece));
      continue;
    }
    for (int rank = 0; rank < world; ++rank) {
      const auto& slice = layout_.slice(i, rank);
      if (slice.numel == 0) continue;
      const at::Tensor row = flat.narrow(0, rank * layout_.shard_numel() + slice.shard_offset, slice.numel);
      if (shape.empty()) {
        pieces.push_back({.parameter = i, .view = {1}, .place = row});
      } else {
        pieces.push_back({.parameter = i,
                          .dim = dim,
                          .start = slice.start,
                          .length = slice.shape[static_cast<std::size_t>(dim)],
                          .place = row.view(slice.shape)});
      }
    }
  }
  return pieces;
}

/// A wider dtype holds every gradient exactly, so that they can travel as they are. Custom communication sums in what it is
/// given.
void ParamGroup::choose_wire_dtype() {
  const bool wider = c10::elementSize(options_.reduce_dtype) > c10::elementSize(options_.compute_dtype);
  wire_dtype_ = wider && !options_.settings->reduce_scatter ? options_.compute_dtype : options_.reduce_dtype;
  accum_dtype_differs_ = wire_dtype_ != options_.reduce_dtype;
}

void ParamGroup::settings_changed() {
  choose_wire_dtype();
  wire_ = {};
  accumulation_ = {};
}

bool ParamGroup::alone() const {
  const CommSettings& settings = *options_.settings;
  return layout_.world() == 1 && replicas_ == 1 && !settings.reduce_scatter && !settings.all_reduce_hook &&
         master_.device() == compute_.device();
}

/// Whether reductions go through the partial gradient instead of straight into the flat one.
bool ParamGroup::staged() const {
  const CommSettings& settings = *options_.settings;
  return replicas_ > 1 || settings.reduce_scatter || settings.all_reduce_hook || master_.device() != compute_.device();
}

void ParamGroup::ensure_grad() {
  ensure_packs();
  if (grad_.defined()) return;
  if (spare_grad_.defined() && spare_grad_.storage().use_count() == 1) {
    grad_ = std::move(spare_grad_);
  } else {
    const at::TensorOptions options = options_.main_grad ? master_.dtype(at::kFloat) : master_;
    grad_ = allocate_flat(layout_.shard_numel(), options, host_allocator());
  }
  grad_.zero_();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& slice = layout_.slice(i, rank_);
    parameters_[i].grad_home = part_of_flat(grad_, slice.shard_offset, slice.numel, slice.shape);
  }
}

void ParamGroup::ensure_packs() {
  if (alone() || wire_.buffer.defined()) return;
  wire_ = make_pack(wire_dtype_);
  if (accum_dtype_differs_) accumulation_ = make_pack(options_.reduce_dtype);
  const at::TensorOptions options = compute_.dtype(options_.reduce_dtype);
  partial_ = SwappedBuffer(layout_.shard_numel(), options, "[fully_shard] internal: partial gradient used after it was freed");
  exchange_ = SwappedBuffer(exchange_numel(), options, "[fully_shard] internal: exchange buffer used after it was freed");
}

/// Leaves the flat gradient to the tensors that still refer to it.
void ParamGroup::release_grad() {
  grad_.reset();
  for (auto& parameter : parameters_) parameter.grad_home.reset();
}

/// Receive space of the all-reduce over the replicas: one chunk from each.
std::int64_t ParamGroup::exchange_numel() const {
  const std::int64_t chunk = (layout_.shard_numel() + replicas_ - 1) / replicas_;
  return chunk * replicas_;
}

GroupFootprint ParamGroup::footprint(bool map) const {
  const auto bytes = [](std::int64_t numel, at::ScalarType dtype) {
    return static_cast<std::size_t>(numel) * c10::elementSize(dtype);
  };
  const std::int64_t n = layout_.shard_numel();
  const std::int64_t rows = n * layout_.world();
  GroupFootprint size{.trainable = trainable()};
  if (!aliased_ && !(map && can_map())) size.full = bytes(full_.flat().numel(), options_.compute_dtype);
  if (part_.defined()) size.part = bytes(part_.flat().numel(), options_.compute_dtype);
  if (!aliased_ && !layout_.in_place()) size.gathered = bytes(rows, options_.compute_dtype);
  size.gathered_use = gathered_use();
  size.together =
      (follows_ || !others_.empty()) && !(map && can_map()) && !options_.settings->all_gather && compute_.device().is_cpu();
  if (alone()) return size;
  size.wire = bytes(rows, wire_dtype_);
  if (accum_dtype_differs_) size.accumulation = bytes(rows, options_.reduce_dtype);
  if (layout_.world() > 1 && !options_.settings->reduce_scatter) {
    size.wire_receive = size.wire;
    size.accumulation_receive = size.accumulation;
    size.receive_use = receive_use();
  }
  size.custom = static_cast<bool>(options_.settings->reduce_scatter);
  size.staged = staged();
  size.replicated = replicas_ > 1;
  size.partial = bytes(n, options_.reduce_dtype);
  size.exchange = bytes(exchange_numel(), options_.reduce_dtype);
  return size;
}

std::int64_t ParamGroup::grad_bytes() const {
  std::size_t bytes = 0;
  for (const at::Tensor* flat : {&grad_, &spare_grad_}) bytes += flat->defined() ? flat->nbytes() : 0;
  return static_cast<std::int64_t>(bytes);
}

std::int64_t ParamGroup::planned_grad_bytes() const {
  if (!trainable()) return 0;
  return layout_.shard_numel() * static_cast<std::int64_t>(options_.main_grad ? sizeof(float) : master_.dtype().itemsize());
}

bool ParamGroup::any_grad() {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](ManagedParameter& parameter) { return gradient(parameter).defined(); });
}

/// Somebody but us refers to the flat gradient or to a part of it.
bool ParamGroup::kept_elsewhere() const {
  return grad_.defined() && (grad_.storage().use_count() > 1 + parameters_.size() ||
                             std::any_of(parameters_.begin(), parameters_.end(), [](const ManagedParameter& parameter) {
                               return parameter.grad_home.storage().use_count() > 1;
                             }));
}

/// Brings the flat gradient into the state that the leaves' .grad describe, on top of what it holds if that is to be kept; true
/// when the new result must be added to it.
bool ParamGroup::prepare_grad(bool keep) {
  const bool any = any_grad();
  // The user has kept a .grad and let go of it here.
  if (!keep && !any && kept_elsewhere()) release_grad();
  ensure_grad();
  if (!any) return keep;
  for (auto& parameter : parameters_) {
    at::Tensor& grad = gradient(parameter);
    if (grad.defined()) {
      if (same_storage(grad, parameter.grad_home)) continue;
      keep ? parameter.grad_home.add_(grad.detach()) : parameter.grad_home.copy_(grad.detach());
      grad = parameter.grad_home.variable_data();
      gradient_changed(parameter);
    } else if (!keep) {
      parameter.grad_home.zero_();
    }
  }
  return true;
}

void ParamGroup::check_gradients(const std::vector<at::Tensor>& gradients) const {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    check_value(gradients[i].layout() == at::kStrided, "fully_shard", "the gradient of ", describe(i), " is ",
                gradients[i].layout(), ", want Strided: build the embedding with sparse(false)");
  }
}

void ParamGroup::pack(Pack& pack, std::vector<at::Tensor>& gradients, bool add) {
  sources_.clear();
  places_.clear();
  for (const Piece& piece : pack.pieces) {
    const auto& parameter = parameters_[piece.parameter];
    const at::Tensor& gradient = gradients[piece.parameter];
    if (!gradient.defined() || !parameter.trainable) {
      if (!add) piece.place.zero_();
      continue;
    }
    sources_.push_back(piece.view.empty() ? gradient.narrow(piece.dim, piece.start, piece.length) : gradient.reshape(piece.view));
    places_.push_back(piece.place);
  }
  if (!add) {
    for (const at::Tensor& padding : pack.padding) padding.zero_();
    if (!places_.empty()) at::_foreach_copy_(places_, sources_);
  } else {
    for (std::size_t i = 0; i < places_.size(); ++i) places_[i].add_(sources_[i]);
  }
  sources_.clear();
  places_.clear();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && parameters_[i].trainable) parameters_[i].present = true;
    gradients[i].reset();  // dropped at once, so that the next backward can use the memory
  }
}

/// World of one: straight into the flat gradient.
void ParamGroup::reduce_alone(std::vector<at::Tensor>& gradients, bool add) {
  sources_.clear();
  places_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (!gradients[i].defined() || !parameter.trainable) {
      if (!add) parameter.grad_home.zero_();
      continue;
    }
    parameter.present = true;
    sources_.push_back(parameter.grad_home.sizes() == gradients[i].sizes() ? std::move(gradients[i])
                                                                           : gradients[i].reshape(parameter.grad_home.sizes()));
    places_.push_back(parameter.grad_home);
    gradients[i].reset();
  }
  if (add) {
    for (std::size_t i = 0; i < places_.size(); ++i) places_[i].add_(sources_[i]);
  } else if (!places_.empty()) {
    at::_foreach_copy_(places_, sources_);
  }
  sources_.clear();
  places_.clear();
}

void ParamGroup::accumulate(std::vector<at::Tensor>& gradients, MemoryPool& pool) {
  at::NoGradGuard no_grad;
  check_gradients(gradients);
  // Alone, nothing is ever sent: the flat gradient itself is the accumulator. A .grad that is there keeps its memory until then;
  // the next step that finds one accumulates in that.
  if (alone() && !accumulated_) {
    const at::Tensor kept = any_grad() || kept_elsewhere() ? grad_ : at::Tensor();
    if (kept.defined()) release_grad();
    ensure_grad();
    spare_grad_ = kept;
  }
  ensure_grad();
  if (alone()) {
    reduce_alone(gradients, accumulated_);
  } else {
    if (!accumulated_) accumulation().buffer.acquire(pool);
    pack(accumulation(), gradients, accumulated_);
  }
  accumulated_ = true;
}

void ParamGroup::start_reduce(std::vector<at::Tensor>& gradients, bool again, MemoryPool& pool) {
  at::NoGradGuard no_grad;
  check_gradients(gradients);
  check_internal(stage_ == Stage::kIdle, "fully_shard", "reduction of unit ", options_.unit, " started twice");
  if (alone()) {
    const double factor = scales().first;
    if (accumulated_) {
      reduce_alone(gradients, true);
      if (factor != 1.0) grad_.mul_(factor);
      (void)prepare_grad(true);
    } else if (const bool add = prepare_grad(again); factor == 1.0 || !add) {
      reduce_alone(gradients, add);
      if (factor != 1.0) grad_.mul_(factor);
    } else {
      for (at::Tensor& gradient : gradients) {
        if (gradient.defined()) gradient = gradient.mul(factor);
      }
      reduce_alone(gradients, true);
    }
    accumulated_ = false;
    return;
  }
  add_to_grad_ = prepare_grad(again);
  Pack& source = accumulated_ ? accumulation() : wire_;
  if (!accumulated_) source.buffer.acquire(pool);
  pack(source, gradients, accumulated_);
  accumulated_ = false;
  in_flight_ = &source;
  stage_ = Stage::kReduceScatter;
}

/// Factors of the sum over the shard group and of the one over the replicas; together the average, or what was set instead.
/// Low-precision partial sums are averaged at once so that they stay in range; otherwise there is one scale, at the very end.
std::pair<double, double> ParamGroup::scales() const {
  const CommSettings& settings = *options_.settings;
  const double ranks = static_cast<double>(layout_.world()) * replicas_;
  const bool sum = settings.reduce_op == ReduceOp::kSum && !settings.divide_factor;
  const bool average = settings.reduce_op == ReduceOp::kAvg && !settings.divide_factor;
  // Copies along source axes: an average must not divide summands, and what adds must divide whole gradients.
  const double copies =
      static_cast<double>(average ? options_.partial_copies : 1) / static_cast<double>(average ? 1 : options_.whole_copies);
  const double total = settings.scaling_factor.value_or(1.0) * copies / (sum ? 1.0 : settings.divide_factor.value_or(ranks));
  // What is parked is added to reductions that may have another factor: it carries its own.
  if (replicas_ == 1 || park_ || parked_ || sum) return {total, 1.0};
  if (c10::elementSize(options_.reduce_dtype) < 4) return {total * replicas_, 1.0 / replicas_};
  return {1.0, total};
}

void ParamGroup::launch_reduce(bool park, MemoryPool& pool) {
  at::NoGradGuard no_grad;
  if (stage_ != Stage::kReduceScatter) return;
  park_ = park;
  scales_ = scales();  // those of now, also for the stages that follow later
  to_partial_ = staged() || park_ || parked_;
  if (to_partial_ && !parked_) partial_.acquire(pool);
  launch_scatter(pool);
}

void ParamGroup::launch_scatter(MemoryPool& pool) {
  Pack& source = *in_flight_;
  const double scale = scales_.first;
  if (const auto& custom = options_.settings->reduce_scatter) {
    custom_reduced_ = true;
    if (parked_) exchange_.acquire(pool);
    const at::Tensor output = parked_ ? exchange_.flat().narrow(0, 0, layout_.shard_numel()) : partial_.flat();
    reduction_ = PendingComm(custom(options_.shard_comm, output, source.buffer.flat()));
    return;
  }
  if (source.receive.defined()) source.receive.acquire(pool);
  const ReduceScatterOptions options{.scale = scale,
                                     .accumulate = to_partial_ ? parked_ : add_to_grad_,
                                     .workspace = source.receive.defined() ? &source.receive.flat() : nullptr,
                                     .label = options_.unit};
  reduction_ = reduce_scatter_with_notes(options_.shard_comm, to_partial_ ? partial_.flat() : grad_, source.buffer.flat(),
                                         write_presence(scatter_notes_, options_.shard_comm), options);
}

void ParamGroup::finish_scatter(MemoryPool& pool) {
  in_flight_->buffer.release(pool);
  in_flight_->receive.release(pool);
  in_flight_ = nullptr;
  if (!options_.settings->reduce_scatter) return read_presence(scatter_notes_, options_.shard_comm);
  const at::Tensor output = parked_ ? exchange_.flat().narrow(0, 0, layout_.shard_numel()) : partial_.flat();
  if (scales_.first != 1.0) output.mul_(scales_.first);
  if (!parked_) return;
  partial_.flat().add_(output);
  exchange_.release(pool);
}

bool ParamGroup::advance_reduce(MemoryPool& pool) {
  if (stage_ == Stage::kIdle) return false;
  at::NoGradGuard no_grad;
  if (stage_ == Stage::kAllReduce) {
    reduction_.advance();
    read_presence(replica_notes_, options_.replicate_comm);
    exchange_.release(pool);
    stage_ = Stage::kSpread;
    return true;
  }
  reduction_.wait();
  if (stage_ == Stage::kReduceScatter) {
    finish_scatter(pool);
    if (!park_ && replicas_ > 1) {
      exchange_.acquire(pool);
      reduction_ =
          all_reduce_with_notes(options_.replicate_comm, partial_.flat(), write_presence(replica_notes_, options_.replicate_comm),
                                {.scale = scales_.second, .workspace = &exchange_.flat(), .label = options_.unit});
      stage_ = Stage::kAllReduce;
      return true;
    }
  }
  finish_reduce(pool);
  stage_ = Stage::kIdle;
  return false;
}

void ParamGroup::finish_reduce(MemoryPool& pool) {
  parked_ = park_;
  if (park_ || !to_partial_) return;
  if (const auto& hook = options_.settings->all_reduce_hook) hook(partial_.flat());
  if (add_to_grad_) {
    grad_.add_(partial_.flat().device() == grad_.device() ? partial_.flat() : partial_.flat().to(grad_.device()));
  } else {
    grad_.copy_(partial_.flat());
  }
  partial_.release(pool);
}

void ParamGroup::reset(MemoryPool& pool) {
  if (reduction_.pending()) reduction_.wait();
  for (Pack* pack : {&wire_, &accumulation_}) {
    pack->buffer.release(pool);
    pack->receive.release(pool);
  }
  partial_.release(pool);
  exchange_.release(pool);
  in_flight_ = nullptr;
  stage_ = Stage::kIdle;
  accumulated_ = false;
  parked_ = false;
  forget_presence();
}

/// Which parameters have a gradient travels with what is sent anyway: row r of `notes` is rank r's, one bit per parameter.
const at::Tensor& ParamGroup::write_presence(at::Tensor& notes, const Comm& comm) const {
  if (comm.size() == 1) return notes;
  const std::size_t bytes = (parameters_.size() + 7) / 8;
  if (!notes.defined()) notes = at::zeros({comm.size() * static_cast<std::int64_t>(bytes)}, at::kByte);
  auto* mine = static_cast<std::uint8_t*>(notes.mutable_data_ptr()) + static_cast<std::size_t>(comm.rank()) * bytes;
  std::fill_n(mine, bytes, std::uint8_t{0});
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].present) mine[i / 8] |= static_cast<std::uint8_t>(1U << (i % 8));
  }
  return notes;
}

void ParamGroup::read_presence(const at::Tensor& notes, const Comm& comm) {
  if (!notes.defined()) return;
  const std::size_t bytes = (parameters_.size() + 7) / 8;
  const auto* row = static_cast<const std::uint8_t*>(notes.const_data_ptr());
  for (int rank = 0; rank < comm.size(); ++rank, row += bytes) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if ((row[i / 8] >> (i % 8)) & 1U) parameters_[i].present = true;
    }
  }
}

void ParamGroup::forget_presence() {
  for (auto& parameter : parameters_) parameter.present = false;
  custom_reduced_ = false;
}

void ParamGroup::install_grad(std::size_t i) {
  auto& parameter = parameters_[i];
  at::Tensor& grad = gradient(parameter);
  if (grad.defined()) {
    if (same_storage(grad, parameter.grad_home)) {
      if (parameter.leaf) parameter.leaf->grad_arrived();
      return;
    }
    // Autograd put it there after the reduction began: the loss has a term that reads the shard itself.
    parameter.grad_home.add_(grad.detach());
  }
  grad = parameter.grad_home.variable_data();
  gradient_changed(parameter);
  if (parameter.leaf) parameter.leaf->grad_arrived();
}

}  // namespace hyper_parallel::fsdp
