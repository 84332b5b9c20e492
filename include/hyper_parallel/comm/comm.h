#pragma once
// Comm: collectives over one process group. See docs/design for how each is built.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/core/error.h>

namespace at {
class Tensor;
}
namespace c10 {
struct Allocator;
class DataPtr;
}  // namespace c10

namespace hyper_parallel {

enum class ReduceOp { kSum, kAvg, kProduct, kMin, kMax };

/// An operation in flight. Wait for it exactly once or move it on; dropping it is a compile-time warning.
///
/// Destroying a pending Work abandons the operation without waiting. Thread safety: one thread at a time.
class [[nodiscard, gnu::visibility("default")]] Work {  // g++ takes no HP_API after [[nodiscard]] on a class
 public:
  Work() = default;  ///< nothing to wait for
  Work(Work &&) noexcept = default;
  Work& operator=(Work&&) noexcept = default;
  ~Work();

  /// Blocks (CPU) or orders the current stream after the operation (CUDA), then runs what is left of it on the calling thread,
  /// such as the local sum of a reduction. CommError or TimeoutError with operation, label, group and peer.
  void wait();
  /// Like `wait`, but leaves before the second phase of an all_reduce that has two has arrived, once that is on its way: true if
  /// so (then the operation is still pending), false once it is complete. Errors are those of `wait`.
  bool advance();
  [[nodiscard]] bool pending() const noexcept { return impl_ != nullptr; }

  struct Impl;  // src/comm
  explicit Work(std::unique_ptr<Impl> impl);

 private:
  struct HP_API Deleter {
    void operator()(Impl* impl) const noexcept;
  };
  std::unique_ptr<Impl, Deleter> impl_;
};

/// Options of every operation.
struct CommOptions {
  std::string_view label = {};  ///< who asks, e.g. a unit's name: shown in errors and in the flight recorder
  std::optional<std::chrono::milliseconds> timeout = {};  ///< default: the group's
};

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;       ///< multiplies the reduced result (with kAvg after the division by the group size)
  bool accumulate = false;  ///< add the result to `output` instead of overwriting it
  /// Receive space of at least `input.numel()` elements of input's dtype; allocated when null. Must stay untouched until `wait`.
  const at::Tensor* workspace = nullptr;
  std::string_view label = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllReduceOptions {
  ReduceOp op = ReduceOp::kSum;
  double scale = 1.0;
  const at::Tensor* workspace = nullptr;  ///< at least size * ceil(numel / size) elements; allocated when null
  std::string_view label = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Payload counters of one group on this rank (bytes that this rank sent to and received from peers; headers not counted). Equal
/// on every path, but for `bytes_mapped`.
struct CommCounters {
  std::int64_t calls = 0;
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  /// Of these, bytes that this rank read where the peer has them: mapped slices, and rows that were summed in place.
  std::int64_t bytes_mapped = 0;
  /// Received bytes that were moved.
  [[nodiscard]] std::int64_t bytes_copied() const { return bytes_received - bytes_mapped; }
};

/// One line of the flight recorder.
struct FlightRecord {
  std::uint64_t sequence = 0;
  std::string operation;
  std::string label;
  std::int64_t bytes = 0;
  enum class State { kStarted, kDone, kFailed } state = State::kStarted;
};

/// Memory of a group whose ranks share a host: `size()` equal slices, one written by each rank, which every rank sees side by
/// side in a read-only view, so that a gather moves nothing. A cheap handle. See docs/design/009-same-host.md.
///
/// The slices of the peers may be read from the end of `publish(...).wait()` until `finish_reading`; a rank may write its own
/// whenever no peer reads, that is between `wait_for_readers` and the next `publish`. Thread safety: that of its Comm.
class HP_API GatheredBuffer {
 public:
  GatheredBuffer() = default;
  [[nodiscard]] bool defined() const noexcept { return impl_ != nullptr; }
  /// This rank's slice, to write. Lives as long as the last one that was returned.
  [[nodiscard]] c10::DataPtr own() const;
  /// Maps the slices of all ranks, once, before the first `publish`. Collective; false on all ranks, for ever, if one of them
  /// cannot (rank 0 logs why). CommError, TimeoutError.
  [[nodiscard]] bool connect(const CommOptions& options = {}) const;
  [[nodiscard]] bool connected() const;
  /// An all-gather: says that this rank's slice is complete. After `wait`, those of all ranks are and the view shows them.
  [[nodiscard]] Work publish(const CommOptions& options = {}) const;
  /// All slices, one after the other; to read only. Page boundaries that do not fall between slices are copies of this rank's
  /// own.
  [[nodiscard]] c10::DataPtr view() const;
  /// This rank has done with reading. As often on every rank. Local.
  void finish_reading() const;
  /// Waits until all ranks have called `finish_reading` as often as this one. Collective; CommError, TimeoutError.
  void wait_for_readers(const CommOptions& options = {}) const;
  /// Bytes of the view that show peers' memory.
  [[nodiscard]] std::int64_t mapped_bytes() const;
  /// Bytes of the view on pages of this rank's own, with slices of `slice_bytes` of `ranks` ranks.
  [[nodiscard]] static std::int64_t private_bytes(std::int64_t slice_bytes, int ranks);

  struct Impl;  // src/comm
  explicit GatheredBuffer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// Collectives over one process group; a cheap value. Every member function that moves data is collective: all ranks of the group
/// call it in the same order with matching sizes and dtypes. A group of one makes every operation local.
/// Works for fp32, fp64, fp16, bf16, all integer types, bool and bytes. Tensors must be contiguous and stay alive until `wait`.
/// Thread safety: one thread at a time per group.
class HP_API Comm {
 public:
  Comm() = default;
  [[nodiscard]] bool defined() const noexcept { return impl_ != nullptr; }
  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  [[nodiscard]] const std::string& name() const;
  /// Global ranks of the members, by group rank.
  [[nodiscard]] const std::vector<int>& ranks() const;

  /// output[r * n .. (r+1) * n) = input of rank r, n = input.numel(). `input` may be this rank's slice of `output`:
  /// then nothing is copied.
  Work all_gather_single(const at::Tensor& output, const at::Tensor& input, const CommOptions& options = {}) const;
  /// Like all_gather_single with one numel per rank (zeros allowed), laid one after the other in `output`.
  Work all_gather_v(const at::Tensor& output, const at::Tensor& input, std::span<const std::int64_t> sizes,
                    const CommOptions& options = {}) const;
  /// output {=, +=} scale * reduction over ranks q = 0..W-1, in this order and in fp32 for low-precision floats, of
  /// input_q[r * n .. (r+1) * n), n = output.numel(), r = this rank. `output` may have another floating dtype than `input`: it is
  /// rounded once, after the sum.
  Work reduce_scatter_single(const at::Tensor& output, const at::Tensor& input, const ReduceScatterOptions& options = {}) const;
  /// Reduces `tensor` in place over all ranks, in rank order: every rank gets the same bits.
  /// Its second phase starts in `wait` or `advance`: ranks must call these for the pending all_reduces of a group in the same
  /// order.
  Work all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {}) const;
  /// Chunk r of input (input_sizes[r] elements; equal chunks when empty) goes to rank r; chunks received are laid in rank order.
  Work all_to_all_single(const at::Tensor& output, const at::Tensor& input, std::span<const std::int64_t> output_sizes = {},
                         std::span<const std::int64_t> input_sizes = {}, const CommOptions& options = {}) const;
  Work broadcast(const at::Tensor& tensor, int root, const CommOptions& options = {}) const;
  /// output = input[r * n .. (r+1) * n) of the root, which alone reads `input`.
  Work scatter(const at::Tensor& output, const at::Tensor& input, int root, const CommOptions& options = {}) const;
  /// Between two ranks only: the i-th send to a peer meets its i-th recv from this rank.
  Work send(const at::Tensor& tensor, int peer, const CommOptions& options = {}) const;
  Work recv(const at::Tensor& tensor, int peer, const CommOptions& options = {}) const;
  void barrier(const CommOptions& options = {}) const;

  /// Strings of all ranks, by group rank. Collective, blocking.
  [[nodiscard]] std::vector<std::string> all_gather_string(const std::string& mine, const CommOptions& options = {}) const;
  /// Every rank passes its own error text (empty: fine). If any is not empty, all ranks throw Error with the first one
  /// and its rank.
  void agree(std::string_view op, const std::string& error, const CommOptions& options = {}) const;
  /// All ranks must pass equal lines. Otherwise all ranks throw ValueError naming the first line that differs, with both versions
  /// and ranks. Cheap when equal: 16 bytes per peer.
  void check_same(std::string_view op, const std::vector<std::string>& lines, const CommOptions& options = {}) const;

  /// What moves the bytes of this group: "samehost" (memory shared by the ranks of one host), "gloo", "none" (a group of one) or
  /// "fake" (a dry run). Equal on all ranks. Local.
  [[nodiscard]] std::string_view transport_name() const;
  [[nodiscard]] CommCounters counters() const;
  void reset_counters() const;
  [[nodiscard]] std::vector<FlightRecord> flight_record() const;  ///< oldest first, last 64 operations

  /// Where buffers that this group sends from and receives into should get their memory.
  [[nodiscard]] c10::Allocator* allocator() const;
  /// Whether gathered_buffer gives buffers: the ranks share memory, more than one, in arenas of their own, and mapping is not
  /// switched off (InitOptions). Equal on all ranks. Local.
  [[nodiscard]] bool maps_slices() const;
  /// A gathered buffer of slices of `slice_bytes` > 0 bytes, the same on all ranks; undefined unless maps_slices(). Local.
  [[nodiscard]] GatheredBuffer gathered_buffer(std::int64_t slice_bytes) const;

  struct Impl;  // src/comm
  explicit Comm(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  [[nodiscard]] Impl& impl() const { return *impl_; }
  [[nodiscard]] const std::shared_ptr<Impl>& shared_impl() const { return impl_; }

  /// The group of this rank alone, with the same allocator. Local.
  [[nodiscard]] Comm self() const;
  /// The group of some of this group's ranks (positions in it, ascending), of which this rank must be one. Collective among them
  /// when it is made for the first time. ValueError: empty, not ascending, out of range, without this rank.
  [[nodiscard]] Comm subgroup(std::span<const int> members) const;

  /// A group of `size` ranks without peers: data from others is this rank's own. For dry runs and for measuring host time
  /// at any size.
  [[nodiscard]] static Comm fake(int rank, int size);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace hyper_parallel
