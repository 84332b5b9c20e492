#include "ckpt/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include <nlohmann/json.hpp>

#include <hyper_parallel/core/error.h>

#include "ckpt/runs.h"
#include "ckpt/sizes.h"

namespace hyper_parallel::ckpt {
namespace {

using nlohmann::json;

/// What several ranks have is cut if it has at least so many bytes.
constexpr std::uint64_t kWorthCutting = 64 << 10;

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) text += concat(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

/// Cuts a region into one part for each holder; the first parts are the smaller ones.
void cut(const Region& region, std::size_t tensor, const std::vector<int>& ranks, std::vector<PlannedPiece>& pieces) {
  const auto parts = static_cast<std::int64_t>(ranks.size());
  std::int64_t dims = 0, positions = 1;
  while (positions < parts && dims < static_cast<std::int64_t>(region.box.size.size())) {
    positions *= region.box.size[static_cast<std::size_t>(dims++)];
  }
  for (std::int64_t i = 0; i < parts; ++i) {
    for (Box& box : boxes_of_range(region.box, dims, positions * i / parts, positions * (i + 1) / parts))
      pieces.push_back({tensor, std::move(box), ranks[static_cast<std::size_t>(i)], {}});
  }
}

}  // namespace

bool make_up(std::vector<Box> boxes, const std::vector<std::int64_t>& shape) {
  std::erase_if(boxes, [](const Box& box) { return box.numel() == 0; });
  std::sort(boxes.begin(), boxes.end(), [](const Box& a, const Box& b) { return a.offset < b.offset; });
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    numel += boxes[i].numel();
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      if (!shape.empty() && boxes[j].offset[0] >= boxes[i].offset[0] + boxes[i].size[0]) break;  // ordered by their first rows
      if (intersect(boxes[i], boxes[j])) return false;
    }
  }
  return numel == whole_box(shape).numel();
}

std::string pack(const Holdings& holdings) {
  json all = json::array();
  for (const Holding& holding : holdings) {
    json boxes = json::array();
    for (const Box& box : holding.boxes) boxes.push_back({box.offset, box.size});
    all.push_back({holding.spec.name, static_cast<int>(holding.spec.dtype), holding.spec.shape, boxes, holding.layout});
  }
  const std::vector<std::uint8_t> bytes = json::to_cbor(all);
  return {bytes.begin(), bytes.end()};
}

Holdings unpack(std::string_view text) {
  Holdings holdings;
  for (const json& row : json::from_cbor(text)) {
    Holding& holding = holdings.emplace_back();
    holding.spec = {row[0].get<std::string>(), static_cast<Dtype>(row[1].get<int>()), row[2].get<std::vector<std::int64_t>>()};
    for (const json& box : row[3])
      holding.boxes.push_back({box[0].get<std::vector<std::int64_t>>(), box[1].get<std::vector<std::int64_t>>()});
    holding.layout = row[4].get<std::string>();
  }
  return holdings;
}

std::vector<GlobalTensor> combine(std::string_view op, const std::vector<Holdings>& of_rank) {
  struct Found {
    GlobalTensor tensor;
    int rank = 0;  // that has it first
    std::map<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>, std::size_t> boxes;
  };
  std::map<std::string_view, Found> all;
  std::string problems;
  for (std::size_t r = 0; r < of_rank.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (const Holding& holding : of_rank[r]) {
      const auto [entry, is_new] = all.try_emplace(holding.spec.name, Found{{holding.spec, holding.layout, {}, false}, rank, {}});
      Found& found = entry->second;
      const TensorSpec& first = found.tensor.spec;
      if (first.dtype != holding.spec.dtype || first.shape != holding.spec.shape) {
        problems += concat(problems.empty() ? "" : "; ", first.name, " is ", to_string(first.dtype), ' ', shape_text(first.shape),
                           " on rank ", found.rank, ", ", to_string(holding.spec.dtype), ' ', shape_text(holding.spec.shape),
                           " on rank ", rank);
        continue;
      }
      for (const Box& box : holding.boxes) {
        std::vector<Region>& regions = found.tensor.regions;
        const auto [known, is_new_box] = found.boxes.try_emplace({box.offset, box.size}, regions.size());
        if (is_new_box) regions.push_back({box, {}});
        std::vector<int>& holders = regions[known->second].holders;
        if (holders.empty() || holders.back() != rank) holders.push_back(rank);
      }
    }
  }
  check_value(problems.empty(), op, "ranks disagree: ", problems);
  std::vector<GlobalTensor> tensors;
  for (auto& [name, found] : all) {
    std::vector<Box> boxes;
    for (const Region& region : found.tensor.regions) boxes.push_back(region.box);
    found.tensor.exact = make_up(std::move(boxes), found.tensor.spec.shape);
    tensors.push_back(std::move(found.tensor));
  }
  return tensors;
}

std::vector<PlannedPiece> deal_out(std::string_view op, const std::vector<GlobalTensor>& tensors, int world_size) {
  std::vector<PlannedPiece> pieces;
  std::vector<std::uint64_t> load(static_cast<std::size_t>(world_size), 0);
  const auto bytes_of_box = [&](std::size_t tensor, const Box& box) {
    return static_cast<std::uint64_t>(box.numel() * bits_of(tensors[tensor].spec.dtype) / 8);
  };
  struct Small {
    std::size_t tensor;
    const Region* region;
    std::uint64_t bytes;
  };
  std::vector<Small> small;
  std::string inexact;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    if (!tensors[t].exact) inexact += concat(inexact.empty() ? "" : ", ", tensors[t].spec.name, " (", tensors[t].layout, ')');
    for (const Region& region : tensors[t].regions) {
      const std::uint64_t bytes = bytes_of_box(t, region.box);
      if (region.holders.size() > 1 && bytes < kWorthCutting) {
        small.push_back({t, &region, bytes});
        continue;
      }
      std::vector<int> ranks = region.holders;  // those that have the most get the smaller parts
      std::stable_sort(ranks.begin(), ranks.end(),
                       [&](int a, int b) { return load[static_cast<std::size_t>(a)] > load[static_cast<std::size_t>(b)]; });
      const std::size_t before = pieces.size();
      cut(region, t, ranks, pieces);
      for (std::size_t i = before; i < pieces.size(); ++i)
        load[static_cast<std::size_t>(pieces[i].rank)] += bytes_of_box(t, pieces[i].box);
    }
  }
  check_value(inexact.empty(), op, "the ranks' parts overlap or leave holes, want each element once or on replicas: ", inexact);
  std::stable_sort(small.begin(), small.end(), [](const Small& a, const Small& b) { return a.bytes > b.bytes; });
  for (const Small& next : small) {
    const int rank = *std::min_element(next.region->holders.begin(), next.region->holders.end(), [&](int a, int b) {
      return load[static_cast<std::size_t>(a)] < load[static_cast<std::size_t>(b)];
    });
    load[static_cast<std::size_t>(rank)] += next.bytes;
    pieces.push_back({next.tensor, next.region->box, rank, {}});
  }
  for (PlannedPiece& piece : pieces) piece.key = piece_key(tensors[piece.tensor].spec, piece.box);
  return pieces;
}

std::string piece_key(const TensorSpec& tensor, const Box& box) {
  return box.size == tensor.shape ? tensor.name : tensor.name + box.to_string();
}

}  // namespace hyper_parallel::ckpt
