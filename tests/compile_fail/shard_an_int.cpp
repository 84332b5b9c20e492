// want: no matching function for call to .fully_shard\(int\)
#include <torch/torch.h>

#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/nn/library.h>

void shard(const hyper_parallel::nn::Linear& linear) {
#ifdef HP_MISTAKE
  hyper_parallel::fully_shard(3);
  (void)linear;
#else
  hyper_parallel::fully_shard(linear);
#endif
}
