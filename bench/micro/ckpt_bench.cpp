// Saving and loading a state on two ranks, against plain write and read of the same bytes. ckpt_bench [MB [FOLDER [ROUNDS]]]
//
// Everything is timed once in each round, one after the other, so that what else the machine does meets all alike; the best of
// the rounds counts. Prints a table and one line of JSON.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"

namespace hp = hyper_parallel;

namespace {

constexpr std::int64_t kTensors = 24;
constexpr int kWorld = 2;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double seconds(const std::function<void()>& call) {
  const double start = now();
  call();
  return now() - start;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

void plain_write(const std::string& path, const std::vector<torch::Tensor>& tensors) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  require(file >= 0, "open");
  for (const torch::Tensor& tensor : tensors) {
    const auto size = static_cast<ssize_t>(tensor.nbytes());
    require(::write(file, tensor.const_data_ptr(), tensor.nbytes()) == size, "write");
  }
  require(::fsync(file) == 0 && ::close(file) == 0, "fsync");
}

void plain_read(const std::string& path, std::vector<torch::Tensor>& tensors) {
  const int file = ::open(path.c_str(), O_RDONLY);
  require(file >= 0, "open");
  for (torch::Tensor& tensor : tensors) {
    const auto size = static_cast<ssize_t>(tensor.nbytes());
    require(::read(file, tensor.mutable_data_ptr(), tensor.nbytes()) == size, "read");
  }
  ::close(file);
}

std::vector<torch::Tensor> make_tensors(std::int64_t megabytes) {
  std::vector<torch::Tensor> tensors;
  const std::int64_t rows = std::max<std::int64_t>(kWorld, megabytes * (1 << 20) / 4 / kTensors / 1024);
  for (std::int64_t i = 0; i < kTensors; ++i) tensors.push_back(torch::rand({rows, 1024}));
  return tensors;
}

struct State {
  explicit State(const std::vector<torch::Tensor>& whole) {
    const hp::DeviceMesh mesh = hp::init_device_mesh("cpu", {hp::get_world_size()});
    for (std::size_t i = 0; i < whole.size(); ++i) {
      parts.push_back(hp::distribute_tensor(whole[i], mesh, {hp::Shard(0)}));
      dict.add(hp::concat("layers.", i, ".weight"), parts.back());
    }
  }
  std::vector<hp::DTensor> parts;
  hp::ckpt::StateDict dict;
};

/// Best seconds of each thing that is timed. The slowest rank counts.
class Times {
 public:
  /// What all ranks do.
  void together(const std::string& name, const std::function<void()>& call) {
    hp::current_world().comm().barrier();
    torch::Tensor time = torch::tensor({seconds(call)});
    hp::current_world().comm().all_reduce(time, {.op = hp::ReduceOp::kMax}).wait();
    note(name, time.item<double>());
  }
  /// What rank 0 does while the others wait.
  void alone(const std::string& name, const std::function<void()>& call) {
    hp::current_world().comm().barrier();
    if (hp::get_rank() == 0) note(name, seconds(call));
    hp::current_world().comm().barrier();
  }
  void next_round() { ++round_; }
  [[nodiscard]] const std::map<std::string, double>& best() const { return best_; }

 private:
  void note(const std::string& name, double time) {
    if (round_ == 0) return;  // warms up
    const auto found = best_.find(name);
    if (found == best_.end() || time < found->second) best_[name] = time;
  }
  std::map<std::string, double> best_;
  int round_ = 0;
};

std::map<std::string, double> measure(std::int64_t megabytes, const std::filesystem::path& folder, int rounds) {
  std::map<std::string, double> best;
  std::vector<torch::Tensor> tensors = make_tensors(megabytes);
  const auto file = [&](const char* name) { return (folder / name).string(); };
  hp::testing::RankOptions options;
  options.timeout = options.watchdog = std::chrono::minutes(20);
  hp::testing::run_ranks(kWorld, options, [&](int rank) {
    State state(tensors);
    hp::ckpt::Checkpointer checkpointer(file("run"), {.keep_last = 1});
    Times times;
    for (int round = 0; round <= rounds; ++round, times.next_round()) {
      times.alone("plain_write", [&] { plain_write(file("plain"), tensors); });
      times.together("save", [&] { hp::ckpt::save(file("ckpt"), state.dict, {.overwrite = true}); });
      times.together("stall", [&] { checkpointer.save_async(round, state.dict); });
      checkpointer.wait();
      times.alone("plain_read", [&] { plain_read(file("plain"), tensors); });
      times.together("load", [&] { hp::ckpt::load(file("ckpt"), state.dict); });
    }
    if (rank == 0) best = times.best();
  });
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t megabytes = argc > 1 ? std::atoll(argv[1]) : 500;
  const std::filesystem::path folder = std::filesystem::path(argc > 2 ? argv[2] : ".") / "ckpt_bench_files";
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  std::filesystem::create_directories(folder);
  std::map<std::string, double> best = measure(megabytes, folder, rounds);
  std::filesystem::remove_all(folder);
  const auto print = [&](const char* what, const char* name, const char* against) {
    std::printf("%-28s %8.3f s %8.0f MB/s %6.2f of %s\n", what, best[name], static_cast<double>(megabytes) / best[name],
                best[name] / best[against], against);
  };
  std::printf("%lld MB in %lld tensors, %d ranks, best of %d\n", static_cast<long long>(megabytes),
              static_cast<long long>(kTensors), kWorld, rounds);
  print("plain write and fsync", "plain_write", "plain_write");
  print("ckpt::save", "save", "plain_write");
  print("save_async, until it returns", "stall", "save");
  print("plain read", "plain_read", "plain_read");
  print("ckpt::load", "load", "plain_read");
  std::string json;
  for (const auto& [name, time] : best) json += hp::concat(json.empty() ? "{" : ", ", '"', name, "\": ", time);
  std::printf("%s}\n", json.c_str());
}
