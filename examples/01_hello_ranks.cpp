// Ranks meet, form a mesh, and add up their numbers.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/01_hello_ranks
#include <iostream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

int main() {
  hp::init_process_group();  // torchrun's environment; without it a world of one
  const int world = hp::get_world_size();

  // Ranks in a box with named axes: here one axis over all of them.
  const hp::DeviceMesh mesh = hp::init_device_mesh("cpu", {world}, {"dp"});
  const hp::Comm group = mesh.get_group("dp");

  const torch::Tensor sum = torch::full({1}, group.rank() + 1.0);
  hp::Work work = group.all_reduce(sum, {.op = hp::ReduceOp::kSum, .label = "hello"});
  // Anything that does not touch `sum` can run here, while the messages travel.
  work.wait();

  std::cout << hp::concat("rank ", group.rank(), " of ", group.size(), " on ", mesh.to_string(), ": sum ", sum.item<double>(),
                          ", ", group.counters().bytes_sent, " bytes sent\n");
  hp::destroy_process_group();
  return sum.item<double>() == world * (world + 1) / 2.0 ? 0 : 1;
}
