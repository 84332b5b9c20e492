// Gathers that move nothing.
#include <algorithm>
#include <cstring>
#include <vector>

#include <c10/core/Allocator.h>

#include <hyper_parallel/core/log.h>

#include "comm/comm_impl.h"

namespace hyper_parallel {
namespace {

constexpr std::string_view kOp = "gathered_buffer";

std::shared_ptr<Comm::Impl> group_of(const std::shared_ptr<GatheredBuffer::Impl>& impl) {
  check_value(impl != nullptr, kOp, "empty handle, want one from Comm::gathered_buffer");
  auto comm = impl->comm.lock();
  check_value(comm != nullptr, kOp, "its group is gone, want it alive");
  return comm;
}

/// `mine` of all ranks.
template <class T>
std::vector<T> exchange(const Comm& comm, const T& mine) {
  const auto input = byte_buffer(comm.allocator(), sizeof(T));
  const auto output = byte_buffer(comm.allocator(), static_cast<std::int64_t>(sizeof(T)) * comm.size());
  std::memcpy(input.data_ptr(), &mine, sizeof(T));
  comm.all_gather_single(output, input, {.label = "mapped shards"}).wait();
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  std::memcpy(all.data(), output.const_data_ptr(), sizeof(T) * all.size());
  return all;
}

/// Wakes peers that wait for a word of this rank.
void tell(Comm::Impl& group) {
  group.untold = false;
  group.transport->ring_peers();
}

}  // namespace

bool Comm::maps_slices() const {
  const auto& comm = require(impl_, "Comm::maps_slices");
  return comm.transport != nullptr && comm.transport->maps();
}

GatheredBuffer Comm::gathered_buffer(std::int64_t slice_bytes) const {
  const auto& comm = require(impl_, "Comm::gathered_buffer");
  check_value(slice_bytes > 0, "Comm::gathered_buffer", "slices of ", slice_bytes, " bytes, want more than 0");
  if (!maps_slices()) return {};
  auto impl = std::make_shared<GatheredBuffer::Impl>();
  impl->comm = impl_;
  impl->slices = comm.transport->make_slices(static_cast<std::size_t>(slice_bytes));
  return GatheredBuffer(std::move(impl));
}

c10::DataPtr GatheredBuffer::own() const {
  group_of(impl_);
  return impl_->slices->own();
}

bool GatheredBuffer::connected() const { return impl_ != nullptr && impl_->slices->connected() && !impl_->refused; }

bool GatheredBuffer::connect(const CommOptions& options) const {
  const auto group = group_of(impl_);
  if (connected() || impl_->refused) return connected();
  const Comm comm(group);
  std::string problem;
  const auto addresses = exchange(comm, impl_->slices->address());
  try {
    group->transport->connect(*impl_->slices, addresses);
  } catch (const SharedMemoryError& error) {
    problem = error.what();
  }
  const auto refused = exchange(comm, static_cast<char>(problem.empty() ? 0 : 1));
  const auto first = std::find(refused.begin(), refused.end(), 1);
  if (first == refused.end()) return true;
  impl_->refused = true;
  const auto problems = comm.all_gather_string(problem, options);
  const auto rank = static_cast<std::size_t>(first - refused.begin());
  if (comm.rank() != 0) return false;
  log::warn("unit ", options.label, ", group ", group->name, ": shards are copied, not mapped: rank ", group->ranks[rank], ": ",
            problems[rank]);
  return false;
}

Work GatheredBuffer::publish(const CommOptions& options) const {
  const auto group = group_of(impl_);
  check_internal(connected(), kOp, "published before it was connected");
  const auto slice = static_cast<std::int64_t>(impl_->slices->bytes());
  auto work = begin(group, Op::kAllGather, slice * group->size, options.label, options.timeout);
  auto& counters = group->counters;
  counters.bytes_sent += slice * (group->size - 1);
  counters.bytes_received += slice * (group->size - 1);
  counters.bytes_mapped += static_cast<std::int64_t>(impl_->slices->mapped_bytes());
  // Releases the slice to whoever sees the new count.
  word(impl_->slices->state(group->rank).published).store(++impl_->published, std::memory_order_release);
  tell(*group);
  work->gathered = impl_;
  work->gathered_count = impl_->published;
  return Work(std::move(work));
}

c10::DataPtr GatheredBuffer::view() const {
  check_internal(connected(), kOp, "view before it was connected");
  return impl_->slices->view();
}

void GatheredBuffer::finish_reading() const {
  const auto group = group_of(impl_);
  if (!connected() || group->broken) return;
  word(impl_->slices->state(group->rank).finished).store(++impl_->finished, std::memory_order_release);
  group->untold = true;  // the wait that follows rings once for all buffers; without one, peers look by themselves soon
}

void GatheredBuffer::wait_for_readers(const CommOptions& options) const {
  const auto group = group_of(impl_);
  if (!connected()) return;
  if (group->broken) group->throw_broken(Op::kBarrier);
  if (group->untold) tell(*group);
  const auto timeout = options.timeout.value_or(group->timeout);
  for (int r = 0; r < group->size; ++r) {
    if (r == group->rank) continue;
    try {
      group->transport->wait_for(impl_->slices->state(r).finished, impl_->finished, r, timeout);
    } catch (const TransportError& error) {
      // No operation of its own: ranks may leave a phase by an exception, without waiting.
      auto failed = begin(group, Op::kBarrier, 0, options.label, options.timeout);
      auto& operation = *failed;
      const Work owner(std::move(failed));
      group->fail(operation, r, error);
    }
  }
}

std::int64_t GatheredBuffer::mapped_bytes() const {
  return connected() ? static_cast<std::int64_t>(impl_->slices->mapped_bytes()) : 0;
}

std::int64_t GatheredBuffer::private_bytes(std::int64_t slice_bytes, int ranks) {
  return static_cast<std::int64_t>(SharedSlices::private_bytes(static_cast<std::size_t>(slice_bytes), ranks));
}

}  // namespace hyper_parallel
