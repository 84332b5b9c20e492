// How each collective is built from pairs: docs/design/001-collectives-from-pairs.md.
#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/comm_impl.h"
#include "comm/rows.h"

namespace hyper_parallel {
namespace {

// Up to here all_reduce sends whole tensors in one phase, because a second round trip costs more than the bytes. With two ranks
// one phase sends no more than two do; only the sum is done twice.
constexpr std::int64_t kDirectAllReduceBytes = 4096;
constexpr std::int64_t kDirectAllReduceBytesOfTwo = 65536;

void check_same_dtype(Op op, const at::Tensor& output, const at::Tensor& input) {
  check_value(output.scalar_type() == input.scalar_type(), op_name(op), "output is ", c10::toString(output.scalar_type()),
              ", want the input's ", c10::toString(input.scalar_type()));
}

void check_peer(Op op, const char* what, int peer, const Comm::Impl& comm) {
  check_value(peer >= 0 && peer < comm.size, op_name(op), what, ' ', peer, ", want 0 to ", comm.size - 1, " (group ", comm.name,
              ')');
}

void* at_byte(const at::Tensor& tensor, std::int64_t offset) { return static_cast<char*>(tensor.data_ptr()) + offset; }

const void* const_at_byte(const at::Tensor& tensor, std::int64_t offset) {
  return static_cast<const char*>(tensor.const_data_ptr()) + offset;
}

// memmove semantics are not needed: `to` and `from` are equal or disjoint.
void copy_bytes(void* to, const void* from, std::int64_t nbytes) {
  if (to != from && nbytes > 0) std::memcpy(to, from, static_cast<std::size_t>(nbytes));
}

// An operation on its way: the Work owns it, so that an exception on the way gives everything back.
struct Started {
  Work work;
  Work::Impl* op;
  Started(const std::shared_ptr<Comm::Impl>& comm, Op kind, std::int64_t bytes, std::string_view label,
          std::optional<std::chrono::milliseconds> timeout)
      : op(nullptr) {
    auto made = begin(comm, kind, bytes, label, timeout);
    op = made.get();
    work = Work(std::move(made));
  }
};

// Offsets of chunks that lie one after the other; the last entry is the sum.
std::vector<std::int64_t> offsets_of(std::span<const std::int64_t> sizes) {
  std::vector<std::int64_t> out{0};
  out.reserve(sizes.size() + 1);
  for (const auto size : sizes) out.push_back(out.back() + size);
  return out;
}

// Sizes per rank: as given, or equal chunks of `numel`.
std::vector<std::int64_t> chunk_sizes(Op op, const char* what, std::span<const std::int64_t> given, std::int64_t numel,
                                      const Comm::Impl& comm) {
  if (given.empty()) {
    check_value(numel % comm.size == 0, op_name(op), what, " has ", numel, " elements, want a multiple of the group size ",
                comm.size, " (group ", comm.name, ')');
    return std::vector<std::int64_t>(static_cast<std::size_t>(comm.size), numel / comm.size);
  }
  check_value(given.size() == static_cast<std::size_t>(comm.size), op_name(op), given.size(), " sizes for ", what,
              ", want one for each of ", comm.size, " ranks (group ", comm.name, ')');
  std::int64_t sum = 0;
  for (const auto size : given) {
    check_value(size >= 0, op_name(op), "size ", size, " for ", what, ", want 0 or more (group ", comm.name, ')');
    sum += size;
  }
  check_value(sum == numel, op_name(op), what, " has ", numel, " elements, want the sum of its sizes, ", sum, " (group ",
              comm.name, ')');
  return {given.begin(), given.end()};
}

// Receive space of `nbytes`: the caller's workspace or fresh memory of the group's allocator.
at::Tensor receive_space(Op op, const Comm::Impl& comm, const at::Tensor* workspace, std::int64_t nbytes, c10::ScalarType dtype) {
  if (workspace == nullptr) return byte_buffer(comm.allocator, nbytes);
  check_tensor(op, "workspace", *workspace);
  check_value(workspace->scalar_type() == dtype, op_name(op), "workspace is ", c10::toString(workspace->scalar_type()),
              ", want the input's ", c10::toString(dtype));
  const auto have = static_cast<std::int64_t>(workspace->nbytes());
  check_value(have >= nbytes, op_name(op), "workspace has ", have, " bytes, want at least ", nbytes, " (group ", comm.name, ')');
  return *workspace;
}

// One message to or from `peer`, matched by the number of messages between the two ranks: the others know nothing of them.
Started start_message(const std::shared_ptr<Comm::Impl>& impl, Op op, std::vector<std::uint64_t> Comm::Impl::*count,
                      const at::Tensor& tensor, int peer, const CommOptions& options) {
  auto& comm = require(impl, op_name(op));
  check_tensor(op, "tensor", tensor);
  check_peer(op, "peer", peer, comm);
  check_value(peer != comm.rank, op_name(op), "peer ", peer, " is this rank itself (group ", comm.name, ')');
  Started started(impl, op, static_cast<std::int64_t>(tensor.nbytes()), options.label, options.timeout);
  started.op->tag_seed = static_cast<std::uint32_t>(++(comm.*count)[static_cast<std::size_t>(peer)]) | 0x80000000U;
  return started;
}

void check_notes(Op op, const at::Tensor& notes, const Comm::Impl& comm) {
  if (!notes.defined()) return;
  check_tensor(op, "notes", notes);
  check_value(notes.scalar_type() == c10::ScalarType::Byte && notes.numel() % comm.size == 0, op_name(op), "notes are ",
              notes.numel(), " of ", c10::toString(notes.scalar_type()), ", want bytes, a multiple of the group size ", comm.size,
              " (group ", comm.name, ')');
}

// An operation that may stay pending for long leaves its small receive space to others.
void leave_scratch(Work::Impl& op) {
  if (!op.scratch.defined()) return;
  auto& idle = op.comm->pool;
  auto other = std::find_if(idle.begin(), idle.end(), [](const auto& work) { return !work->scratch.defined(); });
  if (other == idle.end()) other = idle.insert(idle.begin(), std::make_unique<Work::Impl>());
  std::swap((*other)->scratch, op.scratch);
}

// `nbytes` of `own` from `offset` on go to every other rank, whose bytes come to the places of their ranks in `rows`.
void exchange_rows(Work::Impl& op, const at::Tensor& rows, const at::Tensor& own, std::int64_t offset, std::int64_t nbytes,
                   Kind kind = Kind::kFirst) {
  const auto& comm = *op.comm;
  for (int k = 1; k < comm.size; ++k) {
    const int from = (comm.rank - k + comm.size) % comm.size;
    op.post_receive(rows, from * nbytes, nbytes, from, kind);
  }
  for (int k = 1; k < comm.size; ++k) op.post_send(own, offset, nbytes, (comm.rank + k) % comm.size, kind);
}

void exchange_notes(Work::Impl& op, const at::Tensor& notes) {
  if (!notes.defined()) return;
  const auto& comm = *op.comm;
  const auto nbytes = notes.numel() / comm.size;
  exchange_rows(op, notes, notes, comm.rank * nbytes, nbytes, Kind::kNote);
  if (!comm.fake) return;
  for (int r = 0; r < comm.size; ++r) copy_bytes(at_byte(notes, r * nbytes), const_at_byte(notes, comm.rank * nbytes), nbytes);
}

double reduce_scale(ReduceOp op, double scale, int size) { return op == ReduceOp::kAvg ? scale / size : scale; }

}  // namespace

Work Comm::all_gather_single(const at::Tensor& output, const at::Tensor& input, const CommOptions& options) const {
  constexpr Op kOp = Op::kAllGather;
  auto& comm = require(impl_, op_name(kOp));
  check_tensor(kOp, "output", output);
  check_tensor(kOp, "input", input);
  check_same_dtype(kOp, output, input);
  check_value(output.numel() == input.numel() * comm.size, op_name(kOp), "output has ", output.numel(), " elements, want ",
              comm.size, " x ", input.numel(), " (group ", comm.name, ')');
  const auto nbytes = static_cast<std::int64_t>(input.nbytes());
  Started started(impl_, kOp, nbytes * comm.size, options.label, options.timeout);
  exchange_rows(*started.op, output, input, 0, nbytes);
  if (nbytes > 0) {
    for (int r = 0; r < comm.size; ++r) {
      if (r == comm.rank || comm.fake) copy_bytes(at_byte(output, r * nbytes), input.const_data_ptr(), nbytes);
    }
  }
  return std::move(started.work);
}

Work gather_rows(const Comm& group, std::span<const RowGather> parts, const CommOptions& options) {
  constexpr Op kOp = Op::kAllGather;
  auto& comm = require(group.shared_impl(), op_name(kOp));
  std::int64_t total = 0;
  for (const RowGather& part : parts) {
    check_tensor(kOp, "space", part.space);
    check_tensor(kOp, "input", part.input);
    check_same_dtype(kOp, part.space, part.input);
    check_value(part.space.numel() == part.input.numel() * comm.size, op_name(kOp), "space has ", part.space.numel(),
                " elements, want ", comm.size, " x ", part.input.numel(), " (group ", comm.name, ')');
    total += static_cast<std::int64_t>(part.space.nbytes());
  }
  Started started(group.shared_impl(), kOp, total, options.label, options.timeout);
  auto& op = *started.op;
  leave_scratch(op);
  op.read_once = true;
  for (const RowGather& part : parts) {
    const auto nbytes = static_cast<std::int64_t>(part.input.nbytes());
    if (nbytes == 0) continue;
    exchange_rows(op, part.space, part.input, 0, nbytes);
    ++op.tag_seed;  // each part has tags of its own
    for (int r = 0; r < comm.size; ++r) {
      op.rows.push_back(r == comm.rank || comm.fake ? part.input.const_data_ptr() : const_at_byte(part.space, r * nbytes));
    }
    op.parts.push_back(part);
  }
  return std::move(started.work);
}

Work Comm::all_gather_v(const at::Tensor& output, const at::Tensor& input, std::span<const std::int64_t> sizes,
                        const CommOptions& options) const {
  constexpr Op kOp = Op::kAllGatherV;
  auto& comm = require(impl_, op_name(kOp));
  check_tensor(kOp, "output", output);
  check_tensor(kOp, "input", input);
  check_same_dtype(kOp, output, input);
  check_value(sizes.size() == static_cast<std::size_t>(comm.size), op_name(kOp), sizes.size(), " sizes, want one for each of ",
              comm.size, " ranks (group ", comm.name, ')');
  const auto each = chunk_sizes(kOp, "output", sizes, output.numel(), comm);
  const auto rank = static_cast<std::size_t>(comm.rank);
  check_value(each[rank] == input.numel(), op_name(kOp), "input has ", input.numel(), " elements, want the size of this rank, ",
              each[rank], " (group ", comm.name, ')');
  const auto offsets = offsets_of(each);
  const auto width = static_cast<std::int64_t>(input.element_size());
  Started started(impl_, kOp, output.numel() * width, options.label, options.timeout);
  for (int k = 1; k < comm.size; ++k) {
    const int from = (comm.rank - k + comm.size) % comm.size;
    const auto f = static_cast<std::size_t>(from);
    started.op->post_receive(output, offsets[f] * width, each[f] * width, from);
  }
  for (int k = 1; k < comm.size; ++k) started.op->post_send(input, 0, each[rank] * width, (comm.rank + k) % comm.size);
  if (output.numel() > 0) {
    for (std::size_t r = 0; r < each.size(); ++r) {
      const bool copy = r == rank || comm.fake;
      if (copy) copy_bytes(at_byte(output, offsets[r] * width), input.const_data_ptr(), std::min(each[r], each[rank]) * width);
    }
  }
  return std::move(started.work);
}

Work reduce_scatter_with_notes(const Comm& group, const at::Tensor& output, const at::Tensor& input, const at::Tensor& notes,
                               const ReduceScatterOptions& options) {
  constexpr Op kOp = Op::kReduceScatter;
  auto& comm = require(group.shared_impl(), op_name(kOp));
  check_tensor(kOp, "output", output);
  check_tensor(kOp, "input", input);
  check_value(input.numel() == output.numel() * comm.size, op_name(kOp), "input has ", input.numel(), " elements, want ",
              comm.size, " x ", output.numel(), " (group ", comm.name, ')');
  check_reduction(op_name(kOp), input.scalar_type(), output.scalar_type(), options.op, options.scale);
  check_notes(kOp, notes, comm);
  const auto width = static_cast<std::int64_t>(input.element_size());
  const auto nbytes = output.numel() * width;
  const bool alone = comm.size == 1 || comm.fake || nbytes == 0;
  at::Tensor space;
  if (!alone || options.workspace != nullptr) {
    space = receive_space(kOp, comm, options.workspace, nbytes * comm.size, input.scalar_type());
  }
  Started started(group.shared_impl(), kOp, nbytes * comm.size, options.label, options.timeout);
  auto& op = *started.op;
  exchange_notes(op, notes);
  op.read_once = true;
  for (int k = 1; k < comm.size; ++k) {
    const int from = (comm.rank - k + comm.size) % comm.size;
    op.post_receive(space, from * nbytes, nbytes, from);
  }
  for (int k = 1; k < comm.size; ++k) {
    const int to = (comm.rank + k) % comm.size;
    op.post_send(input, to * nbytes, nbytes, to);
  }
  op.reduce = nbytes > 0;
  if (!op.reduce) return std::move(started.work);
  for (int r = 0; r < comm.size; ++r) {
    const bool mine = r == comm.rank || comm.fake;
    op.rows.push_back(mine ? const_at_byte(input, comm.rank * nbytes) : const_at_byte(space, r * nbytes));
  }
  op.task = {output.data_ptr(), output.scalar_type(), input.scalar_type(),
             output.numel(),    options.op,           reduce_scale(options.op, options.scale, comm.size),
             options.accumulate};
  op.tensor = output;
  op.input = input;
  op.workspace = std::move(space);
  return std::move(started.work);
}

Work Comm::reduce_scatter_single(const at::Tensor& output, const at::Tensor& input, const ReduceScatterOptions& options) const {
  return reduce_scatter_with_notes(*this, output, input, {}, options);
}

Work all_reduce_with_notes(const Comm& group, const at::Tensor& tensor, const at::Tensor& notes,
                           const AllReduceOptions& options) {
  constexpr Op kOp = Op::kAllReduce;
  auto& comm = require(group.shared_impl(), op_name(kOp));
  check_tensor(kOp, "tensor", tensor);
  const auto dtype = tensor.scalar_type();
  check_reduction(op_name(kOp), dtype, dtype, options.op, options.scale);
  check_notes(kOp, notes, comm);
  const auto width = static_cast<std::int64_t>(tensor.element_size());
  const auto numel = tensor.numel();
  const auto total = numel * width;
  const bool direct = total <= (comm.size == 2 ? kDirectAllReduceBytesOfTwo : kDirectAllReduceBytes);
  const auto chunk = (numel + comm.size - 1) / comm.size;
  const auto start = [&](int r) { return std::min(numel, r * chunk); };
  const auto length = [&](int r) { return start(r + 1) - start(r); };
  const auto own = direct ? numel : length(comm.rank);
  const bool alone = comm.size == 1 || comm.fake || numel == 0;
  at::Tensor space;
  if (options.workspace != nullptr) {
    space = receive_space(kOp, comm, options.workspace, chunk * comm.size * width, dtype);
  } else if (!alone && !direct) {
    space = byte_buffer(comm.allocator, own * width * comm.size);
  }
  Started started(group.shared_impl(), kOp, total, options.label, options.timeout);
  auto& op = *started.op;
  exchange_notes(op, notes);
  if (!alone && direct) {
    const auto needed = total * comm.size;
    const auto enough = [&](const at::Tensor& s) { return s.defined() && static_cast<std::int64_t>(s.nbytes()) >= needed; };
    // Another idle Work may have what this one lacks: which of them is taken changes from step to step.
    for (const auto& idle : comm.pool) {
      if (!enough(op.scratch) && enough(idle->scratch)) std::swap(op.scratch, idle->scratch);
    }
    if (!enough(op.scratch)) op.scratch = byte_buffer(comm.allocator, std::max(needed, kDirectAllReduceBytes * comm.size));
    space = op.scratch;
  }
  op.read_once = !direct;  // a direct one must free what it sends before it reads: see `overwrite`
  for (int k = 1; k < comm.size; ++k) {
    const int from = (comm.rank - k + comm.size) % comm.size;
    op.post_receive(space, from * own * width, own * width, from);
    // Safe before the first phase has read this chunk: its owner answers only after it has our part.
    if (!direct) op.post_receive(tensor, start(from) * width, length(from) * width, from, Kind::kLate);
  }
  for (int k = 1; k < comm.size; ++k) {
    const int to = (comm.rank + k) % comm.size;
    op.post_send(tensor, direct ? 0 : start(to) * width, direct ? total : length(to) * width, to);
  }
  op.reduce = numel > 0;
  if (!op.reduce) return std::move(started.work);
  const auto begin_byte = direct || alone ? 0 : start(comm.rank) * width;
  for (int r = 0; r < comm.size; ++r) {
    const bool mine = r == comm.rank || comm.fake;
    op.rows.push_back(mine ? const_at_byte(tensor, begin_byte) : const_at_byte(space, r * own * width));
  }
  op.task = {at_byte(tensor, begin_byte),
             dtype,
             dtype,
             alone ? numel : own,
             options.op,
             reduce_scale(options.op, options.scale, comm.size),
             false};
  op.overwrite = !alone && direct;
  op.spread = !alone && !direct;
  // A dry run counts what the second phase would send.
  if (comm.fake && !direct) op.comm->counters.bytes_sent += own * width * (comm.size - 1);
  op.tensor = tensor;
  op.workspace = std::move(space);
  return std::move(started.work);
}

Work Comm::all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) const {
  return all_reduce_with_notes(*this, tensor, {}, options);
}

Work Comm::all_to_all_single(const at::Tensor& output, const at::Tensor& input, std::span<const std::int64_t> output_sizes,
                             std::span<const std::int64_t> input_sizes, const CommOptions& options) const {
  constexpr Op kOp = Op::kAllToAll;
  auto& comm = require(impl_, op_name(kOp));
  check_tensor(kOp, "output", output);
  check_tensor(kOp, "input", input);
  check_same_dtype(kOp, output, input);
  const auto in = chunk_sizes(kOp, "input", input_sizes, input.numel(), comm);
  const auto out = chunk_sizes(kOp, "output", output_sizes, output.numel(), comm);
  const auto rank = static_cast<std::size_t>(comm.rank);
  check_value(in[rank] == out[rank], op_name(kOp), "this rank sends itself ", in[rank], " elements but expects ", out[rank],
              " (group ", comm.name, ')');
  const auto from_offset = offsets_of(out);
  const auto to_offset = offsets_of(in);
  const auto width = static_cast<std::int64_t>(input.element_size());
  Started started(impl_, kOp, input.numel() * width, options.label, options.timeout);
  for (int k = 1; k < comm.size; ++k) {
    const int from = (comm.rank - k + comm.size) % comm.size;
    const auto f = static_cast<std::size_t>(from);
    started.op->post_receive(output, from_offset[f] * width, out[f] * width, from);
  }
  for (int k = 1; k < comm.size; ++k) {
    const int to = (comm.rank + k) % comm.size;
    const auto t = static_cast<std::size_t>(to);
    started.op->post_send(input, to_offset[t] * width, in[t] * width, to);
  }
  if (in[rank] > 0) {
    const auto* own = const_at_byte(input, to_offset[rank] * width);
    for (std::size_t r = 0; r < out.size(); ++r) {
      if (r != rank && !comm.fake) continue;
      copy_bytes(at_byte(output, from_offset[r] * width), own, std::min(out[r], in[rank]) * width);
    }
  }
  return std::move(started.work);
}

Work Comm::broadcast(const at::Tensor& tensor, int root, const CommOptions& options) const {
  constexpr Op kOp = Op::kBroadcast;
  auto& comm = require(impl_, op_name(kOp));
  check_tensor(kOp, "tensor", tensor);
  check_peer(kOp, "root", root, comm);
  const auto nbytes = static_cast<std::int64_t>(tensor.nbytes());
  Started started(impl_, kOp, nbytes, options.label, options.timeout);
  if (comm.rank != root) {
    started.op->post_receive(tensor, 0, nbytes, root);
  } else {
    for (int k = 1; k < comm.size; ++k) started.op->post_send(tensor, 0, nbytes, (root + k) % comm.size);
  }
  return std::move(started.work);
}

Work Comm::scatter(const at::Tensor& output, const at::Tensor& input, int root, const CommOptions& options) const {
  constexpr Op kOp = Op::kScatter;
  auto& comm = require(impl_, op_name(kOp));
  check_tensor(kOp, "output", output);
  check_peer(kOp, "root", root, comm);
  const auto nbytes = static_cast<std::int64_t>(output.nbytes());
  if (comm.rank == root) {
    check_tensor(kOp, "input", input);
    check_same_dtype(kOp, output, input);
    check_value(input.numel() == output.numel() * comm.size, op_name(kOp), "input has ", input.numel(), " elements, want ",
                comm.size, " x ", output.numel(), " (group ", comm.name, ')');
  }
  Started started(impl_, kOp, nbytes * comm.size, options.label, options.timeout);
  if (comm.rank != root) {
    started.op->post_receive(output, 0, nbytes, root);
    return std::move(started.work);
  }
  for (int k = 1; k < comm.size; ++k) {
    const int to = (root + k) % comm.size;
    started.op->post_send(input, to * nbytes, nbytes, to);
  }
  if (nbytes > 0) copy_bytes(output.data_ptr(), const_at_byte(input, root * nbytes), nbytes);
  return std::move(started.work);
}

Work Comm::send(const at::Tensor& tensor, int peer, const CommOptions& options) const {
  auto started = start_message(impl_, Op::kSend, &Impl::sent, tensor, peer, options);
  started.op->post_send(tensor, 0, started.op->bytes, peer);
  return std::move(started.work);
}

Work Comm::recv(const at::Tensor& tensor, int peer, const CommOptions& options) const {
  auto started = start_message(impl_, Op::kRecv, &Impl::received, tensor, peer, options);
  started.op->post_receive(tensor, 0, started.op->bytes, peer);
  return std::move(started.work);
}

void Comm::barrier(const CommOptions& options) const {
  constexpr Op kOp = Op::kBarrier;
  auto& comm = require(impl_, op_name(kOp));
  // Dissemination: after round i each rank has heard, directly or not, of 2^(i+1) ranks.
  const auto token = byte_buffer(comm.allocator, 2);
  *static_cast<char*>(token.data_ptr()) = 0;
  for (int distance = 1; distance < comm.size; distance *= 2) {
    Started round(impl_, kOp, 1, options.label, options.timeout);
    round.op->post_receive(token, 1, 1, (comm.rank - distance + comm.size) % comm.size);
    round.op->post_send(token, 0, 1, (comm.rank + distance) % comm.size);
    round.work.wait();
  }
}

}  // namespace hyper_parallel
