// want: FullyShardOptions. has no non-static data member named .reshard_after_fwd
#include <ATen/core/Tensor.h>

#include <hyper_parallel/fsdp/policy.h>

hyper_parallel::FullyShardOptions options(const hyper_parallel::DeviceMesh& mesh) {
#ifdef HP_MISTAKE
  return hyper_parallel::FullyShardOptions{.mesh = mesh, .reshard_after_fwd = false};
#else
  return hyper_parallel::FullyShardOptions{.mesh = mesh, .reshard_after_forward = false};
#endif
}
