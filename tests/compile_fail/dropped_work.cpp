// want: ignoring returned value of type .*Work.*Werror=unused-result
#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>

void reduce(const hyper_parallel::Comm& comm, const at::Tensor& tensor) {
#ifdef HP_MISTAKE
  comm.all_reduce(tensor);
#else
  comm.all_reduce(tensor).wait();
#endif
}
