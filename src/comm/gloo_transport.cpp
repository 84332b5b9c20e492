// The only source that sees Gloo's headers. They come from the distribution and are older than the Gloo inside libtorch, so only
// c10d's types and non-virtual, out-of-line functions of Gloo may be used.
#include <cstdlib>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <hyper_parallel/core/log.h>

#include "comm/backend.h"
#include "comm/bounded_store.h"
#include "comm/store_notes.h"
#include "comm/world_impl.h"

namespace hyper_parallel {
namespace {

using Device = ::gloo::transport::Device;

class Group : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  /// Contexts of libtorch's Gloo do not have the virtual functions of the headers', so there is no vtable to check.
  __attribute__((no_sanitize("vptr"))) void close() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store)
      : group_(std::move(group)), notes_(std::move(store)), argument_(1) {}

  Handle send(const at::Tensor& bytes, int peer, int tag) override {
    argument_[0] = bytes;
    try {
      return group_->send(argument_, peer, tag);
    } catch (const std::exception& error) {
      throw translate(error);
    }
  }

  Handle receive(const at::Tensor& bytes, int peer, int tag) override {
    argument_[0] = bytes;
    try {
      return group_->recv(argument_, peer, tag);
    } catch (const std::exception& error) {
      throw translate(error);
    }
  }

  void wait(const Handle& handle, std::chrono::milliseconds timeout) override {
    bool done = false;
    try {
      done = static_cast<c10d::Work*>(handle.get())->wait(timeout);
    } catch (const std::exception& error) {
      throw translate(error);
    }
    if (!done) throw TransportError(TransportError::Kind::kOther, "the message was aborted");
  }

  void abort() noexcept override {
    argument_[0].reset();
    try {
      group_->close();
    } catch (const std::exception& error) {
      log::debug("closing a broken group: ", first_line_of(error.what()));
    }
  }

  void publish(const std::string& key, const std::string& note) noexcept override { notes_.publish(key, note); }
  std::string read_note(const std::string& key, std::chrono::milliseconds patience) noexcept override {
    return notes_.read(key, patience);
  }
  [[nodiscard]] const char* name() const noexcept override { return "gloo"; }

 private:
  c10::intrusive_ptr<Group> group_;
  StoreNotes notes_;
  std::vector<at::Tensor> argument_;  // c10d takes a vector of one: reused
};

std::shared_ptr<Device> make_device(const World::Impl& world) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (world.one_host) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(World::Impl& world, const std::string& key, int group_rank, int group_size) {
  auto* base = dynamic_cast<c10d::Store*>(world.store.get());
  check_internal(base != nullptr, "make_gloo_transport", "a world of ", world.size, " without a store");
  auto store = c10::make_intrusive<c10d::PrefixStore>(key, c10::intrusive_ptr<c10d::Store>::reclaim_copy(base));
  try {
    if (world.device == nullptr) world.device = make_device(world);
    auto options = c10d::ProcessGroupGloo::Options::create(world.timeout);
    options->devices.push_back(std::static_pointer_cast<Device>(world.device));
    options->threads = 1;  // pairs run on the device's thread; c10d's workers stay idle
    const auto bounded = c10::make_intrusive<BoundedStore>(store, world.timeout);
    auto group = c10::make_intrusive<Group>(bounded, group_rank, group_size, options);
    return std::make_unique<GlooTransport>(std::move(group), std::move(store));
  } catch (const std::exception& error) {
    throw translate(error);
  }
}

}  // namespace hyper_parallel
