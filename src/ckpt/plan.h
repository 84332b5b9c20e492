#pragma once
// Which rank has what of which tensor, and which rank writes what. Torch-free.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <hyper_parallel/ckpt/safetensors.h>
#include <hyper_parallel/dtensor/box.h>

namespace hyper_parallel::ckpt {

/// What one rank has of one tensor.
struct Holding {
  TensorSpec spec;  ///< of the whole tensor
  std::vector<Box> boxes;
  std::string layout;
};
using Holdings = std::vector<Holding>;  ///< of one rank, names ascending

/// Whether boxes, which lie inside the shape, make up the whole tensor: no overlaps, no holes. Empty boxes do not count.
[[nodiscard]] bool make_up(std::vector<Box> boxes, const std::vector<std::int64_t>& shape);

[[nodiscard]] HP_API std::string pack(const Holdings& holdings);
[[nodiscard]] HP_API Holdings unpack(std::string_view text);

/// A box and the ranks that have it, ascending.
struct Region {
  Box box;
  std::vector<int> holders;
};
/// A tensor as the ranks have it.
struct GlobalTensor {
  TensorSpec spec;
  std::string layout;
  std::vector<Region> regions;
  bool exact = false;  ///< the regions are the tensor, without overlaps and holes
};

/// What all ranks together have, names ascending. ValueError, with every such tensor: ranks that disagree about shape or dtype.
[[nodiscard]] HP_API std::vector<GlobalTensor> combine(std::string_view op, const std::vector<Holdings>& of_rank);

/// A box that one rank writes.
struct PlannedPiece {
  std::size_t tensor = 0;  ///< position in the list of tensors
  Box box;
  int rank = 0;
  std::string key;  ///< name in the file
};

/// Deals all regions out to their holders, evenly: what several ranks have is cut into as many parts, along leading dimensions,
/// or goes to the one with the least work so far if it is small. Every part is contiguous in its region. ValueError: a tensor
/// that is not exact.
[[nodiscard]] HP_API std::vector<PlannedPiece> deal_out(std::string_view op, const std::vector<GlobalTensor>& tensors,
                                                        int world_size);

/// Name of a piece in its file: the tensor's, with the box behind it if that is not the whole.
[[nodiscard]] std::string piece_key(const TensorSpec& tensor, const Box& box);

}  // namespace hyper_parallel::ckpt
