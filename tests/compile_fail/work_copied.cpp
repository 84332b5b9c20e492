// want: use of deleted function .*Work
#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

void wait_twice(const hyper_parallel::Comm& comm, const at::Tensor& tensor) {
  hyper_parallel::Work work = comm.all_reduce(tensor);
#ifdef HP_MISTAKE
  hyper_parallel::Work other = work;
#else
  hyper_parallel::Work other = std::move(work);
#endif
  other.wait();
}
