#include "support/slow_network.h"

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/comm_impl.h"

namespace hyper_parallel::testing {
namespace {

using Clock = std::chrono::steady_clock;
using Route = std::tuple<std::vector<int>, int, int, int>;  // group, sender, receiver, tag

}  // namespace

/// When each message that is on its way arrives. Shared by the ranks: a receiver learns from it when the sender sent.
class SlowNetwork::Board {
 public:
  explicit Board(const SlowNetworkOptions& options) : options_(options) {}

  void set_options(const SlowNetworkOptions& options) {
    const std::lock_guard lock(mutex_);
    options_ = options;
  }

  void sent(const Route& route, std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto& [group, from, to, tag] = route;
    auto& line_free = lines_[group[static_cast<std::size_t>(from)]];
    auto left = std::max(Clock::now(), line_free);
    if (options_.bytes_per_second > 0)
      left += std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(static_cast<double>(bytes) / options_.bytes_per_second));
    line_free = left;
    arrivals_[route].push_back(left + options_.latency);
  }

  Clock::time_point arrival(const Route& route) {
    const std::lock_guard lock(mutex_);
    auto& queue = arrivals_.at(route);
    const Clock::time_point time = queue.front();
    queue.pop_front();
    if (queue.empty()) arrivals_.erase(route);
    ++delivered_;
    return time;
  }

  [[nodiscard]] std::int64_t delivered() {
    const std::lock_guard lock(mutex_);
    return delivered_;
  }

 private:
  std::mutex mutex_;
  SlowNetworkOptions options_;
  std::map<int, Clock::time_point> lines_;  // by global rank: when its line is free again
  std::map<Route, std::deque<Clock::time_point>> arrivals_;
  std::int64_t delivered_ = 0;
};

namespace {

/// A message of the transport below; `route` is set for receives.
struct SlowMessage : c10::intrusive_ptr_target {
  Transport::Handle below;
  std::optional<Route> route;
};

class SlowTransport final : public Transport {
 public:
  SlowTransport(std::unique_ptr<Transport> below, std::shared_ptr<SlowNetwork::Board> board, std::vector<int> group, int rank)
      : below_(std::move(below)), board_(std::move(board)), group_(std::move(group)), rank_(rank) {}

  [[nodiscard]] bool supports(Collective) const override { return false; }  // those would not pass through here

  Handle send(const at::Tensor& bytes, int peer, int tag) override {
    board_->sent({group_, rank_, peer, tag}, static_cast<std::int64_t>(bytes.nbytes()));
    auto message = c10::make_intrusive<SlowMessage>();
    message->below = below_->send(bytes, peer, tag);
    return message;
  }

  Handle receive(const at::Tensor& bytes, int peer, int tag) override {
    auto message = c10::make_intrusive<SlowMessage>();
    message->below = below_->receive(bytes, peer, tag);
    message->route = Route{group_, peer, rank_, tag};
    return message;
  }

  void wait(const Handle& handle, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    auto& message = *static_cast<SlowMessage*>(handle.get());
    below_->wait(message.below, timeout);
    if (!message.route) return;
    const auto arrival = board_->arrival(*std::exchange(message.route, std::nullopt));
    std::this_thread::sleep_until(std::min(arrival, deadline));
    if (arrival > deadline) throw TransportError(TransportError::Kind::kTimeout, "timed out on the slow network");
  }

  [[nodiscard]] const char* name() const noexcept override { return below_->name(); }
  void abort() noexcept override { below_->abort(); }
  void publish(const std::string& key, const std::string& note) noexcept override { below_->publish(key, note); }
  std::string read_note(const std::string& key, std::chrono::milliseconds patience) noexcept override {
    return below_->read_note(key, patience);
  }

 private:
  std::unique_ptr<Transport> below_;
  std::shared_ptr<SlowNetwork::Board> board_;
  std::vector<int> group_;  // global ranks
  int rank_;
};

}  // namespace

SlowNetwork::SlowNetwork(const SlowNetworkOptions& options) : board_(std::make_shared<Board>(options)) {}
SlowNetwork::~SlowNetwork() = default;

void SlowNetwork::carry(const Comm& comm) {
  auto& transport = comm.impl().transport;
  if (transport == nullptr) return;
  transport = std::make_unique<SlowTransport>(std::move(transport), board_, comm.ranks(), comm.rank());
}

void SlowNetwork::set_options(const SlowNetworkOptions& options) { board_->set_options(options); }
std::int64_t SlowNetwork::delivered() const { return board_->delivered(); }

}  // namespace hyper_parallel::testing
