// want: no matching function for call to .fully_shard\(const std::vector<.*string
#include <torch/torch.h>

#include <hyper_parallel/nn/fully_shard.h>
#include <hyper_parallel/nn/library.h>

void shard(const hyper_parallel::nn::Linear& linear) {
#ifdef HP_MISTAKE
  const std::vector<std::string> names = {"layer1"};
  hyper_parallel::fully_shard(names);
  (void)linear;
#else
  hyper_parallel::fully_shard(std::vector{linear, linear});
#endif
}
