#pragma once
// Matrices whose shards lie on the same ranks: who orthogonalizes which, and how they get there and back.
//
//   send  [to rank 0: its matrices' pieces of mine | to rank 1: ...]     shard  -> all-to-all -> receive
//   receive  [from rank 0: pieces of my matrices | from rank 1: ...]     whole matrices, Newton-Schulz, back into the same places
#include <array>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <hyper_parallel/comm/comm.h>
#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::optim {

struct MuonMatrix {
  std::string name;
  std::size_t group = 0, index = 0;  ///< in the flat groups of the tree
  std::int64_t rows = 0, columns = 0;
  std::vector<std::vector<Box>> boxes = {};  ///< what each rank of the group owns
  std::vector<std::int64_t> numel = {};      ///< elements of that
  int owner = 0;

  // Of the step that runs.
  bool active = false;           ///< has a gradient
  std::int64_t send_offset = 0;  ///< of this rank's piece in the send buffer
};

/// Newton-Schulz iteration: X <- a X + (b A + c A A) X with A = X X^T, on X / max(|X|, eps).
struct NewtonSchulz {
  std::array<double, 3> coefficients = {};
  double eps = 0;
  std::int64_t steps = 0;
};

class MuonExchange {
 public:
  MuonExchange(Comm comm, c10::ScalarType dtype, NewtonSchulz iteration);

  /// Local; matrices in the same order on all ranks.
  void add(MuonMatrix matrix) { matrices_.push_back(std::move(matrix)); }
  /// Chooses the owners: the most expensive matrix first, each to the rank with the least work so far, the lowest of equals.
  void assign();

  [[nodiscard]] const Comm& comm() const { return comm_; }
  [[nodiscard]] std::vector<MuonMatrix>& matrices() { return matrices_; }
  [[nodiscard]] std::int64_t bytes_per_step() const;
  [[nodiscard]] std::int64_t buffer_bytes() const;

  /// Lays out this step's buffers from `active` of every matrix. Local.
  void begin();
  /// This rank's piece of a matrix: the update before `run`, the orthogonalized update after it. Flat, of the exchange's dtype.
  [[nodiscard]] at::Tensor piece(const MuonMatrix& matrix) const;
  /// Collective over the group.
  void run();

 private:
  void orthogonalize(const MuonMatrix& matrix, const std::vector<std::int64_t>& offsets);
  [[nodiscard]] at::Tensor iterate(const at::Tensor& whole);

  Comm comm_;
  c10::ScalarType dtype_;
  NewtonSchulz iteration_;
  std::vector<MuonMatrix> matrices_;
  std::vector<std::int64_t> send_sizes_, receive_sizes_;
  at::Tensor send_, receive_;                // as large as a step with all matrices needs
  at::Tensor whole_, next_, gram_, update_;  // flat workspace of the largest matrix that this rank owns
};

}  // namespace hyper_parallel::optim
