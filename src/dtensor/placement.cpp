#include <hyper_parallel/dtensor/placement.h>

#include <numeric>
#include <ostream>

#include "dtensor/hash.h"

namespace hyper_parallel {

std::int64_t Placement::dim() const {
  check_value(is_shard(), "Placement::dim", to_string(), " cuts no single dimension");
  return dim_;
}

std::int64_t Placement::split_factor() const {
  check_value(is_shard(), "Placement::split_factor", to_string(), " has no split factor");
  return factor_;
}

std::int64_t Placement::ragged_dims() const {
  check_value(is_ragged_shard(), "Placement::ragged_dims", to_string(), " is not ragged");
  return dim_;
}

const std::vector<std::int64_t>& Placement::local_units() const {
  check_value(is_ragged_shard(), "Placement::local_units", to_string(), " is not ragged");
  return units_;
}

ReduceOp Placement::reduce_op() const {
  check_value(is_partial(), "Placement::reduce_op", to_string(), " is not partial");
  return op_;
}

std::string Placement::to_string() const {
  switch (kind_) {
    case Kind::kReplicate:
      return "Replicate()";
    case Kind::kShard:
      return concat("Shard(dim=", dim_, ")");
    case Kind::kStridedShard:
      return concat("_StridedShard(dim=", dim_, ", sf=", factor_, ")");
    case Kind::kPartial:
      return concat("Partial(", hyper_parallel::to_string(op_), ")");
    case Kind::kRaggedShard:
      break;
  }
  std::string dims;
  for (std::int64_t d = 0; d < dim_; ++d) dims += concat(d > 0 ? " " : "", d, d + 1 < dim_ || dim_ == 1 ? "," : "");
  std::string units;
  for (const std::int64_t count : units_) units += concat(units.empty() ? "" : ", ", count);
  return concat("RaggedShard(dims=(", dims, "), local_units=(", units, units_.size() == 1 ? ",))" : "))");
}

std::size_t Placement::hash() const noexcept {
  std::size_t seed = 0;
  hash_combine(seed, static_cast<std::size_t>(kind_));
  hash_combine(seed, static_cast<std::size_t>(op_));
  hash_combine(seed, static_cast<std::size_t>(dim_));
  hash_combine(seed, static_cast<std::size_t>(factor_));
  for (const std::int64_t count : units_) hash_combine(seed, static_cast<std::size_t>(count));
  return seed;
}

Placement Replicate() { return {}; }

Placement Shard(std::int64_t dim) {
  Placement placement;
  placement.kind_ = Placement::Kind::kShard;
  placement.dim_ = dim;
  return placement;
}

Placement StridedShard(std::int64_t dim, std::int64_t split_factor) {
  check_value(split_factor >= 1, "StridedShard", "split_factor is ", split_factor, ", want at least 1");
  Placement placement;
  placement.kind_ = Placement::Kind::kStridedShard;
  placement.dim_ = dim;
  placement.factor_ = split_factor;
  return placement;
}

Placement RaggedShard(std::int64_t dims, std::vector<std::int64_t> local_units) {
  check_value(dims >= 0, "RaggedShard", "dims is ", dims, ", want at least 0");
  for (const std::int64_t count : local_units)
    check_value(count >= 0, "RaggedShard", "local_units has ", count, ", want at least 0");
  check_value(std::accumulate(local_units.begin(), local_units.end(), std::int64_t{0}) > 0, "RaggedShard",
              "local_units sum to 0, want a positive sum");
  Placement placement;
  placement.kind_ = Placement::Kind::kRaggedShard;
  placement.dim_ = dims;
  placement.units_ = std::move(local_units);
  return placement;
}

Placement Partial(ReduceOp op) {
  Placement placement;
  placement.kind_ = Placement::Kind::kPartial;
  placement.op_ = op;
  return placement;
}

std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kProduct:
      return "product";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

std::string to_string(const std::vector<Placement>& placements) {
  std::string text;
  for (const auto& placement : placements) text += (text.empty() ? "" : ", ") + placement.to_string();
  return "[" + text + "]";
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) { return out << placement.to_string(); }

}  // namespace hyper_parallel
