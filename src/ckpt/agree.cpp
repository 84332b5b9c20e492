#include "ckpt/agree.h"

#include <hyper_parallel/comm/world.h>
#include <hyper_parallel/core/error.h>

namespace hyper_parallel::ckpt {

std::vector<std::string> agree(const Comm& comm, std::string_view op, const std::function<std::string()>& local,
                               const CommOptions& options) {
  // The first letter says what it is: a result, or one of the errors.
  std::string mine;
  try {
    mine = concat('+', local());
  } catch (const CommError&) {
    throw;
  } catch (const ValueError& error) {
    mine = concat('V', error.what());
  } catch (const CheckpointError& error) {
    mine = concat('C', error.what());
  } catch (const std::exception& error) {
    mine = concat('E', error.what());
  }
  CommOptions labelled = options;
  labelled.label = op;
  std::vector<std::string> all = comm.size() > 1 ? comm.all_gather_string(mine, labelled) : std::vector{mine};
  bool alike = true;
  const std::string* first = nullptr;
  std::size_t rank = 0;
  for (std::size_t r = 0; r < all.size(); ++r) {
    alike = alike && all[r] == all[0];
    if (first == nullptr && all[r][0] != '+') {
      first = &all[r];
      rank = r;
    }
  }
  if (first == nullptr) {
    for (std::string& text : all) text.erase(0, 1);
    return all;
  }
  std::string text = first->substr(1);
  if (!alike) text += concat(" (rank ", rank, '/', all.size(), ')');
  if (first->front() == 'V') throw ValueError(text);
  if (first->front() == 'C') throw CheckpointError(text);
  throw Error(text);
}

Comm comm_or_world(const Comm& comm) { return comm.defined() ? comm : current_world().comm(); }

}  // namespace hyper_parallel::ckpt
