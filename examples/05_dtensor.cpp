// One tensor, many layouts: a matrix is cut by rows, then by columns, then summed up from contributions, and is always the same
// matrix.
//   torchrun --standalone --no-python --nproc-per-node 2 build/examples/05_dtensor
#include <iostream>

#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

namespace hp = hyper_parallel;

namespace {

void show(const std::string& what, const hp::DTensor& tensor) {
  std::string boxes;
  for (const hp::Box& box : tensor.boxes()) boxes += box.to_string();
  std::cout << hp::concat("rank ", hp::get_rank(), ", ", what, ": ", tensor.to_string(), " holds ", boxes, '\n');
}

}  // namespace

int main() {
  hp::init_process_group();
  const int world = hp::get_world_size();
  const auto mesh = hp::init_device_mesh("cpu", {world}, {"tp"});
  const auto matrix = torch::arange(7 * 5, torch::kFloat).reshape({7, 5});

  // Every rank takes its part of the whole: 7 rows do not divide evenly, the last rank gets fewer.
  const hp::DTensor rows = hp::distribute_tensor(matrix, mesh, {hp::Shard(0)});
  show("rows", rows);

  // One exchange in which each element goes straight to where it is needed.
  const hp::DTensor columns = rows.redistribute({hp::Shard(1)});
  show("columns", columns);

  // Each rank contributes rank + 1 times the matrix; reading the whole adds the contributions up.
  const auto contribution = matrix * static_cast<double>(hp::get_rank() + 1);
  const hp::DTensor partial = hp::DTensor::from_local(contribution, mesh, {hp::Partial()}, {.shape = matrix.sizes().vec()});
  show("contributions", partial);

  const bool same = torch::equal(rows.full_tensor(), matrix) && torch::equal(columns.full_tensor(), matrix) &&
                    torch::equal(partial.full_tensor(), matrix * (world * (world + 1) / 2.0));
  hp::destroy_process_group();
  return same ? 0 : 1;
}
