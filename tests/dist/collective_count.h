#pragma once
// A step of the small network and what each of its units then gathers and reduces, in numbers of collectives. The table that the
// cases are written from is in docs/design/005-memory-and-traffic.md.
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <hyper_parallel/hyper_parallel.h>

#include "support/small_net.h"

namespace hyper_parallel::testing {

inline constexpr const char* kGather = "all_gather_single";
inline constexpr const char* kScatter = "reduce_scatter_single";
inline constexpr const char* kReduce = "all_reduce";
inline constexpr const char* kBroadcast = "broadcast";
inline constexpr const char* kCompared = "equal replicas";
inline const std::string kRoot = "Net", kUser = "of the user";

/// Operations by kind and label.
using Counts = std::map<std::pair<std::string, std::string>, int>;

/// What a unit does in one step, in numbers of collectives for each of its groups.
struct PerGroup {
  int gathers = 2;                      ///< before forward, and before backward
  int reductions = 1;                   ///< over the shard axis
  std::optional<int> all_reduces = {};  ///< over the replicas; default: one after each reduction
  bool by_the_user = false;             ///< gathers and reductions over the shard axis are the user's, with a label of his own
};

struct Case {
  std::string name;
  FullyShardOptions options = {};  ///< but for the mesh
  std::function<void(FullyShardOptions&, const Net&)> choose = [](FullyShardOptions&, const Net&) {};
  NetOptions net = {};
  std::function<void(const Net&)> before_wrapping = [](const Net&) {};
  std::function<void(const HSDPModule&)> after_wrapping = [](const HSDPModule&) {};
  /// One step; default: forward and backward.
  std::function<void(const Net&, const HSDPModule&)> step = {};
  std::function<PerGroup(const std::string& unit)> want = [](const std::string& unit) {
    return PerGroup{.gathers = unit == kRoot ? 1 : 2};  // the root keeps its parameters
  };
  int presence_exchanges = 0;  ///< of their own: only where a reduction is the user's
  /// What the first step does beyond that: the order of backward has still to be learned, replicas are compared.
  Counts more_at_first = {};
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

inline void forward_backward(const Net& net) {
  const Batch batch = make_batch(6, 5);
  net_loss(net(batch.tokens), batch.targets).backward();
}

inline void default_step(const Net& net, const HSDPModule& root) {
  forward_backward(net);
  root.zero_grad();
}

/// A step of as many micro-batches as flags; `set` is told before each whether it is the last.
template <class Set>
auto micro_batches(std::vector<bool> flags, Set set) {
  return [flags = std::move(flags), set](const Net& net, const HSDPModule& root) {
    for (const bool last : flags) {
      set(root, last);
      forward_backward(net);
    }
    root.zero_grad();
  };
}

class CollectiveCount : public ::testing::TestWithParam<std::tuple<std::vector<int64_t>, Case>> {};

inline std::string name_of(const ::testing::TestParamInfo<std::tuple<std::vector<int64_t>, Case>>& info) {
  const auto& [mesh, c] = info.param;
  std::string name = c.name + "On";
  for (std::size_t i = 0; i < mesh.size(); ++i) name += concat(i == 0 ? "" : "x", mesh[i]);
  return name;
}

}  // namespace hyper_parallel::testing
