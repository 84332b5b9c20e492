// Collectives move flat buffers; these cut and join tensors along any dimension around them.
#include "parallel/transfer.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "comm/reduce.h"

namespace hyper_parallel::parallel {
namespace {

using Shape = std::vector<std::int64_t>;

Shape with_length(const at::Tensor& x, std::int64_t dim, std::int64_t length) {
  Shape shape = x.sizes().vec();
  shape[static_cast<std::size_t>(dim)] = length;
  return shape;
}

/// Elements of x for one step along `dim`.
std::int64_t elements_per_step(const at::Tensor& x, std::int64_t dim) { return c10::multiply_integers(with_length(x, dim, 1)); }

/// Whether chunks along `dim` of a contiguous tensor lie one after the other.
bool outermost(const at::Tensor& x, std::int64_t dim) {
  for (std::int64_t d = 0; d < dim; ++d) {
    if (x.size(d) != 1) return false;
  }
  return true;
}

bool equal_sizes(const Shape& sizes) { return std::equal(sizes.begin() + 1, sizes.end(), sizes.begin()); }

Shape times(const Shape& sizes, std::int64_t factor) {
  Shape result = sizes;
  for (std::int64_t& size : result) size *= factor;
  return result;
}

std::int64_t sum_of(const Shape& sizes) { return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}); }

at::Tensor fresh(const Shape& shape, const at::Tensor& like) { return at::empty(shape, like.options().requires_grad(false)); }

/// Chunk after chunk, each contiguous.
at::Tensor in_chunks(const at::Tensor& x, const DimCut& cut) {
  if (outermost(x, cut.dim)) return x.contiguous();
  std::vector<at::Tensor> chunks;
  for (const at::Tensor& chunk : x.split_with_sizes(cut.sizes, cut.dim)) chunks.push_back(chunk.reshape({-1}));
  return at::cat(chunks);
}

}  // namespace

at::Tensor summed(const at::Tensor& x, const Comm& comm, const std::string& label, ReduceOp op) {
  at::Tensor sum = x.detach().clone(at::MemoryFormat::Contiguous);
  comm.all_reduce(sum, {.op = op, .label = label}).wait();
  return sum;
}

at::Tensor gathered(const at::Tensor& x, const Comm& comm, const DimCut& cut, const std::string& label) {
  const at::Tensor input = x.detach().contiguous();
  const std::int64_t step = elements_per_step(x, cut.dim);
  const bool in_place = outermost(x, cut.dim);
  const std::int64_t length = sum_of(cut.sizes);
  // Of its final shape: results are no views, so that callers may change them in place.
  const at::Tensor flat = fresh(in_place ? with_length(x, cut.dim, length) : Shape{length * step}, x);
  if (equal_sizes(cut.sizes)) {
    comm.all_gather_single(flat, input, {.label = label}).wait();
  } else {
    comm.all_gather_v(flat, input, times(cut.sizes, step), {.label = label}).wait();
  }
  if (in_place) return flat;
  std::vector<at::Tensor> chunks;
  std::int64_t begin = 0;
  for (const std::int64_t size : cut.sizes) {
    chunks.push_back(flat.narrow(0, begin, size * step).view(with_length(x, cut.dim, size)));
    begin += size * step;
  }
  return at::cat(chunks, cut.dim);
}

at::Tensor reduced(const at::Tensor& x, const Comm& comm, const DimCut& cut, const std::string& label) {
  const at::Tensor packed = in_chunks(x.detach(), cut);
  const std::int64_t length = cut.sizes[static_cast<std::size_t>(comm.rank())];
  const at::Tensor output = fresh(with_length(x, cut.dim, length), x);
  if (equal_sizes(cut.sizes)) {
    comm.reduce_scatter_single(output, packed, {.label = label}).wait();
    return output;
  }
  // Comm has no reduction of uneven chunks: its two halves, with the same arithmetic.
  check_reduction("reduce_scatter", x.scalar_type(), x.scalar_type(), ReduceOp::kSum, 1.0);
  const std::int64_t numel = output.numel();
  const Shape from_each(static_cast<std::size_t>(comm.size()), numel);
  const at::Tensor space = fresh({numel * comm.size()}, x);
  comm.all_to_all_single(space, packed, from_each, times(cut.sizes, elements_per_step(x, cut.dim)), {.label = label}).wait();
  if (numel == 0) return output;
  std::vector<const void*> rows;
  for (int r = 0; r < comm.size(); ++r) rows.push_back(space.narrow(0, r * numel, numel).const_data_ptr());
  reduce_rows({output.data_ptr(), x.scalar_type(), x.scalar_type(), numel}, rows);
  return output;
}

at::Tensor own_chunk(const at::Tensor& x, const Comm& comm, const DimCut& cut) {
  const auto rank = static_cast<std::size_t>(comm.rank());
  const std::int64_t begin = std::accumulate(cut.sizes.begin(), cut.sizes.begin() + comm.rank(), std::int64_t{0});
  return x.detach().narrow(cut.dim, begin, cut.sizes[rank]).clone(at::MemoryFormat::Contiguous);
}

at::Tensor exchanged(const at::Tensor& x, const Comm& comm, const Shape& output_rows, const Shape& input_rows,
                     const std::string& label) {
  const std::int64_t step = elements_per_step(x, 0);
  const at::Tensor output = fresh(with_length(x, 0, sum_of(output_rows)), x);
  comm.all_to_all_single(output, x.detach().contiguous(), times(output_rows, step), times(input_rows, step), {.label = label})
      .wait();
  return output;
}

}  // namespace hyper_parallel::parallel
