#include "optim/muon_exchange.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "optim/norm.h"

namespace hyper_parallel::optim {
namespace {

/// Multiplications of one iteration.
double cost(const MuonMatrix& matrix) {
  const auto small = static_cast<double>(std::min(matrix.rows, matrix.columns));
  const auto large = static_cast<double>(std::max(matrix.rows, matrix.columns));
  return small * small * (2 * large + small);
}

at::Tensor box_of(const at::Tensor& whole, const Box& box) {
  return whole.narrow(0, box.offset[0], box.size[0]).narrow(1, box.offset[1], box.size[1]);
}

}  // namespace

MuonExchange::MuonExchange(Comm comm, c10::ScalarType dtype, NewtonSchulz iteration)
    : comm_(std::move(comm)), dtype_(dtype), iteration_(iteration) {}

void MuonExchange::assign() {
  std::vector<std::size_t> order(matrices_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cost(matrices_[a]) > cost(matrices_[b]); });
  std::vector<double> work(static_cast<std::size_t>(comm_.size()), 0.0);
  for (const std::size_t i : order) {
    const auto least = std::min_element(work.begin(), work.end());
    *least += cost(matrices_[i]);
    matrices_[i].owner = static_cast<int>(least - work.begin());
  }

  const int rank = comm_.rank();
  const auto me = static_cast<std::size_t>(rank);
  std::int64_t sent = 0, received = 0, largest = 0, small = 0;
  for (const MuonMatrix& matrix : matrices_) {
    sent += matrix.numel[me];
    if (matrix.owner != rank) continue;
    received += matrix.rows * matrix.columns;
    largest = std::max(largest, matrix.rows * matrix.columns);
    small = std::max(small, std::min(matrix.rows, matrix.columns));
  }
  const auto flat = [&](std::int64_t numel) { return at::empty({numel}, at::TensorOptions().dtype(dtype_)); };
  send_ = flat(sent);
  receive_ = comm_.size() > 1 ? flat(received) : send_;
  whole_ = flat(largest), next_ = flat(largest);
  gram_ = flat(small * small), update_ = flat(small * small);
}

std::int64_t MuonExchange::bytes_per_step() const {
  const auto me = static_cast<std::size_t>(comm_.rank());
  std::int64_t elements = 0;
  for (const MuonMatrix& matrix : matrices_) {
    const std::int64_t mine = matrix.numel[me];
    elements += matrix.owner == comm_.rank() ? matrix.rows * matrix.columns - mine : mine;
  }
  return elements * static_cast<std::int64_t>(c10::elementSize(dtype_));
}

std::int64_t MuonExchange::buffer_bytes() const {
  std::size_t bytes = send_.nbytes() + (comm_.size() > 1 ? receive_.nbytes() : 0);
  for (const at::Tensor* tensor : {&whole_, &next_, &gram_, &update_}) bytes += tensor->nbytes();
  return static_cast<std::int64_t>(bytes);
}

void MuonExchange::begin() {
  const auto world = static_cast<std::size_t>(comm_.size()), me = static_cast<std::size_t>(comm_.rank());
  send_sizes_.assign(world, 0);
  receive_sizes_.assign(world, 0);
  std::int64_t offset = 0;
  for (std::size_t owner = 0; owner < world; ++owner) {
    for (MuonMatrix& matrix : matrices_) {
      if (!matrix.active || matrix.owner != static_cast<int>(owner)) continue;
      matrix.send_offset = offset;
      offset += matrix.numel[me];
      send_sizes_[owner] += matrix.numel[me];
      for (std::size_t rank = 0; owner == me && rank < world; ++rank) receive_sizes_[rank] += matrix.numel[rank];
    }
  }
}

at::Tensor MuonExchange::piece(const MuonMatrix& matrix) const {
  return send_.narrow(0, matrix.send_offset, matrix.numel[static_cast<std::size_t>(comm_.rank())]);
}

void MuonExchange::run() {
  const auto total = [](const std::vector<std::int64_t>& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  };
  const at::Tensor send = send_.narrow(0, 0, total(send_sizes_)), receive = receive_.narrow(0, 0, total(receive_sizes_));
  const bool alone = comm_.size() == 1;
  const CommOptions options{.label = "Muon"};
  if (!alone) comm_.all_to_all_single(receive, send, receive_sizes_, send_sizes_, options).wait();
  std::vector<std::int64_t> offsets(receive_sizes_.size(), 0);  // of the next matrix in what each rank sent
  std::exclusive_scan(receive_sizes_.begin(), receive_sizes_.end(), offsets.begin(), std::int64_t{0});
  for (const MuonMatrix& matrix : matrices_) {
    if (!matrix.active || matrix.owner != comm_.rank()) continue;
    orthogonalize(matrix, offsets);
    for (std::size_t rank = 0; rank < offsets.size(); ++rank) offsets[rank] += matrix.numel[rank];
  }
  if (!alone) comm_.all_to_all_single(send, receive, send_sizes_, receive_sizes_, options).wait();
}

void MuonExchange::orthogonalize(const MuonMatrix& matrix, const std::vector<std::int64_t>& offsets) {
  at::Tensor whole = whole_.narrow(0, 0, matrix.rows * matrix.columns).view({matrix.rows, matrix.columns});
  const auto visit = [&](auto&& f) {
    for (std::size_t rank = 0; rank < offsets.size(); ++rank) {
      std::int64_t offset = offsets[rank];
      for (const Box& box : matrix.boxes[rank]) {
        f(box_of(whole, box), receive_.narrow(0, offset, box.numel()).view(box.size));
        offset += box.numel();
      }
    }
  };
  visit([](const at::Tensor& place, const at::Tensor& piece) { place.copy_(piece); });
  whole = iterate(whole);
  visit([](const at::Tensor& place, const at::Tensor& piece) { piece.copy_(place); });
}

/// Works on the wide form of the matrix; a tall one is its own transpose's view, in and out.
at::Tensor MuonExchange::iterate(const at::Tensor& whole) {
  const bool tall = whole.size(0) > whole.size(1);
  const auto wide = [&](const at::Tensor& x) { return tall ? x.t() : x; };
  const std::int64_t small = std::min(whole.size(0), whole.size(1));
  at::Tensor x = whole, next = next_.narrow(0, 0, whole.numel()).view(whole.sizes());
  at::Tensor gram = gram_.narrow(0, 0, small * small).view({small, small});
  at::Tensor update = update_.narrow(0, 0, small * small).view({small, small});

  const double norm = std::sqrt(power_sum(values_of(x), x.numel(), 2));
  scale(values_of(x), x.numel(), 1 / std::max(norm, iteration_.eps));
  const auto [a, b, c] = iteration_.coefficients;
  for (std::int64_t step = 0; step < iteration_.steps; ++step) {
    const at::Tensor from = wide(x);
    at::Tensor to = wide(next);
    at::mm_out(gram, from, from.t());
    at::addmm_out(update, gram, gram, gram, b, c);
    at::addmm_out(to, from, update, from, a, 1);
    std::swap(x, next);
  }
  return x;
}

}  // namespace hyper_parallel::optim
