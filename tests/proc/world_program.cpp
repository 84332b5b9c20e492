// One rank of the process tests: `world_program <mode> [timeout in ms]`. Exit codes: 0 fine, 2 ValueError, 3 CommError, 4
// anything else.
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <thread>

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/mesh/device_mesh.h>

namespace hp = hyper_parallel;

namespace {

// Plays torchrun's agent: holds the store until it is killed.
void host_store() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::cout << "hosting" << std::endl;
  std::this_thread::sleep_for(std::chrono::minutes(2));
}

void run(std::string_view mode, std::chrono::milliseconds timeout) {
  if (mode == "agent") return host_store();
  const auto world = hp::init_process_group({.timeout = timeout});
  if (mode == "init") {
    std::cout << "rank " << world.rank() << " of " << world.size() << ", local " << world.local_rank() << std::endl;
    return;
  }
  const auto mesh = hp::init_device_mesh("cpu", {world.size()});
  const auto group = mesh.get_group();
  if (mode == "sum") {
    const auto tensor = torch::full({1000}, world.rank() + 1.0F);
    group.all_reduce(tensor).wait();
    std::cout << "sum " << tensor[999].item<float>() << std::endl;
    return;
  }
  const std::int64_t n = 200'000;
  const auto input = torch::ones({n * world.size()});
  const auto output = torch::empty({n});
  for (int step = 0;; ++step) {
    group.reduce_scatter_single(output, input, {.label = "layers.4"}).wait();
    if (step == 10) std::cout << "looping" << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "init";
  const std::chrono::milliseconds timeout(argc > 2 ? std::atoi(argv[2]) : 20'000);
  at::set_num_threads(1);
  try {
    run(mode, timeout);
    return 0;
  } catch (const hp::ValueError& error) {
    std::cout << "ValueError: " << error.what() << std::endl;
    return 2;
  } catch (const hp::TimeoutError& error) {
    std::cout << "TimeoutError: " << error.what() << std::endl;
    return 3;
  } catch (const hp::CommError& error) {
    std::cout << "CommError: " << error.what() << std::endl;
    return 3;
  } catch (const std::exception& error) {
    std::cout << "error: " << error.what() << std::endl;
    return 4;
  }
}
