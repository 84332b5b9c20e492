// Life of one operation: from posting its messages to the local part in wait().
#include <algorithm>
#include <array>
#include <utility>

#include "comm/comm_impl.h"

namespace hyper_parallel {
namespace {

// How long a failing rank waits for a word from the peer that it blames: both usually time out together.
constexpr std::chrono::milliseconds kNotePatience{500};

// Ranks that disagree about operation, label, position or size get different tags, so their data never meet.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdULL;
  return hash ^ (hash >> 33);
}

std::uint64_t hash_text(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return hash;
}

int make_tag(std::uint32_t seed, std::int64_t nbytes, Kind kind) noexcept {
  const auto hash = mix(mix(seed, static_cast<std::uint64_t>(nbytes)), static_cast<std::uint64_t>(kind));
  return static_cast<int>(hash & 0x7fffffff);
}

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 4> kUnits{"kB", "MB", "GB", "TB"};
  if (bytes < 1000) return concat(bytes, " B");
  auto value = static_cast<double>(bytes) / 1000.0;
  std::size_t unit = 0;
  while (value >= 1000.0 && unit + 1 < kUnits.size()) {
    value /= 1000.0;
    ++unit;
  }
  return concat(static_cast<double>(static_cast<std::int64_t>(value * 10.0 + 0.5)) / 10.0, ' ', kUnits[unit]);
}

// "all_gather_single #17, unit layers.4, 4.2 MB": what this rank is doing, for peers that wait for it in vain.
std::string describe(const Work::Impl& work) {
  std::string out = concat(op_name(work.op), " #", work.sequence);
  if (*work.label.c_str() != '\0') out += concat(", unit ", work.label.c_str());
  return out + ", " + human_bytes(work.bytes);
}

trace::Lane lane_of(Op op) noexcept {
  if (op == Op::kAllGather || op == Op::kAllGatherV) return trace::Lane::kGather;
  return op == Op::kReduceScatter || op == Op::kAllReduce ? trace::Lane::kReduce : trace::Lane::kOther;
}

using Clock = std::chrono::steady_clock;

std::chrono::milliseconds remaining(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace

const char* op_name(Op op) noexcept {
  switch (op) {
    case Op::kAllGather:
      return "all_gather_single";
    case Op::kAllGatherV:
      return "all_gather_v";
    case Op::kReduceScatter:
      return "reduce_scatter_single";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllToAll:
      return "all_to_all_single";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kScatter:
      return "scatter";
    case Op::kSend:
      return "send";
    case Op::kRecv:
      return "recv";
    case Op::kBarrier:
      return "barrier";
  }
  return "unknown";
}

std::unique_ptr<Work::Impl> begin(const std::shared_ptr<Comm::Impl>& comm, Op op, std::int64_t bytes, std::string_view label,
                                  std::optional<std::chrono::milliseconds> timeout) {
  if (comm->broken) comm->throw_broken(op);
  std::unique_ptr<Work::Impl> work;
  if (comm->pool.empty()) {
    work = std::make_unique<Work::Impl>();
  } else {
    work = std::move(comm->pool.back());
    comm->pool.pop_back();
  }
  work->comm = comm;
  work->op = op;
  work->bytes = bytes;
  work->timeout = timeout.value_or(comm->timeout);
  work->label.assign(label);
  work->sequence = ++comm->sequence;
  ++comm->counters.calls;
  auto& slot = comm->record(work->sequence);
  slot.sequence = work->sequence;
  slot.op = op;
  slot.bytes = bytes;
  slot.state = FlightRecord::State::kStarted;
  slot.label = work->label;
  // Messages between two ranks are unknown to the others: they must not move the number that all ranks agree on.
  if (op != Op::kSend && op != Op::kRecv) ++comm->collectives;
  const auto seed = mix(mix(hash_text(label), static_cast<std::uint64_t>(op)), comm->collectives);
  work->tag_seed = static_cast<std::uint32_t>(seed);
  if (comm->size > 1) work->span.start(lane_of(op), op_name(op), label, bytes);
  return work;
}

void Work::Impl::post_send(const at::Tensor& data, std::int64_t offset, std::int64_t nbytes, int peer, Kind kind) {
  comm->counters.bytes_sent += nbytes;
  if (nbytes == 0 || comm->transport == nullptr) return;
  try {
    sends.push_back({comm->transport->send(byte_view(data, offset, nbytes), peer, make_tag(tag_seed, nbytes, kind)), peer});
  } catch (const TransportError& error) {
    comm->fail(*this, peer, error);
  }
}

void Work::Impl::post_receive(const at::Tensor& data, std::int64_t offset, std::int64_t nbytes, int peer, Kind kind) {
  comm->counters.bytes_received += nbytes;
  if (nbytes == 0 || comm->transport == nullptr) return;
  try {
    const auto tag = make_tag(tag_seed, nbytes, kind);
    const auto space = byte_view(data, offset, nbytes);
    const bool may_stay = read_once && kind == Kind::kFirst;
    auto handle = may_stay ? comm->transport->receive_to_read(space, peer, tag) : comm->transport->receive(space, peer, tag);
    auto& list = kind == Kind::kFirst ? receives : kind == Kind::kLate ? late_receives : notes;
    list.push_back({std::move(handle), peer});
  } catch (const TransportError& error) {
    comm->fail(*this, peer, error);
  }
}

/// Where a row is that the transport left with its sender; null if it was received.
const void* Work::Impl::borrow(const Message& message) {
  try {
    return comm->transport->borrow(message.handle);
  } catch (const TransportError& error) {
    comm->fail(*this, message.peer, error);
  }
}

void Work::Impl::reduce_where_they_are() {
  for (const auto& message : receives) {
    const void* there = borrow(message);
    if (there == nullptr) continue;
    rows[static_cast<std::size_t>(message.peer)] = there;
    comm->counters.bytes_mapped += task.numel * static_cast<std::int64_t>(c10::elementSize(task.input_type));
  }
  reduce_rows(task, rows);
  for (const auto& message : receives) comm->transport->give_back(message.handle);
  receives.clear();
}

void Work::Impl::hand_out_rows() {
  const auto size = static_cast<std::size_t>(comm->size);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (int r = 0; r < comm->size; ++r) {
      if (r == comm->rank || comm->fake) parts[p].read(r, rows[p * size + static_cast<std::size_t>(r)]);
    }
  }
  for (std::size_t m = 0; m < receives.size(); ++m) {
    const std::size_t p = m / (size - 1);
    const Message& message = receives[m];
    const void* there = borrow(message);
    parts[p].read(message.peer, there != nullptr ? there : rows[p * size + static_cast<std::size_t>(message.peer)]);
    comm->transport->give_back(message.handle);
  }
  receives.clear();
  parts.clear();
  span.finish();
}

void Work::Impl::wait_for(std::vector<Message>& messages, Clock::time_point deadline) {
  for (const auto& message : messages) {
    try {
      comm->transport->wait(message.handle, remaining(deadline));
    } catch (const TransportError& error) {
      comm->fail(*this, message.peer, error);
    }
  }
}

// Shards of all ranks, in place.
void Work::Impl::wait_for_slices(Clock::time_point deadline) {
  for (int r = 0; r < comm->size; ++r) {
    if (r == comm->rank) continue;
    try {
      comm->transport->wait_for(gathered->slices->state(r).published, gathered_count, r, remaining(deadline));
    } catch (const TransportError& error) {
      comm->fail(*this, r, error);
    }
  }
  gathered->slices->copy_edges();
  gathered.reset();
}

/// Up to the local result; of an all_reduce in two phases, sends it. Once only.
void Work::Impl::run_first_phase(Clock::time_point deadline) {
  if (comm->broken) comm->throw_broken(op);
  if (gathered != nullptr) wait_for_slices(deadline);
  wait_for(receives, deadline);
  wait_for(notes, deadline);
  notes.clear();
  if (!parts.empty()) hand_out_rows();
  if (!reduce) receives.clear();
  if (overwrite) {
    wait_for(sends, deadline);
    sends.clear();
  }
  if (std::exchange(reduce, false)) reduce_where_they_are();
  if (std::exchange(spread, false)) {
    const auto offset = static_cast<const char*>(task.output) - static_cast<const char*>(tensor.const_data_ptr());
    const auto nbytes = task.numel * tensor.element_size();
    for (int k = 1; k < comm->size; ++k) post_send(tensor, offset, nbytes, (comm->rank + k) % comm->size, Kind::kLate);
  }
}

void Work::Impl::run() {
  const auto deadline = Clock::now() + timeout;
  run_first_phase(deadline);
  wait_for(late_receives, deadline);
  late_receives.clear();
  wait_for(sends, deadline);
  sends.clear();
  span.finish();
  if (auto& slot = comm->record(sequence); slot.sequence == sequence) slot.state = FlightRecord::State::kDone;
}

void Work::Impl::reset() noexcept {
  span.finish();
  receives.clear();
  sends.clear();
  late_receives.clear();
  notes.clear();
  parts.clear();
  rows.clear();
  reduce = false;
  read_once = false;
  overwrite = false;
  spread = false;
  tensor.reset();
  workspace.reset();
  input.reset();
  gathered.reset();
}

Work::Work(std::unique_ptr<Impl> impl) : impl_(impl.release()) {}
Work::~Work() = default;

void Work::wait() {
  if (impl_ == nullptr) return;
  const auto impl = std::move(impl_);
  impl->run();
}

bool Work::advance() {
  if (impl_ == nullptr) return false;
  if (!impl_->spread && impl_->parts.empty()) {
    wait();
    return false;
  }
  auto impl = std::move(impl_);  // gone if that throws, as after wait
  impl->run_first_phase(Clock::now() + impl->timeout);
  impl_ = std::move(impl);
  return true;
}

void Work::Deleter::operator()(Impl* raw) const noexcept {
  std::unique_ptr<Impl> impl(raw);
  const auto comm = std::move(impl->comm);
  if (comm == nullptr) return;
  if (!comm->broken) {
    for (auto* list : {&impl->receives, &impl->sends, &impl->late_receives, &impl->notes}) {
      for (auto& message : *list) comm->abandoned.push_back(std::move(message));
    }
  }
  impl->reset();
  comm->pool.push_back(std::move(impl));
}

Comm::Impl::~Impl() {
  if (transport != nullptr && !broken && !abandoned.empty()) transport->abort();
  abandoned.clear();
}

void Comm::Impl::fail(Work::Impl& work, int peer, const TransportError& error) {
  const bool timeout_hit = error.kind() == TransportError::Kind::kTimeout;
  const auto who =
      peer < 0 ? std::string("a peer") : concat("peer rank ", peer, " (global ", ranks[static_cast<std::size_t>(peer)], ')');
  std::string what = concat('[', op_name(work.op), "] ");
  if (timeout_hit) {
    what += concat("no answer from ", who, " within ", static_cast<double>(work.timeout.count()) / 1000.0, " s");
  } else if (error.kind() == TransportError::Kind::kClosed) {
    what += concat(who, " closed the connection");
  } else {
    what += concat(who, ": ", error.what());
  }
  const bool labelled = *work.label.c_str() != '\0';
  what += concat("; ", labelled ? "unit " : "", work.label.c_str(), labelled ? ", " : "", "group ", name, ", operation #",
                 work.sequence, ", ", human_bytes(work.bytes), " (rank ", rank, '/', size, ')');
  CommFailure failure{op_name(work.op), work.label.c_str(), name, work.sequence, work.bytes, peer};
  if (auto& slot = record(work.sequence); slot.sequence == work.sequence) slot.state = FlightRecord::State::kFailed;
  // Before the connections close: peers that notice will look for it.
  transport->publish(concat(rank), concat(timeout_hit ? "it waits in " : "it failed in ", describe(work), timeout_hit ? "" : ": ",
                                          timeout_hit ? std::string() : what));
  const auto note = peer < 0 ? std::string() : transport->read_note(concat(peer), kNotePatience);
  if (!note.empty()) what += concat("; about that peer: ", note);
  broken.emplace(what, failure);
  broken_by_timeout = timeout_hit;
  transport->abort();
  abandoned.clear();
  if (timeout_hit) throw TimeoutError(what, std::move(failure));
  throw CommError(what, std::move(failure));
}

void Comm::Impl::throw_broken(Op op) const {
  const auto message = concat('[', op_name(op), "] group ", name, " is broken by an earlier failure: ", broken->first);
  if (broken_by_timeout) throw TimeoutError(message, broken->second);
  throw CommError(message, broken->second);
}

}  // namespace hyper_parallel
