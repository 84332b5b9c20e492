// Saving and loading a state, against plain write and read of the same bytes and torch::save. ckpt_bench [MB [FOLDER]]
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/rank_threads.h"

namespace hp = hyper_parallel;

namespace {

constexpr int kRounds = 5;
constexpr std::int64_t kTensors = 24;
constexpr int kWorld = 2;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// Median seconds of a few calls, after one that is not counted.
double median_of(const std::function<double()>& run) {
  std::vector<double> seconds;
  for (int i = 0; i <= kRounds; ++i) {
    const double time = run();
    if (i > 0) seconds.push_back(time);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

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

/// Median over rounds of the slowest rank's time. `prepare` runs once on every rank and returns what gives a round's seconds.
double ranks_take(int world, const std::function<std::function<double()>()>& prepare) {
  double result = 0;
  hp::testing::RankOptions options;
  options.timeout = options.watchdog = std::chrono::minutes(10);
  hp::testing::run_ranks(world, options, [&](int rank) {
    const std::function<double()> call = prepare();
    const double median = median_of([&] {
      hp::current_world().comm().barrier();
      torch::Tensor time = torch::tensor({call()});
      hp::current_world().comm().all_reduce(time, {.op = hp::ReduceOp::kMax}).wait();
      return time.item<double>();
    });
    if (rank == 0) result = median;
  });
  return result;
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

struct Run {
  Run(const std::vector<torch::Tensor>& whole, const std::string& path) : state(whole), checkpointer(path, {.keep_last = 1}) {}
  State state;
  hp::ckpt::Checkpointer checkpointer;
  std::int64_t step = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t megabytes = argc > 1 ? std::atoll(argv[1]) : 500;
  const std::filesystem::path folder = std::filesystem::path(argc > 2 ? argv[2] : ".") / "ckpt_bench_files";
  std::filesystem::create_directories(folder);
  std::vector<torch::Tensor> tensors = make_tensors(megabytes);
  const auto file = [&](const char* name) { return (folder / name).string(); };
  const auto print = [&](const char* what, double time, double against) {
    std::printf("%-34s %8.3f s %8.0f MB/s %6.2f\n", what, time, static_cast<double>(megabytes) / time, time / against);
  };
  std::printf("%lld MB in %lld tensors, median of %d, last column: time over plain file I/O\n", static_cast<long long>(megabytes),
              static_cast<long long>(kTensors), kRounds);

  const double write = median_of([&] { return seconds([&] { plain_write(file("plain"), tensors); }); });
  print("plain write and fsync", write, write);
  print("torch::save (no fsync)", median_of([&] { return seconds([&] { torch::save(tensors, file("torch")); }); }), write);
  double synchronous = 0;
  for (const int world : {1, kWorld}) {
    synchronous = ranks_take(world, [&] {
      return [&, state = std::make_shared<State>(tensors)] {
        return seconds([&] { hp::ckpt::save(file("ckpt"), state->dict, {.overwrite = true}); });
      };
    });
    print(world == 1 ? "ckpt::save, 1 rank" : "ckpt::save, 2 ranks", synchronous, write);
  }
  const double stall = ranks_take(kWorld, [&] {
    return [run = std::make_shared<Run>(tensors, file("run"))] {
      run->checkpointer.wait();
      return seconds([&] { run->checkpointer.save_async(run->step++, run->state.dict); });
    };
  });
  print("save_async, 2 ranks: stall", stall, write);
  std::printf("%-34s %8.3f of a synchronous save\n", "", stall / synchronous);

  const double read = median_of([&] { return seconds([&] { plain_read(file("plain"), tensors); }); });
  print("plain read", read, read);
  print("torch::load", median_of([&] {
          return seconds([&] {
            std::vector<torch::Tensor> loaded;
            torch::load(loaded, file("torch"));
          });
        }),
        read);
  for (const int world : {1, kWorld}) {
    const double time = ranks_take(world, [&] {
      return
          [&, state = std::make_shared<State>(tensors)] { return seconds([&] { hp::ckpt::load(file("ckpt"), state->dict); }); };
    });
    print(world == 1 ? "ckpt::load, 1 rank" : "ckpt::load, 2 ranks", time, read);
  }
  std::filesystem::remove_all(folder);
}
