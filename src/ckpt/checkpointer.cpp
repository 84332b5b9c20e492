// The checkpoints of a run, written in the background.
#include <atomic>
#include <exception>
#include <thread>
#include <utility>

#include <hyper_parallel/core/log.h>

#include "ckpt/agree.h"
#include "ckpt/commit.h"
#include "ckpt/save.h"
#include "ckpt/staging.h"
#include "comm/comm_impl.h"
#include "comm/world_impl.h"

namespace hyper_parallel::ckpt {
namespace {

constexpr std::string_view kOp = "ckpt.save";

}  // namespace

struct Checkpointer::Impl {
  std::filesystem::path folder;
  CheckpointerOptions options;
  Comm comm;
  Comm background;  // used by the thread alone
  Staging staging;
  std::thread thread;
  std::atomic<bool> busy{false};
  std::exception_ptr error;

  void connect() {
    if (comm.defined()) return;
    comm = comm_or_world(options.comm);
    if (comm.rank() == 0) clean_folder(folder);
  }

  /// Removes what is more than is to be kept; only the first rank does.
  void prune(std::int64_t step, const Comm& group) const {
    if (options.keep_last == 0) return;
    agree(
        group, kOp,
        [&] {
          if (group.rank() == 0) keep_last(folder, static_cast<std::size_t>(options.keep_last), step);
          return std::string();
        },
        patience());
  }

  [[nodiscard]] CommOptions patience() const { return {.label = kOp, .timeout = options.timeout}; }

  void join() {
    if (thread.joinable()) thread.join();
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  static void check_step(std::int64_t step) { check_value(step >= 0, kOp, "step is ", step, ", want at least 0"); }
};

Checkpointer::Checkpointer(std::filesystem::path folder, CheckpointerOptions options) : impl_(std::make_unique<Impl>()) {
  check_value(options.keep_last >= 0, "Checkpointer", "keep_last is ", options.keep_last, ", want 0 or more");
  impl_->folder = target_path(folder);
  impl_->options = std::move(options);
}

Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

Checkpointer::~Checkpointer() {
  if (impl_ == nullptr) return;
  try {
    impl_->join();
  } catch (const std::exception& error) {
    log::warn("the last save of ", impl_->folder.string(), " failed: ", error.what());
  }
}

void Checkpointer::save(std::int64_t step, const StateDict& state, const std::string& extra) {
  Impl::check_step(step);
  wait();
  impl_->connect();
  ckpt::save(path_of(step), state, {.extra = extra, .overwrite = true, .comm = impl_->comm, .timeout = impl_->options.timeout});
  impl_->prune(step, impl_->comm);
}

void Checkpointer::save_async(std::int64_t step, const StateDict& state, const std::string& extra) {
  Impl::check_step(step);
  wait();
  impl_->connect();
  if (!impl_->background.defined()) {
    // Several of these may write at the same time, each over connections of its own.
    static std::atomic<int> count{0};
    const std::string mine = impl_->comm.rank() == 0 ? std::to_string(count++) : "";
    impl_->background = separate_group(impl_->comm, concat("ckpt", agree(impl_->comm, kOp, [&] { return mine; })[0]));
  }
  auto plan = std::make_shared<const SavePlan>(plan_save(state, extra, impl_->comm, impl_->patience()));
  const std::span<std::byte> staging = impl_->staging.take(bytes_of_mine(*plan));
  auto places = std::make_shared<std::vector<std::span<const std::byte>>>();
  const PieceBytes source = bytes_in_tensors(*plan, state);
  std::size_t used = 0;
  for (std::size_t i = 0; i < plan->mine.size(); ++i) {
    const std::span<const std::byte> bytes = source(i);
    copy_past_cache(staging.data() + used, bytes);
    places->push_back(staging.subspan(used, bytes.size()));
    used += bytes.size();
  }
  impl_->busy = true;
  impl_->thread = std::thread([impl = impl_.get(), plan, places, step, target = path_of(step)] {
    try {
      const PieceBytes bytes = [&](std::size_t i) { return (*places)[i]; };
      write_checkpoint(target, *plan, bytes, true, impl->background, impl->patience());
      impl->prune(step, impl->background);
    } catch (...) {
      impl->error = std::current_exception();
    }
    impl->busy = false;
  });
}

void Checkpointer::wait() { impl_->join(); }
bool Checkpointer::busy() const { return impl_->busy; }

std::vector<std::int64_t> Checkpointer::steps() const { return steps_in(impl_->folder); }

std::optional<std::int64_t> Checkpointer::latest() const {
  const std::vector<std::int64_t> all = steps();
  return all.empty() ? std::nullopt : std::optional(all.back());
}

std::filesystem::path Checkpointer::path_of(std::int64_t step) const { return impl_->folder / step_name(step); }
std::int64_t Checkpointer::staging_bytes() const { return static_cast<std::int64_t>(impl_->staging.capacity()); }

}  // namespace hyper_parallel::ckpt
