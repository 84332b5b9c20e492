#pragma once
// What Comm and Work point to.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/core/trace.h>

#include "comm/backend.h"
#include "comm/reduce.h"
#include "comm/rows.h"
#include "comm/shared_slices.h"

namespace hyper_parallel {

enum class Op : std::uint8_t {
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kScatter,
  kSend,
  kRecv,
  kBarrier,
};
[[nodiscard]] const char* op_name(Op op) noexcept;

/// A short string without allocation; longer text is cut.
struct Label {
  std::array<char, 64> text{};
  void assign(std::string_view value) noexcept { text[value.copy(text.data(), text.size() - 1)] = '\0'; }
  [[nodiscard]] const char* c_str() const noexcept { return text.data(); }
};

/// Slot of the flight recorder.
struct RecordSlot {
  std::uint64_t sequence = 0;
  Op op = Op::kBarrier;
  FlightRecord::State state = FlightRecord::State::kStarted;
  std::int64_t bytes = 0;
  Label label;
};

/// What a GatheredBuffer points to.
struct GatheredBuffer::Impl {
  std::weak_ptr<Comm::Impl> comm;
  std::shared_ptr<SharedSlices> slices;
  Word published = 0;  ///< by this rank
  Word finished = 0;
  bool refused = false;  ///< connecting has failed
};

struct Message {
  Transport::Handle handle;
  int peer = -1;
};

/// Of the messages of one operation between two ranks.
enum class Kind : std::uint32_t { kFirst, kLate, kNote };

/// Reused from operation to operation: see Comm::Impl::pool.
struct Work::Impl {
  std::shared_ptr<Comm::Impl> comm;
  Op op = Op::kBarrier;
  std::uint64_t sequence = 0;
  std::int64_t bytes = 0;
  std::chrono::milliseconds timeout{};
  Label label;
  trace::AsyncSpan span;
  std::uint32_t tag_seed = 0;
  std::vector<Message> receives;
  std::vector<Message> sends;
  std::vector<Message> late_receives;  ///< second phase of all_reduce, posted with the first
  std::vector<Message> notes;          ///< to receive with the first phase
  std::vector<RowGather> parts;        ///< get the rows when all has arrived
  bool reduce = false;                 ///< run `task` over `rows` when all has arrived
  bool read_once = false;              ///< `receives` are rows, numbered by peer, and may stay with them
  bool overwrite = false;              ///< `task` writes where `sends` read
  bool spread = false;                 ///< then send the result (own chunk of `tensor`) to all
  ReduceTask task;
  std::vector<const void*> rows;                   ///< of the first part, of the next part, ...
  at::Tensor tensor;                               ///< output of a reduction
  at::Tensor workspace;                            ///< received rows
  at::Tensor input;                                ///< own rows
  at::Tensor scratch;                              ///< small receive space, kept with the pool
  std::shared_ptr<GatheredBuffer::Impl> gathered;  ///< wait until all slices are published, then complete the view
  Word gathered_count = 0;                         ///< so often

  void run();
  void run_first_phase(std::chrono::steady_clock::time_point deadline);
  void wait_for(std::vector<Message>& messages, std::chrono::steady_clock::time_point deadline);
  void reduce_where_they_are();
  [[nodiscard]] const void* borrow(const Message& message);
  void hand_out_rows();
  void wait_for_slices(std::chrono::steady_clock::time_point deadline);
  void post_send(const at::Tensor& tensor, std::int64_t offset, std::int64_t nbytes, int peer, Kind kind = Kind::kFirst);
  void post_receive(const at::Tensor& tensor, std::int64_t offset, std::int64_t nbytes, int peer, Kind kind = Kind::kFirst);
  void reset() noexcept;
};

struct Comm::Impl {
  int rank = 0;
  int size = 1;
  bool fake = false;
  std::string name;
  std::string device_type = "cpu";
  std::vector<int> ranks;
  std::chrono::milliseconds timeout{};
  c10::Allocator* allocator = nullptr;
  std::shared_ptr<void> allocator_owner;  ///< keeps `allocator` when nobody else does
  std::weak_ptr<World::Impl> world;
  std::unique_ptr<Transport> transport;  ///< null when there is nobody to talk to

  std::uint64_t sequence = 0;       ///< all operations, for errors and the flight recorder
  std::uint64_t collectives = 0;    ///< those that all ranks take part in, for tags
  std::vector<std::uint64_t> sent;  ///< point-to-point messages by peer
  std::vector<std::uint64_t> received;
  CommCounters counters;
  static constexpr std::size_t kRecords = 64;
  std::array<RecordSlot, kRecords> records;

  std::optional<std::pair<std::string, CommFailure>> broken;  ///< first failure: every later operation repeats it
  bool broken_by_timeout = false;
  bool untold = false;  ///< peers may wait for a word that has changed since they were last woken
  std::vector<std::unique_ptr<Work::Impl>> pool;
  std::vector<Message> abandoned;  ///< of dropped works: their memory may still be written

  ~Impl();
  [[nodiscard]] RecordSlot& record(std::uint64_t number) { return records[(number - 1) % kRecords]; }
  /// Marks the group broken, closes its connections and throws CommError or TimeoutError.
  [[noreturn]] void fail(Work::Impl& work, int peer, const TransportError& error);
  [[noreturn]] void throw_broken(Op op) const;
};

/// What a handle points to; ValueError for an empty one.
Comm::Impl& require(const std::shared_ptr<Comm::Impl>& impl, std::string_view op);
/// Starts an operation: takes a Work from the pool, numbers and records it.
std::unique_ptr<Work::Impl> begin(const std::shared_ptr<Comm::Impl>& comm, Op op, std::int64_t bytes, std::string_view label,
                                  std::optional<std::chrono::milliseconds> timeout);

/// A contiguous byte tensor over part of `tensor`'s memory, without dispatch.
at::Tensor byte_view(const at::Tensor& tensor, std::int64_t offset, std::int64_t nbytes);
/// Bytes from `allocator`.
at::Tensor byte_buffer(c10::Allocator* allocator, std::int64_t nbytes);
/// ValueError unless `tensor` can be sent: defined, strided and contiguous, on the CPU.
void check_tensor(Op op, const char* what, const at::Tensor& tensor);

}  // namespace hyper_parallel
