#include <hyper_parallel/comm/comm.h>

#include <numeric>

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>

#include "comm/comm_impl.h"

namespace hyper_parallel {
namespace {

at::Tensor raw_bytes(c10::Storage storage, std::int64_t offset, std::int64_t nbytes) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      caffe2::TypeMeta::Make<std::uint8_t>());
  out.unsafeGetTensorImpl()->set_storage_offset(offset);
  out.unsafeGetTensorImpl()->set_sizes_contiguous({nbytes});
  return out;
}

}  // namespace

Comm::Impl& require(const std::shared_ptr<Comm::Impl>& impl, std::string_view op) {
  check_value(impl != nullptr, op, "empty Comm handle, want one from World::comm or DeviceMesh::get_group");
  return *impl;
}

at::Tensor byte_view(const at::Tensor& tensor, std::int64_t offset, std::int64_t nbytes) {
  const auto start = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size()) + offset;
  return raw_bytes(tensor.storage(), start, nbytes);
}

at::Tensor byte_buffer(c10::Allocator* allocator, std::int64_t nbytes) {
  return raw_bytes(
      c10::Storage(c10::Storage::use_byte_size_t{}, static_cast<std::size_t>(nbytes), allocator, /*resizable=*/false), 0, nbytes);
}

void check_tensor(Op op, const char* what, const at::Tensor& tensor) {
  check_value(tensor.defined(), op_name(op), what, " is undefined, want a tensor");
  // The device's name is built only for the error: this runs in every operation.
  if (tensor.layout() != c10::Layout::Strided || !tensor.device().is_cpu()) {
    throw ValueError(concat('[', op_name(op), "] ", what, " is on ", tensor.device().str(), ", want a dense tensor on cpu"));
  }
  check_value(tensor.is_contiguous(), op_name(op), what, " is not contiguous");
}

int Comm::rank() const { return require(impl_, "Comm::rank").rank; }
int Comm::size() const { return require(impl_, "Comm::size").size; }
const std::string& Comm::name() const { return require(impl_, "Comm::name").name; }
const std::vector<int>& Comm::ranks() const { return require(impl_, "Comm::ranks").ranks; }
CommCounters Comm::counters() const { return require(impl_, "Comm::counters").counters; }
void Comm::reset_counters() const { require(impl_, "Comm::reset_counters").counters = {}; }
c10::Allocator* Comm::allocator() const { return require(impl_, "Comm::allocator").allocator; }

std::string_view Comm::transport_name() const {
  const auto& comm = require(impl_, "Comm::transport_name");
  if (comm.fake) return "fake";
  return comm.transport == nullptr ? "none" : comm.transport->name();
}

std::vector<FlightRecord> Comm::flight_record() const {
  auto& comm = require(impl_, "Comm::flight_record");
  std::vector<FlightRecord> out;
  const auto kept = std::min<std::uint64_t>(comm.sequence, Impl::kRecords);
  for (auto number = comm.sequence - kept + 1; number <= comm.sequence; ++number) {
    const auto& slot = comm.record(number);
    out.push_back({slot.sequence, op_name(slot.op), slot.label.c_str(), slot.bytes, slot.state});
  }
  return out;
}

Comm Comm::fake(int rank, int size) {
  check_value(size >= 1 && rank >= 0 && rank < size, "Comm::fake", "rank ", rank, " of ", size, ", want 0 <= rank < size");
  auto impl = std::make_shared<Impl>();
  impl->rank = rank;
  impl->size = size;
  impl->fake = true;
  impl->name = "fake";
  impl->ranks.resize(static_cast<std::size_t>(size));
  std::iota(impl->ranks.begin(), impl->ranks.end(), 0);
  impl->timeout = std::chrono::minutes(5);
  impl->allocator = c10::GetCPUAllocator();
  impl->sent.resize(static_cast<std::size_t>(size));
  impl->received.resize(static_cast<std::size_t>(size));
  return Comm(std::move(impl));
}

}  // namespace hyper_parallel
