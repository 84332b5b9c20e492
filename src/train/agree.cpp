#include <hyper_parallel/train/agree.h>

#include <hyper_parallel/comm/comm.h>

namespace hyper_parallel::train {

void agree_on(const Comm& comm, const std::function<void()>& local) {
  std::string mine;
  try {
    local();
  } catch (const std::exception& error) {
    mine = error.what();
    if (mine.empty()) mine = "unknown error";
  }
  const std::vector<std::string> all = comm.all_gather_string(mine, {.label = "hp-train"});
  bool alike = true;
  const std::string* first = nullptr;
  std::size_t rank = 0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    alike = alike && all[r] == all[0];
    if (first == nullptr && !all[r].empty()) {
      first = &all[r];
      rank = r;
    }
  }
  if (first == nullptr) return;
  throw AgreedError(alike ? *first : concat(*first, " (rank ", rank, '/', all.size(), ')'));
}

}  // namespace hyper_parallel::train
