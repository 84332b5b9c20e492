// One rank of the process tests: `world_program <mode> [timeout in ms]`. Exit codes: 0 fine, 2 ValueError, 3 CommError, 4
// anything else. REFUSE=<system call>: the kernel refuses it from the start. HIDE_SHM: /dev/shm is empty and cannot be written.
// LIMIT_FILES=<bytes>: as ulimit -f. AWAIT=<path>: between the world and its first group, until there is such a file.
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
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

[[noreturn]] void give_up(const char* what) {
  std::cout << "cannot " << what << ": " << std::strerror(errno) << std::endl;
  std::exit(5);
}

// What a container's seccomp profile does.
void refuse(std::string_view name) {
  const std::uint32_t number = name == "memfd_create" ? SYS_memfd_create : name == "pidfd_open" ? SYS_pidfd_open : 0xffffffff;
  std::array<sock_filter, 4> code = {
      {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog program{code.size(), code.data()};
  const bool done = ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
  if (!done) give_up("install a filter");
}

void hide_shm() {
  const bool done = ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                    ::mount("none", "/dev/shm", "tmpfs", MS_RDONLY, nullptr) == 0;
  if (!done) give_up("hide /dev/shm");
}

void limit_files(const char* bytes) {
  const rlimit limit{std::strtoull(bytes, nullptr, 10), RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) give_up("limit the size of files");
}

void await(const char* path) {
  std::cout << "joined" << std::endl;
  while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

// Of the smallest one that is mapped.
std::uint64_t arena_bytes() {
  std::ifstream maps("/proc/self/maps");
  std::uint64_t least = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("hyper_parallel arena") == std::string::npos) continue;
    std::uint64_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    if (least == 0 || end - begin < least) least = end - begin;
  }
  return least;
}

void run(std::string_view mode, std::chrono::milliseconds timeout) {
  if (mode == "agent") return host_store();
  const bool few = mode == "first_two";
  const auto world = hp::init_process_group({.timeout = timeout, .wait_for_ranks = !few});
  if (mode == "init") {
    std::cout << "rank " << world.rank() << " of " << world.size() << ", local " << world.local_rank() << std::endl;
    return;
  }
  if (const char* path = std::getenv("AWAIT")) await(path);
  const auto mesh =
      few ? hp::DeviceMesh::from_ranks(world, "cpu", {2}, {0, 1}, {"dp"}) : hp::init_device_mesh("cpu", {world.size()});
  const auto group = mesh.get_group();
  if (mode == "sum") {
    const auto tensor = torch::full({1000}, world.rank() + 1.0F);
    group.all_reduce(tensor).wait();
    std::cout << "sum " << tensor[999].item<float>() << ", " << group.transport_name() << (group.maps_slices() ? ", maps" : "")
              << std::endl;
    return;
  }
  if (mode == "first_two") {
    const auto tensor = torch::full({1000}, world.rank() + 1.0F);
    group.all_reduce(tensor).wait();
    std::cout << "sum " << tensor[999].item<float>() << ", " << group.transport_name() << ", arenas of " << arena_bytes()
              << std::endl;
    group.barrier();
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
  if (const char* name = std::getenv("REFUSE")) refuse(name);
  if (std::getenv("HIDE_SHM") != nullptr) hide_shm();
  if (const char* bytes = std::getenv("LIMIT_FILES")) limit_files(bytes);
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
